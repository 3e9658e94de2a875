import pytest

from kvquant.formats import (
    FORMATS,
    IDENTITY,
    INT4_PER_CHANNEL,
    INT4_PER_TOKEN,
    Clip,
    QuantFormat,
    integer_format,
    largest_divisor,
)


def test_names_are_unique():
    names = [fmt.name for fmt in FORMATS]
    assert len(names) == len(set(names)) == 21


@pytest.mark.parametrize(
    ("head_dim", "group"), [(40, 40), (64, 64), (72, 36), (80, 40), (96, 48), (128, 64), (256, 64)]
)
def test_default_group_of_per_token_formats_divides_head_dim(head_dim, group):
    assert INT4_PER_TOKEN.resolve_group_size(tokens=7, channels=head_dim) == group


def test_default_group_of_per_channel_formats_is_all_tokens():
    assert INT4_PER_CHANNEL.resolve_group_size(tokens=24, channels=64) == 24


def test_group_that_does_not_divide_is_refused_by_name():
    fmt = QuantFormat("g", INT4_PER_TOKEN.grid, "per_token", group_size=48)
    with pytest.raises(ValueError, match=r"group_size=48 of format g does not divide 64 channels"):
        fmt.resolve_group_size(tokens=8, channels=64)


def test_largest_divisor():
    assert [largest_divisor(n, 64) for n in (1, 61, 67, 130, 512)] == [1, 61, 1, 26, 64]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_dict_round_trip(fmt):
    assert QuantFormat.from_dict(fmt.to_dict()) == fmt
    assert QuantFormat.from_dict(fmt.clipped().to_dict()) == fmt.clipped()


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"'int5_per_token' is unknown; known are .*int4_per_token"):
        QuantFormat.from_dict({"name": "int5_per_token", "group_size": None, "clip": None})


@pytest.mark.parametrize(("bits", "symmetric", "top"), [(8, False, 255), (8, True, 254), (2, False, 3), (2, True, 2)])
def test_symmetric_grids_leave_out_one_code_so_that_zero_is_a_level(bits, symmetric, top):
    assert integer_format(bits, "per_token", symmetric).grid.top == top


def test_only_the_identity_is_exact():
    assert [fmt for fmt in FORMATS if fmt.is_exact] == [IDENTITY]


@pytest.mark.parametrize("bits", [0, 5, 6, 7, 16])
def test_widths_that_cannot_be_packed_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits={bits} is not supported; use 8, 4, 3, 2"):
        integer_format(bits, "per_token")


@pytest.mark.parametrize("group_size", [0, -8])
def test_groups_of_nothing_are_refused(group_size):
    with pytest.raises(ValueError, match=f"group_size={group_size} of format g must be at least 1, or None"):
        QuantFormat("g", INT4_PER_TOKEN.grid, "per_token", group_size=group_size)


@pytest.mark.parametrize(
    ("options", "message"), [({"ratios": ()}, "ratios"), ({"ratios": (1.0, 0.0)}, "ratios"), ({"norm": 0.0}, "norm")]
)
def test_clips_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Clip(**options)


def test_groups_of_a_fraction_are_refused():
    with pytest.raises(TypeError, match=r"group_size=8\.0 of format g must be an int, or None"):
        QuantFormat("g", INT4_PER_TOKEN.grid, "per_token", group_size=8.0)
