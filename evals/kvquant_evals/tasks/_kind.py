"""The kinds of retrieval, one value each. A new kind is a function that makes its documents, and a value here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvquant_evals.error import EvalError
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import _ruler
from kvquant_evals.tasks._document import Document, Draft
from kvquant_evals.tasks._record import records


@dataclass(frozen=True)
class Kind:
    """A kind of retrieval.

    make: a document with its questions. new_tokens: the most that an expected string takes, with what stands around it.
    asks_each: whether what is hidden is asked for one by one. has_depths: whether there is a document for each depth.
    """

    name: str
    make: Callable[[Draft], Document]
    new_tokens: int = _ruler.CODE_DIGITS + 2
    asks_each: bool = False
    has_depths: bool = False

    def documents(self, settings: Settings) -> int:
        """How many there are for each context."""
        return settings.documents * (settings.depths if self.has_depths else 1)

    def questions(self, settings: Settings) -> int:
        """About how many there are for a document, to foretell how long they last."""
        return settings.needles if self.asks_each else 1


KINDS = (
    Kind("single", _ruler.single, has_depths=True),
    Kind("multi_key", _ruler.multi_key, asks_each=True),
    Kind("multi_value", _ruler.multi_value, new_tokens=_ruler.CODE_DIGITS + 5),
    Kind("multi_query", _ruler.multi_query, new_tokens=_ruler.CODE_DIGITS + 7),
    Kind("variable_tracking", _ruler.variable_tracking, new_tokens=_ruler.NAME_LETTERS + 3),
    Kind("common_words", _ruler.common_words, new_tokens=6),
    Kind("records", records, asks_each=True),
)


def find(names: Sequence[str]) -> list[Kind]:
    """The kinds of these names; `all` stands for all of them. Raises EvalError for a name that is not one."""
    known = {kind.name: kind for kind in KINDS}
    found: list[Kind] = []
    for name in names:
        if name != "all" and name not in known:
            raise EvalError(f"retrieval {name!r} is unknown; known are {', '.join(known)} and all")
        found += KINDS if name == "all" else [known[name]]
    return list(dict.fromkeys(found))
