"""The Triton kernels against the definition in float64 on the same codes; outputs and scratch are poisoned with NaN."""

import math

import pytest
import torch
from conformance import definition, left_padding_mask, states_for

from kvquant import AttentionCall, QuantConfig, formats
from kvquant.states import LayerStates
from kvquant.testing import relative_errors
from kvquant_kernels.triton.attend import KERNEL

INT8, INT4, INT2 = (
    (formats.INT8_PER_CHANNEL, formats.INT8_PER_TOKEN),
    (formats.INT4_PER_CHANNEL, formats.INT4_PER_TOKEN),
    (formats.INT2_PER_CHANNEL, formats.INT2_PER_TOKEN),
)
FP8 = (formats.FP8_E4M3_PER_TOKEN, formats.FP8_E4M3_PER_TOKEN)
PAIRS = [
    INT8,
    INT4,
    INT2,
    (formats.INT8_PER_CHANNEL, formats.INT4_PER_TOKEN),
    (formats.INT4_PER_CHANNEL, formats.INT2_PER_TOKEN),
    FP8,
    (formats.FP8_E5M2_PER_CHANNEL, formats.FP8_E5M2_PER_CHANNEL),
    (formats.FP8_E5M2_PER_TOKEN, formats.FP8_E4M3_PER_CHANNEL),
    (formats.INT4_PER_TOKEN, formats.INT4_PER_CHANNEL),
    (formats.INT8_PER_TOKEN_SYMMETRIC, formats.INT2_PER_CHANNEL_SYMMETRIC),
    (formats.INT8_PER_TOKEN, formats.INT8_PER_CHANNEL),
]
by_name = {"ids": lambda pair: "-".join(fmt.name for fmt in pair)}


def config_for(pair=INT4, **options):
    return QuantConfig(key=pair[0], value=pair[1], **{"residual_length": 20, "page_size": 64} | options)


# Of the root mean square. Products of queries, or of weights, with scales are rounded to float16, by 2^-12 at most; the
# scores of these tests are some units in base 2, so that their errors are a few of these.
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What kernels leave unwritten is NaN."""
    empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **options):
        out = empty(self, *shape, **options)
        return out.fill_(math.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def attended(snapshot, call):
    """The output in float32: what the kernel computes, before it is rounded to the query's dtype."""
    assert KERNEL.unsupported(snapshot, call) is None
    return KERNEL.run(snapshot, call, torch.float32)


def assert_like_definition(snapshot, call, reference=None):
    reference = definition(snapshot, call) if reference is None else reference
    out = attended(snapshot, call)
    assert out.shape == reference.shape
    assert relative_errors(out, reference).rms <= TOLERANCE


def states(config, shape, dtype=torch.bfloat16, **options):
    # An outlier channel makes scores, and with them their rounding errors, larger: 20 would double both.
    return states_for(config, shape, dtype=dtype, outlier=4, **options)


