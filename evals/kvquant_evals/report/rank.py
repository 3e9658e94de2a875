"""Which caches are held against each other: those of about the same size. And which is best among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvquant_evals import table
from kvquant_evals.report.saved import Saved, SavedRow

BOUNDS = (3, 5, 9)  # effective bits per number: those of 2, of 3 or 4, and of 8 bits with their scales

# How scores are ranked, by the beginning of their names; the longest that fits counts. What is not here is not ranked.
MORE, LESS, NEARER = "more is better", "less is better", "nearer to full precision is better"
_ORDERS = {
    "perplexity": NEARER,  # below that of full precision is luck
    "kl": LESS,
    "top1": MORE,
    "retrieval": MORE,
    "attention": LESS,
    "generate": MORE,
    "generate_kl": LESS,
    "generate_repetition": NEARER,
    "memory": LESS,
    "memory_longest": MORE,
    "speed": MORE,
    "speed_first_token": LESS,
    "speed_step": LESS,
    "bytes": LESS,
    "effective_bits": LESS,
}


@dataclass(frozen=True)
class SizeClass:
    """Rows of about as many effective bits per number; `title` says how many."""

    title: str
    rows: list[SavedRow]

    def leader(self) -> SavedRow | None:
        """The row of the lowest mean KL, of those whose scores may be held against each other."""
        found = {row.label: row.score("kl_mean") for row in self.rows if row.is_sound}
        scored = {label: kl for label, kl in found.items() if kl is not None}
        if not scored:
            return None
        best = min(scored, key=lambda label: scored[label])
        return next(row for row in self.rows if row.label == best)


def classes(saved: Saved) -> list[SizeClass]:
    """All rows but full precision, from the fewest bits to the most, then those whose bits are unknown."""
    titles = [f"up to {bound} bits per number" for bound in BOUNDS]
    titles += [f"more than {BOUNDS[-1]} bits per number", "bits unknown"]
    found: dict[str, list[SavedRow]] = {title: [] for title in titles}
    for row in saved.rows[1:]:
        found[titles[_position(row.score("effective_bits"))]].append(row)
    return [SizeClass(title, rows) for title, rows in found.items() if rows]


def best_cells(saved: Saved) -> set[tuple[str, int]]:
    """Label and column number of the cells that are the best of their class: none where all are alike, or only one."""
    cells = {line[0]: line for line in table.cells(saved.plain)}
    return {
        (row.label, number)
        for group in classes(saved)
        for number, column in enumerate(saved.plain["columns"], start=1)
        for row in _best([row for row in group.rows if row.is_sound], saved.full, cells, number, column["score"])
    }


def _position(bits: float | None) -> int:
    if bits is None:
        return len(BOUNDS) + 1
    return next((i for i, bound in enumerate(BOUNDS) if bits <= bound), len(BOUNDS))


def _best(
    rows: list[SavedRow], full: SavedRow, cells: dict[str, list[str]], number: int, score: str
) -> Iterable[SavedRow]:
    """Those that show the best value; what looks the same in the table is as good."""
    found = [(row, _merit(row, full, score)) for row in rows]
    merits = {row.label: merit for row, merit in found if merit is not None}
    shown = {label: cells[label][number] for label in merits}
    if len(set(shown.values())) < 2:
        return []
    top = max(merits, key=lambda label: merits[label])
    return [row for row in rows if shown.get(row.label) == shown[top]]


def _merit(row: SavedRow, full: SavedRow, score: str) -> float | None:
    """More for what is better; None for what cannot be ranked."""
    value, goal, order = row.score(score), full.score(score), order_of(score)
    if value is None or (order == NEARER and goal is None):
        return None
    return {MORE: value, LESS: -value, NEARER: -abs(value - (goal or 0.0))}.get(order or "")


def order_of(score: str) -> str | None:
    """How a score is ranked; None if that is not known."""
    known = [name for name in _ORDERS if score == name or score.startswith(f"{name}_")]
    return _ORDERS[max(known, key=len)] if known else None
