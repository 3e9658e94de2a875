"""Runs the tests marked `compat` on the older releases of transformers in versions.toml.

Each has a virtual environment under .venvs, which adds its own transformers to what the main environment holds.
`--json FILE` runs them on the main environment's transformers as well, and writes what came out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import tomllib
import transformers

ROOT = Path(__file__).parents[1]
VERSIONS = Path(__file__).with_name("versions.toml")
ENVIRONMENTS = ROOT / ".venvs"


class Outcome(NamedTuple):
    """What a run of the tests gave: how many passed, and how many were skipped, by reason."""

    passed: int
    skipped: dict[str, int]


def installed(version: str, packages: list[str]) -> Path:
    """The interpreter of the environment for `version`, which is built if it does not hold just these packages."""
    folder = ENVIRONMENTS / version
    python, mark = folder / "bin" / "python", folder / "installed.json"
    wanted = [f"transformers=={version}", *packages]
    if mark.exists() and json.loads(mark.read_text()) == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.check_call([*pip, *wanted])
    _lend_packages(python)
    mark.write_text(json.dumps(wanted))
    return python


def _lend_packages(python: Path) -> None:
    """Puts the main environment's packages behind those that `python` has itself."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.check_output([python, "-c", ask], text=True).strip()
    main = sysconfig.get_path("purelib")
    # addsitedir, unlike a plain path, also reads the .pth files there: an editable install is one.
    (Path(own) / "main.pth").write_text(f"import site; site.addsitedir({main!r})\n")


def run_tests(python: Path) -> Outcome:
    """Raises CalledProcessError if a test fails."""
    # Other files need not be importable there.
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.compat" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-m", "compat", "--no-header", "-r", "fE", f"--junitxml={report}"]
        subprocess.check_call([*command, *files], cwd=ROOT)
        return _outcome(ElementTree.parse(report).getroot())


def _outcome(report: ElementTree.Element) -> Outcome:
    reasons = [skip.get("message", "") for skip in report.iter("skipped")]
    passed = sum(len(case) == 0 for case in report.iter("testcase"))
    return Outcome(passed, {reason: reasons.count(reason) for reason in sorted(set(reasons))})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write what came out")
    target = parser.parse_args().json
    pythons = {version: installed(version, more["packages"]) for version, more in _versions().items()}
    if target is not None:
        pythons[transformers.__version__] = Path(sys.executable)
    outcomes = {}
    for version, python in pythons.items():
        sys.stdout.write(f"transformers {version}\n")
        sys.stdout.flush()
        outcomes[version] = run_tests(python)
    if target is not None:
        rows = [{"transformers": version, **outcome._asdict()} for version, outcome in outcomes.items()]
        target.write_text(json.dumps({"versions": rows}, indent=1) + "\n")
    return 0


def _versions() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(VERSIONS.read_text())


if __name__ == "__main__":
    sys.exit(main())
