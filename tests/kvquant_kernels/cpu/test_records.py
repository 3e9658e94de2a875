"""Sealing and restoring in native code, against the codec and the layout in torch: the same numbers, to the bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvquant.codec import StateCodec
from kvquant.formats import FORMATS, INT2_PER_CHANNEL, INT2_PER_TOKEN, INT4_PER_TOKEN, Clip
from kvquant.layout import PageLayout, PagePart, StateShape, append_by_torch
from kvquant_kernels.cpu import library, records
from kvquant_kernels.cpu.layout import CpuLayout

NATIVE = library.load()
pytestmark = pytest.mark.skipif(isinstance(NATIVE, library.Missing), reason=getattr(NATIVE, "reason", ""))
VARIANTS = range(NATIVE.best + 1) if isinstance(NATIVE, library.Library) else ()
SUPPORTED = [fmt for fmt in FORMATS if not fmt.is_exact and fmt.bits != 3]


def assert_same(states, codec):
    """Records and what is read from them, of states [pages, H, page_size, D] as keys and as values."""
    shape = StateShape(*states.shape[1:])
    layout = CpuLayout(PagePart(codec.fmt, shape), PagePart(codec.fmt, shape))
    expected = PageLayout.seal(layout, states, states, (codec, codec))
    for variant in VARIANTS:
        written = torch.zeros_like(expected)
        for part in layout.parts:
            records.seal(states, written, part, codec, variant)
        for part in (0, 1):
            assert_same_codes(layout.unpack(written, part), layout.unpack(expected, part), NATIVE.variants[variant])
            reference = PageLayout.restore(layout, expected, part, codec, states.dtype)
            restored = records.restore(expected, layout.parts[part], codec, states.dtype, variant)
            torch.testing.assert_close(restored, reference, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(restored.signbit() & ~restored.isnan(), reference.signbit() & ~reference.isnan())


def assert_same_codes(found, expected, name):
    torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=0, equal_nan=True, msg=name)
    if expected.zero_point is not None:
        torch.testing.assert_close(found.zero_point, expected.zero_point, rtol=0, atol=0, equal_nan=True, msg=name)
    is_nan = expected.scale.isnan().repeat_interleave(
        expected.codes.shape[expected.fmt.group_dim] // expected.scale.shape[expected.fmt.group_dim],
        dim=expected.fmt.group_dim,
    )
    assert torch.equal(found.codes.masked_fill(is_nan, 0), expected.codes.masked_fill(is_nan, 0)), name


@pytest.mark.parametrize("fmt", SUPPORTED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("rotated", [True, False])
def test_every_format_and_head_dim(fmt, head_dim, rotated):
    states = torch.randn(3, 2, 64, head_dim)
    states[..., 3] *= 20
    assert_same(states, StateCodec(fmt, rotated))


@pytest.mark.parametrize("fmt", [INT2_PER_CHANNEL, INT2_PER_TOKEN, INT4_PER_TOKEN], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("norm", [2.0, 4.0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_finds_the_same_range(fmt, norm, symmetric):
    clipped = replace(fmt, clip=Clip(norm=norm), symmetric=symmetric)
    for head_dim in (64, 72, 128):  # groups of 64 and 36 channels
        assert_same(torch.randn(2, 2, 96 * 2, head_dim) ** 3, StateCodec(clipped, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_strides(dtype):
    states = torch.randn(4, 128, 2, 64).to(dtype).transpose(1, 2)
    assert_same(states, StateCodec(INT4_PER_TOKEN, True))
    assert_same(torch.randn(4, 2, 64, 128).to(dtype).transpose(2, 3), StateCodec(INT4_PER_TOKEN, True))


@pytest.mark.parametrize("fmt", SUPPORTED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("scale", [0.0, 1e-8, 1e-3, 1e4, 1e6, 1e30])
def test_magnitudes_that_float16_covers_or_not(fmt, scale):
    states = scale * torch.randn(1, 2, 64, 64)
    states[0, 0, :32] = 1.0  # ranges of width zero, and halves of others
    assert_same(states, StateCodec(fmt, False))
    if fmt.clip is None and fmt.bits < 8:
        assert_same(states, StateCodec(fmt.clipped(), False))


@pytest.mark.parametrize("fmt", SUPPORTED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip", [True, False])
def test_bad_numbers_make_their_group_nan(fmt, bad, clip):
    states = torch.randn(2, 2, 64, 64)
    states[1, 0, 5, 7] = bad
    assert_same(states, StateCodec(fmt.clipped(clip), False))
    assert_same(states, StateCodec(fmt.clipped(clip), True))


def test_ties_round_alike():
    steps = torch.arange(-64, 64).float().div(8).repeat(64, 1)  # many numbers half-way between two codes
    for fmt in SUPPORTED:
        assert_same(steps.view(1, 1, 64, 128).contiguous(), StateCodec(fmt, False))


def test_what_is_left_to_torch():
    codec = StateCodec(INT2_PER_TOKEN.clipped(), True)
    other_norm = StateCodec(replace(INT2_PER_TOKEN, clip=Clip(norm=2.4)), True)
    assert records.can_seal(torch.zeros(1), codec)
    assert not records.can_seal(torch.zeros(1), other_norm)
    assert not records.can_seal(torch.zeros(1, dtype=torch.float64), codec)
    shape = StateShape(2, 64, 64)
    layout = CpuLayout(PagePart(codec.fmt, shape), PagePart(codec.fmt, shape))
    states = torch.randn(1, 2, 64, 64)
    by_torch = PageLayout.seal(layout, states, states, (other_norm,) * 2)
    assert torch.equal(layout.seal(states, states, (other_norm,) * 2), by_torch)
    by_norm_of_four = layout.seal(states, states, (codec,) * 2)
    assert not torch.equal(by_norm_of_four, by_torch)  # the norm matters: native code would have shown


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_appended_as_torch_does(dtype):
    shape = StateShape(3, 64, 64)
    layout = CpuLayout(PagePart(INT2_PER_TOKEN, shape), PagePart(INT2_PER_TOKEN, shape._replace(head_dim=32)))
    dense = torch.randn(2, 3, 5, 64).to(dtype), torch.randn(2, 3, 5, 32).to(dtype)
    by_token = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in dense)
    sparse = tuple(part.repeat_interleave(2, dim=-1)[..., ::2] for part in dense)
    expected = buffers_like(dense)
    append_by_torch(dense, expected, 3)
    for states in (dense, by_token, sparse):
        found = buffers_like(dense)
        layout.append(states, found, 3)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def buffers_like(states):
    """Room for four more tokens than there are, of every second head of other buffers."""
    return [torch.zeros(2, 6, 9, part.shape[-1], dtype=part.dtype)[:, ::2] for part in states]


def test_switched_off_torch_does_it(monkeypatch):
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    assert not records.can_restore(torch.float32)
