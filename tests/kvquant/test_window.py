"""Sliding windows: what is shown, what is forgotten, and that pages are those of full attention."""

import pytest
import torch
from families import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import DynamicCache

from kvquant import AttentionCall, QuantCache, QuantConfig
from kvquant.attention import attend
from kvquant.layer import QuantLayer, QuantSlidingLayer
from kvquant.states import LayerStates
from kvquant.testing import relative_errors

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


def states_of(config, window, rows=2):
    return LayerStates(config, *(torch.empty(rows, 1, 0, 16),) * 2, window)


class Both:
    """States with a window and states without, which see the same tokens."""

    def __init__(self, bits, window):
        config = QuantConfig.preset(bits, **SMALL_PAGES)
        self.window, self.full, self.windowed = window, states_of(config, None), states_of(config, window)

    def append(self, count):
        key, value = torch.randn(2, self.full.batch_size, 1, count, 16)
        for states in (self.full, self.windowed):
            states.append(key, value)
        self.check(count)
        for states in (self.full, self.windowed):
            states.settle()
        self.check(0)

    def crop(self, count):
        for states in (self.full, self.windowed):
            states.crop(count)
        self.check(0)

    def select(self, rows):
        for states in (self.full, self.windowed):
            states.select(rows)
        self.check(0)

    def check(self, new):
        """The window shows what the others hold, to the bit: `window` - 1 tokens before the new ones."""
        seen = self.full.num_seen
        assert self.windowed.num_seen == seen
        visible = min(seen - new, self.window - 1) + new
        for part in (0, 1):
            shown = self.windowed.snapshot().columns(part)
            assert shown.shape[2] == visible
            assert torch.equal(shown, self.full.snapshot().columns(part)[:, :, seen - visible :])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 30)),
        st.tuples(st.just("append"), st.just(1)),
        st.tuples(st.just("crop"), st.integers(0, 9)),
        st.tuples(st.just("select"), st.sampled_from([[0, 1], [1, 0], [1, 1], [0]])),
    ),
    max_size=25,
)


@given(
    bits=st.sampled_from([16, 4]),
    window=st.integers(2, 60),
    records=st.booleans(),
    first=st.integers(1, 120),
    steps=steps,
)
@settings(max_examples=150, deadline=None)
def test_a_window_shows_the_last_columns_of_full_attention(bits, window, records, first, steps):
    torch.manual_seed(0)
    both = Both(bits, window)
    both.windowed.keep_past = records
    both.append(first)
    kept = 0  # tokens that came since pages were last let go
    for step, argument in steps:
        if step == "crop":
            argument, kept = min(argument, kept), 0
        elif step == "select":
            argument = [row % both.full.batch_size for row in argument]
        else:
            kept += argument if records else 0
        getattr(both, step)(argument)


