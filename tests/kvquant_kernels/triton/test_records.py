"""Sealing and materializing by kernels, against the codec."""

import math

import pytest
import torch

from kvquant import formats
from kvquant.codec import StateCodec
from kvquant.formats import FORMATS
from kvquant.layout import PageLayout, PagePart, StateShape
from kvquant.testing import relative_errors
from kvquant_kernels.triton import layout as layouts
from kvquant_kernels.triton.layout import TritonLayout
from kvquant_kernels.triton.ops.materialize import materialize
from kvquant_kernels.triton.ops.seal import can_seal, seal

pytestmark = pytest.mark.broad

SUPPORTED = [fmt for fmt in FORMATS if not fmt.is_exact and fmt.bits in (8, 4, 2)]
CLIPPED = [
    formats.INT2_PER_CHANNEL.clipped(),
    formats.INT2_PER_TOKEN.clipped(),
    formats.INT4_PER_TOKEN_SYMMETRIC.clipped(),
]


def sealed(states, layout, codec):
    """Records of pages whose keys and values are `states`, by the kernel."""
    records = torch.zeros(states.shape[0], layout.num_heads, layout.head_words, dtype=torch.int32, device=states.device)
    for part in layout.parts:
        assert can_seal(part, codec)
        seal(states, records, part, codec)
    return records.flatten(1).view(torch.uint8)


def layout_of(fmt, size, head_dim, heads=2):
    part = PagePart(fmt, StateShape(heads, size, head_dim))
    return TritonLayout(part, part)


def states_of(shape, dtype, device):
    states = torch.randn(shape) * torch.randn(shape[-1]).exp()
    states[0, 0, :, 3] = 0.0  # a channel without a range
    states[0, 0, 5] = 2.5  # and a token
    states[-1, -1, 7, 9] = 1e4
    return states.to(dtype).to(device)


@pytest.mark.parametrize("fmt", [*SUPPORTED, *CLIPPED], ids=lambda fmt: fmt.name + ("_clipped" if fmt.clip else ""))
@pytest.mark.parametrize("rotated", [True, False])
def test_sealed_records_are_those_of_the_codec(fmt, rotated, device):
    layout, codec = layout_of(fmt, 64, 64), StateCodec(fmt, rotated)
    states = states_of((2, 2, 64, 64), torch.bfloat16, device)
    assert torch.equal(sealed(states, layout, codec), PageLayout.seal(layout, states, states, [codec, codec]))


@pytest.mark.broad
@pytest.mark.parametrize(("size", "head_dim"), [(128, 128), (64, 256), (256, 64)])
@pytest.mark.parametrize("fmt", [formats.INT4_PER_CHANNEL, formats.INT8_PER_TOKEN], ids=lambda fmt: fmt.name)
def test_sealed_records_of_other_shapes(size, head_dim, fmt, device):
    layout, codec = layout_of(fmt, size, head_dim, heads=1), StateCodec(fmt, rotated=True)
    for dtype in (torch.float16, torch.float32):
        states = states_of((1, 1, size, head_dim), dtype, device)
        assert torch.equal(sealed(states, layout, codec), PageLayout.seal(layout, states, states, [codec, codec]))


@pytest.mark.broad
@pytest.mark.parametrize(
    "fmt",
    [formats.INT4_PER_CHANNEL, formats.INT4_PER_TOKEN, formats.FP8_E4M3_PER_TOKEN, *CLIPPED[:2]],
    ids=lambda fmt: fmt.name,
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e7])
def test_what_the_codec_makes_nan_is_nan(fmt, bad, device):
    layout, codec = layout_of(fmt, 64, 64), StateCodec(fmt, rotated=False)
    states = torch.randn(1, 2, 64, 64, device=device)
    states[0, 1, 20, 30] = bad
    expected = PageLayout.seal(layout, states, states, [codec, codec])
    for part in (0, 1):
        got, wanted = layout.unpack(sealed(states, layout, codec), part), layout.unpack(expected, part)
        torch.testing.assert_close(codec.decode(got), codec.decode(wanted), rtol=0, atol=0, equal_nan=True)
        assert got.scale.isnan().sum() == wanted.scale.isnan().sum()


def test_float8_rounds_as_torch_does_at_every_boundary(device):
    """All FP8 numbers, and the middles between neighbours, in one group whose scale is 1."""
    for fmt in (formats.FP8_E4M3_PER_CHANNEL, formats.FP8_E5M2_PER_CHANNEL):
        dtype = fmt.grid.dtype
        finite = torch.arange(127 if dtype == torch.float8_e4m3fn else 124, dtype=torch.uint8).view(dtype).float()
        middles = (finite[1:] + finite[:-1]) / 2
        numbers = torch.cat((finite, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)))
        numbers = torch.cat((numbers, -numbers))
        channels = torch.zeros(64, 64)
        channels[0] = finite[-1]
        channels[1 : 1 + math.ceil(len(numbers) / 64)].view(-1)[: len(numbers)] = numbers
        states = channels.expand(1, 1, -1, -1).to(device)
        layout, codec = layout_of(fmt, 64, 64, heads=1), StateCodec(fmt, rotated=False)
        assert torch.equal(sealed(states, layout, codec), PageLayout.seal(layout, states, states, [codec, codec]))


@pytest.mark.parametrize("head_dim", [64, *(pytest.param(dim, marks=pytest.mark.broad) for dim in (72, 96, 128))])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("fmt", SUPPORTED, ids=lambda fmt: fmt.name)
def test_materialized_states_are_those_of_the_codec(fmt, rotated, head_dim, device):
    layout, codec = layout_of(fmt, 64, head_dim), StateCodec(fmt, rotated)
    states = torch.randn(2, 2, 64, head_dim, device=device)
    records = PageLayout.seal(layout, states, states, [codec, codec])
    heads = records.view(torch.int32).unflatten(1, (2, -1))
    for part in (0, 1):
        wanted = PageLayout.restore(layout, records, part, codec, torch.float32)
        # Products are exact and sums are in float32, in another order than the codec's.
        assert relative_errors(materialize(heads, layout.parts[part], codec, torch.float32), wanted).rms <= 1e-6
        got = materialize(heads, layout.parts[part], codec, torch.bfloat16)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.float(), wanted, rtol=2**-8, atol=1e-6)


def test_the_layout_uses_the_kernels_where_it_can(monkeypatch, device):
    monkeypatch.setattr(layouts, "has_kernels", lambda states: True)
    calls = []
    monkeypatch.setattr(PageLayout, "seal", lambda *args: calls.append("seal"))
    monkeypatch.setattr(PageLayout, "restore", lambda *args: calls.append("restore"))
    for head_dim, by_codec in ((64, []), (96, ["codec"])):  # 96 is no power of two: sealed by the codec, per part
        layout, codec = layout_of(formats.INT4_PER_CHANNEL, 64, head_dim), StateCodec(formats.INT4_PER_CHANNEL, True)
        states = torch.randn(2, 2, 64, head_dim, device=device).to(torch.bfloat16)
        records = layout.seal(states, states, [codec, codec])
        quantized = codec.encode(states)
        assert torch.equal(records, layout.pack(quantized, quantized)), by_codec
        restored = layout.restore(records, 0, codec, torch.bfloat16)
        torch.testing.assert_close(restored, codec.restore(codec.decode(quantized)).to(torch.bfloat16))
    assert calls == []
