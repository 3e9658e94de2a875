import pytest
import torch

from kvquant.codec import quantize
from kvquant.formats import FORMATS, INT2_PER_TOKEN, INT4_PER_CHANNEL, INT4_PER_TOKEN, INT8_PER_CHANNEL, INT8_PER_TOKEN
from kvquant.layout import PagePart, StateShape
from kvquant_kernels.triton.layout import Channels, TritonLayout, unsupported

SUPPORTED = [fmt for fmt in FORMATS if not fmt.is_exact and fmt.bits in (8, 4, 2)]


@pytest.mark.parametrize("fmt", SUPPORTED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("size", "other"), [(64, INT2_PER_TOKEN), (128, INT8_PER_TOKEN), (512, INT4_PER_TOKEN)], ids=str
)
def test_records_give_back_codes_and_scales(fmt, head_dim, size, other):
    shape = StateShape(2, size, head_dim)
    layout = TritonLayout(PagePart(fmt, shape), PagePart(other, shape))
    key, value = (quantize(torch.randn(3, *shape), part) for part in (fmt, other))
    records = layout.pack(key, value)
    assert records.shape == (3, layout.page_bytes)
    assert layout.page_bytes % (2 * 16) == 0
    for part, packed in enumerate((key, value)):
        back = layout.unpack(records, part)
        assert torch.equal(back.codes, packed.codes)
        assert torch.equal(back.scale, packed.scale)
        assert (back.zero_point is None) == (packed.zero_point is None)
        assert packed.zero_point is None or torch.equal(back.zero_point, packed.zero_point)


def test_bytes_of_a_page():
    shape = StateShape(8, 128, 128)
    layout = TritonLayout(PagePart(INT4_PER_CHANNEL, shape), PagePart(INT4_PER_TOKEN, shape))
    codes, scales = 2 * 128 * 128 // 2, 4 * 128 + 4 * 2 * 128  # a word for each channel, and for each token and group
    assert layout.page_bytes == 8 * (codes + scales)
    assert (layout.code_bytes, layout.scale_bytes) == (8 * codes, 8 * scales)


def test_where_codes_lie_in_words():
    """By hand: 4-bit keys, 64 tokens of 64 channels: 2 blocks of 32 tokens, 2 parts of 32 channels, 16 words a row."""
    shape = StateShape(1, 64, 64)
    layout = TritonLayout(PagePart(INT4_PER_CHANNEL, shape), PagePart(INT4_PER_TOKEN, shape))
    key, value = (quantize(torch.randn(1, *shape), fmt) for fmt in (INT4_PER_CHANNEL, INT4_PER_TOKEN))
    key.codes.zero_()
    value.codes.zero_()
    key.codes[0, 0, 32 + 5, 32 + 7] = 9  # second block, second part: field 3; channel 7 is the high half of word 3
    value.codes[0, 0, 5, 32 + 7] = 9  # first block, second part: field 1; token 5 is the high half of word 2
    words = layout.pack(key, value).view(torch.int32)[0].long() & 0xFFFFFFFF
    assert words[5 * 16 + 3] == 9 << (16 + 12)
    first = layout.parts[1].first
    assert words[first + 7 * 16 + 2] == 9 << (16 + 4)
    assert (words[: 64 * 64 // 8] != 0).sum() == 1
    assert (words[first : first + 64 * 64 // 8] != 0).sum() == 1


@pytest.mark.parametrize(
    ("head_dim", "group", "expected"),
    [(64, 64, (32, 2)), (128, 64, (64, 2)), (256, 64, (64, 4)), (96, 48, (16, 6)), (80, 40, (16, 6)), (72, 36, (16, 6)),
     (128, 128, (64, 2)), (128, 32, (32, 4)), (192, 64, (32, 6))],
)  # fmt: skip
def test_parts_of_channels(head_dim, group, expected):
    channels = Channels.of(head_dim, group)
    assert (channels.width, channels.num_parts) == expected
    assert len(set(channels.positions.tolist())) == head_dim
    groups = torch.arange(head_dim) // group
    for part in range(channels.num_parts):  # no part holds two groups
        inside = (channels.positions // channels.width) == part
        assert len(set(groups[inside].tolist())) <= 1


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128])
def test_the_basis_rotates_as_the_codec_does(head_dim):
    from kvquant.rotation import rotate

    channels = Channels.of(head_dim, head_dim // 2)
    x = torch.randn(5, head_dim)
    basis = channels.basis(rotated=True).float() * channels.basis_factor(rotated=True)
    positions = x @ basis.T
    torch.testing.assert_close(positions[:, channels.positions], rotate(x))
    torch.testing.assert_close(positions @ basis, x)
    padding = sorted(set(range(channels.padded)) - set(channels.positions.tolist()))
    assert (positions[:, padding] == 0).all()
    assert torch.equal((x @ channels.basis(rotated=False).float().T)[:, channels.positions], x)


@pytest.mark.parametrize(
    ("fmt", "size", "head_dim", "reason"),
    [
        (FORMATS[-1], 128, 64, "format identity is not one of 8, 4 or 2 bits"),
        (INT8_PER_CHANNEL, 96, 64, "page_size=96 is not a power of two from 64 to 512"),
        (INT8_PER_CHANNEL, 32, 64, "page_size=32 is not a power of two from 64 to 512"),
        (INT8_PER_CHANNEL, 128, 512, "head_dim=512 is more than 256"),
        (INT8_PER_TOKEN, 128, 67, "groups of 1 channels are less than 16"),
    ],
)
def test_what_is_refused_with_the_reason(fmt, size, head_dim, reason):
    assert unsupported(PagePart(fmt, StateShape(2, size, head_dim))) == reason
