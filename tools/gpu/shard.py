"""One worker's share of the checks and of the Triton tests, noted in a file after each, so that another can go on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.checks import Check
from gpu.results import write_json
from gpu.work import FAILURES, DeviceLostError, first_line, free_memory

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "kvquant_kernels" / "triton"
LONGEST_TEXT = 3000  # characters of a failure that are kept


class Notes:
    """What a worker has found so far, in a file that is read again when it is started anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        empty: dict[str, Any] = {
            "checks": {},
            "passed": [],
            "skipped": {},
            "failed": {},
            "running": None,
            "is_finished": False,
        }
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty
        if self.data["running"] is not None:
            self.data["failed"][self.data["running"]] = "the process ended, or the device answered no more"
            self.data["running"] = None

    def write(self, **changed: Any) -> None:
        self.data.update(changed)
        write_json(self.path, self.data)

    def is_done(self, name: str) -> bool:
        held = self.data
        return any(name in held[kind] for kind in ("checks", "passed", "skipped", "failed"))


def run_shard(checks: dict[str, Check], share: tuple[int, int], notes: Notes, tests: str, deadline: float) -> None:
    """Runs every share[1]-th check and test, beginning with the share[0]-th.

    Raises DeviceLostError after a failure that the device does not recover from.
    """
    for name in list(checks)[share[0] :: share[1]]:
        if not notes.is_done(name) and time.time() < deadline:
            _run_check(name, checks[name], notes)
    recorder = Recorder(notes, share, deadline)
    where = [str(TESTS), "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "--import-mode=importlib"]
    how = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "--tb=short", *(["-k", tests] if tests else [])]
    pytest.main([*where, *how], [recorder])
    if recorder.has_lost_device:
        raise DeviceLostError
    notes.write(is_finished=recorder.is_finished, running=None)


def _run_check(name: str, check: Check, notes: Notes) -> None:
    notes.write(running=name)
    begin = time.time()
    try:
        found = check()
    except FAILURES as error:
        found = {"passed": False, "error": first_line(error)}
    free_memory()
    notes.data["checks"][name] = {"seconds": round(time.time() - begin, 2), **found}
    notes.write(running=None)


class Recorder:
    """A plugin of pytest that runs a share of the tests and notes what came out of each."""

    def __init__(self, notes: Notes, share: tuple[int, int], deadline: float) -> None:
        self._notes, self._share, self._deadline = notes, share, deadline
        self.has_lost_device = self.is_finished = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        first, step = self._share
        items[:] = [item for item in items[first::step] if not self._notes.is_done(item.nodeid)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._notes.data["failed"][report.nodeid or "collection"] = str(report.longrepr)[-LONGEST_TEXT:]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        if time.time() > self._deadline:
            item.session.shouldstop = "no time left"
        self._notes.write(running=item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._notes.data
        if report.failed:
            data["failed"][report.nodeid] = report.longreprtext[-LONGEST_TEXT:]
        elif report.skipped:
            data["skipped"][report.nodeid] = str(report.longrepr)[-LONGEST_TEXT:]
        elif report.when == "call":
            data["passed"].append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.has_lost_device = nodeid in self._notes.data["failed"] and not _answers()
        if self.has_lost_device:
            pytest.exit("the device answers no more")
        self._notes.write(running=None)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.is_finished = not session.shouldstop


def _answers() -> bool:
    """Whether the device still does what it is told."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True
