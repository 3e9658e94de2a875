"""Sliding windows: which columns attention no longer sees, and rows without the pages that have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvquant.config import QuantConfig

if TYPE_CHECKING:
    from kvquant.snapshot import Row


class Window(NamedTuple):
    """The window of a layer that has one, and what has left it for good. Columns count from the first that is held.

    size: tokens that a query attends to, itself included; None for full attention.
    forgotten: columns that are no longer held at all.
    unknown: leading columns that are held in part only, so that no query may see them again.
    """

    size: int | None = None
    forgotten: int = 0
    unknown: int = 0

    def hidden(self, settled: int) -> int:
        """How many of `settled` columns the next token does not attend to."""
        return 0 if self.size is None else max(0, settled - self.size + 1)

    def most_pages(self, num_rows: int, config: QuantConfig) -> int:
        """The pages of rows of `max_length` tokens, 0 if that is open. A window has one more, shown in part."""
        tokens = config.max_length or 0
        if self.size is not None:
            tokens = min(tokens, self.size + config.page_size)
        return num_rows * (tokens // config.page_size)

    def reaches_back_to(self, settled: int) -> bool:
        """Whether all that a query after `settled` columns attends to is still held."""
        return self.hidden(settled) >= self.unknown


FULL_ATTENTION = Window()


def forget_passed(
    window: Window, rows: Sequence[Row], settled: int, config: QuantConfig
) -> tuple[Window, list[Row], int]:
    """The window, rows and settled columns without the pages that are hidden as a whole."""
    hidden = window.hidden(settled)
    kept = [_without_passed(row, hidden, config) for row in rows]
    unknown = [row.start + config.sinks for row, old in zip(kept, rows, strict=True) if row is not old]
    first = min((row.start for row in kept), default=0)
    moved = Window(window.size, window.forgotten + first, max(0, max([window.unknown, *unknown]) - first))
    return moved, [row._replace(start=row.start - first) for row in kept], settled - first


def _without_passed(row: Row, hidden: int, config: QuantConfig) -> Row:
    """The row without its hidden pages, or pages' worth of tail; but a row that has pages keeps one.

    Its first columns then stand where sinks do in a row from the start. They are hidden, whatever they hold. Pages lie
    where they would if nothing were forgotten, so that they do not depend on the chunks that tokens came in.
    """
    passed = (hidden - row.start - config.sinks) // config.page_size
    if row.pages:
        passed = min(passed, len(row.pages) - 1)
    if passed <= 0:
        return row
    return row._replace(start=row.start + passed * config.page_size, pages=row.pages[passed:])
