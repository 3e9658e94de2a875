"""What is right on this device: the Triton tests, checks at sizes that are timed, graph replays, greedy tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu import checks, greedy
from gpu.plan import Plan
from gpu.results import Results
from gpu.work import Unit
from kvquant_evals.bench.race import label_of

RUN = Path(__file__).with_name("run.py")
TESTS_SHARE = 0.75  # of the time that is left
RESTARTS = 4
FAILURES_SHOWN = 12
NOTED_EVERY = 0.5  # seconds
GRACE = 5.0  # seconds for a test that is running at the end


def units(plan: Plan, device: torch.device, options: Sequence[str], results: Results, deadline: float) -> list[Unit]:
    """`options` are those that workers get as well; `results` hold what is known of the tests while they run."""
    found = [Unit("tests", partial(_noted_tests, plan, options, results, deadline), seconds=20.0)]
    found.append(Unit("greedy tokens", partial(greedy.compare, plan, device)))
    for bits in plan.bits:
        check = partial(checks.check_replay, plan.shapes[0], bits, max(plan.contexts[:2]), device)
        found.append(Unit(f"graph replay, {label_of(bits)}", check))
    return found


def _noted_tests(plan: Plan, options: Sequence[str], results: Results, deadline: float) -> dict[str, Any]:
    section = results.section("correctness")

    def note(so_far: dict[str, Any]) -> None:
        section["tests_so_far"] = so_far
        results.write()

    found = run_tests(plan, options, note, deadline)
    section.pop("tests_so_far", None)
    return found


def run_tests(
    plan: Plan, options: Sequence[str], note: Callable[[dict[str, Any]], None], deadline: float
) -> dict[str, Any]:
    """What workers, processes of their own, find in the tests and checks; most of the time goes into compiling."""
    count = max(1, min(plan.workers, os.cpu_count() or 1))
    until = time.time() + TESTS_SHARE * (deadline - time.time())
    with tempfile.TemporaryDirectory() as folder:
        workers = [_Worker(Path(folder) / f"{i}.json", f"{i}/{count}", options, until) for i in range(count)]
        while time.time() < until + GRACE and sum(worker.goes_on() for worker in workers):
            time.sleep(NOTED_EVERY)
            note(_joined([worker.found() for worker in workers]))
        for worker in workers:
            worker.stop()
        return _joined([worker.found() for worker in workers]) | {"workers": count}


class _Worker:
    """A process that runs a share of the tests. It is started anew if it ends before them."""

    def __init__(self, path: Path, share: str, options: Sequence[str], until: float) -> None:
        self._path, self._until, self._starts = path, until, 0
        told = ["--worker", share, "--json", str(path), "--until", str(until)]
        self._command = [sys.executable, str(RUN), *told, *options]
        self._log = path.with_suffix(".log").open("w")
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=subprocess.STDOUT)

    def goes_on(self) -> bool:
        if self._process.poll() is None:
            return True
        if self._process.returncode == 0 or self._starts > RESTARTS or time.time() > self._until:
            return False
        self._start()
        return True

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def found(self) -> dict[str, Any]:
        """Its notes, and the end of what it printed if it did not come to its end."""
        notes: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        is_whole = notes.get("is_finished", False)
        log = "" if is_whole else self._path.with_suffix(".log").read_text()[-1500:]
        return notes | {"log": log, "starts": self._starts}


def _joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, all checks, and the texts of the first failures."""
    failed = {name: text for notes in found for name, text in notes.get("failed", {}).items()}
    reasons = [text for notes in found for text in notes.get("skipped", {}).values()]
    all_checks = {name: check for notes in found for name, check in notes.get("checks", {}).items()}
    return {
        "passed": sum(len(notes.get("passed", [])) for notes in found),
        "failed": len(failed),
        "skipped": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "failures": dict(list(failed.items())[:FAILURES_SHOWN]),
        "checks": dict(sorted(all_checks.items())),
        "starts": [notes["starts"] for notes in found],
        "unfinished": [notes["log"] for notes in found if notes["log"]],
    }
