"""attend() against float64 attention on the dequantized states."""

import math

import pytest
import torch
from conformance import definition as expected

from kvquant import FORMATS, AttentionCall, QuantConfig, attend
from kvquant.attention import LONG_CHUNK
from kvquant.formats import INT4_PER_CHANNEL, INT4_PER_TOKEN
from kvquant.snapshot import Snapshot
from kvquant.states import LayerStates
from kvquant.testing import relative_errors

SOFTCAP = 5.0


def states_for(config, rows=2, heads=2, tokens=203, dim=16, value_dim=24, starts=None, dtype=torch.float32, chunk=3):
    key = torch.randn(rows, heads, tokens, dim, dtype=dtype)
    value = torch.randn(rows, heads, tokens, value_dim, dtype=dtype)
    states = LayerStates(config, key, value)
    states.append(key[:, :, :-chunk], value[:, :, :-chunk])
    states.settle(starts=starts)
    return states.append(key[:, :, -chunk:], value[:, :, -chunk:])


def config_for(fmt=INT4_PER_CHANNEL, value=None, **options):
    return QuantConfig(key=fmt, value=value or fmt, **({"sinks": 2, "residual_length": 5, "page_size": 8} | options))


def assert_close(out, reference, tolerance=2e-6):
    # float32 sums of some 200 products, of which the rotation adds log2(16) roundings: a few 2^-23.
    errors = relative_errors(out, reference)
    assert errors.rms <= tolerance, errors
    assert errors.maximum <= 10 * tolerance, errors


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("rotation", [True, False])
def test_every_format_equals_attention_on_dequantized_states(fmt, rotation):
    snapshot = states_for(config_for(fmt, rotation=rotation))
    call = AttentionCall(torch.randn(2, 4, 1, 16))
    assert_close(attend(snapshot, call), expected(snapshot, call))


@pytest.mark.parametrize("n_rep", [1, 4])
@pytest.mark.parametrize("q_len", [1, 2, 7, LONG_CHUNK, LONG_CHUNK + 1])
@pytest.mark.parametrize("mask", ["none", "bool", "bool per head", "float", "causal"])
def test_masks_queries_and_grouped_heads(n_rep, q_len, mask):
    snapshot = states_for(config_for(), chunk=q_len)
    query = torch.randn(2, 2 * n_rep, q_len, 16)
    masks = {
        "none": None,
        "causal": None,
        "bool": torch.rand(2, 1, q_len, 203) < 0.7,
        "bool per head": torch.rand(1, 2 * n_rep, q_len, 203) < 0.7,
        "float": torch.randn(2, 1, q_len, 203),
    }
    call = AttentionCall(query, masks[mask], is_causal=mask == "causal", scale=0.3)
    assert_close(attend(snapshot, call), expected(snapshot, call))


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("q_len", [1, LONG_CHUNK + 1])
def test_softcap_and_sink_logits(softcap, has_sinks, q_len):
    snapshot = states_for(config_for(), chunk=q_len)
    mask = torch.rand(2, 1, q_len, 203) < 0.7
    sinks = torch.randn(4) + 2 if has_sinks else None
    call = AttentionCall(torch.randn(2, 4, q_len, 16), mask, softcap=softcap, sink_logits=sinks)
    assert_close(attend(snapshot, call), expected(snapshot, call))


@pytest.mark.parametrize("q_len", [1, 9, LONG_CHUNK + 1])
def test_left_padded_rows_of_different_lengths(q_len):
    starts = [0, 100, 37, 203 - q_len]
    snapshot = states_for(config_for(), rows=4, starts=starts, chunk=q_len)
    mask = (torch.arange(203) >= torch.tensor(starts)[:, None])[:, None, None].expand(4, 1, q_len, 203)
    call = AttentionCall(torch.randn(4, 4, q_len, 16), mask)
    assert len(snapshot.groups()) == 4
    assert_close(attend(snapshot, call), expected(snapshot, call))


