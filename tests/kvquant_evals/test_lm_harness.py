"""Caches as a model of lm-eval: likelihoods and texts against the tiny model's own."""

from __future__ import annotations

import shutil
from functools import partial
from typing import ClassVar

import lm_tasks
import pytest
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant_evals.error import EvalError
from kvquant_evals.model import default_text, find_source

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'kvquant-cache[dev]'")

from lm_eval.api.instance import Instance

from kvquant_evals.lm_harness.lm import CachedLM, KvquantLM
from kvquant_evals.lm_harness.reader import Decoding, Reader

pytestmark = pytest.mark.broad

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
TEXT = default_text()[20_000:]
# Sums of up to 150 log-likelihoods, each off by 1e-5 or so, since passes of other lengths add up in another order.
CLOSE = {"abs": 2e-3, "rel": 1e-5}


DOCUMENTS = lm_tasks.documents(2, 300)


def reader(tiny, bits=None, **options):
    """Through full precision without `bits`."""
    make = DynamicCache if bits is None else partial(QuantCache, bits=bits, **SMALL_PAGES)
    return Reader(tiny, partial(make, config=tiny.model.config), **options)


def lm_of(tiny, bits=None, max_length=None, **options):
    return CachedLM(reader(tiny, bits, **options), max_length, show_progress=False)


def requests(kind, *arguments):
    return [Instance(kind, {}, given, i, ("task", i, 1)) for i, given in enumerate(arguments)]


class TestLikelihood:
    PAIRS: ClassVar = [(document["text"], choice) for document in DOCUMENTS for choice in document["choices"]]

    @pytest.mark.parametrize("bits", [None, 16])
    def test_is_that_of_one_pass(self, tiny, bits):
        found = lm_of(tiny, bits, chunk=4).loglikelihood(requests("loglikelihood", *self.PAIRS))
        for (context, continuation), (total, is_greedy) in zip(self.PAIRS, found, strict=True):
            before, whole = (tiny.encode(text)[0].tolist() for text in (context, context + continuation))
            expected, expected_greedy = lm_tasks.likelihood(tiny, whole, len(whole) - len(before))
            assert total == pytest.approx(expected, **CLOSE)
            assert is_greedy == expected_greedy

    def test_greedy_continuations_are_told(self, tiny):
        tokens = tiny.encode(DOCUMENTS[0]["text"])[0].tolist()
        greedy = reader(tiny).write(tokens, Decoding(5)).tokens
        lm = lm_of(tiny, 16)
        other = [*greedy[:-1], (greedy[-1] + 1) % 400]
        found = lm._loglikelihood_tokens([(None, tokens, greedy), (None, tokens, other)])
        assert [is_greedy for _, is_greedy in found] == [True, False]

    def test_even_one_token_is_read_through_the_cache(self, tiny):
        """https://github.com/EleutherAI/lm-evaluation-harness/issues/1105: scoring in one pass never reads it."""
        tokens = tiny.encode(TEXT[:300])[0].tolist()
        exact, coarse = (lm_of(tiny, bits)._loglikelihood_tokens([(None, tokens, [5])])[0][0] for bits in (16, 2))
        assert abs(exact - coarse) > 1e-3
        assert exact == pytest.approx(lm_tasks.likelihood(tiny, [*tokens, 5], 1)[0], **CLOSE)

    def test_continuation_without_context_reads_its_own_tokens_through_the_cache(self, tiny):
        text = ("", TEXT[:300])
        one_pass, chunked, exact = (
            lm_of(tiny, bits, chunk=chunk).loglikelihood(requests("loglikelihood", text))[0][0]
            for bits, chunk in ((2, 1000), (2, 16), (16, 16))
        )
        assert one_pass == pytest.approx(exact, **CLOSE)
        assert abs(chunked - exact) > 1e-2

    def test_continuations_of_a_context_share_its_cache_and_nothing_else(self, tiny):
        made, passed = [], []
        lm = lm_of(tiny, 4, advance=passed.append)
        make = lm.reader.new_cache
        object.__setattr__(lm.reader, "new_cache", lambda: made.append(1) or make())
        tokens = tiny.encode(TEXT[:300])[0].tolist()
        continuations = [[5, 6, 7], [8, 9], [5, 6, 8], [9]]
        together = lm._loglikelihood_tokens([(None, tokens, part) for part in continuations])
        assert len(made) == 1
        assert passed == [len(tokens) - 1, 3, 2, 1]  # the first and the third differ in their last token only
        alone = [lm_of(tiny, 4)._loglikelihood_tokens([(None, tokens, part)])[0] for part in continuations]
        assert together == alone

    def test_too_long_a_context_loses_its_beginning(self, tiny):
        tokens = tiny.encode(TEXT[:300])[0].tolist()
        long, short = (
            lm_of(tiny, 8, max_length=50)._loglikelihood_tokens([(None, context, [5, 6, 7])])
            for context in (tokens, tokens[-48:])
        )
        assert long == short
        assert long != lm_of(tiny, 8)._loglikelihood_tokens([(None, tokens, [5, 6, 7])])
        with pytest.raises(EvalError, match="51 tokens of a continuation, of max_length=50, leave no room"):
            lm_of(tiny, 8, max_length=50)._loglikelihood_tokens([(None, tokens, tokens[:51])])

    def test_which_contexts_were_packed_is_known(self, tiny):
        lm = lm_of(tiny, 4)
        lm._loglikelihood_tokens([(None, list(range(1, length)), [5]) for length in (10, 40)])
        assert lm.packed == [False, True]


