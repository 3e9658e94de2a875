"""The codec against hand-computed values, derived bounds and published errors."""

import math
from dataclasses import replace

import pytest
import torch

from kvquant.codec import StateCodec, dequantize, quantize
from kvquant.formats import (
    FORMATS,
    FP8_E4M3_PER_TOKEN,
    FP8_E5M2_PER_TOKEN,
    IDENTITY,
    INT2_PER_CHANNEL,
    INT2_PER_TOKEN,
    INT2_PER_TOKEN_SYMMETRIC,
    INT3_PER_TOKEN,
    INT4_PER_CHANNEL,
    INT4_PER_TOKEN,
    INT4_PER_TOKEN_SYMMETRIC,
    INT8_PER_TOKEN,
    INT8_PER_TOKEN_SYMMETRIC,
    Clip,
    integer_format,
)

QUANTIZED = [fmt for fmt in FORMATS if not fmt.is_exact]
INTEGERS = [fmt for fmt in QUANTIZED if fmt.name.startswith("int")]


def by_name(fmt):
    return fmt.name


# One row per format: numbers of one group, their codes, scale and zero point, worked out by hand. The zero point is the
# middle of the range and the first level lies top / 2 scales below it.
HAND = [
    (INT8_PER_TOKEN, [0.0, 1.0, 100.0, 255.0], [0, 1, 100, 255], 1.0, 127.5),
    (INT8_PER_TOKEN_SYMMETRIC, [-127.0, 0.0, 3.0, 64.0], [0, 127, 130, 191], 1.0, None),
    (INT4_PER_TOKEN, [-7.5, 7.5, 0.4, -0.4], [0, 15, 8, 7], 1.0, 0.0),
    (INT4_PER_TOKEN_SYMMETRIC, [-7.0, 7.0, 0.4, -3.6], [0, 14, 7, 3], 1.0, None),
    (INT3_PER_TOKEN, [10.0, 17.0, 12.2, 16.5], [0, 7, 2, 7], 1.0, 13.5),
    (INT2_PER_TOKEN, [0.0, 6.0, 2.0, 3.1], [0, 3, 1, 2], 2.0, 3.0),
    (INT2_PER_TOKEN_SYMMETRIC, [-4.0, 1.9, 2.1, 0.0], [0, 1, 2, 1], 4.0, None),
    # e4m3: 448 is its largest number, 0x7e; 1.0 is 0x38. e5m2: 57344 is 0x7b; 1.0 is 0x3c.
    (FP8_E4M3_PER_TOKEN, [448.0, 1.0, 0.0, -1.0], [0x7E, 0x38, 0x00, 0xB8], 1.0, None),
    (FP8_E5M2_PER_TOKEN, [57344.0, 1.0, 0.0, -1.0], [0x7B, 0x3C, 0x00, 0xBC], 1.0, None),
]


@pytest.mark.parametrize(
    ("fmt", "numbers", "codes", "scale", "zero_point"), HAND, ids=lambda x: getattr(x, "name", None)
)
def test_hand_computed_codes(fmt, numbers, codes, scale, zero_point):
    q = quantize(torch.tensor([numbers]), fmt)
    assert q.codes.dtype == torch.uint8
    assert q.codes.tolist() == [codes]
    assert q.scale.tolist() == [[scale]]
    assert (None if q.zero_point is None else q.zero_point.tolist()) == (None if zero_point is None else [[zero_point]])


def test_hand_computed_codes_per_channel():
    x = torch.tensor([[0.0, 30.0], [1.0, 15.0], [2.0, 0.0], [3.0, 45.0]])
    q = quantize(x, INT2_PER_CHANNEL)
    assert q.codes.tolist() == [[0, 2], [1, 1], [2, 0], [3, 3]]
    assert q.scale.tolist() == [[1.0, 15.0]]
    assert q.zero_point.tolist() == [[1.5, 22.5]]
    assert torch.equal(dequantize(q), x)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
