"""Where a cache's tensors live: offloading, device maps, threads."""

import copy
import threading

import pytest
import torch
from accelerate import dispatch_model
from families import tiny_model
from transformers import DynamicCache

from kvquant import QuantCache, QuantConfig, transport
from kvquant.states import LayerStates

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
CPU, META = torch.device("cpu"), torch.device("meta")


def generate(model, ids, cache, **options):
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=30, do_sample=False, **options)


def test_everything_moves():
    states = LayerStates(QuantConfig.preset(4, **SMALL_PAGES), *torch.empty(2, 2, 2, 0, 16))
    states.append(*torch.randn(2, 2, 2, 50, 16))
    before = states.append(*torch.randn(2, 2, 2, 1, 16)).columns(0)
    states.move(META)
    held = states.snapshot()
    parts = [*held.tail_buffers, *held.chunk, *held.sinks, held.pool.records]
    assert {part.device for part in parts} == {META}
    assert before.device == CPU
    assert states.num_seen == 51


def test_pages_that_another_cache_moved_are_moved_back():
    cache = QuantCache(bits=4, **SMALL_PAGES)
    cache.update(*torch.randn(2, 1, 2, 50, 16), 0)
    other = copy.deepcopy(cache)
    cache.layers[0].settle()
    assert other.layers[0].states.snapshot().columns(0).device == CPU
    moved = []
    pool = cache.layers[0].states.snapshot().pool
    pool.move = lambda device: moved.append(device)
    pool.records = pool.records.to(META)
    cache.update(*torch.randn(2, 1, 2, 1, 16), 0)
    assert moved == [CPU]


class Stream:
    """What Cache.update asks of a stream, on a machine that has no device with streams."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def wait_stream(self, other):
        pass


@pytest.fixture
def offloaded(monkeypatch):
    """How often states were moved to CPU memory. While they are there, attention must not meet their pages."""
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    away, count = set(), []
    move, return_to, attend = LayerStates.move, LayerStates.return_to, transport.attend

    def leave(states, device):
        move(states, device)
        away.add(states)
        count.append(states)

    def come_back(states, device):
        return_to(states, device)
        away.discard(states)

    def attend_at_home(snapshot, call):
        assert all(states.snapshot().pool is not snapshot.pool for states in away)
        return attend(snapshot, call)

    monkeypatch.setattr(LayerStates, "move", leave)
    monkeypatch.setattr(LayerStates, "return_to", come_back)
    monkeypatch.setattr(transport, "attend", attend_at_home)
    return count


# Of 30 steps; the last one's attention may not be known to be over. An only attention layer is always the next one.
@pytest.mark.parametrize(("family", "moves"), [("llama", 58), ("gemma3_text", 29), ("qwen3_next", 0)])
def test_offloading_changes_no_token_and_attention_finds_its_pages(offloaded, family, moves):
    """https://github.com/huggingface/transformers/issues/48947: hybrids gave wrong logits, or met the wrong device."""
    model, ids = tiny_model(family, "sdpa"), torch.randint(2, 97, (2, 40))
    expected = generate(model, ids, QuantCache(bits=4, config=model.config, **SMALL_PAGES))
    cache = QuantCache(bits=4, config=model.config, offloading=True, **SMALL_PAGES)
    assert torch.equal(generate(model, ids, cache), expected)
    assert len(offloaded) in (moves, moves + 1)


@pytest.mark.parametrize("bits", [16, 4])
def test_a_model_spread_over_devices_by_accelerate(tmp_path, bits):
    model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (2, 40))
    expected = generate(model, ids, QuantCache(bits=bits, **SMALL_PAGES))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
    spread = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    assert torch.equal(generate(spread, ids, QuantCache(bits=bits, **SMALL_PAGES)), expected)
    assert not hasattr(QuantCache(bits=bits), "to")  # accelerate would call it


def test_layers_live_where_their_first_states_were():
    cache = QuantCache(bits=4, **SMALL_PAGES)
    cache.update(*torch.randn(2, 1, 2, 5, 16), 0)
    cache.update(*torch.empty(2, 1, 2, 5, 16, device=META), 1)
    assert [layer.device for layer in cache.layers] == [CPU, META]
    assert [layer.keys.device for layer in cache.layers] == [CPU, META]


def test_two_threads_on_one_model_give_what_one_gives():
    model = tiny_model("llama", "sdpa")
    prompts = [torch.randint(2, 97, (2, 40)) for _ in range(2)]
    shared = QuantCache(bits=4, **SMALL_PAGES)
    with torch.no_grad():
        model(prompts[0][:, :30], cache=shared, use_cache=True)
    prompts[1][:, :30] = prompts[0][:, :30]
    expected = [generate(model, ids, copy.deepcopy(shared)) for ids in prompts]
    for _ in range(5):
        caches, outs = [copy.deepcopy(shared) for _ in prompts], [None, None]

        def run(i, caches=caches, outs=outs):
            outs[i] = generate(model, prompts[i], caches[i])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(*pair) for pair in zip(outs, expected, strict=True))


def test_a_prefix_made_in_inference_mode_is_continued_outside():
    model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 60))
    caches = QuantCache(bits=16, **SMALL_PAGES), DynamicCache()
    outs = []
    for cache in caches:
        with torch.inference_mode():
            model(ids[:, :30], cache=cache, use_cache=True)
        with torch.no_grad():
            model(ids[:, 30:50], cache=cache, use_cache=True)
            outs.append(model(ids[:, 50:], cache=cache, use_cache=True).logits)
    assert torch.equal(*outs)