class TestRolling:
    @pytest.mark.parametrize("chunk", [7, 1000])
    def test_is_the_sum_over_windows(self, tiny, chunk):
        tokens = tiny.encode(TEXT[:300])[0].tolist()
        length = 60
        assert length < len(tokens) < 3 * length
        # All tokens are predicted once: the first window has the end token before it, the others the token before them,
        # and the last one as much as fits.
        windows = [([0, *tokens[:length]], length)]
        windows += [
            (tokens[first - 1 : first + length], length) for first in range(length, len(tokens) - length + 1, length)
        ]
        rest = len(tokens) - sum(scored for _, scored in windows)
        windows.append((tokens[-length - 1 :], rest))
        expected = sum(lm_tasks.likelihood(tiny, window, scored)[0] for window, scored in windows)
        lm = lm_of(tiny, 16, max_length=length, chunk=chunk)
        (total,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (TEXT[:300],)))
        assert total == pytest.approx(expected, **CLOSE)
        assert sum(len(reading.loglikelihoods) for reading in lm.readings) == len(tokens)

    def test_reads_the_cache(self, tiny):
        exact, coarse = (
            lm_of(tiny, bits, chunk=16).loglikelihood_rolling(requests("loglikelihood_rolling", (TEXT[:300],)))[0]
            for bits in (16, 2)
        )
        assert abs(exact - coarse) > 1e-2


class TestGeneration:
    PROMPT = DOCUMENTS[1]["text"]

    def write(self, tiny, bits=None, max_length=None, **options):
        return lm_of(tiny, bits, max_length).generate_until(requests("generate_until", (self.PROMPT, options)))[0]

    @pytest.mark.parametrize("bits", [None, 16])
    def test_is_the_models_own(self, tiny, bits):
        ids = tiny.encode(self.PROMPT)
        out = tiny.model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert self.write(tiny, bits, max_gen_toks=20) == tiny.decode(out[0, ids.shape[1] :])

    def test_reads_the_cache(self, tiny):
        exact, coarse = (self.write(tiny, bits, max_gen_toks=20) for bits in (16, 2))
        assert exact != coarse

    def test_ends_where_it_is_told_and_not_later(self, tiny):
        whole = self.write(tiny, 8, max_gen_toks=20)
        end = whole[8:10]
        lm = lm_of(tiny, 8)
        (text,) = lm.generate_until(
            requests("generate_until", (self.PROMPT, {"until": ["zzz", end], "max_gen_toks": 20}))
        )
        assert text == whole[: whole.index(end)]
        ((_, answer),) = lm.answers
        written = tiny.decode(answer.tokens)
        assert end in written
        assert end not in tiny.decode(answer.tokens[:-1])

    def test_prompt_leaves_room_for_the_answer(self, tiny):
        lm = lm_of(tiny, 8, max_length=50)
        lm.generate_until(requests("generate_until", (self.PROMPT, {"max_gen_toks": 20})))
        ((context, answer),) = lm.answers
        assert context == tiny.encode(self.PROMPT)[0, -30:].tolist()
        assert len(answer.tokens) <= 20
        with pytest.raises(EvalError, match="max_gen_toks=50 of max_length=50 leave no room for a context"):
            self.write(tiny, 8, max_length=50, max_gen_toks=50)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, Decoding(256, (), {"do_sample": False})),
            ({"until": "\n", "max_new_tokens": 5}, Decoding(5, ("\n",), {"do_sample": False})),
            ({"max_tokens": 7, "max_gen_toks": "6"}, Decoding(6, (), {"do_sample": False})),
            ({"temperature": 0.0, "until": None}, Decoding(256, (), {"do_sample": False})),
            ({"temperature": 0.5}, Decoding(256, (), {"do_sample": True, "temperature": 0.5})),
            ({"temperature": 0.5, "do_sample": False}, Decoding(256, (), {"do_sample": False})),
            ({"do_sample": True, "top_p": 0.9}, Decoding(256, (), {"do_sample": True, "top_p": 0.9})),
        ],
        ids=str,
    )
    def test_what_tasks_ask_for(self, given, expected):
        assert Decoding.of(given) == expected


class TestText:
    def test_chat_is_framed_once(self, tiny_folder, tmp_path):
        folder = tmp_path / "chatty"
        shutil.copytree(tiny_folder, folder)
        source = find_source(str(folder))
        source.tokenizer.bos_token = "<eos>"
        source.tokenizer.chat_template = (
            "{{ bos_token }}{% for m in messages %}"
            "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        source.tokenizer.save_pretrained(folder)
        lm = KvquantLM(pretrained=str(folder))
        said = {"role": "user", "content": "hello"}
        text = lm.apply_chat_template([{"role": "system", "content": "be brief"}, said])
        assert text == "<eos>[user]hello[assistant]"
        half = {"role": "assistant", "content": "hi"}
        assert lm.apply_chat_template([said, half], add_generation_prompt=False) == "<eos>[user]hello[assistant]hi"
        assert lm.chat_template(True) == source.tokenizer.chat_template
        assert lm.tokenizer_name == str(folder).replace("/", "__")
        assert lm.tok_encode(text)[0] == 0
        assert lm.tok_encode(text)[1] != 0

    def test_a_text_without_context_follows_the_end_token(self, tiny):
        lm = lm_of(tiny)
        assert lm.eot_token_id == lm.prefix_token_id == 0
        (found,) = lm.loglikelihood(requests("loglikelihood", ("", "hello there")))
        tokens = tiny.encode("hello there")[0].tolist()
        assert found[0] == pytest.approx(lm_tasks.likelihood(tiny, [0, *tokens], len(tokens))[0], **CLOSE)
