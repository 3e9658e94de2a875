"""What the scores in the table's columns and the settings mean, for people who did not make them."""

from __future__ import annotations

from dataclasses import fields

from kvquant_evals.settings import Settings

_MEANINGS = {
    "perplexity": "How surprised the model is by the text it reads through the cache; lower is better. The text goes "
    "in chunks through one growing cache, so that nearly all of it is read from stored keys and values.",
    "kl_mean": "Mean KL divergence to full precision, in nats per token: how far the predicted distribution moved. "
    "Zero is the same model.",
    "kl_p99": "The KL divergence that one token in a hundred exceeds.",
    "kl_p999": "The KL divergence that one token in a thousand exceeds.",
    "top1": "Share of tokens at which the most likely next token is that of full precision.",
    "attention_error": "Relative error of the output of attention, the mean over all layers and heads; each reads "
    "exact queries, so that errors do not add up over layers.",
    "attention_error_max": "The same of the worst head.",
    "generate_first_divergence": "How many greedily generated tokens are those of full precision before the first that "
    "is not. Two tokens that are nearly as likely are enough to part them.",
    "generate_equal": "Share of the continuations that are full precision's to the last token.",
    "generate_repetition": "Share of the runs of four generated tokens that were there before: a broken cache repeats "
    "itself. Full precision does so too, to some extent.",
    "retrieval": "Share of the questions about facts hidden in a long document that are answered right.",
    "memory_mb": "All that the cache holds at that context.",
    "memory_peak_mb": "The most that was allocated at once while the cache was filled and decoded from, beyond what "
    "was there before it.",
    "memory_longest": "The longest context whose cache fits into the budget.",
    "speed_prefill": "Tokens per second of reading the whole context at once.",
    "speed_decode": "Tokens per second of decoding behind that context.",
    "speed_ratio": "How many times as fast as full precision decoding is, in steps that take turns with it.",
    "bytes_per_token": "All that the cache holds, by the tokens in it: codes, scales, sinks and the recent tokens that "
    "are still in full precision.",
    "effective_bits": "The same in bits per number stored. Short caches look larger, since their full-precision tokens "
    "weigh more.",
}


_SETTINGS = {
    "skip": "leading tokens of a segment that are not scored",
    "offset": "where in the text the first segment begins",
}


def setting(name: str) -> str:
    """What a setting is: what the command line's help says, if it is an option."""
    about = {field.name: field.metadata.get("help") for field in fields(Settings)}
    return about.get(name) or _SETTINGS.get(name, name)


def meaning(score: str) -> str | None:
    """That of the score itself, or of all scores that begin like it; None for one that is not known here."""
    known = [name for name in _MEANINGS if score == name or score.startswith(f"{name}_")]
    return _MEANINGS[max(known, key=len)] if known else None
