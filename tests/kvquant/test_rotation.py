import pytest
import torch

from kvquant.rotation import block_size, rotate

HEAD_DIMS = [1, 40, 64, 72, 80, 96, 127, 128, 256, 512]


def test_hand_computed_rotation_of_four_channels():
    assert rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [5.0, -1.0, -2.0, 0.0]


def test_blocks_are_rotated_separately():
    # 12 = 4 x 3: three blocks of four.
    x = torch.zeros(12)
    x[5] = 2.0
    assert rotate(x).tolist() == [0.0] * 4 + [1.0, -1.0, 1.0, -1.0] + [0.0] * 4


@pytest.mark.parametrize(("head_dim", "block"), [(40, 8), (64, 64), (72, 8), (80, 16), (96, 32), (127, 1)])
def test_block_size_is_the_largest_power_of_two_that_divides(head_dim, block):
    assert block_size(head_dim) == block


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_is_orthogonal_and_its_own_inverse(head_dim):
    matrix = rotate(torch.eye(head_dim))
    # log2(512) = 9 additions of numbers below 1 in float32.
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim), atol=1e-6, rtol=0)
    assert torch.equal(matrix, matrix.T)
    x = torch.randn(3, head_dim)
    torch.testing.assert_close(rotate(rotate(x)), x, atol=1e-5, rtol=0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_keeps_dot_products(head_dim):
    q, k = torch.randn(2, 5, head_dim)
    torch.testing.assert_close((rotate(q) * rotate(k)).sum(-1), (q * k).sum(-1), atol=1e-4, rtol=1e-5)


def test_rotation_of_some_tokens_does_not_depend_on_the_others():
    x = torch.randn(1000, 64)
    assert torch.equal(rotate(x)[123:124], rotate(x[123:124]))


def test_rotation_leaves_its_input_alone_and_takes_16_bits_and_views():
    x = torch.randn(2, 64, 3)
    view = x.transpose(1, 2)
    before = x.clone()
    assert torch.equal(rotate(view), rotate(view.contiguous()))
    assert torch.equal(x, before)
    assert rotate(x.transpose(1, 2).to(torch.bfloat16)).dtype == torch.float32