@pytest.mark.parametrize("tokens", [4, 11, 20, 23, 24, 5000])
def test_lengths_around_the_first_page_and_beyond_one_run(tokens):
    snapshot = states_for(config_for(), rows=1, tokens=tokens, chunk=1)
    call = AttentionCall(torch.randn(1, 2, 1, 16))
    assert_close(attend(snapshot, call), expected(snapshot, call), tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_states_are_computed_in_float32_and_rounded_once(dtype):
    snapshot = states_for(config_for(), dtype=dtype)
    call = AttentionCall(torch.randn(2, 4, 1, 16, dtype=dtype))
    out = attend(snapshot, call)
    assert out.dtype == dtype
    # Half a unit in the last place of the output, and that of dequantized states, which columns() rounds to the dtype.
    assert_close(out, expected(snapshot, call), tolerance=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("q_len", [2, LONG_CHUNK + 1])
def test_fully_masked_queries_give_zeros(kind, q_len):
    snapshot = states_for(config_for(), chunk=q_len)
    mask = torch.ones(2, 1, q_len, 203, dtype=torch.bool)
    mask[0, :, 0] = False
    mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    call = AttentionCall(torch.randn(2, 4, q_len, 16), mask)
    out = attend(snapshot, call)
    assert (out[0, :, 0] == 0).all()
    assert_close(out, expected(snapshot, call))


def test_nan_in_a_page_gives_nan_to_its_row_and_head_only():
    key = torch.randn(2, 2, 40, 16)
    key[1, 0, 10, 3] = math.nan
    states = LayerStates(config_for(INT4_PER_TOKEN), key, key)
    states.append(key, key)
    states.settle()
    out = attend(states.append(key[:, :, :1], key[:, :, :1]), AttentionCall(torch.randn(2, 2, 1, 16)))
    assert out.isnan().all(dim=-1).squeeze(-1).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("softcap", [None, SOFTCAP])
@pytest.mark.parametrize("is_new", [False, True], ids=["with history", "empty cache"])
def test_gradients_reach_the_query_and_the_chunk(softcap, is_new):
    config = config_for()
    key, value = torch.randn(2, 1, 2, 60, 16)
    states = LayerStates(config, key, value)
    if not is_new:
        states.append(key, value)
        states.settle()
    chunk = [torch.randn(1, 2, 2, 16, requires_grad=True) for _ in range(2)]
    query = torch.randn(1, 4, 2, 16, requires_grad=True)
    snapshot = states.append(*chunk)
    attend(snapshot, AttentionCall(query, softcap=softcap)).square().sum().backward()
    got = [x.grad for x in (query, *chunk)]
    for x in (query, *chunk):
        x.grad = None
    expected(snapshot, AttentionCall(query, softcap=softcap)).square().sum().backward()
    for grad, x in zip(got, (query, *chunk), strict=True):
        torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-5)  # float32 against float64


@pytest.mark.parametrize("needs", ["mask", "sink_logits", "chunk"])
def test_gradients_reach_whatever_asks_for_one(needs):
    snapshot = states_for(config_for(), tokens=60, chunk=2)
    tensors = {"mask": torch.randn(2, 4, 2, 60), "sink_logits": torch.randn(4)}
    wanted = snapshot.chunk.key if needs == "chunk" else tensors[needs]
    wanted.requires_grad_()
    call = AttentionCall(torch.randn(2, 4, 2, 16), **tensors)
    attend(snapshot, call).square().sum().backward()
    got, wanted.grad = wanted.grad, None
    expected(snapshot, call).square().sum().backward()
    torch.testing.assert_close(got, wanted.grad, rtol=1e-4, atol=1e-5)  # float32 against float64


@pytest.mark.parametrize("tokens", [10, 300], ids=["no page yet", "pages"])
def test_gradients_end_where_a_chunk_becomes_the_tail(tokens):
    states = LayerStates(QuantConfig.preset(4), *torch.randn(2, 1, 2, 1, 64))
    for count in (tokens, 1, 200):
        states.append(*torch.randn(2, 1, 2, count, 64).requires_grad_())
        states.settle()
        held = states.snapshot()
        assert not any(part.requires_grad for part in (*held.tail_buffers, *(held.sinks or ())))
    assert held.rows.have_pages


def test_float64_queries_and_masks():
    snapshot = states_for(config_for())
    call = AttentionCall(torch.randn(2, 4, 1, 16).double(), torch.randn(2, 1, 1, 203).double())
    out = attend(snapshot, call)
    assert out.dtype == torch.float64
    assert_close(out, expected(snapshot, call))


@pytest.mark.parametrize("starts", [None, [0, 100]])
def test_identity_is_exact_for_what_sdpa_cannot_express_too(starts):
    snapshot = states_for(config_for(FORMATS[-1]), starts=starts)
    mask = torch.rand(2, 1, 1, 203) < 0.7
    mask[1, ..., :100] &= starts is None
    call = AttentionCall(torch.randn(2, 4, 1, 16), mask, softcap=SOFTCAP, sink_logits=torch.randn(4))
    assert torch.equal(attend(snapshot, call), attend(Snapshot.of(snapshot.columns(0), snapshot.columns(1)), call))


def test_exact_states_are_plain_attention():
    key, value, query = torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 5, 16)
    out = attend(Snapshot.of(key, value), AttentionCall(query))
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(query, key, value))


