"""What generate() offers around the cache: streaming, stopping, sampling, fewer logits."""

import pytest
import torch
from drafts import drafted, greedy
from families import tiny_model
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from kvquant import QuantCache

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


@pytest.fixture
def ids():
    return torch.randint(2, 97, (1, 30))


def generate(model, ids, cache, **options):
    options = {"max_new_tokens": 40, "do_sample": False} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, **options)


@pytest.mark.parametrize("bits", [16, 4])
def test_streamed_tokens_are_those_that_are_returned(model, ids, bits):
    streamer = Collector()
    out = generate(model, ids, QuantCache(bits=bits, **SMALL_PAGES), streamer=streamer)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize("bits", [16, 4])
def test_a_stopped_generation_goes_on_where_it_stopped(model, ids, bits):
    whole = generate(model, ids, QuantCache(bits=bits, **SMALL_PAGES))
    cache = QuantCache(bits=bits, **SMALL_PAGES)
    stop = StoppingCriteriaList([lambda tokens, scores, **kwargs: torch.full((1,), tokens.shape[1] >= 47)])
    stopped = generate(model, ids, cache, stopping_criteria=stop)
    assert stopped.shape == (1, 47)
    assert cache.get_seq_length() == 46
    assert torch.equal(generate(model, stopped, cache, max_new_tokens=23), whole)


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_a_seed_decides_what_is_sampled(model, ids, bits):
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(generate(model, ids, QuantCache(bits=bits, **SMALL_PAGES), do_sample=True))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kept", [1, 3])
def test_logits_of_the_last_tokens_only(model, ids, kept):
    with torch.no_grad():
        every = model(ids, cache=QuantCache(bits=4, **SMALL_PAGES), use_cache=True).logits
        last = model(ids, cache=QuantCache(bits=4, **SMALL_PAGES), use_cache=True, logits_to_keep=kept).logits
    assert last.shape[1] == kept
    torch.testing.assert_close(last, every[:, -kept:])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_drafts_that_were_sealed_before_they_were_rejected_leave_no_trace(family):
    # In the identity format; others take the scales of such a page from the rejected tokens as well.
    model = tiny_model(family, "sdpa")
    options = {"sinks": 2, "residual_length": 0, "page_size": 8, "config": model.config, "quantize_sliding": True}
    ids = torch.randint(2, 97, (1, 30))
    expected = greedy(model, ids, QuantCache(bits=16, **options), 300)
    cache = QuantCache(bits=16, **options)
    cache.activate_past_recording()
    tokens = drafted(model, ids, cache, expected, rounds=100)
    assert tokens == expected[: len(tokens)]
    assert cache.get_seq_length() == 30 + len(tokens) - 1
