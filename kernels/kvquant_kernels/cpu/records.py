"""Sealing and restoring pages in native code, to the same numbers as the codec."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_float
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvquant.codec import StateCodec, shrink_factors
from kvquant.formats import IntegerGrid
from kvquant.kernel import is_switched_off
from kvquant_kernels.cpu import library

if TYPE_CHECKING:
    from kvquant_kernels.cpu.layout import PartLayout

_NORMS = (2.0, 4.0)  # those that need no power function, whose rounding is nobody's promise


def can_seal(states: Tensor, codec: StateCodec) -> bool:
    clip = codec.fmt.clip
    return can_restore(states.dtype) and (clip is None or clip.norm in _NORMS)


def can_restore(dtype: torch.dtype) -> bool:
    return dtype in library.DTYPES and isinstance(library.load(), library.Library) and not is_switched_off()


def can_append(states: Sequence[Tensor], buffers: Sequence[Tensor]) -> bool:
    return states[0].is_cpu and buffers[0].is_cpu and isinstance(library.load(), library.Library)


def dense(x: Tensor) -> Tensor:
    """x, or a copy of it, with a dense last dimension and an address: lazy tensors and others' kinds have none."""
    return x if type(x) is Tensor and x.stride(-1) == 1 else x.contiguous()


def append(states: Sequence[Tensor], buffers: Sequence[Tensor], first: int) -> None:
    """Copies keys and values [B, H, t, D] into buffers [B, H, T, D] of their type, from token `first` on."""
    (key, value), (keys, values) = map(dense, states), buffers
    batch, heads, tokens, key_dim = key.shape
    arguments = library.Append()
    library.APPEND.pack_into(
        arguments,
        0,
        *library.segment(key, value, tokens),
        *library.segment(keys, values, first),
        batch,
        heads,
        key_dim,
        value.shape[-1],
        key.element_size(),
    )
    arguments.kept = key, value
    _loaded().append(arguments)


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