def test_query_or_mask_that_do_not_fit_are_refused():
    snapshot = states_for(config_for())
    with pytest.raises(ValueError, match="query of 3 rows and 4 heads does not fit states of 2 rows and 2 KV heads"):
        attend(snapshot, AttentionCall(torch.randn(3, 4, 1, 16)))
    with pytest.raises(ValueError, match="query heads a multiple of KV heads"):
        attend(snapshot, AttentionCall(torch.randn(2, 3, 1, 16)))
    with pytest.raises(ValueError, match="query has head_dim 8, the keys have 16"):
        attend(snapshot, AttentionCall(torch.randn(2, 4, 1, 8)))
    with pytest.raises(ValueError, match=r"sink_logits have shape \(8,\), not one for each of 4 query heads"):
        attend(snapshot, AttentionCall(torch.randn(2, 4, 1, 16), sink_logits=torch.randn(8)))
    with pytest.raises(ValueError, match=r"mask of shape \(2, 1, 1, 202\) does not cover the 203 columns"):
        attend(snapshot, AttentionCall(torch.randn(2, 4, 1, 16), torch.ones(2, 1, 1, 202, dtype=torch.bool)))
    for shape in ((3, 1, 1, 203), (2, 2, 1, 203), (2, 8, 1, 203), (2, 1, 5, 203), (1, 2, 1, 1, 203)):
        with pytest.raises(ValueError, match=r"cannot be broadcast to \[2, 4, 1, 203\]"):
            attend(snapshot, AttentionCall(torch.randn(2, 4, 1, 16), torch.zeros(shape)))


@pytest.mark.parametrize("shape", [(203,), (1, 203), (2, 1, 1, 203), (4, 1, 203), (1, 4, 3, 203)])
def test_masks_of_fewer_dimensions_are_broadcast(shape):
    snapshot = states_for(config_for(), chunk=3)
    call = AttentionCall(torch.randn(2, 4, 3, 16), torch.rand(shape) < 0.7)
    assert_close(attend(snapshot, call), expected(snapshot, call))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_bad_key_that_is_masked_out_does_no_harm(kind):
    key = torch.randn(1, 2, 60, 16)
    key[:, :, 30, 2] = math.nan
    states = LayerStates(config_for(INT4_PER_TOKEN), key, torch.randn(1, 2, 60, 16))
    states.append(key, torch.randn(1, 2, 60, 16))
    states.settle()
    snapshot = states.append(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    mask = (torch.arange(61) != 30)[None, None, None]
    mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    assert attend(snapshot, AttentionCall(torch.randn(1, 2, 1, 16), mask)).isfinite().all()


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_autocast_does_not_reach_the_products(monkeypatch, bits):
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    snapshot = states_for(QuantConfig.preset(bits), 1, 2, 600, 64, 64)
    call = AttentionCall(0.1 * torch.randn(1, 4, 1, 64))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(snapshot, call)
    assert relative_errors(out, expected(snapshot, call)).rms < 1e-5


def test_float16_masks_are_read_in_float32(monkeypatch):
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    snapshot = states_for(QuantConfig.preset(4), 1, 2, 600, 64, 64)
    mask = torch.where(torch.rand(1, 1, 1, 600) < 0.5, 0.0, torch.finfo(torch.float16).min)
    query = torch.randn(1, 4, 1, 64)
    out = attend(snapshot, AttentionCall(query, mask.half()))
    assert relative_errors(out, expected(snapshot, AttentionCall(query, mask))).rms < 1e-5


@pytest.mark.parametrize("softcap", [0.0, -5.0, math.nan])
def test_a_softcap_that_is_none_is_refused(softcap):
    snapshot = states_for(QuantConfig.preset(4), 1, 2, 600, 64, 64)
    with pytest.raises(ValueError, match=r"softcap=.* must be above 0"):
        attend(snapshot, AttentionCall(torch.randn(1, 4, 1, 64), softcap=softcap))
