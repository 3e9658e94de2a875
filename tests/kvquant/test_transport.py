"""The lazy tensor: what stays lazy, what is dequantized, and what attention on a pair of them does."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kvquant import QuantConfig
from kvquant.formats import INT4_PER_CHANNEL, INT4_PER_TOKEN
from kvquant.states import LayerStates
from kvquant.transport import LazyStates, lazy_pair, paired

CONFIG = QuantConfig(key=INT4_PER_CHANNEL, value=INT4_PER_TOKEN, sinks=2, residual_length=5, page_size=8)


@pytest.fixture
def states():
    key, value = torch.randn(2, 3, 60, 16), torch.randn(2, 3, 60, 24)
    states = LayerStates(CONFIG, key, value)
    states.append(key, value)
    states.settle()
    return states


@pytest.fixture
def pair(states):
    return lazy_pair(states, states.append(torch.randn(2, 3, 1, 16), torch.randn(2, 3, 1, 24)))


@pytest.fixture
def dequantized(monkeypatch):
    """The number of times a lazy tensor was dequantized."""
    calls = []
    original = LazyStates.materialize
    monkeypatch.setattr(LazyStates, "materialize", lambda lazy: calls.append(1) or original(lazy))
    return calls


def repeat_kv(x, n_rep):
    batch, heads, tokens, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, n_rep, tokens, dim)
    return x.reshape(batch, heads * n_rep, tokens, dim)


def test_metadata_needs_no_dequantization(pair, dequantized):
    key, value = pair
    assert key.shape == (2, 3, 61, 16)
    assert value.size(-1) == 24
    assert (key.dtype, key.device, key.ndim, key.numel(), len(key)) == (torch.float32, torch.device("cpu"), 4, 5856, 2)
    assert key.is_floating_point()
    assert not key.requires_grad
    assert key.stride() == (3 * 61 * 16, 61 * 16, 16, 1)
    assert dequantized == []


@pytest.mark.parametrize(
    "operation",
    [
        lambda k: k + 1,
        lambda k: 2 * k,
        lambda k: k[..., -3:, :],
        lambda k: k[0],
        lambda k: k.transpose(1, 2),
        lambda k: torch.cat([k, k], dim=-1),
        lambda k: torch.matmul(torch.ones(2, 3, 1, 16), k.transpose(-1, -2)),
        lambda k: F.linear(k, torch.ones(4, 16)),
        lambda k: k.to(torch.bfloat16),
        lambda k: k.clone(),
        lambda k: k.detach(),
        lambda k: k.float().contiguous(),
        lambda k: copy.deepcopy(k),
        lambda k: torch.stack(list(k)),
        lambda k: k.reshape(2, -1, 16),
        lambda k: k.expand(2, 3, 61, 16),
        lambda k: k.repeat(1, 2, 1, 1),
        lambda k: torch.einsum("bhtd->bthd", k),
        lambda k: torch.where(k > 0, k, 0),
        lambda k: k[np.array([0, 1, 0])],
        lambda k: k[torch.tensor([0, 1, 0])],
        lambda k: torch.repeat_interleave(input=k, repeats=2, dim=1),
        lambda k: k.repeat_interleave(2, dim=1, output_size=6),
        lambda k: k.repeat_interleave(0, dim=1),
        lambda k: k.repeat_interleave(2),
        lambda k: k.reshape(shape=(2, -1, 16)),
        lambda k: k.expand(size=k.shape),
    ],
)
def test_any_other_operation_gets_a_plain_tensor(pair, operation):
    out = operation(pair[0])
    assert type(out) is torch.Tensor
    assert torch.equal(out, operation(pair[0].materialize()))


@pytest.mark.parametrize(
    "write",
    [
        lambda k: k.mul_(0),
        lambda k: k.__setitem__(0, 0.0),
        lambda k: torch.add(torch.zeros(1), 1, out=k),
        lambda k: k.__iadd__(1),
        lambda k: torch.relu_(k),
    ],
)
def test_writing_is_refused(pair, write):
    with pytest.raises(
        NotImplementedError, match=r"keys and values of a QuantCache are read-only; call clone\(\) on them first"
    ):
        write(pair[0])


def test_operations_below_python_are_caught_too(pair):
    with torch._C.DisableTorchFunctionSubclass():
        out = torch.add(pair[0], 1)
    assert torch.equal(out, pair[0].materialize() + 1)


@pytest.mark.parametrize("repeat", [repeat_kv, lambda x, n: torch.repeat_interleave(x, n, dim=1)])
@pytest.mark.parametrize("n_rep", [1, 4])
def test_repeating_heads_stays_lazy(pair, dequantized, repeat, n_rep):
    repeated = repeat(pair[0], n_rep)
    assert isinstance(repeated, LazyStates)
    assert repeated.shape == (2, 3 * n_rep, 61, 16)
    assert dequantized == []
    assert torch.equal(repeated.materialize(), repeat(pair[0].materialize(), n_rep))


def test_half_way_through_repeating_heads_it_is_a_tensor_like_any_other(pair):
    plain = pair[0].materialize()
    assert torch.equal(pair[0][:, :, None] + 1, plain[:, :, None] + 1)
    grouped = pair[0][:, :, None, :, :].expand(2, 3, 4, 61, 16)
    assert torch.equal(grouped + 1, plain[:, :, None].expand(2, 3, 4, 61, 16) + 1)
    assert torch.equal(grouped.reshape(6, 4, 61, 16), plain[:, :, None].expand(2, 3, 4, 61, 16).reshape(6, 4, 61, 16))


@pytest.mark.parametrize("form", ["enable_gqa", "packed", "repeat_kv"])
def test_attention_reads_the_packed_states_in_every_form_of_grouped_heads(pair, dequantized, form):
    query = torch.randn(2, 12, 1, 16)
    plain = [repeat_kv(x.materialize(), 4) for x in pair]
    reference = F.scaled_dot_product_attention(query, *plain, scale=0.2)
    del dequantized[:]
    if form == "enable_gqa":
        out = F.scaled_dot_product_attention(query, *pair, scale=0.2, enable_gqa=True)
    elif form == "packed":
        out = F.scaled_dot_product_attention(query.view(2, 3, 4, 16), *pair, scale=0.2).view(2, 12, 1, 24)
    else:
        out = F.scaled_dot_product_attention(query, *(repeat_kv(x, 4) for x in pair), scale=0.2)
    assert dequantized == []
    torch.testing.assert_close(out, reference, atol=1e-5, rtol=1e-5)  # float32 in another order


def test_attention_moves_the_chunk_to_its_place(pair, states):
    assert states.snapshot().chunk.num_tokens == 1
    F.scaled_dot_product_attention(torch.randn(2, 3, 1, 16), *pair)
    assert states.snapshot().chunk.num_tokens == 0
    assert states.num_seen == 61


def test_a_second_attention_on_the_same_pair_reads_the_same(pair):
    query = torch.randn(2, 3, 1, 16)
    first = F.scaled_dot_product_attention(query, *pair)
    assert torch.equal(first, F.scaled_dot_product_attention(query, *pair))


def test_a_pair_remembers_its_moment(pair, states):
    before = pair[0].materialize()
    F.scaled_dot_product_attention(torch.randn(2, 3, 1, 16), *pair)
    states.append(torch.randn(2, 3, 30, 16), torch.randn(2, 3, 30, 24))
    states.crop(50)
    states.append(torch.randn(2, 3, 30, 16), torch.randn(2, 3, 30, 24))
    states.select(torch.tensor([1, 1]))
    states.settle()
    assert torch.equal(pair[0].materialize(), before)


@pytest.mark.parametrize("mix", ["one plain", "swapped", "of two moments", "one repeated"])
def test_what_is_no_pair_is_dequantized(states, mix):
    chunk = torch.randn(2, 3, 1, 16), torch.randn(2, 3, 1, 24)
    snapshot = states.append(*chunk)
    key, value = lazy_pair(states, snapshot)
    states.settle()
    others = {
        "one plain": (key, value.materialize()),
        "swapped": (value, key),
        "of two moments": (key, lazy_pair(states, states.snapshot())[1]),
        "one repeated": (key, torch.repeat_interleave(value, 2, dim=1)),
    }
    assert paired(*others[mix]) is None
    if mix == "one plain":
        query = torch.randn(2, 3, 1, 16)
        out = F.scaled_dot_product_attention(query, *others[mix])
        assert torch.equal(out, F.scaled_dot_product_attention(query, key.materialize(), value.materialize()))


def test_keys_and_values_of_a_layer_are_a_pair(states):
    pair = LazyStates(states, states.snapshot(), 0), LazyStates(states, states.snapshot(), 1)
    assert paired(*pair) is not None


def test_dropout_is_left_to_torch(pair):
    query = torch.randn(2, 3, 1, 16)
    torch.manual_seed(1)
    out = F.scaled_dot_product_attention(query, *pair, dropout_p=0.5)
    torch.manual_seed(1)
    plain = F.scaled_dot_product_attention(query, *(x.materialize() for x in pair), dropout_p=0.5)
    assert torch.equal(out, plain)
