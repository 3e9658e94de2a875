"""Public reports of evaluations that never read the cache they were meant to measure."""

from functools import partial

import pytest
import torch
from evaluation import scores

from kvquant import QuantCache, QuantConfig
from kvquant.formats import integer_format
from kvquant_evals.model import default_text
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import perplexity

SETTINGS = Settings(tokens=200, chunk=32, skip=40, offset=100)
SMALL_PAGES = {"sinks": 0, "residual_length": 0, "page_size": 8}
ONE_BIT = QuantConfig(
    key=integer_format(1, "per_channel"), value=integer_format(1, "per_token"), rotation=False, **SMALL_PAGES
)


def divergences(subject, *caches):
    found = scores(subject, perplexity.TASK, SETTINGS, {str(i): cache for i, cache in enumerate(caches)})
    return [found[str(i)]["kl_mean"] for i in range(len(caches))]


@pytest.mark.parametrize("cache", [partial(QuantCache, bits=8, **SMALL_PAGES), partial(QuantCache, quant=ONE_BIT)])
def test_a_score_depends_on_what_is_in_the_cache(tiny, cache):
    """https://github.com/EleutherAI/lm-evaluation-harness/issues/1105: log-likelihoods are those without a cache.

    In one pass, a prompt's own attention reads exact states: any cache at all scores as full precision. See also
    https://github.com/spcl/QuaRot/issues/42.
    """
    ids = tiny.encode(default_text())[:, 100:301]
    with torch.no_grad():
        assert torch.equal(tiny.model(ids, cache=cache(), use_cache=True).logits, tiny.model(ids).logits)
    quantized, identity = divergences(tiny, cache, partial(QuantCache, bits=16, **SMALL_PAGES))
    assert quantized > 0
    assert identity == 0


def test_a_score_shows_how_bad_a_cache_is(tiny):
    """https://github.com/EleutherAI/lm-evaluation-harness/issues/1105"""
    eight, one = divergences(tiny, partial(QuantCache, bits=8, **SMALL_PAGES), partial(QuantCache, quant=ONE_BIT))
    assert one > 1000 * eight
