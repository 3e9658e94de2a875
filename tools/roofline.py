"""Upper bounds on the speed of decode attention, from the instructions of its page loop. Not timings.

A kernel whose instructions for a page take longer than the page's bytes cannot be bound by bandwidth. One whose do not
still has to hide the latency of memory, which nothing here says anything about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The share of a multiprocessor's issue slots that a loop which waits for memory may fill: an assumption.
ISSUE_SHARE = 0.75
# Threads' instructions that a multiprocessor can begin per cycle, on all of these GPUs.
LANES = {"issue": 128, "integer": 64, "special": 16}
INTEGER = ("logic", "shift", "permute", "pack", "other")
SPECIAL = ("special", "convert")


class Gpu(NamedTuple):
    """gigahertz: sustained; terabytes: that a copy reaches per second; products: of 16-bit numbers per cycle and
    multiprocessor by a warp's matrix instructions, which from Hopper on reach 0.62 of the peak."""

    arch: str
    processors: int
    gigahertz: float
    terabytes: float
    products: float


GPUS = {
    "A100 80GB": Gpu("sm_80", 108, 1.41, 1.75, 1024),
    "H100 SXM": Gpu("sm_90", 132, 1.755, 2.95, 1270),
    "H200": Gpu("sm_90", 132, 1.755, 4.3, 1270),
    "B200": Gpu("sm_100", 148, 1.85, 7.2, 1270),
}

Row = Mapping[str, Any]


def bound(row: Row, gpu: Gpu) -> tuple[float, str]:
    """The share of the GPU's bandwidth that a kernel can use, and what limits it."""
    bytes_per_cycle = gpu.terabytes * 1e3 / (gpu.processors * gpu.gigahertz)
    elements = bytes_per_cycle / row["bytes_per_element"]  # per cycle and multiprocessor, at full bandwidth
    use = {unit: elements * row["per_element"][unit] / LANES[unit] for unit in LANES}
    use["matrix"] = elements * row["per_element"]["products"] / gpu.products
    limit = max(use, key=lambda unit: use[unit])
    share = min(1.0, ISSUE_SHARE / use[limit])
    return share, "memory" if share == 1.0 else limit


def per_element(instructions: Mapping[str, int], products: float, elements: float) -> dict[str, float]:
    """What one number of a page costs: instructions, of which some are for one unit, and products.

    instructions, products: of one thread, for its share of a page's numbers, `elements`.
    """
    used: dict[str, float] = {
        "issue": sum(instructions.values()),
        "integer": sum(instructions.get(kind, 0) for kind in INTEGER),
        "special": sum(instructions.get(kind, 0) for kind in SPECIAL),
    }
    return {unit: round(number / elements, 3) for unit, number in (used | {"products": products}).items()}


def bounds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What each kernel can reach on each GPU; `speedup` is over bfloat16 at full bandwidth."""
    found = []
    for name, gpu in GPUS.items():
        for row in (row for row in rows if row["arch"] == gpu.arch and "per_element" in row):
            share, limit = bound(row, gpu)
            speedup = round(share * 2 / row["bytes_per_element"], 2)
            reached = {"share": round(share, 3), "limit": limit, "speedup": speedup}
            found.append({"gpu": name, "variant": row["variant"], **reached})
    return found


def assumptions() -> dict[str, Any]:
    """For the file of results."""
    gpus = {name: gpu._asdict() for name, gpu in GPUS.items()}
    return {"issue_share": ISSUE_SHARE, "lanes": LANES, "gpus": gpus}
