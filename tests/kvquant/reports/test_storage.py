"""Public reports about what is kept in memory, and when it is packed."""

import pytest
import torch
from families import tiny_model
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant.testing import relative_errors


def prefill(model, ids, cache):
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    for layer in cache.layers:
        layer.settle()


@pytest.mark.parametrize(("bits", "bytes_per_code"), [(8, 1), (4, 0.5), (2, 0.25)])
@pytest.mark.parametrize("page_size", [8, 128])
def test_a_prompt_is_packed_but_for_its_last_tokens(bits, bytes_per_code, page_size):
    """https://github.com/huggingface/transformers/pull/35760: quantize the whole prompt, or keep all of it exact?

    All but the first 4 and the last 128 tokens are packed, as far as they fill pages.
    """
    model = tiny_model("llama", "sdpa")
    cache = QuantCache(bits=bits, residual_length=128, page_size=page_size)
    prefill(model, torch.randint(2, 97, (1, 300)), cache)
    packed = (300 - 4 - 128) // page_size * page_size
    numbers = 2 * 2 * 2 * 16  # layers, keys and values, heads, head_dim
    memory = cache.memory()
    assert memory.codes == packed * numbers * bytes_per_code
    assert memory.exact == (300 - packed) * numbers * 4
    assert memory.full_precision == 300 * numbers * 4
    for layer in cache.layers:  # and that is all there is
        states = layer.states.snapshot()
        exact = sum(x.untyped_storage().nbytes() for x in (*states.sinks, *states.chunk, *states.tail_buffers))
        assert exact <= (4 + 128 + page_size + 4) * numbers // 2 * 4
        used = states.pool.capacity - len(states.pool.free_slots)
        assert used * page_size == packed
        assert states.pool.records.numel() <= 1.125 * used * states.layout.page_bytes


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8"])
def test_a_sealed_page_is_never_written_again(bits):
    """https://github.com/huggingface/transformers/pull/31277: packed layouts to which nothing can be appended."""
    cache = QuantCache(bits=bits, sinks=2, residual_length=5, page_size=8, max_length=400)
    cache.update(*torch.randn(2, 2, 2, 60, 64), 0)
    cache.layers[0].settle()
    pool = cache.layers[0].states.snapshot().pool
    pages = [page.index for row in cache.layers[0].states.snapshot().rows for page in row.pages]
    before, address = pool.records[pages].clone(), pool.records.data_ptr()
    for _ in range(300):
        cache.update(*torch.randn(2, 2, 2, 1, 64), 0)
    states = cache.layers[0].states.snapshot()
    assert [page.index for row in states.rows for page in row.pages[: len(pages) // 2]] == pages
    assert len(states.rows[0].pages) > 40
    assert torch.equal(pool.records[pages], before)
    assert pool.records.data_ptr() == address  # room for max_length tokens is made once: nothing moved either


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_generation_far_longer_than_the_residual_is_still_right(attention, bits):
    """https://github.com/huggingface/transformers/pull/39106: no test went past the first flush, which was broken.

    See also https://github.com/huggingface/transformers/pull/39797. The default sizes, and two seals.
    """
    model, ids = tiny_model("llama", attention), torch.randint(2, 97, (1, 10))
    options = {"do_sample": False, "max_new_tokens": 330, "return_dict_in_generate": True, "output_logits": True}
    cache, exact = QuantCache(bits=bits), DynamicCache()
    out, expected = (
        model.generate(ids, attention_mask=torch.ones_like(ids), cache=each, **options) for each in (cache, exact)
    )
    assert len(cache.layers[0].states.snapshot().rows[0].pages) == 2
    assert torch.equal(out.sequences, expected.sequences)
    if bits == 16:
        assert all(torch.equal(*steps) for steps in zip(out.logits, expected.logits, strict=True))
    for ours, theirs in zip(cache.layers[0].keys.clone().unbind(1), exact.layers[0].keys.unbind(1), strict=True):
        assert torch.equal(ours[:, :4], theirs[:, :4])
        assert torch.equal(ours[:, -64:], theirs[:, -64:])
        # 128 numbers of one channel span some 6 deviations, which 255 steps round by 6 / 255 / sqrt(12).
        assert relative_errors(ours, theirs).rms <= (0.01 if bits == 8 else 0)
