import pytest
import torch

from kvquant.codec import quantize
from kvquant.formats import FORMATS, INT2_PER_TOKEN, INT4_PER_CHANNEL, INT4_PER_TOKEN, INT8_PER_TOKEN, QuantFormat
from kvquant.layout import PagePart, StateShape
from kvquant_kernels.cpu.layout import CpuLayout, PartLayout, unsupported

SUPPORTED = [fmt for fmt in FORMATS if not fmt.is_exact and fmt.bits != 3]


@pytest.mark.parametrize("fmt", SUPPORTED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("size", [64, 128])
def test_records_give_back_codes_and_scales(fmt, head_dim, size):
    shape = StateShape(2, size, head_dim)
    layout = CpuLayout(PagePart(fmt, shape), PagePart(fmt, shape))
    key, value = (quantize(torch.randn(3, *shape), fmt) for _ in range(2))
    records = layout.pack(key, value)
    assert records.shape == (3, layout.page_bytes)
    for part, packed in enumerate((key, value)):
        back = layout.unpack(records, part)
        assert torch.equal(back.codes, packed.codes)
        assert torch.equal(back.scale, packed.scale)
        assert back.zero_point is packed.zero_point is None or torch.equal(back.zero_point, packed.zero_point)


def test_hand_computed_key_words():
    part = PartLayout(INT4_PER_CHANNEL, StateShape(1, 32, 8), first=0, is_key=True)
    codes = torch.zeros(1, 1, 32, 8, dtype=torch.uint8)
    codes[0, 0, 3, 6] = 5  # token 3 is lane 3 of field 0; channel 6 is byte 2 of word 1
    codes[0, 0, 19, 6] = 9  # token 19 is lane 3 of field 1
    words = part._to_words(codes)[0, 0]
    assert words.nonzero().flatten().tolist() == [(1 * 16 + 3) * 4 + 2]
    assert words[(1 * 16 + 3) * 4 + 2] == 0x95


def test_hand_computed_value_words():
    fmt = QuantFormat("g", INT2_PER_TOKEN.grid, "per_token", group_size=80)  # 20 words: columns of 16 and of 4
    part = PartLayout(fmt, StateShape(1, 8, 160), first=0, is_key=False)
    codes = torch.zeros(1, 1, 8, 160, dtype=torch.uint8)
    for field, code in enumerate((1, 2, 3, 1)):
        codes[0, 0, 6, 80 + 20 * field + 18] = code  # of the second group, the channels that share its word 18
    words = part._to_words(codes)[0, 0]
    at = 4 * (2 * 20)  # bytes of the first group: two rows of four tokens
    at += 4 * (2 * 16)  # and of the first column
    at += 4 * (4 + 18 - 16) + 2  # token 6 is byte 2 of row 1
    assert words.nonzero().flatten().tolist() == [at]
    assert words[at] == 0b01_11_10_01


def test_codes_are_truly_packed():
    shape = StateShape(8, 128, 128)
    layout = CpuLayout(PagePart(INT4_PER_CHANNEL, shape), PagePart(INT4_PER_TOKEN, shape))
    assert layout.code_bytes == 2 * 8 * 128 * 128 // 2
    assert layout.scale_bytes == 8 * 2 * 2 * (128 + 2 * 128)
    assert layout.page_bytes == layout.code_bytes + layout.scale_bytes


@pytest.mark.parametrize(
    ("fmt", "shape", "is_key", "reason"),
    [
        (FORMATS[-1], (2, 128, 64), True, "format identity is not one of 8, 4 or 2 bits"),
        (INT4_PER_CHANNEL, (2, 48, 64), True, "page_size=48 is not a multiple of 32"),
        (INT4_PER_CHANNEL, (2, 128, 66), True, "head_dim=66 is not a multiple of 4"),
        (INT8_PER_TOKEN, (2, 128, 1024), False, "head_dim=1024 is not a multiple of 4 up to 512"),
        (
            QuantFormat("g", INT8_PER_TOKEN.grid, "per_token", group_size=2),
            (2, 128, 64),
            True,
            "group_size=2 is not a multiple of 4",
        ),
        (
            QuantFormat("g", INT4_PER_TOKEN.grid, "per_token", group_size=9),
            (2, 128, 72),
            False,
            "group_size=9 is not a multiple of 2",
        ),
        (INT4_PER_CHANNEL, (2, 32, 64), True, None),
        (INT4_PER_TOKEN, (2, 8, 72), False, None),
    ],
)
def test_what_does_not_fit_is_named(fmt, shape, is_key, reason):
    found = unsupported(PagePart(fmt, StateShape(*shape)), is_key)
    assert found is reason is None or reason in found
