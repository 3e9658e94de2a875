"""What was timed, as JSON, as tables of text and as a plot."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvquant_evals.bench.attention import KIND as ATTENTION
from kvquant_evals.bench.attention import Shape
from kvquant_evals.bench.decoding import PACKED_HEADS, STOCK
from kvquant_evals.bench.memory import Residence
from kvquant_evals.bench.race import Timing
from kvquant_evals.rows import versions

FAIR_ATTENTION = "matmul, softmax, matmul bf16"


@dataclass
class Report:
    shape: Shape
    timings: list[Timing] = field(default_factory=list)
    memory: list[Residence] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All that is needed to read and repeat the timings, for JSON."""
        machine = {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()}
        rows = [asdict(timing) | {"is_noisy": timing.is_noisy} for timing in self.timings]
        memory = [asdict(residence) for residence in self.memory]
        return {
            "versions": versions(),
            "machine": machine,
            "shape": asdict(self.shape),
            "timings": rows,
            "memory": memory,
        }


def milliseconds(report: dict[str, Any], kind: str, threads: int) -> list[list[str]]:
    """Medians of one kind of timing: a line per contender, a column per context, and the bytes of the longest.

    A noisy median is followed by `~`. The first line names the columns.
    """
    found, labels, contexts = _select(report, kind, threads)
    lines = [
        [
            label,
            *(f"{row['milliseconds']:.2f}{'~' if row['is_noisy'] else ''}" for row in found[label]),
            f"{found[label][-1]['cache_bytes'] / 1e6:,.1f}",
        ]
        for label in labels
    ]
    head = [f"{kind}: ms", *(f"{context:,} tokens" for context in contexts), f"MB at {contexts[-1]:,}"]
    return [head, *lines]


def ratios(report: dict[str, Any], kind: str, threads: int) -> list[list[str]]:
    """How many times as fast as DynamicCache, or as torch's best form of attention, each contender is."""
    found, labels, contexts = _select(report, kind, threads)
    baseline = _baseline(kind)
    if baseline not in found:
        return []
    lines = [
        [
            label,
            *(
                f"{b['milliseconds'] / row['milliseconds']:.2f}x"
                for row, b in zip(found[label], found[baseline], strict=True)
            ),
        ]
        for label in labels
    ]
    return [[f"{kind}: speed relative to {baseline}", *(f"{context:,} tokens" for context in contexts)], *lines]


def origins(report: dict[str, Any], contender: str) -> list[str]:
    """A sentence per model: how much of the gain over DynamicCache is the cache's own, and how much is torch's."""
    sentences = []
    for kind in kinds(report):
        found, _, contexts = _select(report, kind, 1)
        if not {STOCK, PACKED_HEADS, contender} <= found.keys():
            continue
        stock, packed, ours = (found[label][-1]["milliseconds"] for label in (STOCK, PACKED_HEADS, contender))
        sentences.append(
            f"{kind.removeprefix('decoding, ')}, {contexts[-1]:,} tokens, one thread: {contender} is "
            f"{stock / ours:.1f}x as fast as DynamicCache; {stock / packed:.1f}x come from torch's slow handling of "
            f"grouped heads, {packed / ours:.1f}x from the cache"
        )
    return sentences


def residences(report: dict[str, Any]) -> list[list[str]]:
    """Resident memory of real decoding, in MB and relative to DynamicCache."""
    rows = report["memory"]
    base = next((row for row in rows if row["contender"] == STOCK), None)
    lines = []
    for row in rows:
        shares = [f"{row[name] / base[name]:.2f}" if base else "" for name in ("held", "peak")]
        lines.append([row["contender"], f"{row['held'] / 1e6:,.1f}", shares[0], f"{row['peak'] / 1e6:,.1f}", shares[1]])
    context = f"{rows[0]['context']:,}" if rows else ""
    return [[f"resident set, {context} tokens: MB", "held", "of DynamicCache", "peak", "of DynamicCache"], *lines]


def kinds(report: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in report["timings"]))


def thread_counts(report: dict[str, Any]) -> list[int]:
    return sorted({row["threads"] for row in report["timings"]})


def caption(report: dict[str, Any]) -> str:
    """What was timed on what, in one line."""
    shape, found, machine = report["shape"], report["versions"], report["machine"]
    most: dict[str, int] = {}
    for row in report["timings"]:
        what = row["kind"].split(",")[0]
        most[what] = max(most.get(what, 0), row["rounds"])
    rounds = " and ".join(f"{count} rounds of {what}" for what, count in most.items())
    least = min(row["rounds"] for row in report["timings"])
    return (
        f"{machine['processor']}, {machine['cores']} cores; attention of {shape['num_heads']} query and "
        f"{shape['num_kv_heads']} KV heads of {shape['head_dim']}; medians of {rounds} in random orders, {least} at "
        f"least for the slowest; kvquant {found['kvquant']}, transformers {found['transformers']}, "
        f"torch {found['torch']}. `~`: noisy"
    )


def plot(report: dict[str, Any], path: str) -> None:
    """Milliseconds against context, one panel per kind, on all threads and on one. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels = [(kind, threads) for kind in kinds(report) for threads in thread_counts(report)]
    figure = Figure(figsize=(6.4 * len(thread_counts(report)), 4.2 * len(kinds(report))), layout="constrained")
    grid = figure.subplots(len(kinds(report)), len(thread_counts(report)), squeeze=False).flatten()
    for axes, (kind, threads) in zip(grid, panels, strict=True):
        found, labels, contexts = _select(report, kind, threads)
        for label in labels:
            is_ours = label.startswith("kvquant")
            style = "-" if is_ours else "--"
            times = [row["milliseconds"] for row in found[label]]
            axes.plot(contexts, times, style, marker="o", label=label, linewidth=2 if is_ours else 1)
        axes.set(xscale="log", yscale="log", xlabel="cached tokens", ylabel="ms", title=f"{kind}, {threads} threads")
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _select(report: dict[str, Any], kind: str, threads: int) -> tuple[dict[str, list[Any]], list[str], list[int]]:
    rows = [row for row in report["timings"] if row["kind"] == kind and row["threads"] == threads]
    contexts = sorted({row["context"] for row in rows})
    found: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: contexts.index(row["context"])):
        found.setdefault(row["contender"], []).append(row)
    labels = list(dict.fromkeys(row["contender"] for row in rows))
    return found, labels, contexts


def _baseline(kind: str) -> str:
    return FAIR_ATTENTION if kind == ATTENTION else STOCK


def _processor() -> str:
    """The processor's name and the vector instructions that matter here."""
    capability = torch.backends.cpu.get_cpu_capability()
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().split("\n") if listing.exists() else []
    fields = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line}
    name = fields.get("model name", platform.machine())
    family = f" family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else ""
    return f"{name}{family}, {capability}{' with VNNI' if 'avx512_vnni' in fields.get('flags', '') else ''}"


def printed(report: dict[str, Any]) -> Sequence[list[list[str]]]:
    """All tables, in the order in which they are shown."""
    tables = [
        [[f"{lines[0][0]}, {threads} thr.", *lines[0][1:]], *lines[1:]]
        for kind in kinds(report)
        for threads in thread_counts(report)
        for lines in (milliseconds(report, kind, threads), ratios(report, kind, threads))
        if lines
    ]
    return tables + ([residences(report)] if report["memory"] else [])
