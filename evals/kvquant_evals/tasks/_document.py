"""Documents for retrieval: what is hidden in them and where, and what is asked about them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvquant_evals.model import Frame, Source
from kvquant_evals.settings import Settings

LONGEST_WORD = 40  # characters without a space, beyond which a text is of a script without spaces, or no text


@dataclass(frozen=True)
class Question:
    """Something that is asked about a document.

    begin: how the answer begins, for the model to complete: base models can do that too. expected: all strings that the
    answer should hold. depths: where the needle of each lies in the document, 0 to 1 in tokens; empty if it is in no
    one place.
    """

    ask: str
    begin: str
    expected: tuple[str, ...]
    depths: tuple[float, ...] = ()

    @property
    def depth(self) -> float | None:
        """That of the only needle; None if there are several or none."""
        return self.depths[0] if len(self.depths) == 1 else None

    def prompt(self, frame: Frame) -> str:
        """What follows the document."""
        return f"\n\nQuestion: {self.ask}{frame.after or chr(10) + 'Answer: '}{self.begin}"

    def score(self, answer: str) -> float:
        """The share of the expected strings in the answer; a single one has to come first. Only whole words count.

        Source: RULER (Hsieh et al., 2024), section 4.
        """
        if len(self.expected) == 1:
            return float(bool(re.match(rf"\s*{re.escape(self.expected[0])}(?!\w)", answer)))
        found = [re.search(rf"(?<!\w){re.escape(text)}(?!\w)", answer, re.IGNORECASE) for text in self.expected]
        return sum(match is not None for match in found) / len(found)


@dataclass(frozen=True)
class Document:
    """A text with its questions. planted: how many of its tokens are not of the text around them."""

    text: str
    questions: tuple[Question, ...]
    planted: int


@dataclass(frozen=True)
class Draft:
    """All that a document depends on; it has about `context` tokens of the source's tokenizer."""

    source: Source
    text: str
    settings: Settings
    kind: str
    context: int
    index: int

    def rng(self) -> random.Random:
        """The draws for this document, always the same ones."""
        return random.Random(f"{self.settings.seed}/{self.kind}/{self.context}/{self.index}")

    def count(self, text: str) -> int:
        """Tokens of a text that stands between others."""
        return self.source.encode(f" {text}").shape[1]

    def filler(self, rng: random.Random, tokens: int) -> Tensor:
        """Token ids [tokens] from anywhere in the text."""
        ids = self.source.encode(self.text)[0]
        first = rng.randrange(max(1, len(ids) - tokens))
        return ids[first : first + tokens]


@dataclass(frozen=True)
class Woven:
    """A text with sentences in it: the depth of each, 0 to 1 in tokens, and the tokens of all."""

    text: str
    depths: tuple[float, ...]
    planted: int


def weave(draft: Draft, rng: random.Random, sentences: Sequence[str], depths: Sequence[float] | None = None) -> Woven:
    """Puts sentences between words of the draft's text, in their order. depths: ascending; None: drawn."""
    depths = sorted(rng.random() for _ in sentences) if depths is None else depths
    sizes = [draft.count(sentence) for sentence in sentences]
    room = max(1, draft.context - sum(sizes))
    ids = draft.filler(rng, room)
    text = _decode(draft.source, ids)
    places = [round(depth * room) for depth in depths]  # in tokens of the filler
    cuts = [_boundary(text, len(_decode(draft.source, ids[:place]))) for place in places]
    parts = [text[: cuts[0]]]
    for sentence, first, last in zip(sentences, cuts, [*cuts[1:], len(text)], strict=True):
        parts += [sentence, text[first:last]]
    before = [place + sum(sizes[:i]) for i, place in enumerate(places)]
    reached = [round(tokens / (room + sum(sizes) - size), 4) for tokens, size in zip(before, sizes, strict=True)]
    return Woven(" ".join(part.strip(" ") for part in parts if part.strip(" ")), tuple(reached), sum(sizes))


def _decode(source: Source, ids: Tensor) -> str:
    text: str = source.tokenizer.decode(ids, skip_special_tokens=True)
    return text


def _boundary(text: str, position: int) -> int:
    """The last place between two words up to `position`, or that itself where words have no spaces between them."""
    if position >= len(text):
        return len(text)
    last = max(0, *(text.rfind(space, 0, position + 1) for space in " \n"))
    return last if position - last <= LONGEST_WORD else position
