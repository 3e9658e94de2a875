"""Mistakes that the tests of attention must notice, put into the kernels one at a time."""

import os

import pytest
import torch
from conformance import definition, states_for

from kvquant import AttentionCall, QuantConfig
from kvquant.testing import relative_errors
from kvquant_kernels.triton.attend import KERNEL
from kvquant_kernels.triton.ops import pages, tiles

pytestmark = [
    pytest.mark.broad,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels do not see what is changed beneath them"
    ),
]

MUTANTS = {
    "the middle of the grid is a code": (tiles, "above_middle", lambda middle: 0.0),
    "all parts have the same unit": (tiles, "part_unit", lambda code, part: 1),
    "key codes keep their offset": (tiles, "any_row", lambda x: x.max(0) * 0.0),
    "later pages are not brought to the new maximum": (tiles, "shift_of", lambda maximum: maximum * 0.5),
    "the window does not matter": (tiles, "masked_scores", lambda scores, *rest: scores),
    "values have no zero points": (pages, "_with_zeros", lambda acc, zeros, *rest: acc),
}


def error():
    torch.manual_seed(0)
    config = QuantConfig.preset(4, page_size=64, residual_length=200, quantize_sliding=True)
    snapshot = states_for(config, (1, 1, 450, 64), dtype=torch.bfloat16, outlier=4)
    mask = torch.rand(1, 1, 1, 450) < 0.8
    call = AttentionCall(torch.randn(1, 4, 1, 64).to(torch.bfloat16), mask)
    return relative_errors(KERNEL.run(snapshot, call, torch.float32), definition(snapshot, call)).rms


def test_without_a_mistake_all_is_well():
    assert error() <= 1e-3


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_noticed(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    assert not error() <= 1e-2
