"""Peer: somebody else's cache, with what one has to know about it to read its row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from transformers import Cache

from kvquant import QuantConfig
from kvquant_evals.model import Subject
from kvquant_evals.rows import Contender


class Recipe(Protocol):
    """How a peer's cache is made."""

    def missing(self) -> str | None:
        """Why the cache cannot be made here; None if it can."""

    def new_cache(self, subject: Subject) -> Cache: ...

    def quant(self, subject: Subject) -> QuantConfig | None:
        """The configuration of a cache that is made of our formats."""


@dataclass(frozen=True)
class Peer:
    """A kind of cache that others have published.

    name: for the command line; label: in the table; source: who published it, and the year; what: what it stores.
    differs: how what is measured here differs from what was published; empty if it does not.
    """

    name: str
    label: str
    source: str
    what: str
    recipe: Recipe
    differs: str = ""

    def contender(self, subject: Subject) -> Contender:
        """The peer as a row of an evaluation of `subject`."""
        make, quant = partial(self.recipe.new_cache, subject), self.recipe.quant(subject)
        return Contender(self.label, make, quant, is_peer=True)

    def describe(self) -> str:
        """Name, label and source, and below them what is stored, what differs and why it cannot run here."""
        missing = self.recipe.missing()
        lines = [f"{self.name}: {self.label}; {self.source}", self.what]
        lines += [f"differs: {self.differs}"] if self.differs else []
        lines += [f"cannot run here: {missing}"] if missing else []
        return "\n    ".join(lines)
