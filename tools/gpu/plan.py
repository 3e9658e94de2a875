"""What is measured at which sizes: on a GPU, and in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """One layer's attention while decoding."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Plan:
    """Sizes and repetitions.

    tokens_first: cells of up to this many cached tokens, batch and all, come before everything that is larger.
    rounds: turns of each contender; milliseconds: what it is repeated for in a turn.
    pages: sealed and restored at once; copied_bytes: of the copy that gives the device's bandwidth.
    workers: processes that compile and check side by side; tests: what pytest selects with -k, all if empty.
    decode_sizes, launch_sizes: rows and tokens of each; decode_steps: of one turn.
    launch_warps and so on: what is tried beside the launch parameters of the table.
    """

    shapes: tuple[Shape, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    bits: tuple[Any, ...]
    tokens_first: int
    rounds: int
    milliseconds: float
    pages: int
    copied_bytes: int
    workers: int
    tests: str
    prompt: int
    tokens: int
    decode_sizes: tuple[tuple[int, int], ...]
    decode_steps: int
    decode_rounds: int
    launch_sizes: tuple[tuple[int, int], ...]
    launch_warps: tuple[int, ...]
    launch_stages: tuple[int, ...]
    launch_programs: tuple[int, ...]


FULL = Plan(
    shapes=(Shape("Llama-3-8B", 32, 8, 128), Shape("Qwen2.5-7B", 28, 4, 128)),
    batches=(1, 8, 32),
    contexts=(4096, 32_768, 131_072),
    bits=(8, 4, (4, 2), 2, "fp8"),
    tokens_first=2**20,
    rounds=5,
    milliseconds=12.0,
    pages=4096,
    copied_bytes=4 << 30,
    workers=14,
    tests="",
    prompt=700,
    tokens=64,
    decode_sizes=((8, 32_768), (1, 32_768), (8, 8192), (1, 8192), (32, 32_768)),
    decode_steps=32,
    decode_rounds=4,
    launch_sizes=((8, 32_768), (1, 32_768), (32, 32_768)),
    launch_warps=(2, 4),
    launch_stages=(2, 3, 4),
    launch_programs=(4, 8, 16),
)

SMOKE = Plan(
    shapes=(Shape("tiny llama", 4, 2, 64), Shape("tiny qwen", 7, 1, 64)),
    batches=(1, 2),
    contexts=(200, 330),
    bits=(4, "fp8"),
    tokens_first=400,
    rounds=1,
    milliseconds=0.0,
    pages=2,
    copied_bytes=1 << 16,
    workers=2,
    tests="test_no_queries or test_bytes_of_a_page",
    prompt=210,
    tokens=3,
    decode_sizes=((1, 200), (2, 200)),
    decode_steps=2,
    decode_rounds=1,
    launch_sizes=((1, 200),),
    launch_warps=(2,),
    launch_stages=(2,),
    launch_programs=(4,),
)
