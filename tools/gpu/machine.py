"""The device that is measured: what it is called, how fast it copies, and a CPU with the interpreter in its place."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpu import timing

ROOT = Path(__file__).parents[2]


def facts(device: torch.device) -> dict[str, Any]:
    """The device and the versions of what runs on it."""
    packages = {name: _version(name) for name in ("torch", "triton", "transformers", "numpy", "flashinfer-python")}
    found = {"device": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        found |= {
            "device": of.name,
            "capability": f"{of.major}.{of.minor}",
            "processors": of.multi_processor_count,
            "memory_bytes": of.total_memory,
            "l2_bytes": of.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return found | {"python": platform.python_version(), "kvquant": _kvquant_version(), "versions": packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kvquant_version() -> str:
    found: str = importlib.import_module("kvquant.version").__version__
    return found


def copy_bandwidth(device: torch.device, num_bytes: int, milliseconds: float) -> dict[str, Any]:
    """Bytes per second that a copy within the device reads and writes, both counted."""
    source = torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = timing.times(lambda: target.copy_(source), device, milliseconds)
    found = timing.Times(times)
    return {**found.to_dict(), "bytes": 2 * num_bytes, "bytes_per_second": 2 * num_bytes / (1e-6 * found.median)}


@contextmanager
def interpreted() -> Iterator[None]:
    """Lets a CPU stand for a GPU: the interpreter is repaired, and kvquant takes the Triton kernel there."""
    sys.path.append(str(ROOT / "tests" / "support"))
    importlib.import_module("interpreter").install()
    kernel = importlib.import_module("kvquant_kernels.triton.attend").KERNEL
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(type(kernel), "device_type", "cpu"))
        stack.enter_context(mock.patch.object(type(kernel), "missing", return_value=None))
        stack.enter_context(mock.patch("kvquant.kernel.discover", return_value=(kernel,)))
        yield
