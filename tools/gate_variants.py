"""The kernels that the gate compiles, as their launchers launch them, on small tensors and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from kvquant import formats
from kvquant.codec import StateCodec
from kvquant.config import QuantConfig
from kvquant.formats import QuantFormat
from kvquant.layout import PagePart, StateShape
from kvquant_kernels.triton import launch
from kvquant_kernels.triton.attend import Operands, RowTables
from kvquant_kernels.triton.layout import TritonLayout
from kvquant_kernels.triton.ops.decode import decode
from kvquant_kernels.triton.ops.materialize import materialize
from kvquant_kernels.triton.ops.seal import can_seal, seal

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NUM_HEADS = 8
PAGE_SIZE = 128
NUM_PAGES = 1021  # neither this nor the number of columns is a multiple of 16, which triton would make use of
NUM_COLUMNS = 4 + NUM_PAGES * PAGE_SIZE + 67
PROCESSORS = 132  # decides how many partial results there are to combine

Pair = tuple[QuantFormat, QuantFormat]
Features = Literal["plain", "full", "masked"]  # full: window, softcap and logits of sinks; masked: and a mask


class Arch(NamedTuple):
    """A kind of GPU. shared_limit: bytes of shared memory that a program may have."""

    target: GPUTarget
    shared_limit: int

    @property
    def name(self) -> str:
        return f"sm_{self.target.arch}" if self.target.backend == "cuda" else str(self.target.arch)

    @property
    def lanes(self) -> int:
        """Threads that execute an instruction together."""
        return int(self.target.warp_size)


# Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; AMD's CDNA3 ISA document.
ARCHS = {
    "sm_80": Arch(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_89": Arch(GPUTarget("cuda", 89, 32), 99 * 1024),
    "sm_90": Arch(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Arch(GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": Arch(GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


# Each kernel is compiled for all in some of its variants; most differ too little to take that long for each.
ALL, MOST, FEW = tuple(ARCHS), ("sm_80", "sm_90", "gfx942"), ("sm_90", "gfx942")


class Variant(NamedTuple):
    """One way to launch one kernel. layout: of the pages that it attends to, where that is what it does."""

    kernel: str
    archs: tuple[str, ...]
    launch: Callable[[], object]
    layout: TritonLayout | None = None

    @property
    def elements(self) -> int:
        """Numbers in the keys and values of one page of one head."""
        shapes = [] if self.layout is None else [part.shape for part in self.layout.parts]
        return sum(shape.page_size * shape.head_dim for shape in shapes)

    @property
    def bytes_per_element(self) -> float:
        return 0.0 if self.layout is None else self.layout.page_bytes / NUM_HEADS / self.elements


def layout_of(pair: Pair, head_dim: int) -> TritonLayout:
    shape = StateShape(NUM_HEADS, PAGE_SIZE, head_dim)
    return TritonLayout(*(PagePart(fmt, shape, torch.bfloat16) for fmt in pair))


def _operands(layout: TritonLayout, num_rep: int, q_len: int, features: Features) -> Operands:
    """Of a long row."""
    head_dim = layout.parts[0].shape.head_dim
    return Operands(
        layout=layout,
        query=torch.zeros(1, NUM_HEADS * num_rep, q_len, head_dim, dtype=torch.bfloat16),
        pool=torch.zeros(1, layout.page_bytes // 4, dtype=torch.int32),
        tables=RowTables(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, NUM_PAGES, dtype=torch.int32)),
        lengths=torch.zeros(4, dtype=torch.int32),
        sinks=(_states(head_dim, 4), _states(head_dim, 4)),
        tail=(_states(head_dim, 193), _states(head_dim, 193)),
        chunk=(_states(head_dim, q_len), _states(head_dim, q_len)),
        num_sinks=4,
        rotated=(True, True),
        scale=head_dim**-0.5,
        mask=torch.zeros(1, 1, q_len, NUM_COLUMNS, dtype=torch.uint8) if features == "masked" else None,
        has_window=features != "plain",
        softcap=None if features == "plain" else 30.0,
        sink_logits=None if features == "plain" else torch.zeros(NUM_HEADS * num_rep),
    )


def _decode(
    pair: Pair,
    archs: tuple[str, ...],
    head_dim: int = 128,
    rows: tuple[int, int] = (8, 1),
    features: Features = "plain",
) -> Variant:
    """rows: query heads per KV head, and queries."""
    layout = layout_of(pair, head_dim)
    return Variant("decode", archs, lambda: decode(_operands(layout, *rows, features), torch.bfloat16), layout)


def _combine(head_dim: int) -> Variant:
    layout = layout_of(PAIRS["int4"], head_dim)
    return Variant(
        "combine", ALL if head_dim == 128 else FEW, lambda: decode(_operands(layout, 8, 1, "full"), torch.bfloat16)
    )


def _seal(fmt: QuantFormat, head_dim: int, part: int) -> Variant:
    layout, codec = layout_of((fmt, fmt), head_dim), StateCodec(fmt, rotated=True)
    archs, shape = ALL if fmt.bits == 4 and head_dim == 128 else FEW, (head_dim, PAGE_SIZE)
    return Variant("seal", archs, lambda: seal(_states(*shape), _records(layout), layout.parts[part], codec))


def _materialize(fmt: QuantFormat, head_dim: int, part: int) -> Variant:
    layout, codec = layout_of((fmt, fmt), head_dim), StateCodec(fmt, rotated=True)
    archs = FEW if fmt.bits == 2 else ALL
    return Variant(
        "materialize", archs, lambda: materialize(_records(layout), layout.parts[part], codec, torch.bfloat16)
    )


def _states(head_dim: int, tokens: int) -> torch.Tensor:
    return torch.zeros(1, NUM_HEADS, tokens, head_dim, dtype=torch.bfloat16)


def _records(layout: TritonLayout) -> torch.Tensor:
    return torch.zeros(1, NUM_HEADS, layout.head_words, dtype=torch.int32)


def _preset(bits: Any) -> Pair:
    config = QuantConfig.preset(bits)
    return config.key, config.value


PAIRS: dict[str, Pair] = {
    "int8": _preset(8),
    "int4": _preset(4),
    "int2": _preset(2),
    "int8,int4": _preset((8, 4)),
    "int4,int2": _preset((4, 2)),
    "e4m3": _preset("fp8"),
    "e5m2 per channel": (formats.FP8_E5M2_PER_CHANNEL, formats.FP8_E5M2_PER_CHANNEL),
    "int4 per token,channel": (formats.INT4_PER_TOKEN, formats.INT4_PER_CHANNEL),
}


def _variants() -> Iterator[tuple[str, Variant]]:
    for name, pair in PAIRS.items():
        yield f"decode {name}", _decode(pair, ALL if name in ("int8", "int4", "e4m3") else MOST)
    int4 = PAIRS["int4"]
    for head_dim in (64, 96, 256):
        yield f"decode int4 d{head_dim}", _decode(int4, ALL if head_dim == 256 else MOST, head_dim)
    yield "decode int4 16 heads", _decode(int4, ALL, rows=(16, 1))
    yield "decode int4 4 heads, 4 queries", _decode(int4, MOST, rows=(4, 4))
    for name in ("int8", "int4"):
        yield f"decode {name} full", _decode(PAIRS[name], ALL if name == "int4" else MOST, features="full")
        yield f"decode {name} masked", _decode(PAIRS[name], MOST, features="masked")
    for head_dim in (64, 128, 256):
        yield f"combine d{head_dim}", _combine(head_dim)
    for name in ("int8", "int4", "int2", "e4m3"):
        for i, part in enumerate(("keys", "values")):
            for head_dim in (128, 256) if name in ("int4", "e4m3") else (128,):
                yield f"materialize {name} {part} d{head_dim}", _materialize(PAIRS[name][i], head_dim, i)
            for head_dim in (64, 128, 256):
                if can_seal(layout_of(PAIRS[name], head_dim).parts[i], StateCodec(PAIRS[name][i], rotated=True)):
                    yield f"seal {name} {part} d{head_dim}", _seal(PAIRS[name][i], head_dim, i)


VARIANTS = dict(_variants())


class _Driver:
    """Stands for a GPU that is not there: a launch finds out for what to compile, and no more."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        """A number of its own for each target: what is compiled for a device is kept."""
        return list(ARCHS.values()).index(next(arch for arch in ARCHS.values() if arch.target == self._target))

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiled(NamedTuple):
    """readers: programs that read the same page, each for some of the query rows; 1 for other kernels."""

    kernel: CompiledKernel
    readers: int


def compiled(variant: Variant, arch: Arch) -> Compiled:
    """The kernel that the variant's launcher asks triton for on a GPU of this kind. Raises what triton raises."""
    found, run = [], JITFunction.run

    def instead(kernel: JITFunction, *args: Any, **options: Any) -> None:
        if kernel.__name__ == f"_{variant.kernel}_kernel":
            if "USE_ASM" in options:
                options["USE_ASM"] = arch.target.backend == "cuda"
            readers = options["grid"][1] // NUM_HEADS if variant.kernel == "decode" else 1
            found.append(Compiled(run(kernel, *args, **options | {"warmup": True}), readers))

    with _pretending(arch), mock.patch.object(JITFunction, "run", instead):
        variant.launch()
    (one,) = found
    return one


@contextmanager
def _pretending(arch: Arch) -> Iterator[None]:
    """Launchers choose what they would on such a GPU, of which there is one."""
    with (
        mock.patch.object(launch, "target_of", return_value=arch.name),
        mock.patch.object(launch, "processors", return_value=PROCESSORS),
    ):
        driver.set_active(_Driver(arch.target))  # for good: to reset it would look for a GPU
        yield
