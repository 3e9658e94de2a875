import json

import pytest

from kvquant import QuantConfig, formats
from kvquant.config import parse_bits


@pytest.mark.parametrize(
    ("bits", "key", "value"),
    [
        (8, formats.INT8_PER_CHANNEL, formats.INT8_PER_TOKEN),
        (4, formats.INT4_PER_CHANNEL, formats.INT4_PER_TOKEN),
        (3, formats.INT3_PER_CHANNEL.clipped(), formats.INT3_PER_TOKEN.clipped()),
        (2, formats.INT2_PER_CHANNEL.clipped(), formats.INT2_PER_TOKEN.clipped()),
        (16, formats.IDENTITY, formats.IDENTITY),
        ("fp8", formats.FP8_E4M3_PER_TOKEN, formats.FP8_E4M3_PER_TOKEN),
        ((8, 4), formats.INT8_PER_CHANNEL, formats.INT4_PER_TOKEN),
        ((4, 2), formats.INT4_PER_CHANNEL, formats.INT2_PER_TOKEN.clipped()),
        ((16, "fp8"), formats.IDENTITY, formats.FP8_E4M3_PER_TOKEN),
    ],
)
def test_presets(bits, key, value):
    config = QuantConfig.preset(bits)
    assert (config.key, config.value) == (key, value)
    assert (config.sinks, config.residual_length, config.page_size, config.rotation) == (4, 64, 128, True)


def test_exact_formats_are_not_rotated():
    config = QuantConfig.preset((16, 4))
    assert [config.codec(part).rotated for part in (0, 1)] == [False, True]
    assert not config.is_exact
    assert QuantConfig.preset(16).is_exact


@pytest.mark.parametrize("clip", [False, True])
def test_clip_overrides_the_preset_for_both(clip):
    config = QuantConfig.preset((4, 2), clip=clip)
    assert [fmt.clip is not None for fmt in (config.key, config.value)] == [clip, clip]


@pytest.mark.parametrize("bits", [5, 0, -4, "int4", (4,), (4, 5), (4, 4, 4), None, 4.0, True, [4, 2]])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"bits=.* is not supported; use one of 16, 8, 4, 3, 2, 'fp8', or a pair"):
        QuantConfig.preset(bits)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"sinks": -1}, ValueError, "sinks=-1 must be at least 0"),
        ({"residual_length": -1}, ValueError, "residual_length=-1 must be at least 0"),
        ({"page_size": 12}, ValueError, "page_size=12 must be a multiple of 8"),
        ({"page_size": 0}, ValueError, "page_size=0 must be at least 8"),
        ({"max_length": 0}, ValueError, "max_length=0 must be at least 1"),
        ({"sinks": 4.0}, TypeError, "sinks must be an int, got 4.0"),
        ({"sinks": True}, TypeError, "sinks must be an int, got True"),
        ({"key": "int4"}, TypeError, "key must be a QuantFormat, got 'int4'"),
    ],
)
def test_options_out_of_range_are_refused_by_name(option, error, message):
    with pytest.raises(error, match=message):
        QuantConfig(**option)


def test_channel_statistics_must_be_taken_over_pages():
    with pytest.raises(ValueError, match="group_size=32 of the key format int4_per_channel must be page_size=128"):
        QuantConfig(
            key=formats.QuantFormat("int4_per_channel", formats.INT4_PER_CHANNEL.grid, "per_channel", group_size=32)
        )


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 16, "fp8", (8, 4), (4, 2)])
def test_json_round_trip(bits):
    config = QuantConfig.preset(bits, sinks=7, max_length=1000)
    assert QuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="unknown fields of QuantConfig: group"):
        QuantConfig.from_dict({**QuantConfig().to_dict(), "group": 3})


@pytest.mark.parametrize(
    ("text", "bits"), [("4", 4), ("fp8", "fp8"), ("4,2", (4, 2)), ("8, 4", (8, 4)), ("fp8,4", ("fp8", 4))]
)
def test_bits_from_text(text, bits):
    assert parse_bits(text) == bits


@pytest.mark.parametrize("text", ["5", "", "4,", "4,2,2", "four", "-4", "4.5"])
def test_bits_from_bad_text(text):
    with pytest.raises(ValueError, match="is not supported"):
        parse_bits(text)
