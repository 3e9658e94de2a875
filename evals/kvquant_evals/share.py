"""Which part of the work this process does, when several were started by `accelerate launch` or torchrun."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from kvquant_evals.error import EvalError

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """The rank of this process among `count`; one process alone has all the work."""

    rank: int = 0
    count: int = 1

    @staticmethod
    def find() -> Share:
        """As the launcher tells in the environment. Connects the processes, if there are several."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Share()
        from accelerate import PartialState

        # The first to finish waits for the last, however long: shares take unequal times.
        state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=365))
        return Share(state.process_index, state.num_processes)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def of(self, jobs: Sequence[T]) -> list[T]:
        """Every `count`-th job, since neighbours take about as long as each other."""
        return list(jobs[self.rank :: self.count])

    def device(self) -> torch.device:
        """Where this process computes."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or self.count == 1:
            return accelerator or torch.device("cpu")
        return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))

    def folder(self, wanted: Path | None) -> Path | None:
        """Where results lie: several processes need a folder to meet in, and get a temporary one on one machine.

        Raises EvalError if they are on several machines and none was given.
        """
        if wanted is not None or self.count == 1:
            return wanted
        if os.environ.get("LOCAL_WORLD_SIZE", str(self.count)) != str(self.count):
            raise EvalError("processes on several machines need a folder that all of them see; give --out")
        from accelerate.utils import broadcast_object_list

        made: list[str] = broadcast_object_list([tempfile.mkdtemp(prefix="kvquant-eval-") if self.is_first else ""])
        return Path(made[0])

    def wait(self) -> None:
        """Returns once all processes are here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
