"""Documents after RULER, written from its description: needles, chains of variables and common words.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024, section 3.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from string import ascii_uppercase

from kvquant_evals.error import EvalError
from kvquant_evals.tasks._document import Document, Draft, Question, weave

NAMES = """
    Alice Bruno Carla David Elena Frank Greta Hugo Irene Jonas Karen Louis Maria
    Nadia Oscar Paula Quinn Ralph Sofia Tomas Ursula Victor Wendy Xavier Yvonne Zachary
""".split()
NEEDLE = "The secret code of {name} is {code}."
CODE_DIGITS = 5

CHAINS = 2  # of variables in a document: the one that is asked for, and one of the same form
NAME_LETTERS = 3

COMMON_WORDS = 5  # that are asked for
COMMON_RATIO = 10  # how much more often they occur than any other word
WORDS_CONTEXT = 1024  # tokens per occurrence of the other words, so that long documents need no larger vocabulary


def single(draft: Draft) -> Document:
    """One needle, at the depth of the document's index."""
    rng, steps = draft.rng(), draft.settings.depths
    depth = draft.index % steps / (steps - 1) if steps > 1 else 0.5
    (name,), (code,) = rng.sample(NAMES, 1), _codes(rng, 1)
    woven = weave(draft, rng, [NEEDLE.format(name=name, code=code)], [depth])
    return Document(woven.text, (_question(name, code, depth),), woven.planted)


def multi_key(draft: Draft) -> Document:
    """Needles of the same form, each asked for by itself."""
    rng, count = draft.rng(), draft.settings.needles
    names, codes = rng.sample(NAMES, count), _codes(rng, count)
    woven = weave(draft, rng, _needles(names, codes))
    return Document(woven.text, tuple(map(_question, names, codes, woven.depths)), woven.planted)


def multi_value(draft: Draft) -> Document:
    """Needles with the same key, whose values are asked for all at once."""
    rng, count = draft.rng(), draft.settings.needles
    (name,), codes = rng.sample(NAMES, 1), _codes(rng, count)
    woven = weave(draft, rng, [f"One of the secret codes of {name} is {code}." for code in codes])
    ask, begin = f"What are all the secret codes of {name}?", f"The secret codes of {name} are 1)"
    return Document(woven.text, (Question(ask, begin, codes, woven.depths),), woven.planted)


def multi_query(draft: Draft) -> Document:
    """Needles with different keys, which are asked for all at once."""
    rng, count = draft.rng(), draft.settings.needles
    names, codes = rng.sample(NAMES, count), _codes(rng, count)
    woven = weave(draft, rng, _needles(names, codes))
    ask, begin = f"What are the secret codes of {', '.join(names)}?", f"{names[0]}:"
    return Document(woven.text, (Question(ask, begin, codes, woven.depths),), woven.planted)


def variable_tracking(draft: Draft) -> Document:
    """Chains of variables, each set to the one before it; asked for are all that have the value of one chain."""
    rng, length = draft.rng(), draft.settings.hops + 1
    names, values = _variables(rng, CHAINS * length), _codes(rng, CHAINS)
    chains = [names[i * length : (i + 1) * length] for i in range(CHAINS)]
    steps = [_assignments(chain, value) for chain, value in zip(chains, values, strict=True)]
    order = sorted(list(range(CHAINS)) * length, key=lambda _: rng.random())  # which chain goes on next
    woven = weave(draft, rng, [steps[chain].pop(0) for chain in order])
    depths = tuple(depth for chain, depth in zip(order, woven.depths, strict=True) if chain == 0)
    ask = f"Which {length} variables have the value {values[0]}?"
    begin = f"The {length} variables that have the value {values[0]} are VAR"
    return Document(woven.text, (Question(ask, begin, tuple(chains[0]), depths),), woven.planted)


def common_words(draft: Draft) -> Document:
    """A list of words of which some are far more common than the others.

    Raises EvalError if the text has too few words to take them from.
    """
    rng, times = draft.rng(), max(1, draft.context // WORDS_CONTEXT)
    vocabulary = sorted(set(re.findall(r"\b[^\W\d_]{4,8}\b", draft.text.lower())))
    rng.shuffle(vocabulary)
    common, others = vocabulary[:COMMON_WORDS], iter(vocabulary[COMMON_WORDS:])
    words = common * (times * COMMON_RATIO)
    planted = size = sum(draft.count(f"{word},") for word in words)
    while size < draft.context:
        word = next(others, None)
        if word is None:
            raise EvalError(
                f"the text has only {len(vocabulary)} words of 4 to 8 letters, too few for common_words at "
                f"context={draft.context}; use a longer text or another kind"
            )
        words += [word] * times
        size += times * draft.count(f"{word},")
    rng.shuffle(words)
    ask, begin = (
        "Which words are repeated most often in the list above?",
        'The words that are repeated most often are "',
    )
    return Document(", ".join(words) + ".", (Question(ask, begin, tuple(common)),), planted)


def _needles(names: Sequence[str], codes: Sequence[str]) -> list[str]:
    return [NEEDLE.format(name=name, code=code) for name, code in zip(names, codes, strict=True)]


def _question(name: str, code: str, depth: float) -> Question:
    return Question(
        f"What is the secret code of {name}?", f"The secret code of {name} is", expected=(code,), depths=(depth,)
    )


def _assignments(names: Sequence[str], value: str) -> list[str]:
    """The first variable has the value, every other one that of the variable before it."""
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    return [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=True)]


def _codes(rng: random.Random, count: int) -> tuple[str, ...]:
    """Different ones, so that the code of another needle is never right."""
    return tuple(f"{code:0{CODE_DIGITS}}" for code in rng.sample(range(10**CODE_DIGITS), count))


def _variables(rng: random.Random, count: int) -> list[str]:
    """Different names of capital letters."""
    letters = len(ascii_uppercase)
    numbers = rng.sample(range(letters**NAME_LETTERS), count)
    return ["".join(ascii_uppercase[n // letters**i % letters] for i in range(NAME_LETTERS)) for n in numbers]
