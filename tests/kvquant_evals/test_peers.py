"""Peers on a tiny model: finite scores, bytes and bits by hand, gaps instead of crashes, broken caches found out."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from evaluation import broken_caches, evaluate
from torch.utils import _pytree as pytree
from transformers import DynamicCache, LlamaConfig

from kvquant import QuantCache, QuantConfig, cache_memory, dequantize, quantize
from kvquant.rotation import rotate
from kvquant_evals.error import EvalError
from kvquant_evals.model import default_text
from kvquant_evals.peers import catalog
from kvquant_evals.peers.layout import LAYOUTS, Inexpressible, Layout
from kvquant_evals.peers.peer import Peer
from kvquant_evals.peers.stock import STOCK
from kvquant_evals.rows import Contender
from kvquant_evals.settings import Settings
from kvquant_evals.task import find

pytestmark = pytest.mark.broad

TEXT = default_text()[:8000]
SETTINGS = Settings(tokens=320, chunk=32, skip=64, offset=100, needles=2, contexts=(160,), documents=1)
HEADS, HEAD_DIM, LAYERS = 2, 16, 2
RUNNABLE = catalog.runnable()
OURS = [peer for peer in LAYOUTS if isinstance(peer.recipe, Layout)]
SMALL_PAGES = {"sinks": 2, "residual_length": 0, "page_size": 8}
ids = lambda peers: [peer.name for peer in peers]  # noqa: E731  # shorter than a function


def rows(subject, *contenders, settings=SETTINGS):
    found = evaluate(subject, find("perplexity,needles"), settings, contenders, text=TEXT)
    assert [row.label for row in found.rows] == ["full precision", *(contender.label for contender in contenders)]
    return found.rows[1:]


@pytest.fixture(scope="module")
def found(tiny):
    """The row of every peer that can run here, by name."""
    contenders = [peer.contender(tiny) for peer in RUNNABLE]
    return dict(zip(ids(RUNNABLE), rows(tiny, *contenders), strict=True))


def test_names_and_labels_are_unique():
    for known in ([peer.name for peer in catalog.PEERS], [peer.label for peer in catalog.PEERS]):
        assert len(known) == len(set(known))


@pytest.mark.parametrize("peer", RUNNABLE, ids=ids(RUNNABLE))
def test_scores_are_finite_and_say_that_something_was_quantized(found, peer):
    row = found[peer.name]
    assert row.is_peer
    assert not row.is_untested
    assert 0 < row.scores["kl_mean"] < math.inf
    assert math.isfinite(row.scores["perplexity"])
    assert 0 < row.scores["effective_bits"] < 32
    assert row.scores["bytes_per_token"] * 8 == pytest.approx(
        row.scores["effective_bits"] * LAYERS * 2 * HEADS * HEAD_DIM
    )


@pytest.mark.parametrize("peer", RUNNABLE, ids=ids(RUNNABLE))
def test_every_task_has_a_score_or_a_reason(found, peer):
    row = found[peer.name]
    assert row.items.keys() | row.failures.keys() == {"perplexity", "needles"}
    assert "perplexity" in row.items
    assert ("retrieval_160" in row.scores) == ("needles" not in row.failures)
    if isinstance(peer.recipe, Layout):
        assert row.failures == {}


def test_rows_are_the_same_again(tiny, found):
    names = ["quanto-4", "hqq-4", "stock-fp8", "kivi-2", "saw-int4", "vllm-fp8+window"]
    peers = [peer for peer in RUNNABLE if peer.name in names]
    assert rows(tiny, *(peer.contender(tiny) for peer in peers)) == [found[peer.name] for peer in peers]


def expected_bits(quant: QuantConfig, tokens: int) -> float:
    """Bits per number after `tokens` tokens of the tiny model in float32: all is sealed that does not stay exact."""
    exact = quant.sinks + quant.residual_length
    exact += (tokens - exact) % quant.page_size
    sealed = 0.0
    for fmt in (quant.key, quant.value):
        group = quant.page_size if fmt.granularity == "per_channel" else fmt.group_size
        sealed += (fmt.bits + 16 * (1 if fmt.symmetric else 2) / group) / 2
    page_table = 32 * ((tokens - exact) // quant.page_size) / (2 * HEADS * HEAD_DIM)
    return ((tokens - exact) * sealed + exact * 32 + page_table) / tokens


@pytest.mark.parametrize("peer", OURS, ids=ids(OURS))
def test_bits_of_layouts_are_those_of_codes_scales_and_exact_tokens(tiny, found, peer):
    expected = expected_bits(peer.recipe.quant(tiny), SETTINGS.tokens)
    assert found[peer.name].scores["effective_bits"] == pytest.approx(expected, rel=1e-12)


def storages(held):
    """The storages of all tensors in nested containers, by address; of tensors made of others, those of these."""
    sizes = {}
    for leaf in pytree.tree_leaves(held):
        if not isinstance(leaf, torch.Tensor):
            continue
        if names := getattr(leaf, "__tensor_flatten__", lambda: ((), None))()[0]:
            sizes |= storages([getattr(leaf, name) for name in names])
        elif leaf.dim():
            sizes[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
    return sizes


@pytest.mark.parametrize("peer", STOCK, ids=ids(STOCK))
def test_bytes_of_transformers_caches_are_those_of_codes_scales_and_residual(tiny, peer):
    if missing := peer.recipe.missing():
        pytest.skip(missing)
    tokens = torch.randint(1, 400, (1, 224))
    cache = peer.recipe.new_cache(tiny)
    with torch.inference_mode():
        for chunk in tokens.split(32, dim=1):
            tiny.model(chunk, cache=cache, use_cache=True)
    # The first chunk is packed, then nothing until 128 tokens wait: after 224 tokens, 160 are packed and 64 are not.
    bits = dict(peer.recipe.options).get("nbits")
    packed, waiting = (224, 0) if bits is None else (160, 64)
    codes = packed * HEADS * HEAD_DIM * (bits or 8) // 8
    parameters = 0 if bits is None else packed * HEADS * HEAD_DIM // 64 * 2 * 4  # scale and shift, float32, per 64
    expected = LAYERS * 2 * (codes + parameters + waiting * HEADS * HEAD_DIM * 4)
    assert cache_memory(cache).total == expected
    assert sum(storages([vars(layer) for layer in cache.layers]).values()) == expected


def test_sixteen_bits_differ_in_nothing(tiny):
    (row,) = rows(tiny, Contender("16", partial(QuantCache, bits=16, **SMALL_PAGES), is_peer=True))
    assert row.scores["kl_mean"] == row.scores["kl_p99"] == 0.0
    assert row.scores["top1"] == 1.0


def test_a_broken_cache_is_worse_than_its_intact_twin(tiny):
    intact = Contender("intact", partial(QuantCache, bits=8, **SMALL_PAGES))
    good, *bad = rows(tiny, intact, *(Contender(*broken) for broken in broken_caches(**SMALL_PAGES).items()))
    assert not good.faults
    for row in bad:
        assert row.scores["kl_mean"] > 20 * good.scores["kl_mean"], row.label
    assert all("perplexity" in row.faults for row in bad[:2])  # that of two tokens of 256 the model can lose


class Uncopied(DynamicCache):
    def __deepcopy__(self, memo):
        raise RuntimeError("this cache cannot be copied\nand much more about it")


class Unusable(DynamicCache):
    def update(self, *args, **kwargs):
        raise NotImplementedError("no keys please")


def test_what_a_peer_cannot_do_is_a_gap_in_its_row_only(tiny):
    uncopied, unusable, eight = rows(
        tiny,
        Contender("uncopied", Uncopied, is_peer=True),
        Contender("unusable", Unusable, is_peer=True),
        Contender("8", partial(QuantCache, bits=8, **SMALL_PAGES)),
    )
    assert uncopied.failures == {"needles": "RuntimeError: this cache cannot be copied"}
    assert uncopied.scores["kl_mean"] == 0.0
    assert uncopied.scores["effective_bits"] == 32
    assert unusable.failures == dict.fromkeys(("perplexity", "needles"), "NotImplementedError: no keys please")
    assert unusable.scores == {}
    assert not unusable.faults
    assert eight.failures == {}
    assert "retrieval_160" in eight.scores


def test_what_our_own_cache_cannot_do_ends_the_run(tiny):
    with pytest.raises(NotImplementedError, match="no keys please"):
        rows(tiny, Contender("ours", Unusable))


def test_bad_peers_do_not_fail_the_run(tiny):
    new_cache = broken_caches(**SMALL_PAGES)["one bit"]
    contenders = [Contender("peer", new_cache, is_peer=True), Contender("ours", new_cache)]
    report = evaluate(tiny, find("perplexity"), SETTINGS, contenders, text=TEXT)
    assert [bool(row.faults) for row in report.rows] == [False, True, True]
    assert [row.label for row in report.broken] == ["ours"]


@pytest.mark.parametrize("peer", OURS[1::2], ids=ids(OURS[1::2]))
def test_like_for_like_has_our_sinks_and_window_and_the_published_formats(tiny, peer):
    quant, ours = peer.recipe.quant(tiny), QuantConfig()
    published = catalog.find([peer.name.removesuffix("+window")])[0].recipe.quant(tiny)
    assert (quant.sinks, quant.residual_length) == (ours.sinks, ours.residual_length)
    assert quant == replace(
        published, sinks=quant.sinks, residual_length=quant.residual_length, page_size=quant.page_size
    )
    assert quant.page_size == (32 if peer.name.startswith("kivi") else ours.page_size)


def test_saw_rotates_keys_only(tiny):
    (peer,) = catalog.find(["saw-int4"])
    cache, quant = peer.recipe.new_cache(tiny), peer.recipe.quant(tiny)
    states = torch.randn(2, 1, HEADS, 16, HEAD_DIM)
    cache.update(states[0], states[1], 0)
    cache.update(states[0, :, :, :1], states[1, :, :, :1], 0)
    key, value = (read.clone()[:, :, :16] for read in cache.update(states[0, :, :, :1], states[1, :, :, :1], 0))
    assert torch.equal(value, dequantize(quantize(states[1], quant.value)))
    torch.testing.assert_close(key, rotate(dequantize(quantize(rotate(states[0]), quant.key))))
    assert quant.to_dict()["rotation"] == "keys"
    assert copy.deepcopy(quant) == quant


# Least squared errors of scalar quantization of a normal variable: Max (1960), table I.
@pytest.mark.parametrize(("name", "optimum"), [("turboquant-4", 0.009497), ("turboquant-3", 0.03454)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_grid_in_place_of_a_codebook_is_no_worse_on_normal_data(name, optimum, head_dim):
    fmt = catalog.find([name])[0].recipe.at(head_dim).key
    x = torch.randn(2000, head_dim)
    assert (dequantize(quantize(x, fmt)) - x).square().mean() <= optimum


def test_the_error_of_q4_0_that_is_stated(tiny):
    """The block format of ggml: the number of largest magnitude is level -8 of a signed scale."""
    x = torch.randn(10_000, 32)
    scale = (x.gather(1, x.abs().argmax(dim=1, keepdim=True)) / -8).half().float()
    published = (x / scale).add(8.5).floor().clamp(0, 15).sub(8) * scale
    fmt = catalog.find(["llama-cpp-q4_0"])[0].recipe.at(64).key
    ratio = (dequantize(quantize(x, fmt)) - x).square().mean() / (published - x).square().mean()
    assert ratio.item() == pytest.approx(1.28, abs=0.015)


def test_llama_cpp_rotates_where_heads_are_multiples_of_64():
    (peer,) = catalog.find(["llama-cpp-q8_0"])
    assert [peer.recipe.at(head_dim).rotation for head_dim in (16, 64, 96, 128)] == [False, True, False, True]


def test_what_cannot_run_here_says_why(tiny):
    left_out = [peer for peer in LAYOUTS if isinstance(peer.recipe, Inexpressible)]
    assert left_out
    for peer in left_out:
        assert peer not in RUNNABLE
        with pytest.raises(EvalError, match=f"peer '{peer.name}' cannot run here: .*sees no queries"):
            catalog.find([peer.name])


def test_a_missing_package_is_a_reason(monkeypatch):
    from transformers import cache_utils

    monkeypatch.setattr(cache_utils, "is_optimum_quanto_available", lambda: False)
    with pytest.raises(EvalError, match=r"peer 'quanto-4' cannot run here: .*install optimum-quanto"):
        catalog.find(["quanto-4"])
    assert "quanto-4" not in ids(catalog.runnable())


def test_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(EvalError, match=r"peer 'kivi' is unknown; known are quanto-4, .*, kivi-4, "):
        catalog.find(["kivi-4", "kivi"])


def test_names_are_found_once_and_in_their_order():
    assert ids(catalog.find(["vllm-fp8", "kivi-4", "vllm-fp8"])) == ["vllm-fp8", "kivi-4"]


def test_a_model_that_transformers_refuses_is_a_gap(tiny):
    """QuantizedCache takes models of full attention only."""
    config = LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=8)
    peer = next(peer for peer in STOCK if peer.name == "stock-fp8")
    if missing := peer.recipe.missing():
        pytest.skip(missing)
    refused = replace(tiny, model=copy.copy(tiny.model))
    refused.model.config = config
    row = rows(tiny, replace(peer.contender(tiny), new_cache=partial(peer.recipe.new_cache, refused)))[0]
    assert row.failures["perplexity"].startswith("ValueError: `QuantizedCache` is only supported for models with only")


def test_listing_names_every_peer_with_source_and_reason():
    lines = catalog.listing().split("\n")
    for peer in catalog.PEERS:
        assert f"{peer.name}: {peer.label}; {peer.source}" in lines
        assert any(year in peer.source for year in map(str, range(2023, 2027)))
    assert (
        "    cannot run here: its basis is fitted to queries of a calibration set, and a cache sees no queries" in lines
    )


def test_description_leaves_out_what_there_is_not():
    peer = Peer("a", "A", "A (2024)", "what", Inexpressible("why"))
    assert peer.describe() == "a: A; A (2024)\n    what\n    cannot run here: why"
    assert replace(peer, differs="how").describe().split("\n")[2] == "    differs: how"