@pytest.mark.parametrize(
    "shape", [(1, 1, 8, 40), (2, 3, 24, 64), (1, 2, 8, 72), (1, 1, 1, 96), (1, 1, 16, 1), (0, 1, 8, 64)]
)
def test_shapes_of_codes_and_scales(fmt, shape):
    q = quantize(torch.randn(shape), fmt)
    b, h, t, d = shape
    scales = (b, h, 1, d) if fmt.granularity == "per_channel" else (b, h, t, d // min(d, {72: 36, 96: 48}.get(d, 64)))
    assert q.codes.shape == shape
    assert q.scale.shape == scales
    assert q.scale.dtype == torch.float16
    assert (q.zero_point is None) == fmt.symmetric
    assert dequantize(q).shape == shape


@pytest.mark.parametrize("fmt", INTEGERS, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 60.0])
def test_error_is_at_most_half_a_step(fmt, dtype, offset):
    x = (torch.randn(2, 3, 128, 64) * torch.rand(64) + offset * (torch.arange(64) == 5)).to(dtype)
    x[0, 0, 3, 7] = 1e4
    q = quantize(x, fmt)
    dim = fmt.group_dim
    repeats = x.shape[dim] // q.scale.shape[dim]
    step = q.scale.float().repeat_interleave(repeats, dim=dim)
    # Half a step, and the float32 rounding of numbers as large as the group's: 2^-23 of them, twice.
    largest = x.float().abs().amax()
    assert ((dequantize(q) - x.float()).abs() <= step / 2 + largest * 2**-22).all()


