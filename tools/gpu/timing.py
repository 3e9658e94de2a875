"""Times of contenders that take turns, with a cold cache before each run, launched one by one and as a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

Run = Callable[[], Any]
WARM_UP = 3.0  # milliseconds before those that count


@dataclass(frozen=True)
class Times:
    """Microseconds of single runs."""

    microseconds: list[float]

    @property
    def median(self) -> float:
        return self._quantiles()[1]

    def _quantiles(self) -> list[float]:
        found: list[float] = torch.tensor(self.microseconds, dtype=torch.float64).quantile(_QUARTERS).tolist()
        return found

    def to_dict(self) -> dict[str, Any]:
        """The median, how wide the middle half spreads relative to it, and the number of runs."""
        low, median, high = self._quantiles()
        return {"microseconds": median, "spread": (high - low) / median, "repetitions": len(self.microseconds)}


_QUARTERS = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


def times(run: Run, device: torch.device, milliseconds: float) -> list[float]:
    """Microseconds of runs that take about `milliseconds` together; on a CPU, of one run.

    Before each run the L2 cache is overwritten, as other layers' weights would while a model decodes.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return [1e6 * (time.perf_counter() - begin)]
    found = triton.testing.do_bench(run, warmup=WARM_UP, rep=milliseconds, return_mode="all")
    return [1e3 * ms for ms in found]


def race(runs: Mapping[str, Run], device: torch.device, rounds: int, milliseconds: float) -> dict[str, Times]:
    """Times of all runs, which take turns, so that what else the device does hits all alike."""
    found: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            found[label] += times(run, device, milliseconds)
    return {label: Times(all_times) for label, all_times in found.items()}


def captured(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """What replays `run` as a CUDA graph and returns its output; on a CPU, which has no graphs, `run` itself."""
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
