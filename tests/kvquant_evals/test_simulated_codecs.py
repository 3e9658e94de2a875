"""The quantizers and bytes of simulated layouts, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvquant import MemoryReport
from kvquant.rotation import rotate
from kvquant_evals.peers.simulated_kitty import BoostedChannels, PlainTokens, kitty
from kvquant_evals.peers.simulated_kvarn import VarianceNormalized, evened, kvarn
from kvquant_evals.peers.simulated_kvquant import DenseAndSparse, fitted, kvquant, nearest, normalized, num_outliers

HALF = 2.0**-11  # the relative error of rounding to float16

all_codecs = pytest.mark.parametrize(
    "codec",
    [
        DenseAndSparse(4, "per_channel"), DenseAndSparse(2, "per_token", is_normalized=True),
        VarianceNormalized(4, "per_channel"), VarianceNormalized(2, "per_token"), BoostedChannels(1 / 8), PlainTokens(),
    ],
    ids=["kvquant-key", "kvquant-value", "kvarn-key", "kvarn-value", "kitty-key", "kitty-value"],
)  # fmt: skip


def tile_of(codec, rows=1):
    return torch.randn(rows, 2, max(codec.tile, 5), 16, generator=torch.Generator().manual_seed(0))


@all_codecs
def test_rows_do_not_depend_on_each_other(codec):
    x = tile_of(codec, rows=3) * torch.tensor([1.0, 20.0, 0.01]).view(3, 1, 1, 1)
    assert torch.equal(codec.stored(x)[1:2], codec.stored(x[1:2].clone()))


@all_codecs
@pytest.mark.parametrize("constant", [0.0, 0.1, -300.0])
def test_constant_tiles_are_kept(codec, constant):
    x = torch.full_like(tile_of(codec), constant)
    # A rotated constant is one large channel and zeros; every number goes through at most three roundings to float16.
    torch.testing.assert_close(codec.stored(x), x, rtol=3 * HALF, atol=3 * HALF * abs(constant))


@all_codecs
def test_an_outlier_leaves_numbers_finite(codec):
    x = tile_of(codec)
    x[0, 0, 2, 3] = 1e4
    assert codec.stored(x).isfinite().all()


def test_one_percent_of_a_tile_of_keys_are_outliers():
    assert num_outliers(200) == 1
    assert [num_outliers(length) for length in (192, 201, 1024, 4096)] == [1, 2, 6, 21]


def test_levels_are_the_means_of_their_clusters():
    x = torch.tensor([[10.0, 0.0, 9.0, 1.0], [4.0, 4.0, -4.0, 8.0]])
    # The first levels are 2 and 8, and about -.7 and 5.4.
    torch.testing.assert_close(fitted(x, 2), torch.tensor([[0.5, 9.5], [-4.0, 16 / 3]]))


def test_a_level_without_numbers_stays():
    assert fitted(torch.tensor([[0.0, 0.0, 0.0, 4.0]]), 4).tolist() == [[0.0, 1.5, 2.5, 4.0]]


# Least squared errors of scalar quantization of a normal variable: Max (1960), table I.
@pytest.mark.parametrize(("bits", "optimum"), [(4, 0.009497), (3, 0.03454), (2, 0.1175)])
def test_levels_for_normal_data_are_as_good_as_the_best_ones(bits, optimum):
    x = torch.randn(1, 38_400, generator=torch.Generator().manual_seed(0))
    # The mean of 38,400 squared errors varies by about .7 %.
    assert (nearest(x, fitted(x, 2**bits)) - x).square().mean() <= 1.02 * optimum


def test_nearest_level():
    levels, x = torch.tensor([[0.0, 1.0, 4.0], [-1.0, 0.0, 1.0]]), torch.tensor([[-9.0, 0.6, 2.4, 2.6, 9.0]] * 2)
    assert nearest(x, levels).tolist() == [[0.0, 1.0, 1.0, 4.0, 4.0], [-1.0, 1.0, 1.0, 1.0, 1.0]]


NUMBERS = [0.0, 1.0, 2.0, -100.0, 3.0, 4.0, 5.0, 100.0]
# Without the two outliers the range is 0 to 5: (x - 2.5) / 2.5 = -1, -.6, -.2, .2, .6, 1, whose means are -.6 and .6.
ROUNDED = [1.0, 1.0, 1.0, -100.0, 4.0, 4.0, 4.0, 100.0]


def test_keys_are_rounded_per_channel_around_their_outliers():
    x = torch.stack([torch.tensor(NUMBERS), 8 * torch.tensor(NUMBERS)], dim=1).view(1, 1, 8, 2)
    expected = torch.stack([torch.tensor(ROUNDED), 8 * torch.tensor(ROUNDED)], dim=1).view(1, 1, 8, 2)
    torch.testing.assert_close(DenseAndSparse(1, "per_channel", tile=8).stored(x), expected, rtol=HALF, atol=0)


def test_values_are_rounded_per_token_over_all_heads():
    x = torch.tensor(NUMBERS).view(1, 2, 1, 4)
    stored = DenseAndSparse(1, "per_token", tile=1).stored(x)
    torch.testing.assert_close(stored, torch.tensor(ROUNDED).view(1, 2, 1, 4), rtol=HALF, atol=0)


def test_normalization_keeps_mean_and_deviation():
    x = torch.tensor([[-1.0, -0.6, -0.2, 0.2, 0.6, 1.0]]) + 3
    # Squares of x - 3 sum up to 2.8, those of six numbers .6 to 2.16.
    far = 0.6 * math.sqrt(2.8 / 2.16)
    torch.testing.assert_close(normalized(torch.tensor([[2.4, 3.6]]), x), torch.tensor([[3 - far, 3 + far]]))


def test_two_bits_are_normalized_as_published():
    assert [kvquant(bits).key.is_normalized for bits in (4, 3, 2)] == [False, False, True]


def test_bytes_of_kvquant():
    """Of three heads of 64: ranges of 4 bytes, outliers of 4 bytes, and 16 levels of 2 bytes."""
    plan = kvquant(4)
    assert plan.key.size(3, 64) == MemoryReport(codes=200 * 192 // 2, scales=192 * (4 + 2 * 4) + 32)
    assert plan.value.size(3, 64) == MemoryReport(codes=200 * 192 // 2, scales=200 * (4 + 2 * 4) + 32)
    # Published are 4.33 bits for 4096 channels, without ranges of keys, which are constants of the layer there.
    key, value = (codec.size(32, 128) for codec in (plan.key, plan.value))
    per_number = 8 * (key.total - 4096 * 4 + value.total) / (2 * 200 * 4096)
    assert per_number == pytest.approx(4.33, abs=0.005)


def test_scales_of_rows_and_columns():
    """x = r_i * c_j * s_ij: columns vary by c_j * 7 / sqrt(2), what is left by 2 * r_i / 7, and then all by 1."""
    r, c, s = torch.tensor([[3.0], [4.0]]), torch.tensor([[10.0, 20.0]]), torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    rows, columns = evened(r * c * s)
    torch.testing.assert_close(rows, torch.tensor([[6 / 7], [8 / 7]]))
    torch.testing.assert_close(columns, torch.tensor([[70.0, 140.0]]) / math.sqrt(2))


def test_scales_of_small_numbers_stop_where_published():
    rows, columns = evened(0.001 * torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(rows, torch.full((4, 1), -0.3).exp())
    assert torch.equal(columns, torch.full((1, 8), -0.3).exp())


def test_scales_make_deviations_alike():
    """Unless rows vary by much less than the others: their scales, too, are relative to columns that are evened out."""
    x = torch.randn(3, 128, 64, generator=torch.Generator().manual_seed(0)).sign()
    x = 10 * x * torch.linspace(0, 3, 64).exp() * torch.linspace(0, 0.2, 128).exp()[:, None]
    rows, columns = evened(x)
    for dim in (-1, -2):
        deviation = (x / rows / columns).std(dim=dim)
        assert deviation.max() / deviation.min() < 1.01  # 20 before, and not quite 1 after so many passes


@pytest.mark.parametrize("granularity", ["per_channel", "per_token"])
@pytest.mark.parametrize("bits", [2, 4])
def test_a_tile_that_scales_alone_can_tell_is_kept(granularity, bits):
    """Evened out, each group of r_i * c_j * s_ij is a number and its negative: the ends of its range."""
    signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    x = rotate(torch.tensor([[3.0], [4.0]]) * torch.tensor([[10.0, 12.0]]) * signs)[None, None]
    stored = VarianceNormalized(bits, granularity, tile=2).stored(x)
    # Roundings to float16: of the ends of the range, 1 and 2 halves of it, and of the other scale.
    torch.testing.assert_close(stored, x, rtol=0, atol=4 * HALF * x.norm(dim=-1).max().item())


@pytest.mark.parametrize(("granularity", "bits"), [("per_channel", 4), ("per_token", 2)])
def test_errors_are_within_half_a_step_of_the_evened_tile(granularity, bits):
    x = 5 * torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(0))
    codec = VarianceNormalized(bits, granularity)
    grouped, error = rotate(x), (rotate(codec.stored(x)) - rotate(x)).abs()
    if granularity == "per_channel":
        grouped, error = grouped.transpose(2, 3), error.transpose(2, 3)
    rows, columns = evened(grouped)
    relative = grouped / rows / columns
    step = (relative.amax(-1, keepdim=True) - relative.amin(-1, keepdim=True)) / (2**bits - 1)
    # Beyond half a step: rounding of two scales and a zero point, of numbers not above the range.
    bound = (step / 2 + 4 * HALF * relative.abs().amax(-1, keepdim=True)) * rows * columns
    assert (error <= bound).all()


def test_bytes_of_kvarn():
    """The record of a tile in the published kernels has 17,920 bytes for one head of 128 at 4 bits."""
    plan = kvarn(4, 4)
    assert plan.key.size(1, 128) == MemoryReport(codes=8192, scales=768)
    assert plan.key.size(1, 128).total + plan.value.size(1, 128).total == 17_920
    assert kvarn(4, 2).value.size(3, 64) == MemoryReport(codes=3 * 128 * 64 // 4, scales=3 * 2 * (2 * 128 + 64))
    assert kvarn(2, 2).key.size(3, 64) == MemoryReport(codes=3 * 128 * 64 // 4, scales=3 * 2 * (2 * 64 + 128))


def test_the_largest_channels_have_four_bits():
    """Of eight channels one has four bits: 0, 3, 42 and 45 are levels then, and 0 and 45 are the nearest in two."""
    uneven, even = torch.tensor([0.0, 3.0, 42.0, 45.0]), torch.tensor([0.0, 1.0, 2.0, 3.0])
    x = torch.stack([even, uneven / 15, even, even, uneven, uneven / 3, even, even], dim=1).view(1, 1, 4, 8)
    coarse = torch.tensor([0.0, 0.0, 45.0, 45.0])
    expected = torch.stack([even, coarse / 15, even, even, uneven, coarse / 3, even, even], dim=1).view(1, 1, 4, 8)
    torch.testing.assert_close(BoostedChannels(1 / 8, tile=4).stored(x), expected, rtol=0, atol=0)


def test_channels_are_chosen_per_head_and_page():
    x = torch.rand(1, 2, 128, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0, :, [3, 5]] *= -9
    x[0, 1, :, [0, 15]] *= 9
    error = (BoostedChannels(1 / 8).stored(x) - x).abs().amax(dim=2)[0]
    # Ranges are 9 and 1 at most, of 15 and 3 steps.
    assert all(error[head, channel] < 9 / 15 / 2 * 1.01 for head, channel in ((0, 3), (0, 5), (1, 0), (1, 15)))
    assert error[0, 0] > 1 / 15
    assert error[1, 3] > 1 / 15


def test_values_of_kitty_are_rounded_per_token():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 42.0, 45.0]]).view(1, 1, 2, 4)
    assert PlainTokens().stored(x).view(2, 4).tolist() == [[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 45.0, 45.0]]


def test_bytes_of_kitty():
    plan, pro = kitty(1 / 8), kitty(1 / 4)
    assert plan.key.size(1, 128) == MemoryReport(codes=128 * (16 * 4 + 112 * 2) // 8, scales=128 * 5)
    assert pro.key.size(1, 128) == MemoryReport(codes=128 * (32 * 4 + 96 * 2) // 8, scales=128 * 5)
    assert plan.value.size(1, 128) == MemoryReport(codes=32, scales=4)
    # Published are 2.39 bits, in which there is no byte per channel: with 32 sinks of 32,768 tokens.
    key, value = plan.key.size(1, 128).total - 128, plan.value.size(1, 128).total * 128
    per_number = 8 * (key + value) / (2 * 128 * 128)
    assert per_number + (16 - per_number) * 32 / 32_768 == pytest.approx(2.39, abs=0.005)
