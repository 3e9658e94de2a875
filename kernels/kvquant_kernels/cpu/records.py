"""Sealing and restoring pages in native code, to the same numbers as the codec, and appending the tokens between."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_float
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvquant.codec import StateCodec, shrink_factors
from kvquant.formats import IntegerGrid
from kvquant.kernel import is_switched_off
from kvquant_kernels.cpu import library

if TYPE_CHECKING:
    from kvquant.snapshot import Snapshot
    from kvquant_kernels.cpu.layout import PartLayout

_NORMS = (2.0, 4.0)  # those that need no power function, whose rounding is nobody's promise


def can_seal(states: Tensor, codec: StateCodec) -> bool:
    clip = codec.fmt.clip
    return can_restore(states.dtype) and (clip is None or clip.norm in _NORMS)


def can_restore(dtype: torch.dtype) -> bool:
    return dtype in library.DTYPES and isinstance(library.load(), library.Library) and not is_switched_off()


def dense(x: Tensor) -> Tensor:
    """x, or a copy of it, with a dense last dimension and an address: lazy tensors and others' kinds have none."""
    return x if type(x) is Tensor and x.stride()[-1] == 1 else x.contiguous()


class _Call(NamedTuple):
    """A structure that says where from and where to a chunk is appended, and what it speaks of."""

    structure: library.Attend
    chunk: Sequence[Tensor]
    buffers: Sequence[Tensor]
    dense_chunk: tuple[Tensor, Tensor]

    def says(self, chunk: Sequence[Tensor], buffers: Sequence[Tensor], first: int) -> bool:
        return self.chunk is chunk and self.buffers is buffers and self.structure.tail_tokens == first


_last_call: _Call | None = None


def remember(structure: library.Attend, states: Snapshot, dense_chunk: tuple[Tensor, Tensor]) -> None:
    """Keeps the structure of a call until its chunk is appended, or another call is made.

    To ask the tensors again for what it says would take longer. It keeps no pages alive.
    """
    global _last_call
    if 0 < states.chunk.num_tokens <= states.tail_buffers.num_tokens - states.tail_length:
        _last_call = _Call(structure, states.chunk, states.tail_buffers, dense_chunk)


def append(chunk: Sequence[Tensor], buffers: Sequence[Tensor], first: int) -> bool:
    """Copies keys and values [B, H, t, D] into buffers [B, H, T, D] of their type, from token `first` on.

    Returns False, and does nothing, for tensors elsewhere than in CPU memory and without the library.
    """
    global _last_call
    call, _last_call = _last_call, None
    native = library.load()
    if not isinstance(native, library.Library):
        return False
    # torch.compile would take what is the same object once to be the same one always.
    if torch.compiler.is_compiling() or call is None or not call.says(chunk, buffers, first):
        if not (chunk[0].is_cpu and buffers[0].is_cpu):
            return False
        call = _call_to_append(chunk, buffers, first)
    native.append(call.structure)
    return True


def _call_to_append(chunk: Sequence[Tensor], buffers: Sequence[Tensor], first: int) -> _Call:
    key, value = map(dense, chunk)
    structure = library.Attend(
        batch=key.shape[0], heads=key.shape[1], dtype=library.DTYPES[key.dtype], tail_tokens=first
    )
    structure.key.dim, structure.value.dim = key.shape[-1], value.shape[-1]
    library.place_segment(structure, library.Attend.chunk.offset, key, value)
    library.place_segment(structure, library.Attend.tail.offset, *buffers)
    return _Call(structure, chunk, buffers, (key, value))


def seal(states: Tensor, records: Tensor, part: PartLayout, codec: StateCodec, variant: int | None = None) -> None:
    """Writes states [pages, H, page_size, D] into their part of records uint8 [pages, page_bytes]."""
    states = dense(states)
    arguments = _arguments(states, records, part, codec)
    factors = shrink_factors(codec.fmt) if codec.fmt.clip else []
    array = (c_float * len(factors))(*factors)
    arguments.shrink, arguments.num_shrinks = addressof(array), len(factors)
    arguments.norm = int(codec.fmt.clip.norm) if codec.fmt.clip else 0
    arguments.kept = states, array  # until the call is over, also where torch.compile drops names that it need not keep
    _loaded().seal(arguments, variant)


def restore(
    records: Tensor, part: PartLayout, codec: StateCodec, dtype: torch.dtype, variant: int | None = None
) -> Tensor:
    """The states of a part of records uint8 [pages, page_bytes],
    [pages, H, page_size, D], with one head's pages in a row."""
    heads, size, dim = part.shape
    states = torch.empty(heads, records.shape[0], size, dim, dtype=dtype).transpose(0, 1)
    _loaded().restore(_arguments(states, records, part, codec), variant)
    return states


def _loaded() -> library.Library:
    found = library.load()
    assert isinstance(found, library.Library)
    return found


def _arguments(states: Tensor, records: Tensor, part: PartLayout, codec: StateCodec) -> library.Pages:
    pages, heads, size, _ = states.shape
    grid = codec.fmt.grid
    return library.Pages(
        states=states.data_ptr(),
        records=records.data_ptr(),
        stride=library.Strides(*states.stride()[:3]),
        page_bytes=records.stride(0),
        pages=pages,
        heads=heads,
        page_size=size,
        dtype=library.DTYPES[states.dtype],
        num_threads=torch.get_num_threads(),
        is_key=part.is_key,
        rotated=codec.rotated,
        top=grid.top if isinstance(grid, IntegerGrid) else 0,
        half_width=grid.half_width,
        part=part.structure,
    )