@pytest.mark.parametrize("bits", [16, 8, 2])
def test_pages_that_have_left_are_reused(bits):
    window, config = 40, QuantConfig.preset(bits, **SMALL_PAGES)
    states = states_of(config, window)
    for _ in range(400):
        states.append(*torch.randn(2, 2, 1, 1, 16))
    snapshot = states.snapshot()
    # At most what the window shows, a page that is hidden in part, and what waits until the next page is due.
    assert all(len(row.pages) <= (window - 1) // 8 + 2 for row in snapshot.rows)
    assert snapshot.kv_len <= window - 1 + config.sinks + 2 * config.page_size + 1
    assert snapshot.pool.capacity <= 2 * (window // 8 + 4)
    assert states.num_seen == 400


def test_of_a_long_prompt_only_what_the_window_shows_is_packed():
    states = states_of(QuantConfig.preset(4, **SMALL_PAGES), 40, rows=1)
    states.append(*torch.randn(2, 1, 1, 5000, 16))
    states.settle()
    assert states.snapshot().pool.capacity <= 40 // 8 + 1
    assert states.num_seen == 5000


def test_a_maximum_length_allocates_no_more_than_the_window_needs():
    states = states_of(QuantConfig.preset(4, max_length=10_000, **SMALL_PAGES), 40)
    states.append(*torch.randn(2, 2, 1, 30, 16))
    states.settle()
    records = states.snapshot().pool.records
    assert records.shape[0] == 2 * (40 + 8) // 8
    for _ in range(300):
        states.append(*torch.randn(2, 2, 1, 1, 16))
    assert states.snapshot().pool.records is records


def test_a_crop_beyond_what_was_kept_is_refused():
    states = states_of(QuantConfig.preset(4, **SMALL_PAGES), 20)
    for _ in range(100):
        states.append(*torch.randn(2, 2, 1, 1, 16))
    with pytest.raises(RuntimeError, match="cannot crop 30 tokens"):
        states.crop(30)


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("bits", [8, 4, 2, "fp8"])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attention_sees_the_window_only(monkeypatch, switch, bits, mask):
    monkeypatch.setenv("KVQUANT_KERNELS", switch)
    config = QuantConfig.preset(bits, sinks=2, residual_length=16, page_size=64, precision="exact")
    states = LayerStates(config, *(torch.empty(2, 2, 0, 64),) * 2, window=200)
    states.append(*torch.randn(2, 2, 2, 333, 64))
    states.settle()
    snapshot = states.append(*torch.randn(2, 2, 2, 3, 64))
    assert snapshot.hidden > 0
    allowed = torch.rand(2, 1, 3, 202) < 0.8
    masks = {"none": None, "bool": allowed, "float": torch.randn(2, 4, 3, 202).masked_fill(~allowed, -torch.inf)}
    query = torch.randn(2, 4, 3, 64)
    out = attend(snapshot, AttentionCall(query, masks[mask]))
    shown = [snapshot.columns(part).double().repeat_interleave(2, dim=1) for part in (0, 1)]
    wide = masks[mask].double() if mask == "float" else masks[mask]
    expected = F.scaled_dot_product_attention(query.double(), *shown, attn_mask=wide)
    assert relative_errors(out, expected).rms < 2e-5  # the bar of float32 arithmetic


def test_causal_attention_without_a_mask_starts_at_the_first_visible_column():
    states = states_of(QuantConfig.preset(4, **SMALL_PAGES), 12, rows=1)
    states.append(*torch.randn(2, 1, 1, 50, 16))
    states.settle()
    snapshot = states.append(*torch.randn(2, 1, 1, 3, 16))
    query = torch.randn(1, 1, 3, 16)
    out = attend(snapshot, AttentionCall(query, is_causal=True))
    shown = [snapshot.columns(part) for part in (0, 1)]
    expected = F.scaled_dot_product_attention(query, *shown, is_causal=True)
    assert relative_errors(out, expected).rms < 1e-5


def generated(model, ids, mask, cache, **options):
    return model.generate(
        ids, attention_mask=mask, cache=cache, max_new_tokens=50, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("family", "attention"), [
    ("gemma3_text", "sdpa"), ("gemma3_text", "eager"), ("cohere2", "sdpa"), ("gpt_oss", "eager"), ("gemma2", "eager"),
])  # fmt: skip
@pytest.mark.parametrize("padding", [0, 13])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}], ids=str)
def test_identity_with_packed_windows_is_dynamic_cache(family, attention, padding, options):
    model = tiny_model(family, attention)
    ids = torch.randint(2, 97, (2, 60))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = QuantCache(bits=16, config=model.config, quantize_sliding=True, **SMALL_PAGES)
    assert [type(layer) for layer in cache.layers] == [QuantSlidingLayer, QuantLayer]
    outs = [generated(model, ids, mask, c, **options) for c in (DynamicCache(config=model.config), cache)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert all(torch.equal(*steps) for steps in zip(outs[0].logits, outs[1].logits, strict=True))


@pytest.mark.parametrize("bits", [16, 8])
def test_prompt_lookup_rolls_windows_back(bits):
    model = tiny_model("gemma3_text", "sdpa")
    ids = torch.randint(2, 97, (1, 20)).repeat(1, 4)
    mask = torch.ones_like(ids)
    options = {"quantize_sliding": True, **SMALL_PAGES}
    plain = generated(model, ids, mask, QuantCache(bits=bits, config=model.config, **options))
    cache = QuantCache(bits=bits, config=model.config, **options)
    looked_up = generated(model, ids, mask, cache, prompt_lookup_num_tokens=4)
    assert torch.equal(plain.sequences, looked_up.sequences)
    assert len(cache.layers[0].states.snapshot().rows[0].pages) <= 32 // 8 + 2


def test_a_full_window_is_cropped_only_if_the_past_was_recorded():
    layer = QuantSlidingLayer(QuantConfig.preset(4, **SMALL_PAGES), 20)
    layer.update(*torch.randn(2, 1, 1, 15, 16))
    layer.crop(-3)
    layer.update(*torch.randn(2, 1, 1, 30, 16))
    layer.crop(0)
    with pytest.raises(RuntimeError, match=r"crop\(-3\) .* activate_past_recording\(\)"):
        layer.crop(-3)
    layer.activate_past_recording()
    layer.update(*torch.randn(2, 1, 1, 4, 16))
    layer.crop(-3)
    assert layer.get_seq_length() == 15 - 3 + 30 + 1


def test_mask_sizes_are_those_of_the_stock_layer():
    model_config = tiny_model("gemma3_text", "sdpa").config
    stock = DynamicCache(config=model_config)
    ours = QuantCache(bits=4, config=model_config, quantize_sliding=True, **SMALL_PAGES)
    for count in (7, 1, 23, 1, 1, 5, 40, 1):
        assert ours.get_mask_sizes(count, 0) == stock.get_mask_sizes(count, 0)
        states = torch.randn(2, 1, 2, count, 16)
        shapes = [cache.update(*states, 0)[0].shape for cache in (stock, ours)]
        assert shapes[0] == shapes[1]
        assert ours.get_seq_length(0) == stock.get_seq_length(0)
    ours.layers[0].settle()
    assert ours.layers[0].keys.shape == stock.layers[0].keys.shape


def test_windows_that_would_stay_exact_anyway_are_left_to_transformers():
    model = tiny_model("gemma3_text", "sdpa")
    cache = QuantCache(bits=4, config=model.config, quantize_sliding=True)  # the window of 32 is shorter than a page
    assert not isinstance(cache.layers[0], QuantLayer)
    with pytest.raises(TypeError, match="quantize_sliding must be True or False"):
        QuantCache(bits=4, quantize_sliding=1)


def test_the_memory_report_counts_what_the_window_shows():
    layer = QuantSlidingLayer(QuantConfig.preset(16, **SMALL_PAGES), 100)
    layer.update(*torch.randn(2, 1, 2, 1000, 16))
    report = layer.memory()
    per_token = 2 * 2 * 16 * 4  # keys and values of 2 heads, 16 channels, float32
    assert report.full_precision == 99 * per_token
    assert report.elements == 99 * 2 * 2 * 16
    assert report.total <= (99 + 2 + 8) * per_token + 4 * 13
