"""What the processes do that the command starts: a part, or a worker's share of the tests."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from gpu import attention, checks, correctness, decoding, launching, machine, sealing, shard
from gpu.plan import FULL, SMOKE, Plan
from gpu.results import Results
from gpu.work import DeviceLostError, Unit, run_units

DEVICE_LOST = 3  # the exit status after which another process may go on


def run_part(name: str, path: Path, until: float, is_smoke: bool) -> int:
    """Does what is not done yet of a part; its exit status."""
    device, plan = _device(is_smoke), SMOKE if is_smoke else FULL
    results = Results(path)
    results.data["machine"] = machine.facts(device)
    torch.manual_seed(0)
    try:
        with machine.interpreted() if is_smoke else nullcontext():
            run_units(_units(name, plan, device, results, until, is_smoke), name, results, until)
    except DeviceLostError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return DEVICE_LOST
    return 0


def run_worker(share: str, path: Path, until: float, is_smoke: bool) -> int:
    """Runs a share of the tests and checks, "i/n"; its exit status."""
    device, plan = _device(is_smoke), SMOKE if is_smoke else FULL
    first, step = (int(number) for number in share.split("/"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with machine.interpreted() if is_smoke else nullcontext():
            shard.run_shard(checks.checks(plan, device), (first, step), shard.Notes(path), plan.tests, until)
    except DeviceLostError:
        return DEVICE_LOST
    return 0


def _device(is_smoke: bool) -> torch.device:
    return torch.device("cpu" if is_smoke else "cuda")


def _units(name: str, plan: Plan, device: torch.device, results: Results, until: float, is_smoke: bool) -> list[Unit]:
    if name == "correctness":
        return correctness.units(plan, device, ["--smoke"] if is_smoke else [], results, until)
    if name == "decoding":
        return decoding.units(plan, device, is_smoke, until)
    if name == "launch":
        return launching.units(plan, device)
    return _kernel_units(plan, device, results)


def _kernel_units(plan: Plan, device: torch.device, results: Results) -> list[Unit]:
    """The copy, cells of few tokens, sealing, cells of many tokens, and the copy once more."""

    def copy() -> dict[str, object]:
        return machine.copy_bandwidth(device, plan.copied_bytes, 10 * plan.milliseconds)

    def measured() -> float:
        return float(results.section("kernels")["results"]["copy"]["bytes_per_second"])

    cells = attention.units(plan, device, measured)
    few = [unit for tokens, unit in cells if tokens <= plan.tokens_first]
    many = [unit for tokens, unit in cells if tokens > plan.tokens_first]
    sealed = sealing.units(plan, device, measured)
    return [Unit("copy", copy), *few, *sealed, *many, Unit("copy again", copy)]
