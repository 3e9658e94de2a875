"""generate() with many families of models, every attention and several ways to decode.

With 16 bits QuantCache is DynamicCache to the bit: whatever else the machinery does, it must not change a number. With
8 and 4 bits attention on packed pages gives what the model's own attention gives on the same states, dequantized.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from dequantized import DequantizedCache
from families import ATTENTIONS, PADDING, SMALL_PAGES, WAYS, generate, new_cache, prompt, rows_of, tiny_model
from family_table import FAMILIES
from observation import observe
from replay import parts, recording
from transformers import DynamicCache, __version__

from kvquant import QuantCache, QuantLayer

NATIVE_PAGES = SMALL_PAGES | {"page_size": 32}  # the smallest that the native kernel takes
PAGES = {16: SMALL_PAGES, 8: SMALL_PAGES, 4: NATIVE_PAGES}

# Errors relative to the largest logit, since layers are normalized, in up to 4 layers. Float32: sums of up to 32
# products (scores) and 79 weighted values in another order. The native kernel may round queries to 15 bits and weights
# to 16, and exp() multiplies an error of scores by the score, up to about 8 here.
REORDERED = 4 * (32 + 79) * torch.finfo(torch.float32).eps
ROUNDED = 4 * 8 * (2**-15 + 2**-16)
TOLERANCES = {8: REORDERED, 4: ROUNDED}


class Case(NamedTuple):
    family: str
    attention: str
    padding: int
    way: str

    def __str__(self):
        return f"{self.family}-{self.attention}-{'padded' if self.padding else 'full'}-{self.way.replace(' ', '_')}"

    def model(self):
        return tiny_model(self.family, self.attention, spread=0.1)

    def run(self, model, cache, **options):
        inputs = prompt(model, rows_of(self.way), self.padding)
        return generate(model, inputs, cache, **WAYS[self.way], **options)

    def dynamic_cache(self):
        return new_cache(self.family, DynamicCache)

    def quant_cache(self, bits, kind=QuantCache):
        return new_cache(self.family, partial(kind, bits=bits, **PAGES[bits], **FAMILIES[self.family].options))


def limit_of(case):
    return FAMILIES[case.family].limit(case.attention, case.way, "left padding" if case.padding else "")


def attention_of(family):
    """What transformers takes by default."""
    return next((name for name in ATTENTIONS if FAMILIES[family].limit(name) is None), "eager")


def cases():
    """All combinations, except those that no release can do; those of later releases are skipped."""
    for case in (Case(*values) for values in product(FAMILIES, ATTENTIONS, (0, PADDING), WAYS)):
        limit = limit_of(case)
        marks = [pytest.mark.compat if case.attention == attention_of(case.family) else pytest.mark.broad]
        if case.padding and case.way != "greedy":
            marks.append(pytest.mark.broad)
        if limit is None:
            yield pytest.param(case, marks=marks)
        elif limit.before is not None:
            reason = "{}: {} before transformers {}.{}".format(case.family, limit.reason, *limit.before)
            yield pytest.param(case, marks=[*marks, pytest.mark.skip(reason)])


def assert_identical(got, expected):
    assert torch.equal(got.sequences, expected.sequences)
    for steps in ("logits", "scores"):
        pairs = list(zip(got[steps], expected[steps], strict=True))
        assert all(torch.equal(*pair) for pair in pairs)


def assert_close(got, expected, tolerance):
    for got_logits, expected_logits in zip(got, expected, strict=True):
        assert got_logits.isfinite().all()
        assert (got_logits - expected_logits).abs().max() <= tolerance * expected_logits.abs().max()


def packed_rows(cache):
    return [layer.states.snapshot().rows for layer in cache.layers if isinstance(layer, QuantLayer)]


def row_starts(cache):
    """The columns at which the rows of a cache start, which are the same in all its layers."""
    return next(([row.start for row in rows] for rows in packed_rows(cache)), [])


@pytest.mark.parametrize("case", list(cases()), ids=str)
class TestGeneration:
    def test_sixteen_bits_are_dynamic_cache_to_the_bit(self, case):
        model, cache = case.model(), case.quant_cache(16)
        assert_identical(case.run(model, cache), case.run(model, case.dynamic_cache()))
        assert all(row.pages for part in parts(cache) for rows in packed_rows(part) for row in rows)

    @pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.broad), 4])
    def test_packed_pages_are_read_as_dequantized_states_are(self, case, bits):
        model, cache = case.model(), case.quant_cache(bits)
        with recording(model, cache) as trace:
            case.run(model, cache)
        if case.way == "prompt lookup" and not model.config.is_encoder_decoder:  # these all but repeat themselves
            assert any(change.method == "crop" and change.arguments[0] for change in trace.changes)
        again = trace.repeat(model, case.quant_cache(bits))
        assert all(torch.equal(*pair) for pair in zip(again, trace.logits, strict=True))
        states, starts = iter(trace.states), map(row_starts, parts(cache))
        reference = case.quant_cache(
            bits, lambda **options: DequantizedCache(states=states, starts=next(starts), **options)
        )
        assert_close(trace.logits, trace.repeat(model, reference), TOLERANCES[bits])
        assert next(states, None) is None


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in (
            Case(*values) for values in product(FAMILIES, ["kvquant"], (0, PADDING), ("greedy", "prompt lookup"))
        )
        if limit_of(case) is None
    ],
    ids=str,
)
def test_kvquant_attention_gives_what_eager_gives(case):
    """On plain tensors, along the same tokens; what it does with packed ones is compared to that above."""
    model, cache = case._replace(attention="eager").model(), case.dynamic_cache()
    with recording(model, cache) as trace:
        case.run(model, cache)
    got = trace.repeat(case.model(), case.dynamic_cache())
    expected = trace.logits
    got[0], expected[0] = got[0][:, -1:], expected[0][:, -1:]  # what comes out for padding is of no use
    assert_close(got, expected, REORDERED)


@pytest.mark.parametrize(
    ("family", "limit"),
    [(name, limit) for name, family in FAMILIES.items() for limit in family.limits if limit.before is None],
    ids=lambda value: value if isinstance(value, str) else value.what,
)
def test_what_is_left_out_fails_with_dynamic_cache_too(family, limit):
    attention = limit.what if limit.what in ATTENTIONS else "eager"
    case = Case(family, attention, 0, limit.what if limit.what in WAYS else "greedy")
    with pytest.raises((KeyError, ValueError, NotImplementedError)) as caught:
        case.run(case.model(), case.dynamic_cache())
    assert limit.reason in f"{caught.typename}: {caught.value}"


RECORDED = json.loads((Path(__file__).parents[2] / "results" / "models.json").read_text())


def test_a_test_has_its_model_to_itself():
    first = tiny_model("llama", "sdpa")
    kept = first.lm_head.weight.clone()
    first.to(torch.bfloat16).lm_head.weight.data.fill_(torch.nan)
    torch.testing.assert_close(tiny_model("llama", "sdpa").lm_head.weight, kept, rtol=0, atol=0)


def test_the_table_of_models_lists_all_families():
    assert [row["family"] for row in RECORDED["families"]] == list(FAMILIES)


@pytest.mark.broad
@pytest.mark.skipif(RECORDED["transformers"] != __version__, reason="recorded with another release of transformers")
@pytest.mark.parametrize("row", RECORDED["families"], ids=lambda row: row["family"])
def test_the_table_of_models_says_what_is_observed(row):
    assert json.loads(json.dumps(observe(row["family"]))) == row


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "t5"])
def test_identity_over_300_tokens_and_two_seals_of_default_pages(family, attention, padding):
    case = Case(family, attention, padding, "greedy")
    model, cache = case.model(), new_cache(family, partial(QuantCache, bits=16))
    assert_identical(case.run(model, cache, new_tokens=300), case.run(model, case.dynamic_cache(), new_tokens=300))
    rows = parts(cache)[0].layers[-1].states.snapshot().rows
    assert len(rows[1].pages) == 2
