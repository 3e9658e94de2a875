"""Caches of simulated layouts: what is sealed is sealed for good, however tokens come, and bytes are counted."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from evaluation import evaluate, scores
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from kvquant import MemoryReport, QuantConfig, cache_memory
from kvquant_evals.model import default_text
from kvquant_evals.peers.simulated import SIMULATED
from kvquant_evals.peers.simulated_cache import Plan, SimulatedCache, SimulatedLayer, memory_of
from kvquant_evals.peers.simulated_kitty import kitty
from kvquant_evals.peers.simulated_kvquant import kvquant
from kvquant_evals.rows import Contender
from kvquant_evals.settings import Settings
from kvquant_evals.task import find

pytestmark = pytest.mark.broad

TEXT = default_text()[:8000]
SETTINGS = Settings(tokens=320, chunk=32, skip=64, offset=100, needles=2, contexts=(160,), documents=1)
HEADS, HEAD_DIM, LAYERS = 2, 16, 2
ONE_LAYER = LlamaConfig(num_hidden_layers=1)
KITTY = kitty(1 / 8)

all_peers = pytest.mark.parametrize("peer", SIMULATED, ids=[peer.name for peer in SIMULATED])


@dataclass(frozen=True)
class Lossless:
    """A layout that gives back what it was given, in 32 bits."""

    tile: int

    def stored(self, x: Tensor) -> Tensor:
        return x

    def size(self, num_heads: int, head_dim: int) -> MemoryReport:
        return MemoryReport(codes=4 * self.tile * num_heads * head_dim)


@dataclass(frozen=True)
class Zeros(Lossless):
    """A layout that stores zeros."""

    def stored(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def states(num_tokens, seed=0, rows=1):
    return torch.randn(2, rows, HEADS, num_tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def filled(plan, pair, chunks):
    cache = SimulatedCache(plan, ONE_LAYER)
    for key, value in zip(pair[0].split(chunks, dim=2), pair[1].split(chunks, dim=2), strict=True):
        cache.update(key, value, 0)
    return cache


def held(cache):
    return torch.stack([cache.layers[0].keys, cache.layers[0].values])


@pytest.mark.parametrize(
    ("num_tokens", "keys", "values"),
    [(0, 0, 0), (3, 0, 0), (15, 0, 8), (16, 8, 12), (17, 8, 12), (23, 8, 16), (24, 16, 20)],
)
def test_sealed_are_the_full_tiles_between_sinks_and_window(num_tokens, keys, values):
    plan = Plan(Lossless(8), Lossless(4), sinks=3, key_window=5, value_window=1)
    assert (plan.sealed(0, num_tokens), plan.sealed(1, num_tokens)) == (keys, values)


def test_sinks_and_tail_stay_exact_and_the_rest_is_what_is_stored():
    pair = states(22)
    cache = filled(Plan(Zeros(8), Zeros(4), sinks=3, key_window=5, value_window=1), pair, 22)
    keys, values = held(cache)
    assert torch.equal(keys[:, :, :3], pair[0][:, :, :3])
    assert torch.equal(keys[:, :, 11:], pair[0][:, :, 11:])
    assert torch.equal(values[:, :, 19:], pair[1][:, :, 19:])
    assert not keys[:, :, 3:11].any()
    assert not values[:, :, 3:19].any()


def test_attention_reads_what_it_was_given_until_the_next_step():
    pair = states(40)
    cache = SimulatedCache(Plan(Zeros(8), Zeros(8)), ONE_LAYER)
    read = cache.update(pair[0][:, :, :32], pair[1][:, :, :32], 0)
    assert torch.equal(torch.stack(read), pair[:, :, :, :32])
    read = torch.stack(cache.update(pair[0][:, :, 32:], pair[1][:, :, 32:], 0))
    assert not read[..., :32, :].any()
    assert torch.equal(read[..., 32:, :], pair[..., 32:, :])


@all_peers
def test_sealing_at_once_equals_token_by_token(peer):
    pair = states(460)
    assert torch.equal(held(filled(peer.recipe.plan, pair, 460)), held(filled(peer.recipe.plan, pair, 1)))


@all_peers
def test_what_is_sealed_never_changes_again(peer):
    plan, pair = peer.recipe.plan, states(700)
    cache = filled(plan, pair[..., :400, :], 100)
    before = held(cache)
    cache.update(*pair[..., 400:, :], 0)
    for index, (old, new) in enumerate(zip(before, held(cache), strict=True)):
        end = plan.sinks + plan.sealed(index, 400)
        assert end > plan.sinks
        assert torch.equal(new[:, :, :end], old[:, :, :end])
        assert not torch.equal(new[:, :, plan.sinks : end], pair[index][:, :, plan.sinks : end])


def test_memory_of_a_cache():
    """Of 300 tokens Kitty has sealed two pages of keys, and all values but 32 and 128."""
    pair = states(300, rows=2)
    memory = filled(KITTY, pair, 300).memory()
    per_token = HEADS * HEAD_DIM
    codes = 2 * (256 * per_token * 2.25 + 140 * per_token * 2) / 8
    scales = 2 * (2 * per_token * 5 + 140 * HEADS * 4)
    exact = 2 * (44 + 160) * per_token * 4
    assert memory == MemoryReport(
        codes=int(codes), scales=scales, exact=exact, elements=2 * 2 * 300 * per_token,
        full_precision=2 * 2 * 300 * per_token * 4,
    )  # fmt: skip
    assert filled(KITTY, pair, 1).memory() == memory
    assert SimulatedCache(KITTY, ONE_LAYER).memory() == MemoryReport()


def test_memory_of_caches_that_simulate_nothing_is_what_they_hold():
    cache = DynamicCache()
    cache.update(*states(10), 0)
    assert memory_of(cache) == cache_memory(cache)


def test_only_layers_of_full_attention_are_simulated():
    config = LlamaConfig(
        num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=8,
        num_attention_heads=2, num_key_value_heads=2, hidden_size=32,
    )  # fmt: skip
    cache, pair = SimulatedCache(KITTY, config), states(6)
    assert [type(layer) is SimulatedLayer for layer in cache.layers] == [True, False]
    for layer in (0, 1):
        cache.update(*pair, layer)
    assert cache.memory().exact == cache.memory().unquantized == pair.numel() * 4


def test_latents_are_refused():
    with pytest.raises(NotImplementedError, match="latent states"):
        SimulatedCache(KITTY, ONE_LAYER).update(torch.zeros(1, 1, 3, 64), torch.zeros(1, 1, 3, 16), 0)


@all_peers
def test_copies_go_on_by_themselves(peer):
    pair = states(460)
    cache = filled(peer.recipe.plan, pair[..., :300, :], 300)
    other = copy.deepcopy(cache)
    cache.update(*states(160, seed=1), 0)
    other.update(*pair[..., 300:, :], 0)
    assert torch.equal(held(other), held(filled(peer.recipe.plan, pair, 460)))
    assert other.memory() == cache.memory()


def test_sealed_tokens_cannot_be_cropped():
    cache = filled(KITTY, states(300), 300)
    with pytest.raises(NotImplementedError, match=r"crop\(-1\)"):
        cache.crop(-1)


def test_a_layout_that_loses_nothing_differs_in_nothing(tiny):
    plan = Plan(Lossless(8), Lossless(4), sinks=3, key_window=5)
    contender = Contender("lossless", lambda: SimulatedCache(plan, tiny.model.config), is_peer=True)
    full, row = evaluate(tiny, find("perplexity,needles"), SETTINGS, [contender], text=TEXT).rows
    assert row.scores["kl_mean"] == row.scores["kl_p99"] == 0.0
    assert row.scores["effective_bits"] == 32
    same = full.scores.keys() - {"packed_bytes", "kl_mean_low", "kl_mean_high"}
    assert {name: row.scores[name] for name in same} == {name: full.scores[name] for name in same}


def test_a_layout_that_stores_zeros_is_broken(tiny):
    plan = Plan(Zeros(8), Zeros(4), sinks=3, key_window=5)
    contender = Contender("zeros", lambda: SimulatedCache(plan, tiny.model.config), is_peer=True)
    row = evaluate(tiny, find("perplexity"), SETTINGS, [contender], text=TEXT).rows[1]
    assert row.scores["kl_mean"] > 0.1


def test_bits_are_those_that_the_cache_counts(tiny):
    """Of 320 tokens 4 and 64 are exact, and of keys those that do not fill a second page."""
    peer = next(peer for peer in SIMULATED if peer.name == "kitty+window")
    row = evaluate(tiny, find("perplexity"), SETTINGS, [peer.contender(tiny)], text=TEXT).rows[1]
    key = (128 * (2 * 4 + 14 * 2) // 8 + 16 * 5) * HEADS  # of a page
    value = (16 * 2 // 8 + 4) * HEADS  # of a token
    exact = (320 - 128) + (320 - 252)
    expected = LAYERS * (key + 252 * value + exact * HEADS * HEAD_DIM * 4)
    assert row.scores["bytes_per_token"] * 320 == expected
    assert row.scores["effective_bits"] == pytest.approx(8 * expected / (2 * LAYERS * 320 * HEADS * HEAD_DIM))


@all_peers
def test_like_for_like_has_our_sinks_and_window_and_the_published_formats(peer):
    published = next(twin for twin in SIMULATED if twin.name == peer.name.removesuffix("+window"))
    ours, plan = QuantConfig(), peer.recipe.plan
    if peer is not published:
        assert (plan.sinks, plan.key_window, plan.value_window) == (ours.sinks, *[ours.residual_length] * 2)
    kept = {name: getattr(plan, name) for name in ("sinks", "key_window", "value_window")}
    assert replace(published.recipe.plan, **kept) == plan


@all_peers
def test_labels_and_differences_say_that_it_is_simulated(peer):
    assert peer.label.endswith("(simulated)")
    assert "only its values are simulated" in peer.differs


@pytest.mark.slow
def test_real_states_are_kept_as_well_as_published(smollm2):
    """KVQuant loses next to nothing at four bits; Kitty loses much less than without its channels of four bits."""
    window = {"sinks": 4, "key_window": 64, "value_window": 64}
    plans = {"kvquant": kvquant(4), "kitty": kitty(1 / 8), "none of four bits": kitty(0)}
    caches = {
        name: partial(SimulatedCache, replace(plan, **window), smollm2.model.config) for name, plan in plans.items()
    }
    found = scores(smollm2, find("perplexity")[0], Settings(tokens=512), caches)
    kl = {name: found[name]["kl_mean"] for name in plans}
    assert kl["kvquant"] < 0.005
    assert 0.02 < kl["kitty"] < 0.1
    assert kl["none of four bits"] > 1.5 * kl["kitty"]
