"""Finding, loading and calling the native library. Without it kvquant's own reference does the work."""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch  # first, for its OpenMP runtime: the library has none of its own, so that there is one thread pool
from torch import Tensor

LIBRARY = "libkvquant_cpu.so"
VARIABLE = "KVQUANT_CPU_LIBRARY"  # the environment variable that names another file
ABI = 5  # KVQ_ABI of native/kvq.h


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # KvqDtype
FLOAT_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}  # KvqCode

Strides = c_int64 * 3


class Part(Structure):
    """KvqPart of native/kvq.h."""

    _fields_ = [
        *((name, c_int64) for name in ("first", "head_stride", "scales", "zeros")),
        *((name, c_int32) for name in ("code", "bits", "per_channel", "group", "dim")),
        ("middle", c_float),
    ]


class Segment(Structure):
    """KvqSegment of native/kvq.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("key", "value")),
        *((name, Strides) for name in ("key_stride", "value_stride")),
        ("tokens", c_int64),
    ]


class Attend(Structure):
    """KvqAttend of native/kvq.h."""

    _fields_ = [
        *((name, c_void_p) for name in "query out mask sink_logits".split()),
        *((name, Strides) for name in ("query_stride", "mask_stride")),
        ("chunk", Segment),
        ("tail_tokens", c_int64),
        *((name, c_int32) for name in "n_rep q_len settled query_dtype num_threads".split()),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in "batch heads page_size dtype exact key_rotated value_rotated".split()),
        *((name, c_void_p) for name in "pool table num_pages start".split()),
        *((name, c_int64) for name in ("page_bytes", "table_stride")),
        *((name, Part) for name in ("key", "value")),
        *((name, Segment) for name in ("sinks", "tail")),
    ]


# The fields of Attend from `query` to `softcap`, and of a segment: packed at once, which is faster than one by one.
CALL = struct.Struct("=4Q 6q 9q q 5i 2f")
SEGMENT = struct.Struct("=9q")
assert CALL.size == Attend.batch.offset
assert SEGMENT.size == ctypes.sizeof(Segment)


def place_segment(structure: Attend, offset: int, key: Tensor, value: Tensor) -> None:
    """Writes the segment of all tokens into a structure."""
    SEGMENT.pack_into(structure, offset, *segment(key, value, key.shape[-2]))


def segment(key: Tensor, value: Tensor, tokens: int) -> tuple[int, ...]:
    """The fields of a segment: the first tokens of keys [B, Hkv, T, Dk] and values [B, Hkv, T, Dv], dense in D."""
    return key.data_ptr(), value.data_ptr(), *key.stride()[:3], *value.stride()[:3], tokens


class Pages(Structure):
    """KvqPages of native/kvq.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("states", "records", "shrink")),
        ("stride", Strides),
        ("page_bytes", c_int64),
        *((name, c_int32) for name in "pages heads page_size dtype num_threads is_key rotated".split()),
        *((name, c_int32) for name in ("top", "num_shrinks", "norm")),
        ("half_width", c_float),
        ("part", Part),
    ]


@dataclass(frozen=True)
class Library:
    """The loaded library. variants: the instruction sets it was built for; best: the number of the one in use."""

    handle: ctypes.CDLL
    variants: tuple[str, ...]
    best: int

    def attend(self, arguments: Attend, variant: int | None = None) -> None:
        self.handle.kvq_attend(arguments, self.best if variant is None else variant)

    def append(self, arguments: Attend) -> None:
        """Copies the chunk behind the tail."""
        self.handle.kvq_append(arguments)

    def seal(self, arguments: Pages, variant: int | None = None) -> None:
        """Writes states into records."""
        self.handle.kvq_seal(arguments, self.best if variant is None else variant)

    def restore(self, arguments: Pages, variant: int | None = None) -> None:
        """Writes what records hold into states."""
        self.handle.kvq_restore(arguments, self.best if variant is None else variant)


@dataclass(frozen=True)
class Missing:
    """Why there is no library."""

    reason: str


@cache
def load() -> Library | Missing:
    """The native library, or why it cannot be used here."""
    given = os.environ.get(VARIABLE)
    path = Path(given) if given else Path(__file__).parent / "native" / LIBRARY
    if not path.exists():
        reason = f"{VARIABLE} names no file" if given else "no C++ compiler was found, or it failed, at installation"
        return Missing(f"there is no {path.name}: {reason}")
    try:
        handle = ctypes.CDLL(str(path))
        structures = (Attend, Part, Segment, Pages)
        is_ours = handle.kvq_abi(0) == ABI and all(
            handle.kvq_abi(1 + i) == ctypes.sizeof(structure) for i, structure in enumerate(structures)
        )
    except (OSError, AttributeError) as error:
        return Missing(f"{path.name} cannot be loaded: {error}")
    if not is_ours:
        return Missing(f"{path.name} belongs to another version of kvquant; install it again")
    best = handle.kvq_best_variant()
    if best < 0:
        return Missing(f"{path.name} has no variant for this processor")
    handle.kvq_variants.restype = c_char_p
    for name, structure in (("kvq_attend", Attend), ("kvq_seal", Pages), ("kvq_restore", Pages)):
        function = getattr(handle, name)
        function.argtypes, function.restype = [POINTER(structure), c_int32], None
    handle.kvq_append.argtypes, handle.kvq_append.restype = [POINTER(Attend)], None
    return Library(handle, tuple(handle.kvq_variants().decode().rstrip(",").split(",")), best)
