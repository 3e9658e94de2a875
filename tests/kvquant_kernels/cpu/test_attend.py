"""The native attention against the definition in float64, for every instruction set this machine has."""

from __future__ import annotations

import copy
import gc
import math
import mmap
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conformance import definition, left_padding_mask, states_for
from hypothesis import given, settings
from hypothesis import strategies as st

from kvquant import AttentionCall, QuantCache, QuantConfig, formats
from kvquant.states import LayerStates
from kvquant.testing import relative_errors
from kvquant_kernels.cpu import library
from kvquant_kernels.cpu.attend import KERNEL, _Arguments

NATIVE = library.load()
pytestmark = pytest.mark.skipif(isinstance(NATIVE, library.Missing), reason=getattr(NATIVE, "reason", ""))
VARIANTS = range(NATIVE.best + 1) if isinstance(NATIVE, library.Library) else ()

PAIRS = [
    (formats.INT8_PER_CHANNEL, formats.INT8_PER_TOKEN),
    (formats.INT4_PER_CHANNEL, formats.INT4_PER_TOKEN),
    (formats.INT2_PER_CHANNEL, formats.INT2_PER_TOKEN),
    (formats.INT8_PER_CHANNEL, formats.INT4_PER_TOKEN),
    (formats.INT4_PER_CHANNEL, formats.INT2_PER_TOKEN),
    (formats.FP8_E4M3_PER_TOKEN, formats.FP8_E4M3_PER_TOKEN),
    (formats.FP8_E5M2_PER_CHANNEL, formats.FP8_E5M2_PER_CHANNEL),
    (formats.INT4_PER_TOKEN, formats.INT4_PER_CHANNEL),
    (formats.INT8_PER_TOKEN_SYMMETRIC, formats.INT2_PER_CHANNEL_SYMMETRIC),
]
SYMMETRIC = [
    (formats.INT8_PER_CHANNEL_SYMMETRIC, formats.INT8_PER_TOKEN_SYMMETRIC),
    (formats.INT4_PER_CHANNEL_SYMMETRIC, formats.INT4_PER_TOKEN_SYMMETRIC),
    (formats.INT2_PER_CHANNEL_SYMMETRIC, formats.INT2_PER_TOKEN_SYMMETRIC),
]
# Relative L2. Exact: float32 sums of some thousand products, whose rounding errors mostly cancel. Else queries
# are rounded to 15 bits per page and weights to 16, both relative to the largest of a row.
EXACT, ROUNDED = 2e-5, 4e-3


def config_for(pair=PAIRS[1], **options):
    return QuantConfig(key=pair[0], value=pair[1], **{"residual_length": 20, "page_size": 64} | options)


def with_precision(snapshot, precision):
    return replace(snapshot, config=replace(snapshot.config, precision=precision))


def assert_every_variant(snapshot, call, reference=None):
    assert KERNEL.unsupported(snapshot, call) is None
    reference = definition(snapshot, call) if reference is None else reference
    for variant in VARIANTS:
        for precision, tolerance in (("exact", EXACT), ("default", ROUNDED)):
            out = KERNEL.run(with_precision(snapshot, precision), call, variant)
            assert out.dtype == call.query.dtype
            assert out.shape == reference.shape
            assert relative_errors(out, reference).rms <= tolerance, NATIVE.variants[variant]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(fmt.name for fmt in pair))
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_every_format_and_head_dim(pair, head_dim):
    snapshot = states_for(config_for(pair), (2, 2, 333, head_dim))
    assert_every_variant(snapshot, AttentionCall(torch.randn(2, 8, 1, head_dim)))


@pytest.mark.parametrize("n_rep", [1, 3, 7, 32])
@pytest.mark.parametrize("q_len", [1, 2, 8])
def test_grouped_heads_and_several_queries(n_rep, q_len):
    snapshot = states_for(config_for(), (1, 2, 333, 64), q_len=q_len)
    assert_every_variant(snapshot, AttentionCall(torch.randn(1, 2 * n_rep, q_len, 64)))


