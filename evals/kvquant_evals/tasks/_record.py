"""Documents with records that are near duplicates: each shares all but one part of its key with many others."""

from __future__ import annotations

from itertools import product
from math import isqrt

from kvquant_evals.tasks._document import Document, Draft, Question, weave
from kvquant_evals.tasks._ruler import NAMES

CITIES = """
    Athens Berlin Cairo Delhi Essen Florence Geneva Helsinki Istanbul Jakarta Kyoto London Madrid
    Naples Oslo Paris Quito Rome Seoul Tokyo Utrecht Vienna Warsaw Xian York Zurich
""".split()
RECORD = "{name} in {city} has room {room}. {name} in {city} has key {key}."
FIELDS = ("room", "key")
NUMBERS = range(100, 1000)
MOST = len(NUMBERS) // len(FIELDS)


def records(draft: Draft) -> Document:
    """Everybody in every city; asked for is one field of some of them.

    A context that is too short for all records has as many as fill half of it.
    """
    rng = draft.rng()
    name, city = (max(words, key=draft.count) for words in (NAMES, CITIES))
    size = draft.count(RECORD.format(name=name, city=city, room=NUMBERS[-1], key=NUMBERS[-1]))
    count = max(1, min(draft.settings.records, draft.context // 2 // size))
    side = isqrt(count - 1) + 1
    keys = list(product(rng.sample(NAMES, side), rng.sample(CITIES, side)))[:count]
    rng.shuffle(keys)
    numbers = iter(rng.sample(NUMBERS, len(FIELDS) * count))  # none is the value of two fields
    values = [{field: next(numbers) for field in FIELDS} for _ in range(count)]
    told = [RECORD.format(name=name, city=city, **value) for (name, city), value in zip(keys, values, strict=True)]
    woven = weave(draft, rng, told)
    asked = [(i, rng.choice(FIELDS)) for i in rng.sample(range(count), min(draft.settings.needles, count))]
    questions = [_question(*keys[i], field, values[i][field], woven.depths[i]) for i, field in asked]
    return Document(woven.text, tuple(questions), woven.planted)


def _question(name: str, city: str, field: str, value: int, depth: float) -> Question:
    ask, begin = f"Which {field} does {name} in {city} have?", f"{name} in {city} has {field}"
    return Question(ask, begin, (str(value),), (depth,))
