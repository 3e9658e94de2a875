"""The command: one process for each part, started anew if it dies, and then plots and a table of what was found."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu import report
from gpu.results import Results

ROOT = Path(__file__).parents[2]
RUN = Path(__file__).with_name("run.py")

# The parts by importance, and the share of all time at whose end each must be done. What one leaves is the next one's.
PARTS = {"correctness": 0.37, "kernels": 0.7, "decoding": 0.94, "launch": 0.97}
STARTS = 3  # of a part, if it dies
GRACE = 5.0  # seconds for a part to end by itself after its deadline


def main() -> int:
    options = _parser().parse_args()
    if options.smoke:
        # Read when triton and torch are imported, here and in the processes that are started.
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if options.worker:
        from gpu import part

        return part.run_worker(options.worker, options.json, options.until, options.smoke)
    if options.until:
        from gpu import part

        return part.run_part(options.part[0], options.json, options.until, options.smoke)
    return _run_all(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "gpu.json", help="the file of results")
    parser.add_argument("--seconds", type=float, default=540.0, help="what all parts together may take")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in Triton's interpreter, without a GPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of a process that this command starts
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def _run_all(options: argparse.Namespace) -> int:
    """Runs the parts. 0 if nothing that they checked was wrong."""
    if not options.smoke and not _sees_gpu():
        sys.exit("torch sees no GPU; --smoke does without")
    begin = time.time()
    options.json.unlink(missing_ok=True)
    for name in options.part or PARTS:
        deadline = begin + PARTS[name] * options.seconds
        for _ in range(STARTS):
            status = _run_process(name, deadline, options)
            if status == 0 or time.time() > deadline:
                break
        _draw(options.json)
    results = Results(options.json)
    results.data |= {"is_smoke": options.smoke, "seconds": round(time.time() - begin, 1), "allowed": options.seconds}
    results.write()
    sys.stdout.write(report.text(results.data))
    return 0 if report.is_right(results.data) else 1


def _draw(path: Path) -> None:
    """Plots of what there is so far. What is missing for them must not end the measurement."""
    results = Results(path)
    try:
        report.draw(results.data, path)
    except (ImportError, LookupError, TypeError, ValueError) as error:
        results.data["plots"] = f"{type(error).__name__}: {error}"
        results.write()


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_process(name: str, deadline: float, options: argparse.Namespace) -> int:
    """The exit status of a process that runs a part; what it died of, if it did, is noted."""
    command = [sys.executable, str(RUN), "--part", name, "--json", str(options.json), "--until", str(deadline)]
    process = subprocess.Popen([*command, *(["--smoke"] if options.smoke else [])], start_new_session=True)
    try:
        status = process.wait(max(1.0, deadline + GRACE - time.time()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    if status:
        _note_death(options.json, name, status)
    return status


def _note_death(path: Path, part: str, status: int) -> None:
    results = Results(path)
    section: dict[str, Any] = results.section(part)
    section["deaths"].append({"status": status, "running": section["running"]})
    results.write()