@pytest.mark.parametrize("starts", [[0], [0, 300], [0, 120, 299, 37, 250]], ids=str)
@pytest.mark.parametrize("tokens", [301, 389, 600])
def test_rows_that_start_at_different_columns(starts, tokens):
    snapshot = states_for(config_for(), (len(starts), 2, tokens, 64), starts=starts)
    call = AttentionCall(torch.randn(len(starts), 6, 1, 64))
    masked = AttentionCall(call.query, left_padding_mask(starts, tokens))
    assert_every_variant(snapshot, masked)
    assert_every_variant(snapshot, call, definition(snapshot, masked))  # padding is not stored, mask or no mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotation", [True, False])
def test_dtypes_with_and_without_rotation(dtype, rotation):
    snapshot = states_for(config_for(rotation=rotation), (2, 2, 333, 64), dtype=dtype)
    query = torch.randn(2, 8, 1, 64).to(dtype)
    assert_every_variant(snapshot, AttentionCall(query.float()))
    for variant in VARIANTS:  # queries of 16 bits are read exactly, and the output is rounded to them once
        out, in_float32 = (KERNEL.run(snapshot, AttentionCall(q), variant) for q in (query, query.float()))
        assert torch.equal(out, in_float32.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_as_torch_does(dtype):
    value = torch.randn(16, 64) * 2.0 ** torch.randint(-45, 20, (16, 64))  # subnormal in float16, and beyond it
    value[0, :8] = torch.tensor([65504.0, 65519.0, 65520.0, 3e38, 0.0, math.inf, -math.inf, math.nan])
    snapshot = states_for(config_for(), (1, 1, 333, 64))
    mask = torch.zeros(1, 1, 1, 334, dtype=torch.bool)
    mask[..., -1] = True  # the only column that counts, so that the output is its value
    states = LayerStates(config_for(), snapshot.columns(0), snapshot.columns(1))
    states.append(snapshot.columns(0), snapshot.columns(1))
    states.settle()
    for row in value:
        new = states.append(snapshot.chunk.key, row.view(1, 1, 1, 64))
        call = AttentionCall(torch.zeros(1, 1, 1, 64, dtype=dtype), mask)
        for variant in VARIANTS:
            out = KERNEL.run(new, call, variant).flatten()
            torch.testing.assert_close(out, row.to(dtype), rtol=0, atol=0, equal_nan=True)
        states.crop(1)


def test_queries_of_any_strides():
    snapshot = states_for(config_for(), (2, 2, 333, 64), q_len=3)
    query = torch.randn(2, 3, 8, 64)
    reference = KERNEL.run(snapshot, AttentionCall(query.transpose(1, 2).contiguous()))
    assert torch.equal(KERNEL.run(snapshot, AttentionCall(query.transpose(1, 2))), reference)
    sparse = torch.randn(2, 8, 64, 3).transpose(2, 3)
    reference = KERNEL.run(snapshot, AttentionCall(sparse.contiguous()))
    assert torch.equal(KERNEL.run(snapshot, AttentionCall(sparse)), reference)


@pytest.mark.parametrize("kind", ["bool", "bool per head", "float", "window"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_masks(kind, q_len):
    shape = (2, 8 if kind == "bool per head" else 1, q_len, 333)
    mask = {"float": torch.randn(shape), "window": (torch.arange(333) > 250).expand(shape)}.get(
        kind, torch.rand(shape) < 0.6
    )
    snapshot = states_for(config_for(), (2, 2, 333, 64), q_len=q_len)
    assert_every_variant(snapshot, AttentionCall(torch.randn(2, 8, q_len, 64), mask))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_sink_logits(softcap, has_sinks):
    snapshot = states_for(config_for(), (2, 2, 333, 64), q_len=2)
    sinks = torch.randn(8) + 3 if has_sinks else None
    assert_every_variant(snapshot, AttentionCall(torch.randn(2, 8, 2, 64), None, False, 0.2, softcap, sinks))


@pytest.mark.parametrize("pair", PAIRS[:3], ids=lambda pair: pair[0].name)
@pytest.mark.parametrize("magnitude", [1.0, 0.1])
def test_long_contexts_are_as_exact_as_short_ones(pair, magnitude):
    snapshot = states_for(config_for(pair, page_size=128), (1, 1, 16_000, 64), outlier=1)
    assert_every_variant(snapshot, AttentionCall(magnitude * torch.randn(1, 2, 1, 64)))


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[5], PAIRS[6]], ids=lambda pair: pair[0].name)
def test_flushing_denormals_changes_nothing(pair):
    key, value = torch.randn(2, 1, 1, 333, 64).unbind(0)
    states = LayerStates(config_for(pair), key, value)
    states.append(key, value * 1e-3)
    states.settle()
    snapshot = states.append(key[:, :, :1], value[:, :, :1] * 1e-3)
    call = AttentionCall(torch.randn(1, 2, 1, 64))
    reference = definition(snapshot, call)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert_every_variant(snapshot, call, reference)
    finally:
        torch.set_flush_denormal(False)


def test_a_bad_key_that_is_masked_out_does_no_harm():
    key, value = torch.randn(2, 1, 1, 333, 64).unbind(0)
    key[:, :, 100, 3], key[:, :, 330, 3] = math.nan, math.inf
    config = config_for((formats.INT4_PER_TOKEN, formats.INT4_PER_TOKEN))
    states = LayerStates(config, key, value)
    states.append(key, value)
    states.settle()
    mask = torch.ones(1, 1, 1, 334, dtype=torch.bool)
    mask[..., 100] = mask[..., 330] = False
    call = AttentionCall(torch.randn(1, 2, 1, 64), mask)
    assert KERNEL.run(states.append(value[:, :, :1], value[:, :, :1]), call).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_masked_with_the_least_finite_number_give_the_mean(dtype):
    snapshot = states_for(config_for(), (1, 2, 333, 64))
    mask = torch.full((1, 1, 1, 333), torch.finfo(dtype).min, dtype=dtype)
    mean = snapshot.columns(1).double().mean(dim=2, keepdim=True).repeat_interleave(4, dim=1)
    assert_every_variant(snapshot, AttentionCall(torch.randn(1, 8, 1, 64), mask), mean)


def test_fully_masked_rows_give_zeros():
    mask = torch.ones(2, 1, 1, 333, dtype=torch.bool)
    mask[0] = False
    snapshot = states_for(config_for(), (2, 2, 333, 64))
    call = AttentionCall(torch.randn(2, 8, 1, 64), mask)
    assert_every_variant(snapshot, call)
    assert (KERNEL.run(snapshot, call)[0] == 0).all()


@pytest.mark.parametrize("page_size", [32, 96, 256, 512])
@pytest.mark.parametrize("bits", [0, 1])
def test_page_sizes_whose_sums_would_overflow_too(page_size, bits):
    config = config_for(PAIRS[bits], page_size=page_size, rotation=False)
    key, value = torch.randn(1, 1, 3 * page_size, 64), torch.rand(1, 1, 3 * page_size, 64)
    value[..., 0] = 100.0  # the largest code throughout, under equal weights: the largest sum there can be
    states = LayerStates(config, key * 0, value)
    states.append(key * 0, value)
    states.settle()
    snapshot = states.append(key[:, :, :1], value[:, :, :1])
    assert_every_variant(snapshot, AttentionCall(torch.randn(1, 1, 1, 64)))


@pytest.mark.parametrize(
    "pair", [PAIRS[0], SYMMETRIC[1], (formats.INT8_PER_CHANNEL,) * 2], ids=lambda pair: pair[1].name
)
def test_large_pages_under_flat_attention_cancel_nothing(pair):
    snapshot = states_for(config_for(pair, page_size=512), (1, 1, 4000, 64), outlier=1)
    call = AttentionCall(0.1 * torch.randn(1, 2, 1, 64))
    reference = definition(snapshot, call)
    for variant in VARIANTS:
        out = KERNEL.run(with_precision(snapshot, "exact"), call, variant)
        # Codes are read with their middle taken out: no sum is larger than what it stands for.
        assert relative_errors(out, reference).rms <= 5e-6


def test_masks_of_float16():
    mask = torch.where(torch.rand(2, 1, 1, 333) < 0.5, 0.0, torch.finfo(torch.float16).min)
    snapshot = states_for(config_for(), (2, 2, 333, 64))
    query = torch.randn(2, 8, 1, 64)
    assert_every_variant(snapshot, AttentionCall(query, mask.half()), definition(snapshot, AttentionCall(query, mask)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bool_masks_where_tensors_are_not_float32_by_default(dtype):
    snapshot = states_for(config_for(), (2, 2, 333, 64))
    call = AttentionCall(torch.randn(2, 8, 1, 64), torch.rand(2, 1, 1, 333) < 0.5)
    expected = KERNEL.run(snapshot, call)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(KERNEL.run(snapshot, call), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_another_cache_returns_is_appended_and_read():
    """Lazy tensors have strides, but no address."""
    states, query = torch.randn(2, 1, 2, 310, 64), torch.randn(1, 4, 1, 64)
    other = QuantCache(bits=4)
    other.update(*states[..., 300:, :], 0)
    tails, outs = [], []
    for new in (states[..., 300:, :], (other.layers[0].keys, other.layers[0].values)):
        cache = QuantCache(bits=4)
        cache.update(*states[..., :300, :], 0)
        cache.update(*new, 0)
        held = cache.layers[0].states
        outs.append(KERNEL.run(held.snapshot(), AttentionCall(query)))
        held.settle()
        tails.append(held.snapshot().tail)
    assert torch.equal(*outs)
    assert all(torch.equal(*pair) for pair in zip(*tails, strict=True))


def test_each_cache_appends_its_own_tokens_whatever_attention_read_last():
    """Attention leaves behind where from and where to it would append."""
    states = torch.randn(2, 2, 1, 2, 301, 64)
    caches = [QuantCache(bits=4), QuantCache(bits=4)]
    for cache, (key, value) in zip(caches, states, strict=True):
        cache.update(key[..., :300, :], value[..., :300, :], 0)
        cache.update(key[..., 300:, :], value[..., 300:, :], 0)
    held = [cache.layers[0].states for cache in caches]
    copies = [copy.deepcopy(held[0]), copy.deepcopy(held[0])]
    for each in (*held, *copies):
        KERNEL.run(each.snapshot(), AttentionCall(torch.randn(1, 4, 1, 64)))
    for each, (key, value) in zip((*held, *copies), (*states, states[0], states[0]), strict=True):
        each.settle()
        tail = each.snapshot().tail
        assert torch.equal(tail.key[..., -1, :], key[..., 300, :])
        assert torch.equal(tail.value[..., -1, :], value[..., 300, :])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_exact_tokens_that_are_all_hidden_are_not_read(bad):
    """Sinks that a window has left behind, say: their values do not matter, also where all have weight 0."""
    snapshot = states_for(config_for(), (1, 2, 333, 64))
    snapshot.sinks.value.fill_(bad)
    mask = torch.zeros(1, 1, 1, 333)
    mask[..., : snapshot.sinks.num_tokens] = -math.inf
    for variant in VARIANTS:
        assert KERNEL.run(snapshot, AttentionCall(torch.randn(1, 4, 1, 64), mask), variant).isfinite().all()


def test_attention_keeps_no_pages_alive():
    snapshot = states_for(config_for(), (1, 2, 333, 64))
    KERNEL.run(snapshot, AttentionCall(torch.randn(1, 2, 1, 64)))
    records = weakref.ref(snapshot.pool.records)
    del snapshot
    gc.collect()
    assert records() is None


@pytest.mark.parametrize("threads", [1, 2])
def test_no_queries(threads):
    snapshot = states_for(config_for(), (2, 2, 333, 64))
    torch.set_num_threads(threads)
    out = KERNEL.run(snapshot, AttentionCall(torch.randn(2, 8, 0, 64)))
    torch.set_num_threads(1)
    assert out.shape == (2, 8, 0, 64)


def test_pages_stay_in_place_while_a_call_reads_them():
    snapshot = states_for(config_for(), (1, 2, 333, 64))
    arguments = _Arguments(snapshot, AttentionCall(torch.randn(1, 2, 1, 64)))
    read = weakref.ref(snapshot.pool.records)
    snapshot.pool.write(torch.zeros(100, snapshot.layout.page_bytes, dtype=torch.uint8))  # by a copy of the cache, say
    assert snapshot.pool.records is not read()
    assert read() is not None
    del arguments
    assert read() is None


def test_what_calls_have_in_common_is_found_again_when_the_pool_has_moved():
    snapshot = states_for(config_for(), (1, 2, 333, 64))
    call = AttentionCall(torch.randn(1, 2, 1, 64))
    before = KERNEL.run(snapshot, call)
    old = snapshot.pool.records
    snapshot.pool.write(torch.zeros(100, snapshot.layout.page_bytes, dtype=torch.uint8))  # by a copy of the cache, say
    assert snapshot.pool.records is not old
    old.fill_(0xFF)  # nothing may read it any more
    assert torch.equal(KERNEL.run(snapshot, call), before)


def test_states_are_pickled_without_what_a_kernel_derived_from_them():
    snapshot = states_for(config_for(), (1, 2, 333, 64))
    call = AttentionCall(torch.randn(1, 2, 1, 64))
    before = KERNEL.run(snapshot, call)
    restored = pickle.loads(pickle.dumps(snapshot))
    assert torch.equal(KERNEL.run(restored, call), before)


@pytest.mark.parametrize("options", [{"sinks": 0}, {"residual_length": 0}, {"sinks": 0, "residual_length": 0}], ids=str)
def test_empty_sinks_and_tail(options):
    config = config_for(**options)
    tokens = config.sinks + config.residual_length + 5 * 64 + 1
    snapshot = states_for(config, (1, 2, tokens, 64))
    assert snapshot.tail.num_tokens == config.residual_length
    assert_every_variant(snapshot, AttentionCall(torch.randn(1, 8, 1, 64)))


@pytest.mark.parametrize("pair", [*PAIRS, *SYMMETRIC], ids=lambda pair: "-".join(fmt.name for fmt in pair))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1])
def test_a_bad_number_in_a_page_gives_nan_to_its_row_and_head_only(pair, bad, part):
    config = config_for(pair)
    snapshot = states_for(config, (2, 2, 333, 64))
    key, value = (snapshot.columns(i).clone() for i in (0, 1))
    (key, value)[part][1, 0, 100, 3] = bad
    states = LayerStates(config, key, value)
    states.append(key, value)
    states.settle()
    snapshot = states.append(key[:, :, :1], value[:, :, :1])
    call = AttentionCall(torch.randn(2, 2, 1, 64))
    for variant in VARIANTS:
        out = KERNEL.run(snapshot, call, variant)
        assert out.isnan().any(dim=-1).squeeze(-1).tolist() == [[False, False], [True, False]], NATIVE.variants[variant]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("pair", PAIRS[:4], ids=lambda pair: "-".join(fmt.name for fmt in pair))
@pytest.mark.parametrize("n_rep", [1, 3, 6])
def test_a_bad_number_in_a_query_gives_nan_to_its_head_only(pair, bad, n_rep):
    """Rows are computed on side by side; the fast variant rounds them by a scale of their own each."""
    snapshot = states_for(config_for(pair), (1, 2, 333, 64))
    query = torch.randn(1, 2 * n_rep, 1, 64)
    query[0, n_rep, 0, 3] = bad
    for variant in VARIANTS:
        out = KERNEL.run(snapshot, AttentionCall(query), variant)
        assert out[0, n_rep].isnan().all()
        assert out[:, [i for i in range(2 * n_rep) if i != n_rep]].isfinite().all()


def test_threads_do_not_change_what_is_computed():
    snapshot = states_for(config_for(), (1, 2, 3000, 64))
    call = AttentionCall(torch.randn(1, 8, 1, 64))
    torch.set_num_threads(2)
    out = KERNEL.run(snapshot, call)
    torch.set_num_threads(1)
    assert relative_errors(out, definition(snapshot, call)).rms <= ROUNDED


def test_rounding_is_what_the_fast_variant_does_and_exact_does_not():
    if NATIVE.variants[NATIVE.best] != "v4_vnni":
        pytest.skip("this processor has no AVX512-VNNI")
    snapshot = states_for(config_for(), (1, 2, 1000, 128))
    call = AttentionCall(torch.randn(1, 8, 1, 128))
    exact, rounded = (KERNEL.run(with_precision(snapshot, precision), call) for precision in ("exact", "default"))
    assert 1e-5 < relative_errors(rounded, exact).rms < ROUNDED


def test_a_channel_that_dwarfs_the_others_costs_no_accuracy():
    snapshot = states_for(config_for(PAIRS[0]), (1, 2, 333, 64), outlier=1e3)
    assert_every_variant(snapshot, AttentionCall(torch.randn(1, 8, 1, 64) * 1e-3))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_shape(data):
    """Batches of any lengths, starts and options, against the definition, in every variant."""
    draw = data.draw
    pair = draw(st.sampled_from(PAIRS))
    heads, n_rep, q_len = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 8))
    config = config_for(
        pair,
        page_size=draw(st.sampled_from([64, 128, 192])),
        sinks=draw(st.integers(0, 5)),
        residual_length=draw(st.integers(0, 70)),
        rotation=draw(st.booleans()),
    )
    tokens = draw(st.integers(q_len + 1, 700))
    starts = draw(st.lists(st.integers(0, tokens - q_len - 1), min_size=1, max_size=5))
    shape = (len(starts), heads, tokens, draw(st.sampled_from([32, 64, 72, 128])))
    torch.manual_seed(draw(st.integers(0, 1000)))
    snapshot = states_for(config, shape, starts, q_len=q_len, outlier=3)
    if snapshot.pool is None:
        return
    query = torch.randn(len(starts), heads * n_rep, q_len, shape[3])
    mask = left_padding_mask(starts, tokens)
    softcap = draw(st.sampled_from([None, 10.0]))
    assert_every_variant(snapshot, AttentionCall(query, mask, softcap=softcap))


def test_ten_thousand_calls_leak_nothing():
    snapshot = states_for(config_for(), (2, 2, 333, 64), starts=[0, 50])
    mask = left_padding_mask([0, 50], 333)
    call = AttentionCall(torch.randn(2, 4, 1, 64), mask, sink_logits=torch.zeros(4))
    states = torch.randn(2, 2, 64, 64)

    def repeat(count):
        for _ in range(count):
            KERNEL.run(snapshot, call)
        for _ in range(count // 10):
            records = snapshot.layout.seal(states, states, [snapshot.config.codec(part) for part in (0, 1)])
            snapshot.layout.restore(records, 0, snapshot.config.codec(0), torch.float32)
        return resident_bytes()

    repeat(500)  # what allocators keep for later
    before = repeat(500)
    # One leaked result of 2 KiB per call, or one record of 17 KiB per tenth call, would be 20 MB.
    assert repeat(10_000) - before < 4 * 2**20


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