@pytest.mark.parametrize("fmt", [FP8_E4M3_PER_TOKEN, FP8_E5M2_PER_TOKEN], ids=by_name)
def test_float_error_is_at_most_half_a_unit_in_the_last_place(fmt):
    x = torch.randn(2, 128, 64)
    q = quantize(x, fmt)
    mantissa_bits = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[fmt.grid.dtype]
    smallest_step = torch.finfo(fmt.grid.dtype).smallest_normal * 2.0**-mantissa_bits * q.scale.float()
    bound = torch.maximum(x.abs() * 2.0 ** -(mantissa_bits + 1), smallest_step / 2)
    assert ((dequantize(q) - x).abs() <= bound * (1 + 1e-5)).all()  # 1e-5: float32 rounding of the division


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
@pytest.mark.parametrize("clip", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("value", [0.0, 1.5, -3.25, 1e-30, 60_000.0, -60_000.0])
def test_constant_groups_come_back(fmt, clip, value):
    x = torch.full((1, 8, 64), value)
    back = dequantize(quantize(x, fmt.clipped(clip)))
    # float16 scales and zero points have 11 bits, and no numbers between 0 and 2^-24.
    torch.testing.assert_close(back, x, rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
@pytest.mark.parametrize("value", [0.0, 2.7, -1e4])
def test_single_element_groups_come_back(fmt, value):
    x = torch.full((1, 1), value)
    torch.testing.assert_close(dequantize(quantize(x, fmt)), x, rtol=2**-10, atol=0)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
def test_tiny_numbers_do_not_turn_into_nan_or_large_ones(fmt):
    x = torch.randn(1, 8, 64) * 1e-30
    assert (dequantize(quantize(x, fmt)).abs() <= 2**-24).all()


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
def test_huge_float16_numbers_stay_within_half_a_step(fmt):
    x = (torch.rand(1, 8, 64) * 1.2e5 - 6e4).to(torch.float16)
    back = dequantize(quantize(x, fmt))
    assert back.isfinite().all()
    # The coarsest of these grids has 3 levels over 1.2e5, e5m2 a relative error of 1/8.
    assert ((back - x.float()).abs() <= 3.1e4).all()


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
@pytest.mark.parametrize("clip", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e10])
def test_bad_number_makes_its_group_nan_and_no_other(fmt, clip, bad):
    x = torch.randn(2, 8, 64)
    x[0, 3, 5] = bad
    back = dequantize(quantize(x, fmt.clipped(clip)))
    in_group = torch.zeros_like(x, dtype=torch.bool)
    if fmt.granularity == "per_channel":
        in_group[0, :, 5] = True
    else:
        in_group[0, 3, :] = True
    assert torch.equal(back.isnan(), in_group)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
@pytest.mark.parametrize("clip", [False, True], ids=["whole", "clipped"])
def test_a_range_beyond_float16_is_nan_even_if_a_clipped_one_would_fit(fmt, clip):
    reach = 65_504 * fmt.grid.half_width * 1.01
    x = torch.zeros(64)
    x[0], x[1] = -reach, reach
    x = x[:, None] if fmt.granularity == "per_channel" else x[None]
    assert dequantize(quantize(x, fmt.clipped(clip))).isnan().all()


@pytest.mark.parametrize("fmt", FORMATS, ids=by_name)
@pytest.mark.parametrize("shape", [(1, 2, 0, 64), (0, 2, 8, 64), (1, 2, 8, 0)])
@pytest.mark.parametrize("rotated", [False, True])
def test_empty_tensors_stay_empty(fmt, shape, rotated):
    codec = StateCodec(fmt, rotated)
    assert codec.restore(codec.decode(codec.encode(torch.randn(shape)))).shape == shape


@pytest.mark.parametrize("fmt", QUANTIZED, ids=by_name)
def test_groups_do_not_influence_each_other(fmt):
    x = torch.randn(2, 8, 64)
    scaled = x.clone()
    scaled[1] *= 50
    assert torch.equal(dequantize(quantize(x, fmt))[0], dequantize(quantize(scaled, fmt))[0])


@pytest.mark.parametrize(("bits", "published"), [(2, 0.2505), (3, 0.0457), (4, 0.00995)])
@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
def test_relative_error_of_gaussian_data_is_the_published_one(bits, published, granularity):
    assert gaussian_error(integer_format(bits, granularity)) == pytest.approx(published, rel=0.02)


def test_relative_error_of_eight_bits_on_gaussian_data_is_the_published_one():
    # Published for symmetric codes; a zero point gains what the two ends of a group differ.
    assert gaussian_error(integer_format(8, "per_channel", symmetric=True)) == pytest.approx(4.2e-5, rel=0.02)
    assert gaussian_error(integer_format(8, "per_channel")) < 3.8e-5


def gaussian_error(fmt):
    """Relative squared error over 1 M numbers in groups of 128; its sampling error is well below 1 %."""
    x = torch.randn(64, 128, 128)
    return ((dequantize(quantize(x, replace(fmt, group_size=128))) - x).square().mean() / x.square().mean()).item()


@pytest.mark.parametrize(
    ("bits", "fixed_clip", "optimal"), [(2, 0.1213, 0.1160), (3, 0.0348, 0.0340), (4, 0.0092, 0.0093)]
)
def test_clipping_search_beats_one_fixed_clip(bits, fixed_clip, optimal):
    error = gaussian_error(replace(integer_format(bits, "per_channel"), clip=Clip(norm=2.0)))
    # A grid fitted per group may pass Lloyd-Max, which is fitted to the distribution, by what a group of 128 deviates.
    assert 0.9 * optimal < error < fixed_clip


@pytest.mark.parametrize("norm", [2.0, 4.0])
def test_clipping_takes_the_range_of_the_least_error_in_its_norm(norm):
    x = torch.randn(16, 128, 64)
    ratios = Clip().ratios

    def error(*ratios):
        fmt = replace(INT2_PER_CHANNEL, clip=Clip(ratios, norm))
        return (dequantize(quantize(x, fmt)) - x).abs().pow(norm).sum(dim=-2)

    assert torch.equal(error(*ratios), torch.stack([error(ratio) for ratio in ratios]).amin(dim=0))


def test_float8_error_of_gaussian_data_is_the_published_one():
    x = torch.randn(8192, 64)
    error = (dequantize(quantize(x, FP8_E4M3_PER_TOKEN)) - x).square().mean() / x.square().mean()
    assert error.item() == pytest.approx(6.6e-4, rel=0.05)


def test_identity_keeps_the_numbers_and_their_dtype():
    x = torch.randn(1, 2, 3, 5, dtype=torch.bfloat16)
    assert quantize(x, IDENTITY).codes is x
    assert torch.equal(dequantize(quantize(x, IDENTITY), torch.bfloat16), x)


def test_dequantize_rounds_to_the_wanted_dtype():
    q = quantize(torch.randn(1, 8, 64), INT4_PER_CHANNEL)
    assert torch.equal(dequantize(q, torch.bfloat16), dequantize(q).to(torch.bfloat16))


@pytest.mark.parametrize("bad", [torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4)])
def test_what_is_no_states_tensor_is_refused(bad):
    with pytest.raises(TypeError, match=r"x must be a floating point tensor \[\.\.\., T, D\]"):
        quantize(bad, INT4_PER_TOKEN)


def test_rotation_spreads_an_outlier_channel():
    x = torch.randn(1, 128, 64)
    x[..., 5] *= 60

    def error(codec):
        return (codec.restore(codec.decode(codec.encode(x))) - x)[..., :5].square().mean().sqrt()

    assert error(StateCodec(INT4_PER_TOKEN, rotated=True)) < 0.5 * error(StateCodec(INT4_PER_TOKEN, rotated=False))
