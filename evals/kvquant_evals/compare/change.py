"""How the scores of one evaluation differ from those of an earlier one, and which of that is worse than allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvquant_evals.compare.limit import MEASURES, Amount, Limits, Measure
from kvquant_evals.report.saved import Saved, SavedRow

HEADER = ("cache", "score", "A", "B", "change", "allowed", "")


@dataclass(frozen=True)
class Change:
    """A score of one cache in A (before) and in B (after); None where there is none.

    full: that of full precision in B. is_gated: whether its getting worse matters, as it does in rows of ours.
    """

    label: str
    measure: Measure
    title: str
    before: float | None
    after: float | None
    full: float | None
    is_gated: bool
    limits: Limits

    @property
    def allowed(self) -> Amount | None:
        return self.limits.allowed.get(self.measure.name)

    def complaints(self) -> Iterator[str]:
        """Why it is worse than allowed."""
        if not self.is_gated:
            return
        if self.after is None:
            was = self._shown(self.before)
            yield f"has no {self.title}, {f'which in A is {was}' if was else 'for which there is a limit'}"
            return
        yield from self._beyond_limit(self.after)
        if self.before is not None:
            yield from self._worse_than_before(self.before, self.after)

    def cells(self) -> list[str]:
        """A line of the table under HEADER."""
        sign = "+" if self.measure.is_cost else "-"
        allowed = f"{sign}{self.allowed}" if self.is_gated and self.allowed and self.before is not None else ""
        verdict = "worse than allowed" if any(self.complaints()) else ""
        return [
            self.label, self.title, self._shown(self.before), self._shown(self.after), self._difference(), allowed,
            verdict,
        ]  # fmt: skip

    def _beyond_limit(self, after: float) -> Iterator[str]:
        limit, flag = self.limits.limits.get(self.measure.name), self.measure.limit_flag
        if limit is None:
            return
        if not self.measure.from_full:
            if not self.measure.worsening(limit.of(1.0), after) <= 0:
                yield f"{self.title} {self._shown(after)} is beyond {flag} {limit}"
        elif self.full is not None:
            bound = self.full + limit.of(self.full)
            # The sum above rounds: what is allowed to the last digit must not fail by it.
            if not self.measure.worsening(bound, after) <= 1e-9 * abs(bound):
                yield (
                    f"{self.title} {self._shown(after)} is beyond {flag} {limit}, from full precision's "
                    f"{self._shown(self.full)}"
                )

    def _worse_than_before(self, before: float, after: float) -> Iterator[str]:
        if self.allowed is None:
            return
        slack = self.allowed.of(abs(before)) + self.measure.rounding + 1e-9 * abs(before)
        if not self.measure.worsening(before, after) <= slack:
            yield (
                f"{self.title} went from {self._shown(before)} to {self._shown(after)} ({self._difference()}), more "
                f"than {self.measure.change_flag} {self.allowed}"
            )

    def _difference(self) -> str:
        if self.before is None or self.after is None:
            return ""
        if self.before and (self.allowed is None or self.allowed.is_share):
            return f"{self.after / self.before - 1:+.2%}"
        return f"{self.after - self.before:+.4g}"

    def _shown(self, value: float | None) -> str:
        return "" if value is None else format(value, self.measure.spec)


def changes(a: Saved, b: Saved, limits: Limits, labels: Collection[str] = ()) -> list[Change]:
    """All scores that matter, of the rows that are in B. labels: which rows; all if empty."""
    before = {row.label: row for row in a.rows}
    titles = {column["score"]: column["title"] for column in b.plain["columns"] if not column["is_relative"]}
    return [
        Change(
            row.label,
            measure,
            titles.get(score, score),
            before[row.label].scores.get(score) if row.label in before else None,
            row.scores.get(score),
            b.full.score(score),
            row.is_ours,
            limits,
        )
        for row in wanted(b.rows, labels)
        for measure in MEASURES
        for score in _names(measure, row, before.get(row.label), limits)
    ]


def complaints(a: Saved, b: Saved, found: Sequence[Change], labels: Collection[str] = ()) -> list[str]:
    """One line for each thing that is worse than allowed; none if all is well."""
    present = {row.label for row in b.rows}
    why = "it was evaluated without it" if b.is_complete else "it is unfinished"
    lines = [f"{row.label}: is missing in B: {why}" for row in wanted(a.rows, labels) if row.label not in present]
    for row in wanted(b.rows, labels):
        if row.is_ours:
            lines += [f"{row.label}: is broken, says {task}: {fault}" for task, fault in row.faults.items()]
            lines += [f"{row.label}: packed nothing, so that its scores say nothing"] if row.is_untested else []
    return lines + [f"{change.label}: {complaint}" for change in found for complaint in change.complaints()]


def wanted(rows: Sequence[SavedRow], labels: Collection[str]) -> list[SavedRow]:
    return [row for row in rows if not labels or row.label in labels]


def _names(measure: Measure, row: SavedRow, before: SavedRow | None, limits: Limits) -> list[str]:
    """The scores of a measure in either report, and one that a limit is for in any case."""
    if row.is_full and not measure.in_full:
        return []
    every = dict.fromkeys([*(before.scores if before else ()), *row.scores])
    found = [score for score in every if measure.includes(score)]
    return found or ([measure.score] if measure.name in limits.limits else [])
