"""What was found, as plots beside the file of results and as a few lines of text. Nothing here is typed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

KERNELS, DECODING, CORRECTNESS, LAUNCH = "kernels", "decoding", "correctness", "launch"
MODE = "graph"  # the times that plots show
OURS = "kvquant "  # what the labels of our contenders begin with

Found = dict[str, Any]


def results_of(data: Found, part: str) -> Found:
    found: Found = data.get("parts", {}).get(part, {}).get("results", {})
    return found


def cells(data: Found) -> list[Found]:
    """Sizes at which attention was timed."""
    return [found for found in results_of(data, KERNELS).values() if "batch" in found]


def is_right(data: Found) -> bool:
    """Whether all that was checked is right, and every part ran."""
    return not list(wrong(data))


def wrong(data: Found) -> Iterator[str]:
    """What is not right, a line each."""
    for name, part in data.get("parts", {}).items():
        yield from (f"{name}: {unit} failed: {_last_line(text)}" for unit, text in part["failed"].items())
        yield from (f"{name}: died with status {death['status']}" for death in part["deaths"])
    skipped = data.get("parts", {}).get(CORRECTNESS, {}).get("skipped", {})
    yield from (f"not checked: {unit}: {reason}" for unit, reason in skipped.items())
    found = results_of(data, CORRECTNESS)
    tests = found.get("tests", {})
    yield from (f"a worker did not finish: {_last_line(log)}" for log in tests.get("unfinished", []))
    yield from (f"test failed: {test}" for test in tests.get("failures", {}))
    checks = tests.get("checks", {}) | {name: unit for name, unit in found.items() if name != "tests"}
    yield from (f"check failed: {name}: {check}" for name, check in checks.items() if not check["passed"])
    for cell in cells(data):
        rows = [row["contender"] for row in cell["rows"] if not row["is_finite"]]
        yield from (f"not finite: {label}, {size_of(cell)}" for label in rows)
    for part in (KERNELS, DECODING):
        for name, unit in results_of(data, part).items():
            failed = {label: why for label, why in unit.get("unsupported", {}).items() if label.startswith(OURS)}
            yield from (f"{part}: {label}, {name}: {why}" for label, why in failed.items())


def _last_line(text: str) -> str:
    return text.strip().split("\n")[-1]


def size_of(cell: Found) -> str:
    return f"{cell['shape']['name']}, {cell['batch']} x {cell['context']:,}"


def text(data: Found) -> str:
    """A short table of everything, for the end of a log."""
    lines = [*_machine_lines(data), *_tests_lines(data), *map(_cell_line, cells(data)), *_page_lines(data)]
    lines += [line for found in results_of(data, DECODING).values() for line in _decoding_lines(found)]
    lines += [_launch_line(found) for found in results_of(data, LAUNCH).values() if found["best"]]
    for name, part in data.get("parts", {}).items():
        lines += [f"{name}: skipped {unit}: {reason}" for unit, reason in part["skipped"].items()]
    return "\n".join([*lines, *(f"WRONG {line[:400]}" for line in wrong(data))]) + "\n"


def _machine_lines(data: Found) -> list[str]:
    machine = data.get("machine", {})
    copies = [results_of(data, KERNELS).get(name, {}).get("bytes_per_second") for name in ("copy", "copy again")]
    speeds = ", ".join(f"{copy / 1e9:,.1f} GB/s" for copy in copies if copy)
    return [f"{machine.get('device')}, {machine.get('versions')}, copy {speeds}"]


def _tests_lines(data: Found) -> list[str]:
    tests = results_of(data, CORRECTNESS).get("tests")
    if tests is None:
        return []
    skipped = sum(tests["skipped"].values())
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {skipped} skipped, {len(tests['checks'])} checks"
    return [f"tests: {counts}, {len(tests['unfinished'])} of {tests['workers']} workers did not finish"]


def _cell_line(cell: Found) -> str:
    rows = [row for row in cell["rows"] if MODE in row]
    best = min((row[MODE]["microseconds"] for row in rows if not row["is_packed"]), default=float("nan"))
    ours = [
        f"{row['contender'].removeprefix('kvquant ')}: {row[MODE]['microseconds']:,.1f} us "
        f"{row[MODE].get('ratio_over_bf16', float('nan')):.2f}x {row[MODE]['share_of_copy']:.0%}"
        for row in rows
        if row["is_packed"]
    ]
    return f"{size_of(cell)}: bf16 {best:,.1f} us; " + "; ".join(ours)


def _page_lines(data: Found) -> list[str]:
    found = [unit for unit in results_of(data, KERNELS).values() if "pages" in unit]
    return [
        f"{unit['bits']}, {unit['pages']} pages: "
        + "; ".join(f"{row['what']} {row['microseconds']:,.1f} us {row['share_of_copy']:.0%}" for row in unit["rows"])
        for unit in found
    ]


def _decoding_lines(found: Found) -> list[str]:
    rows = [
        f"{row['contender']} {row['tokens_per_second']:,.1f} tok/s {row['cache_bytes'] / 1e6:,.0f} MB"
        for row in found["rows"]
    ]
    return [f"{found['model']}, {found['batch']} x {found['context']:,}: " + "; ".join(rows)]


def _launch_line(found: Found) -> str:
    table, best = found["rows"][0], found["best"]
    names = ("num_warps", "num_stages", "programs_per_processor")
    chosen = ", ".join(f"{name} {best[name]}" for name in names)
    size = f"{found['bits']}, {found['batch']} x {found['context']:,}"
    return f"launch of {size}: {table['microseconds']:,.1f} us by the table, {best['microseconds']:,.1f} us by {chosen}"


def draw(data: Found, path: Path) -> None:
    """Plots of what there is so far, in files beside `path`."""
    from gpu import plots

    stem = path.with_suffix("")
    if cells(data):
        plots.draw_ratios(data, stem.with_name(f"{stem.name}_ratio.png"))
        plots.draw_shares(data, stem.with_name(f"{stem.name}_bandwidth.png"))
    if results_of(data, DECODING):
        plots.draw_decoding(data, stem.with_name(f"{stem.name}_decoding.png"))


def caption(data: Found) -> str:
    """The device and the versions, in one line."""
    machine = data["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return f"{machine['device']}; kvquant {machine['kvquant']}, {versions}"
