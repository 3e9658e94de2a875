"""Compiles every Triton kernel for GPUs that need not be there, and fails if their machine code is not as it should be.

Reads registers, spills, shared memory, the width of loads and, of decode attention, instructions per number of the
page loop; of those there may be at most 10 % more than in results/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gate_variants
import machine_code
import roofline
import triton
import versions
from gate_variants import ARCHS, VARIANTS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "kernels.json"
TOLERANCE = 1.1  # times the instructions per element of the results
# Instructions per element, whatever the results have. The oldest triton takes more to load keys for matrix products.
BUDGETS = {("decode int4 full", "sm_90"): 2.6 if triton.__version__.startswith("3.6") else 2.5}
READ_PAGES = ("decode", "materialize")

Row = dict[str, Any]


def measured(name: str, arch_name: str) -> Row:
    """What one kernel, compiled for one kind of GPU, consists of."""
    variant, arch = VARIANTS[name], ARCHS[arch_name]
    kernel, readers = gate_variants.compiled(variant, arch)
    if arch.target.backend == "hip":
        code = machine_code.read_amd(kernel.asm["amdgcn"])
    else:
        code = machine_code.read_nvidia(kernel.asm["cubin"], gate_variants.TOOLS)
    row: Row = {"variant": name, "arch": arch_name}
    row |= {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
    row |= {field: getattr(code, field) for field in ("registers", "spills", "wide_loads", "matrix", "instructions")}
    if variant.elements and code.has_loop:
        share = variant.elements / (row["warps"] * arch.lanes * readers)
        row["bytes_per_element"] = variant.bytes_per_element
        row["per_element"] = roofline.per_element(code.instructions, code.products / arch.lanes, share)
    return row


def failures(row: Row, shared_limit: int, results: Sequence[Row]) -> Iterator[str]:
    """What is wrong with a kernel; `results` are those of the same release of triton, if there are any."""
    kernel = row["variant"].split()[0]
    if row["spills"]:
        yield f"{row['spills']} spills"
    if row["shared"] > shared_limit:
        yield f"{row['shared']} bytes of shared memory, of {shared_limit}"
    if kernel in READ_PAGES and not row["wide_loads"]:
        yield "no 16-byte loads"
    if kernel in READ_PAGES and not row["matrix"]:
        yield "no matrix instructions"
    if kernel not in READ_PAGES and row["matrix"]:
        yield f"{row['matrix']} matrix instructions"
    if kernel == "decode" and "per_element" not in row:
        yield "no loop over pages"
    elif kernel == "decode":
        yield from _excess(row, results)


def _excess(row: Row, results: Sequence[Row]) -> Iterator[str]:
    place, now = (row["variant"], row["arch"]), row["per_element"]["issue"]
    if now > BUDGETS.get(place, now):
        yield f"{now} instructions per element, of {BUDGETS[place]}"
    same = [old for old in results if (old["variant"], old["arch"]) == place and "per_element" in old]
    before = [old["per_element"]["issue"] for old in same]
    if results and not before:
        yield "not in results/kernels.json; run this with --update"
    elif before and now > TOLERANCE * before[0]:
        yield f"{now} instructions per element, {before[0]} in results/kernels.json"


def run(places: Sequence[tuple[str, str]]) -> tuple[list[Row], list[str]]:
    """The rows of the variants that compile, and the errors of the others."""
    rows, errors = [], []
    _say(HEADER)
    # Not forked: torch's threads do not survive that.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        futures = [(place, pool.submit(measured, *place)) for place in places]
        for place, future in futures:
            if error := future.exception():
                errors.append(f"{', '.join(place)}: {error.__cause__ or error}")  # the cause has the worker's traceback
            else:
                rows.append(future.result())
                _say(_line(rows[-1]))
    return rows, errors


HEADER = (
    f"{'variant':36}{'arch':8}{'warps':>5}{'regs':>6}{'spills':>7}{'shared':>8}{'16 B':>6}{'matrix':>7}"
    f"{'instr.':>8}{'per element: all':>18}{'integer':>9}"
)


def _line(row: Row) -> str:
    """Of the table; what is counted is a loop, where there is one with matrix instructions."""
    line = f"{row['variant']:36}{row['arch']:8}{row['warps']:5}{row['registers']:6}{row['spills']:7}{row['shared']:8}"
    line += f"{row['wide_loads']:6}{row['matrix']:7}{sum(row['instructions'].values()):8}"
    used = row.get("per_element")
    return f"{line}{used['issue']:18.2f}{used['integer']:9.2f}" if used else line


def _bounds(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'GPU':12}{'variant':36}{'bandwidth':>10}{'bound by':>10}{'times bf16':>12}"
    for row in roofline.bounds(rows):
        yield f"{row['gpu']:12}{row['variant']:36}{row['share']:10.0%}{row['limit']:>10}{row['speedup']:12.2f}"


def _stored() -> dict[str, Any]:
    """results/kernels.json: rows by release of triton."""
    stored: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"kernels": {}}
    return stored


def _store(rows: Sequence[Row], path: Path) -> None:
    """Beside the rows of other releases of triton that results/kernels.json has."""
    kernels = _stored()["kernels"] | {triton.__version__: rows}
    newest = max(kernels, key=lambda version: [int(part) for part in version.split(".")])
    lists = ",\n".join(f'  "{version}": {_one_a_line(kernels[version])}' for version in kernels)
    assumptions, bounds = json.dumps(roofline.assumptions()), _one_a_line(roofline.bounds(kernels[newest]))
    path.write_text(f'{{\n "assumptions": {assumptions},\n "bounds": {bounds},\n "kernels": {{\n{lists}\n }}\n}}\n')


def _one_a_line(rows: Sequence[Row]) -> str:
    """JSON in which a change of a row is a change of a line."""
    return "[\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"


def _python_with(version: str) -> Path:
    """The interpreter of an environment with this release of triton before the main environment's packages."""
    folder = versions.ENVIRONMENTS / f"triton-{version}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=False, symlinks=True, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.check_call([*pip, f"triton=={version}"])
        versions._lend_packages(python)
        (folder / "installed").touch()
    return python


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", help="another release of triton, in an environment of its own under .venvs")
    parser.add_argument("--only", default="", help="a regular expression for variants")
    parser.add_argument(
        "--arch", action="append", choices=ARCHS, help="repeatable; by default those that each variant has"
    )
    parser.add_argument("--json", type=Path, help="where to write what came out")
    parser.add_argument("--update", action="store_true", help="write it to results/kernels.json")
    parser.add_argument("--roofline", action="store_true", help="print upper bounds on speed as well")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: kernels would not be compiled")
    return options


def main() -> int:
    options = _options()
    if options.triton not in (None, triton.__version__):
        return subprocess.call([_python_with(options.triton), *sys.argv])
    _say(f"triton {triton.__version__}")
    os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))
    names = [name for name in VARIANTS if re.search(options.only, name)]
    rows, wrong = run([(name, arch) for name in names for arch in options.arch or VARIANTS[name].archs])
    results = [] if options.update else _stored()["kernels"].get(triton.__version__, [])
    for row in rows:
        reasons = failures(row, ARCHS[row["arch"]].shared_limit, results)
        wrong += [f"{row['variant']}, {row['arch']}: {reason}" for reason in reasons]
    for line in _bounds(rows) if options.roofline else ():
        _say(line)
    for path in filter(None, (options.json, RESULTS if options.update else None)):
        _store(rows, path)
    for line in wrong:
        _say(f"FAILED {line}")
    return int(bool(wrong))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
