"""How kernels are launched: the table in launch.json, and how many programs share a row's pages."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

NUM_EXACT = 4  # programs for the exact tokens of a row: as long as a few pages each


@dataclass(frozen=True)
class Launch:
    """Launch parameters of decode attention on one kind of device for one head_dim.

    max_registers: of a thread; without it NVIDIA's compiler spills some, to make room for more programs.
    block_rows: the least and the most query rows of a program.
    exact_tokens: exact tokens that a program takes at a time.
    programs_per_processor: what keeps a multiprocessor busy.
    """

    num_warps: int
    num_stages: int
    max_registers: int | None
    block_rows: tuple[int, int]
    exact_tokens: int
    programs_per_processor: int

    @property
    def options(self) -> dict[str, int]:
        """What triton is told beside the kernel's arguments."""
        found = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return found if self.max_registers is None else found | {"maxnreg": self.max_registers}

    def block_r(self, num_rows: int) -> int:
        """Query rows of a program, of num_rows that share a KV head."""
        least, most = self.block_rows
        return min(max(power_of_two(num_rows), least), most)

    def num_splits(self, programs: int, most_pages: int, processors: int) -> int:
        """Programs that share a row's pages, where there are `programs` with one each. At least two pages for each."""
        wanted = -(-processors * self.programs_per_processor // programs)
        return max(1, min(wanted, most_pages // 2, int(_table()["max_splits"])))


def choose(target: str, head_dim: int) -> Launch:
    """The parameters for a target, such as "sm_90" or "gfx942", and the larger head_dim of keys and values."""
    for rule in _table()["rules"]:
        if target.startswith(rule["target"]) and head_dim <= rule["max_head_dim"]:
            fields = {name: rule[name] for name in Launch.__dataclass_fields__}
            return Launch(**fields | {"block_rows": tuple(fields["block_rows"])})
    raise ValueError(f"launch.json has no rule for target={target!r} and head_dim={head_dim}")


@cache
def target_of(device: torch.device) -> str:
    """The architecture of a GPU. What the interpreter runs on a CPU is launched as on a Hopper GPU."""
    if device.type != "cuda":
        return "sm_90"
    properties = torch.cuda.get_device_properties(device)
    return str(properties.gcnArchName) if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the device of x the one that kernels are launched on, which is not always the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; of a CPU, where the interpreter runs, one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def power_of_two(n: int) -> int:
    """The least power of two not below n."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(resources.files(__package__).joinpath("launch.json").read_text())
    return table
