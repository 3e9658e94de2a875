import pytest

from kvquant_kernels.triton import launch


@pytest.mark.parametrize(
    ("target", "head_dim", "rows", "block"),
    [
        ("sm_80", 128, 16, 8),
        ("sm_90", 128, 16, 16),
        ("sm_90", 128, 7, 8),
        ("sm_100", 256, 16, 8),
        ("gfx942", 64, 1, 16),
    ],
)
def test_query_rows_of_a_program(target, head_dim, rows, block):
    assert launch.choose(target, head_dim).block_r(rows) == block


def test_only_nvidia_is_told_how_many_registers_to_use():
    assert launch.choose("sm_90", 128).options["maxnreg"] == 255
    assert "maxnreg" not in launch.choose("gfx942", 128).options


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="no rule for target='xpu' and head_dim=128"):
        launch.choose("xpu", 128)


def test_programs_that_share_the_pages_of_a_row():
    """132 processors of 4 programs want 528: 66 each where there are 8, but no more than one for two pages, or 128."""
    chosen = launch.choose("sm_90", 128)
    assert chosen.programs_per_processor == 4
    assert chosen.num_splits(8, 1000, 132) == 66
    assert chosen.num_splits(8, 31, 132) == 15
    assert chosen.num_splits(1, 1000, 132) == 128
    assert chosen.num_splits(1000, 1000, 132) == chosen.num_splits(8, 0, 132) == 1
