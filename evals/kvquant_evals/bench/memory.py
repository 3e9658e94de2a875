"""What a cache adds to a process: its resident set while a real prompt is decoded, measured in a process of its own.

Linux only: it reads /proc and returns freed memory to the system before it measures.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvquant import kernel
from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.bench.decoding import new_cache
from kvquant_evals.error import EvalError
from kvquant_evals.model import default_text, find_source

STEPS = 200  # enough for a page to be sealed while the peak is watched


@dataclass(frozen=True)
class Residence:
    """Bytes of the resident set over that of the process before it had the cache.

    held: after `context` tokens of prompt and STEPS of decoding; peak: the most while these were decoded.
    """

    contender: str
    context: int
    held: int
    peak: int


def measure(model: str | None, contenders: list[str], context: int) -> list[Residence]:
    """Measures one after the other, each in a fresh process. Raises EvalError if one fails."""
    return [_in_fresh_process(model, contender, context) for contender in contenders]


def _in_fresh_process(model: str | None, contender: str, context: int) -> Residence:
    arguments = json.dumps({"model": model, "contender": contender, "context": context})
    done = subprocess.run([sys.executable, "-m", __name__, arguments], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().split("\n")[-1]
        raise EvalError(f"memory of {contender} at {context} tokens could not be measured: {last}")
    return Residence(**json.loads(done.stdout.strip().split("\n")[-1]))


def residence(model: PreTrainedModel, ids: torch.Tensor, contender: str) -> Residence:
    """Of ids [1, context + STEPS], of which the first `context` are read at once and the others one by one."""
    context = ids.shape[1] - STEPS
    with torch.inference_mode():
        model(ids[:, :256], use_cache=False)  # what the model needs for itself, allocated once
        kernel.discover()  # code, which is not what a cache adds either
        before = _resident()
        cache = new_cache(contender, model)
        options = {CACHE_ARGUMENT: cache, "use_cache": True, "logits_to_keep": 1}
        model(ids[:, :context], **options)
        _resident()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        for i in range(context, ids.shape[1]):
            model(ids[:, i : i + 1], **options)
        peak = _status("VmHWM")
        return Residence(contender, context, _resident() - before, peak - before)


def _resident() -> int:
    """The bytes that are resident once all that was freed has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().split("\n")
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def _main(arguments: str) -> None:
    wanted = json.loads(arguments)
    subject = find_source(wanted["model"]).load()
    model: Any = subject.model
    model = model.to(torch.bfloat16)
    ids = subject.encode(default_text())[:, 20_000 : 20_000 + wanted["context"] + STEPS]
    sys.stdout.write(json.dumps(asdict(residence(model, ids, wanted["contender"]))))


if __name__ == "__main__":
    _main(sys.argv[1])
