import pytest
import torch

from kvquant.codec import quantize
from kvquant.formats import FORMATS, IDENTITY, INT3_PER_TOKEN, INT4_PER_CHANNEL, INT4_PER_TOKEN
from kvquant.layout import PagePart, PlainLayout, StateShape, pack, unpack


def test_hand_computed_bytes():
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
    assert pack(codes, 8).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pack(codes, 4).tolist() == [0x51, 0x62, 0x73, 0x84]
    two = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0], dtype=torch.uint8)
    assert pack(two, 2).tolist() == [0b01_11_10_00, 0b00_10_11_01]
    three = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    # Low planes 0 1 2 3 0 1 2 3, then the high bits 0 0 0 0 1 1 1 1.
    assert pack(three, 3).tolist() == [0b10_00_10_00, 0b11_01_11_01, 0b11110000]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [8, 24, 1000])
def test_unpack_inverts_pack_and_the_size_is_truly_packed(bits, count):
    codes = torch.randint(0, 2**bits, (3, 2, count), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 2, count * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_packing_what_fills_no_whole_bytes_is_refused():
    with pytest.raises(ValueError, match="multiples of 8, got 12"):
        pack(torch.zeros(12, dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match="bits=5 cannot be packed"):
        pack(torch.zeros(8, dtype=torch.uint8), 5)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "head_dim"), [(1, 8, 64), (3, 24, 40), (2, 16, 72)])
def test_records_give_back_codes_and_scales(fmt, dtype, heads, size, head_dim):
    shape = StateShape(heads, size, head_dim)
    value_shape = StateShape(heads + 1, size, head_dim // 2)  # keys and values may differ in heads and head_dim
    layout = PlainLayout(PagePart(fmt, shape, dtype), PagePart(INT4_PER_TOKEN, value_shape, dtype))
    key = quantize(torch.randn(5, *shape).to(dtype), fmt)
    value = quantize(torch.randn(5, *value_shape).to(dtype), INT4_PER_TOKEN)
    records = layout.pack(key, value)
    assert records.shape == (5, layout.page_bytes)
    assert layout.page_bytes % 16 == 0
    for part, packed in enumerate((key, value)):
        back = layout.unpack(records, part)
        assert torch.equal(back.codes, packed.codes)
        for got, expected in ((back.scale, packed.scale), (back.zero_point, packed.zero_point)):
            assert got is expected is None or torch.equal(got, expected)


def test_bytes_of_a_page():
    shape = StateShape(8, 128, 128)
    layout = PlainLayout(PagePart(INT4_PER_CHANNEL, shape), PagePart(INT4_PER_TOKEN, shape))
    elements = 8 * 128 * 128
    assert layout.code_bytes == 2 * elements // 2
    assert layout.scale_bytes == 2 * 2 * elements // 128 + 2 * 2 * elements // 64
    assert layout.page_bytes == layout.code_bytes + layout.scale_bytes


def test_three_bits_take_three_bits_and_the_identity_its_dtype():
    shape = StateShape(1, 8, 64)
    three = PlainLayout(PagePart(INT3_PER_TOKEN, shape), PagePart(INT3_PER_TOKEN, shape))
    assert three.code_bytes == 2 * 8 * 64 * 3 // 8
    wide, narrow = PagePart(IDENTITY, shape, torch.float32), PagePart(IDENTITY, shape, torch.float16)
    assert PlainLayout(wide, wide).page_bytes == 2 * 8 * 64 * 4
    assert PlainLayout(wide, narrow).page_bytes == 8 * 64 * (4 + 2)
