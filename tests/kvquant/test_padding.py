"""Where the rows of a padded batch start."""

import math

import pytest
import torch

from kvquant.padding import padding_of, row_starts


def test_row_starts_from_bool_and_float_masks():
    mask = torch.ones(4, 1, 3, 5, dtype=torch.bool).tril(2)
    mask[1, :, :, :2] = False
    mask[2] = False
    mask[3, :, 0] = False
    assert row_starts(mask, 4, 5) == [0, 2, 5, 0]
    for hidden in (torch.finfo(torch.float32).min, -math.inf):
        assert row_starts(torch.zeros(mask.shape).masked_fill(~mask, hidden), 4, 5) == [0, 2, 5, 0]
    assert row_starts(mask[1:2], 3, 5) == [2, 2, 2]
    assert row_starts(None, 4, 5) is None
    assert row_starts(mask, 4, 6) is None


@pytest.mark.parametrize(
    ("positions", "padding"),
    [
        ([0, 1, 2, 3], 0),
        ([0, 0, 0, 1, 2], 2),
        ([1, 1, 0, 1, 2], 2),
        ([0, 0, 0, 0], 3),
        ([1, 1, 1], 3),
        ([5, 6, 7], 0),
        ([1], 0),
        ([0], 0),
        ([0, 1, 2, 0, 1], 0),
        ([2, 2, 0, 1], 0),
        ([0, 0, 0, 2, 3], 0),
        ([1, 0, 0, 1], 0),
    ],
    ids=str,
)
def test_padding_that_position_ids_show(positions, padding):
    assert padding_of(positions) == padding
