"""What a compiled kernel consists of: registers, spills, loads, matrix instructions and its main loop, from assembly.

NVIDIA's comes from the disassembler that triton ships, AMD's from triton's compiler. Nothing is compiled here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """name: with its modifiers, as LDG.E.128."""

    name: str
    operands: str


class Listing(NamedTuple):
    """labels: the index of the instruction behind each."""

    instructions: list[Instruction]
    labels: dict[str, int]


class Dialect(NamedTuple):
    """How to read one vendor's assembly.

    kinds: what names without modifiers match, the first match counting.
    wide_load: of 16 bytes from global memory.
    shape: of a matrix instruction, three numbers in its name.
    """

    label: re.Pattern[str]
    instruction: re.Pattern[str]
    branch: re.Pattern[str]
    wide_load: re.Pattern[str]
    shape: re.Pattern[str]
    kinds: dict[str, re.Pattern[str]]


class MachineCode(NamedTuple):
    """What a kernel consists of. Those of a loop count the loop that a kernel spends its time in, else all of it.

    registers: of a thread; on AMD vector registers, accumulators included.
    spills: instructions (NVIDIA), or registers and bytes (AMD), that keep registers in memory.
    instructions: of a loop, by kind.
    wide_loads, matrix: 16-byte loads from global memory and matrix instructions, of a loop.
    products: multiplications of numbers by the loop's matrix instructions.
    has_loop: whether there is a loop with matrix instructions.
    """

    registers: int
    spills: int
    instructions: dict[str, int]
    wide_loads: int
    matrix: int
    products: int
    has_loop: bool


def _patterns(kinds: dict[str, str]) -> dict[str, re.Pattern[str]]:
    return {kind: re.compile(pattern) for kind, pattern in kinds.items()}


NVIDIA = Dialect(
    label=re.compile(r"^\s*(\.L\w+):"),
    instruction=re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*)"),
    branch=re.compile(r"BRA\b.*?(\.L\w+)"),
    wide_load=re.compile(r"(LDG|LDGSTS)\..*\b128\b"),
    shape=re.compile(r"\.(16)(8)(8|16|32)\b"),  # HMMA.16816
    kinds=_patterns(
        {
            "matrix": r"[HIQDO]MMA|[HIQ]GMMA|UTC\w*MMA",
            "copy": r"LDGSTS|UBLKCP|UTMALDG",
            "global": r"LDG|STG|RED|ATOMG?",
            "shared": r"LDS|STS|LDSM|STSM|ATOMS",
            "local": r"LDL|STL",
            "special": r"MUFU",
            "convert": r"I2F|F2I|F2F|I2I",
            "pack": r"F2FP|I2FP|F2IP",
            "half": r"H(FMA|ADD|MUL|MNMX|SET|SETP)2",
            "float": r"(FFMA|FMUL|FADD)2?",
            "multiply": r"IMAD",
            "permute": r"PRMT",
            "logic": r"LOP3",
            "shift": r"SHF|SHL|SHR",
            "shuffle": r"SHFL",
            "uniform": r"U[A-Z0-9]+|R2UR|S2U?R|CS2R|LDCU?|REDUX",
            "control": r"BRA|BSSY|BSYNC|\w*BAR|WARPSYNC|NOP|EXIT|SYNCS|FENCE|CALL|RET|BREAK|ELECT|VOTEU?",
            "other": r".*",
        }
    ),
)

AMD = Dialect(
    label=re.compile(r"^(\.L\w+):"),
    instruction=re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)\s*(.*)"),
    branch=re.compile(r"s_c?branch\w*\s.*?(\.L\w+)"),
    wide_load=re.compile(r"(global|buffer)_load_(lds_)?dwordx4"),
    shape=re.compile(r"_(\d+)x(\d+)x(\d+)"),  # v_mfma_f32_16x16x16_bf16
    kinds=_patterns(
        {
            "matrix": r"v_s?mfmac?_\w+",
            "global": r"(global|buffer|flat)_\w+",
            "local": r"scratch_\w+",
            "shared": r"ds_\w+",
            "special": r"v_(exp|log|rcp|rsq|sqrt)_\w+",
            "convert": r"v_cvt_\w+",
            "permute": r"v_(perm|alignbit|alignbyte)\w*|v_\w+_dpp",
            "logic": r"v_(and|or|xor|bfi|bfe|not)\w*|v_lshl_or\w*",
            "shift": r"v_(lshl|lshr|ashr)\w*",
            "move": r"v_(mov|accvgpr)\w*",
            "float": r"v_(pk_)?(fma|fmac|mul|add|sub|subrev|max|max3|min|dual)\w*_f(16|32)\w*",
            "scalar": r"s_\w+",
            "other": r".*",
        }
    ),
)


def parse(assembly: str, dialect: Dialect) -> Listing:
    """The instructions of a listing that holds one kernel."""
    listing = Listing([], {})
    for line in assembly.splitlines():
        if label := dialect.label.search(line):
            listing.labels[label[1]] = len(listing.instructions)
        elif found := dialect.instruction.search(line):
            listing.instructions.append(Instruction(found[1], found[2]))
    return listing


def loops(listing: Listing, dialect: Dialect) -> list[list[Instruction]]:
    """The bodies of all loops: what lies between a label and a branch back to it."""
    found = []
    for i, instruction in enumerate(listing.instructions):
        target = dialect.branch.match(" ".join(instruction))
        first = listing.labels.get(target[1], i + 1) if target else i + 1
        if first < i:
            found.append(listing.instructions[first : i + 1])
    return found


def count(instructions: Sequence[Instruction], dialect: Dialect) -> Counter[str]:
    """The number of instructions of each kind."""
    return Counter(kind_of(instruction, dialect) for instruction in instructions)


def kind_of(instruction: Instruction, dialect: Dialect) -> str:
    name = instruction.name.split(".")[0]
    return next(kind for kind, pattern in dialect.kinds.items() if pattern.fullmatch(name))


def main_loop(listing: Listing, dialect: Dialect) -> list[Instruction] | None:
    """The loop that unpacks codes: of those with matrix instructions the one with most bit operations."""
    counted = [(count(body, dialect), body) for body in loops(listing, dialect)]
    # Of nested loops the inner one counts, as long as it has the bit operations.
    ranked = [(kinds["logic"], -len(body), body) for kinds, body in counted if kinds["matrix"]]
    return max(ranked, key=lambda found: found[:2])[2] if ranked else None


def _read(listing: Listing, dialect: Dialect, registers: int, spills: int) -> MachineCode:
    loop = main_loop(listing, dialect)
    body = listing.instructions if loop is None else loop
    matrix = [instruction for instruction in body if kind_of(instruction, dialect) == "matrix"]
    return MachineCode(
        registers=registers,
        spills=spills,
        instructions=dict(count(body, dialect).most_common()),
        wide_loads=sum(dialect.wide_load.match(instruction.name) is not None for instruction in body),
        matrix=len(matrix),
        products=sum(_products(instruction.name, dialect) for instruction in matrix),
        has_loop=loop is not None,
    )


def _products(name: str, dialect: Dialect) -> int:
    """Multiplications of numbers by one matrix instruction of a warp."""
    shape = dialect.shape.search(name)
    return prod(map(int, shape.groups())) if shape else 0


def read_nvidia(cubin: bytes, tools: Path) -> MachineCode:
    """Of a binary for one kernel; `tools` is the folder of cuobjdump and nvdisasm. Raises CalledProcessError."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        assembly = _output(tools / "nvdisasm", "-c", file.name)
    listing = parse(assembly, NVIDIA)
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|LOCAL):(\d+)", usage)}
    return _read(listing, NVIDIA, numbers["REG"], count(listing.instructions, NVIDIA)["local"] + numbers["LOCAL"])


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_amd(assembly: str) -> MachineCode:
    """Of the text of one kernel, with its metadata."""
    numbers = {name: int(number) for name, number in re.findall(r"^\s+\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
    spilled = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    return _read(parse(assembly, AMD), AMD, numbers["vgpr_count"], sum(numbers[name] for name in spilled))