def query(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("pair", PAIRS, **by_name)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_format(pair, head_dim):
    snapshot = states(config_for(pair), (1, 2, 211, head_dim))
    assert_like_definition(snapshot, AttentionCall(query(1, 8, 1, head_dim)))


@pytest.mark.broad
@pytest.mark.parametrize("head_dim", [72, 80, 96, 192, 256])
@pytest.mark.parametrize("pair", [INT8, INT4, FP8], **by_name)
def test_every_head_dim(pair, head_dim):
    snapshot = states(config_for(pair), (1, 1, 211, head_dim))
    assert_like_definition(snapshot, AttentionCall(query(1, 4, 1, head_dim)))


@pytest.mark.parametrize("rotation", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_with_and_without_rotation(rotation, dtype):
    snapshot = states(config_for(rotation=rotation), (1, 1, 211, 64), dtype=dtype)
    call = AttentionCall(query(1, 4, 1, 64, dtype=dtype))
    assert_like_definition(snapshot, call)
    assert torch.equal(KERNEL.run(snapshot, call), attended(snapshot, call).to(dtype))


@pytest.mark.parametrize(("n_rep", "q_len"), [(1, 1), (7, 1), (16, 1), (1, 8), (4, 3), (7, 5)])
def test_grouped_heads_and_several_queries(n_rep, q_len):
    snapshot = states(config_for(), (1, 2, 149, 64), q_len=q_len)
    assert_like_definition(snapshot, AttentionCall(query(1, 2 * n_rep, q_len, 64)))


@pytest.mark.parametrize("starts", [[0, 100], [130, 0, 37]], ids=str)
def test_rows_that_start_at_different_columns(starts):
    snapshot = states(config_for(), (len(starts), 1, 251, 64), starts=starts)
    call = AttentionCall(query(len(starts), 4, 1, 64))
    masked = AttentionCall(call.query, left_padding_mask(starts, 251))
    assert_like_definition(snapshot, masked)
    assert_like_definition(snapshot, call, definition(snapshot, masked))  # padding is not stored, mask or no mask


def test_a_row_without_pages_beside_one_with():
    snapshot = states(config_for(), (2, 1, 151, 64), starts=[0, 120])
    assert [len(row.pages) for row in snapshot.rows] == [1, 0]
    assert_like_definition(snapshot, AttentionCall(query(2, 4, 1, 64), left_padding_mask([0, 120], 151)))


@pytest.mark.broad
@pytest.mark.parametrize("shape", [(1, 1, 1, 151), (2, 1, 3, 151), (1, 4, 3, 151), (3, 151)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float32", "float64"])
def test_masks(shape, kind):
    snapshot = states(config_for(), (2, 1, 151, 64), q_len=3)
    mask = torch.rand(shape) < 0.5
    if kind != "bool":
        dtype = getattr(torch, kind)
        mask = torch.where(mask, torch.randn(shape).to(dtype), torch.tensor(-math.inf, dtype=dtype))
    assert_like_definition(snapshot, AttentionCall(query(2, 4, 3, 64), mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_masked_with_the_least_finite_number_give_the_mean(dtype):
    snapshot = states(config_for(), (1, 1, 151, 64))
    mask = torch.full((1, 1, 1, 151), torch.finfo(dtype).min, dtype=dtype)
    mean = definition(snapshot, AttentionCall(torch.zeros(1, 4, 1, 64)))
    assert_like_definition(snapshot, AttentionCall(query(1, 4, 1, 64), mask), mean)


def test_fully_masked_rows_give_zeros():
    mask = torch.ones(2, 1, 1, 151, dtype=torch.bool)
    mask[0] = False
    snapshot = states(config_for(), (2, 1, 151, 64))
    call = AttentionCall(query(2, 4, 1, 64), mask)
    assert_like_definition(snapshot, call)
    assert (attended(snapshot, call)[0] == 0).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_sink_logits(softcap, has_sinks):
    snapshot = states(config_for(), (1, 2, 151, 64), q_len=2)
    sinks = torch.randn(8) + 3 if has_sinks else None
    assert_like_definition(snapshot, AttentionCall(query(1, 8, 2, 64), None, False, 0.2, softcap, sinks))


@pytest.mark.parametrize("window", [90, 150, 200])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("is_masked", [False, True])
def test_sliding_windows(window, q_len, is_masked):
    key = torch.randn(1, 1, 300, 64).to(torch.bfloat16)
    held = LayerStates(config_for(), key, key, window=window)
    held.append(key, key)
    held.settle()
    snapshot = held.append(key[:, :, :q_len], key[:, :, :q_len])
    assert snapshot.hidden
    mask = (torch.rand(1, 1, q_len, snapshot.visible_len) < 0.7) if is_masked else None
    assert_like_definition(snapshot, AttentionCall(query(1, 4, q_len, 64), mask))


@pytest.mark.parametrize("options", [{"sinks": 0}, {"residual_length": 0}, {"sinks": 0, "residual_length": 0}], ids=str)
def test_empty_sinks_and_tail(options):
    config = config_for(**options)
    tokens = config.sinks + config.residual_length + 3 * 64 + 1
    snapshot = states(config, (1, 1, tokens, 64))
    assert snapshot.tail.num_tokens == config.residual_length
    assert_like_definition(snapshot, AttentionCall(query(1, 4, 1, 64)))


@pytest.mark.broad
@pytest.mark.parametrize("page_size", [128, 256, 512])
@pytest.mark.parametrize("pair", [INT8, INT2], **by_name)
def test_page_sizes(page_size, pair):
    snapshot = states(config_for(pair, page_size=page_size), (1, 1, page_size + 101, 64))
    assert_like_definition(snapshot, AttentionCall(query(1, 4, 1, 64)))


def test_more_programs_than_pages(monkeypatch):
    monkeypatch.setattr("kvquant_kernels.triton.launch.Launch.num_splits", lambda *args: 7)
    snapshot = states(config_for(), (2, 1, 251, 64), starts=[0, 130])
    call = AttentionCall(query(2, 4, 1, 64), left_padding_mask([0, 130], 251))
    assert_like_definition(snapshot, call)


@pytest.mark.broad
@pytest.mark.parametrize("pair", [INT8, INT4, FP8], **by_name)
@pytest.mark.parametrize("magnitude", [1e-3, 1e3])
@pytest.mark.parametrize("part", [0, 1])
def test_small_and_large_states(pair, magnitude, part):
    key, value = torch.randn(2, 1, 1, 211, 64).unbind(0)
    key, value = (states * (magnitude if part == i else 1.0) for i, states in enumerate((key, value)))
    key, value = key.to(torch.bfloat16), value.to(torch.bfloat16)
    held = LayerStates(config_for(pair), key, value)
    held.append(key, value)
    held.settle()
    snapshot = held.append(key[:, :, :1], value[:, :, :1])
    scale = 0.125 / (magnitude if part == 0 else 1.0)
    assert_like_definition(snapshot, AttentionCall(query(1, 4, 1, 64), scale=scale))


@pytest.mark.parametrize(
    "pair", [INT4, *(pytest.param(x, marks=pytest.mark.broad) for x in (INT8, INT2, FP8))], **by_name
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1])
def test_a_bad_number_in_a_page_gives_nan_to_its_row_and_head_only(pair, bad, part):
    both = torch.randn(2, 2, 2, 149, 64).to(torch.bfloat16)
    both[part][1, 0, 50, 3] = bad
    held = LayerStates(config_for(pair), *both)
    held.append(*both)
    held.settle()
    snapshot = held.append(both[0][:, :, :1], both[1][:, :, :1])
    out = attended(snapshot, AttentionCall(query(2, 2, 1, 64)))
    assert out.isnan().any(dim=-1).squeeze(-1).tolist() == [[False, False], [True, False]]


def test_no_queries():
    snapshot = states(config_for(), (2, 1, 151, 64))
    assert attended(snapshot, AttentionCall(query(2, 4, 0, 64))).shape == (2, 4, 0, 64)


def test_queries_of_any_strides():
    snapshot = states(config_for(), (2, 1, 151, 64), q_len=3)
    q = query(2, 3, 4, 64)
    expected = attended(snapshot, AttentionCall(q.transpose(1, 2).contiguous()))
    assert torch.equal(attended(snapshot, AttentionCall(q.transpose(1, 2))), expected)
    sparse = query(2, 4, 64, 3).transpose(2, 3)
    assert torch.equal(
        attended(snapshot, AttentionCall(sparse)), attended(snapshot, AttentionCall(sparse.contiguous()))
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_causal": True}, "causality without a mask over a history"),
        ({"query": torch.zeros(1, 4, 1, 64)}, "queries are torch.float32, keys and values torch.bfloat16"),
    ],
)
def test_calls_that_are_refused_with_the_reason(change, reason):
    snapshot = states(config_for(), (1, 1, 151, 64))
    call = AttentionCall(**{"query": query(1, 4, 1, 64)} | change)
    assert KERNEL.unsupported(snapshot, call) == reason


def test_exact_precision_is_refused():
    snapshot = states(config_for(precision="exact"), (1, 1, 151, 64))
    reason = KERNEL.unsupported(snapshot, AttentionCall(query(1, 4, 1, 64)))
    assert reason == "precision='exact' asks for products in float32"
