"""`kvquant plan`: its sizes are those of real caches to the byte, and what it says fits does, but no more of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from families import SMALL_PAGES, tiny_config, tiny_model
from family_table import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, Gemma3Config, Gemma3TextConfig, LlamaConfig

from kvquant import QuantCache, QuantConfig, cache_memory
from kvquant.compat import CACHE_ARGUMENT, EMPTY_LAYERS
from kvquant.layout import PlainLayout
from kvquant.pages import GROWTH
from kvquant_evals.model import EvalError
from kvquant_evals.plan import advice, option, report, verb
from kvquant_evals.plan.architecture import Architecture, Heads, LayerShape
from kvquant_evals.plan.fit import Budget, largest_batch, largest_context
from kvquant_evals.plan.option import CHOICES, make_plan
from kvquant_evals.plan.quantity import format_bytes, parse_bytes, parse_share, parse_tokens
from kvquant_evals.plan.size import Storage, Workload, equation, page_layout
from kvquant_kernels.triton.layout import TritonLayout

CORE = ("llama", "gemma3_text")
OTHERS = (
    "falcon, one KV head", "deepseek_v3", "qwen3_next",
    "mistral", "gpt_oss", "llama4_text", "gemma3n_text", "gemma4_text", "qwen3_5_text", "falcon_h1", "jamba", "zamba2",
    "lfm2",
)  # fmt: skip
KINDS = (*CORE, *(pytest.param(family, marks=pytest.mark.broad) for family in OTHERS))
PACKED = tuple(bits for bits in CHOICES if bits is not None)
FIRST_PAGE = SMALL_PAGES["sinks"] + SMALL_PAGES["residual_length"] + SMALL_PAGES["page_size"]
# Around the first page, at a later one, and beyond the tiny models' window.
CONTEXTS = (1, FIRST_PAGE - 1, FIRST_PAGE, FIRST_PAGE + 1, FIRST_PAGE + SMALL_PAGES["page_size"], 60)
LAYER = LayerShape("full attention", torch.float16, Heads(2, 16), Heads(2, 16))


def architecture_of(family):
    limit = FAMILIES[family].limit()
    if limit is not None:
        pytest.skip(limit.reason)
    return Architecture.of(tiny_config(family), torch.float32)


def fill(family, cache, tokens, batch, chunk=None):
    """Runs the family's tiny model over random tokens, `chunk` at a time."""
    model = tiny_model(family, "eager" if FAMILIES[family].limit("sdpa") else "sdpa")
    ids = torch.randint(3, 97, (batch, tokens))
    with torch.inference_mode():
        for part in ids.split(chunk or tokens, dim=1):
            model(input_ids=part, **{CACHE_ARGUMENT: cache}, use_cache=True)
    return cache


def held(cache):
    """What a plan tells: all but the room that is not used."""
    return replace(cache_memory(cache), reserved=0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", KINDS)
def test_sizes_are_those_of_memory(family, batch):
    architecture = architecture_of(family)
    storages = {bits: Storage.of(architecture, QuantConfig.preset(bits, **SMALL_PAGES), "cpu") for bits in PACKED}
    for tokens in CONTEXTS:
        for bits, storage in storages.items():
            cache = fill(family, QuantCache(bits, config=tiny_config(family), **SMALL_PAGES), tokens, batch)
            assert storage.memory(Workload(tokens, batch)) == held(cache), (bits, tokens)


@pytest.mark.parametrize("family", KINDS)
def test_full_precision_is_that_of_dynamic_cache(family):
    architecture = architecture_of(family)
    for tokens in CONTEXTS:
        found = held(fill(family, DynamicCache(config=tiny_config(family)), tokens, 3))
        workload = Workload(tokens, 3)
        assert Storage.of(architecture, None).memory(workload) == found
        assert sum(term.size for term in equation(architecture, workload)) == found.total


@pytest.mark.parametrize("bits", PACKED, ids=str)
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_packed_windows_are_those_of_memory_when_tokens_come_one_by_one(family, bits):
    options = {**SMALL_PAGES, "quantize_sliding": True}
    storage = Storage.of(architecture_of(family), QuantConfig.preset(bits, **options), "cpu")
    cache = QuantCache(bits, config=tiny_config(family), **options)
    for tokens in range(1, 61):
        assert storage.memory(Workload(tokens, 2)) == held(fill(family, cache, 1, 2)), tokens


@pytest.mark.parametrize("tokens", [15, 40, 47, 60, 75])
@pytest.mark.parametrize("sinks", [0, 2])
def test_packed_windows_hold_no_more_when_tokens_come_at_once(tokens, sinks):
    options = {**SMALL_PAGES, "sinks": sinks, "quantize_sliding": True}
    storage = Storage.of(architecture_of("mistral"), QuantConfig.preset(4, **options), "cpu")
    cache = fill("mistral", QuantCache(4, config=tiny_config("mistral"), **options), tokens, 1)
    planned, found = storage.memory(Workload(tokens, 1)), held(cache)
    assert found.exact == planned.exact
    page_bytes = sum(count * layer.packing[1].page_bytes for layer, count in storage.layers)
    assert 0 <= planned.codes + planned.scales - found.codes - found.scales <= page_bytes


@pytest.mark.parametrize("bits", PACKED, ids=str)
@pytest.mark.parametrize("window", [14, 15, 32])  # residual + page + 1 and 2: the shortest that are packed
def test_short_packed_windows_without_sinks(window, bits):
    options = {**SMALL_PAGES, "sinks": 0, "quantize_sliding": True}
    config = tiny_config("mistral")
    config.sliding_window = window
    storage = Storage.of(Architecture.of(config, torch.float32), QuantConfig.preset(bits, **options), "cpu")
    cache = QuantCache(bits, config=config, **options)
    states = torch.randn(1, 2, 1, 16)
    for tokens in range(1, 61):
        for layer in range(config.num_hidden_layers):
            cache.update(states, states, layer)
        assert storage.memory(Workload(tokens, 1)) == held(cache), tokens


@pytest.mark.parametrize("bits", PACKED, ids=str)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_pages_of_native_kernels(family, bits):
    pages = {"sinks": 4, "residual_length": 16, "page_size": 64}
    storage = Storage.of(architecture_of(family), QuantConfig.preset(bits, **pages), "cpu")
    for tokens in (83, 84, 200):
        cache = fill(family, QuantCache(bits, config=tiny_config(family), **pages), tokens, 2)
        assert storage.memory(Workload(tokens, 2)) == held(cache)


@pytest.mark.parametrize("bits", PACKED, ids=str)
def test_pages_of_triton_kernels(bits, monkeypatch):
    quant = QuantConfig.preset(bits)
    layout = page_layout(LAYER, quant, "cuda")
    assert isinstance(layout, PlainLayout if bits in (16, 3) else TritonLayout)
    monkeypatch.setattr("kvquant.pages.choose_layout", lambda key, value, device: layout)
    cache = QuantCache(bits)
    states = torch.randn(3, 2, 400, 16, dtype=torch.float16)
    cache.update(states, states, 0)
    architecture = Architecture(tiny_config("llama"), torch.float16, (LAYER, LayerShape("", torch.float16)), 0)
    assert Storage.of(architecture, quant, "cuda").memory(Workload(400, 3)) == held(cache)


@pytest.mark.parametrize("max_length", [None, 500])
def test_room_that_is_not_counted_is_as_little_as_the_note_says(max_length):
    cache = QuantCache(4, max_length=max_length, **SMALL_PAGES)
    states = torch.randn(2, 2, 1, 16)
    for _ in range(500):
        cache.update(states, states, 0)
    states, tail_bytes = cache.layers[0].states, 2 * 2 * (2 * 16 * 4)  # per token of two rows, keys and values
    pool = states.snapshot().pool
    room = cache.memory().reserved - states.tail_room * tail_bytes
    assert room == pool.layout.page_bytes * len(pool.free_slots)
    assert len(pool.free_slots) <= (pool.capacity * (1 - 1 / GROWTH) if max_length is None else 2)  # one of each row


def test_without_kernels_pages_are_plain(monkeypatch):
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    for device_type in ("cpu", "cuda"):
        assert isinstance(page_layout(LAYER, QuantConfig.preset(4), device_type), PlainLayout)


@pytest.mark.parametrize("prefix", [5, FIRST_PAGE, 30])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_shared_prefix_counts_once(family, prefix):
    options = {**SMALL_PAGES, "quantize_sliding": True}
    cache = fill(family, QuantCache(4, config=tiny_config(family), **options), prefix, 1, chunk=1)
    cache.batch_repeat_interleave(3)
    fill(family, cache, 60 - prefix, 3, chunk=1)
    storage = Storage.of(architecture_of(family), QuantConfig.preset(4, **options), "cpu")
    assert storage.memory(Workload(60, 3, prefix)) == held(cache)
    shared = held(cache).codes < storage.memory(Workload(60, 3)).codes
    assert shared == (family == "llama" and prefix >= FIRST_PAGE)


@pytest.fixture(scope="module")
def llama_70b():
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=131_072, dtype="bfloat16",
    )  # fmt: skip
    return Architecture.of(config)


def test_llama_3_70b_takes_40_gib_at_128k(llama_70b):
    workload = Workload(parse_tokens("context", "128k"), 1)
    (term,) = equation(llama_70b, workload)
    assert term.size == 40 * 2**30 == Storage.of(llama_70b, None).memory(workload).total
    factors = "2 x 80 layers x 8 KV heads x head_dim 128 x 2 bytes x 131,072 tokens x batch 1"
    assert str(term) == factors
    assert f"{factors} = 40.00 GiB" in report.printed(make_plan("70B", llama_70b, workload))
    assert term.size // workload.tokens == 327_680


def test_weights_are_those_of_the_model(llama_70b):
    assert llama_70b.num_weights == 70_553_706_496  # as its model card says: 70.6 B
    tied = tiny_config("gemma3_text")
    model = tiny_model("gemma3_text", "sdpa")
    assert Architecture.of(tied).num_weights == sum(weight.numel() for weight in model.parameters())


def test_layers_of_every_kind():
    gemma = architecture_of("gemma3_text").layers
    assert [(layer.kind, layer.window) for layer in gemma] == [("sliding-window", 32), ("full attention", None)]
    latent = architecture_of("deepseek_v3").layers[0]
    if latent.key.heads == 1:  # since transformers 5.15
        assert (latent.key, latent.value) == (Heads(1, 32), Heads(1, 8))
    linear = architecture_of("qwen3_next").layers[0]
    assert linear.key is None
    assert linear.state_bytes > 0 == linear.state_token_bytes
    sharing = architecture_of("gemma3n_text").layers
    assert sum(layer.token_bytes > 0 for layer in sharing) == 2
    assert len(sharing) == (4 if EMPTY_LAYERS else len(sharing))


def storage_of(layers, bits, device_type="cpu"):
    quant = None if bits is None else QuantConfig.preset(bits, **SMALL_PAGES, quantize_sliding=True)
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    config.sliding_window = layers[0].window
    return Storage.of(Architecture(config, torch.float16, layers, 0), quant, device_type)


@settings(max_examples=200, deadline=None)
@given(
    bits=st.sampled_from(CHOICES),
    batch=st.integers(1, 4),
    window=st.integers(2, 60),
    shared=st.integers(0, 90),
    tokens=st.integers(1, 110),
    some=st.integers(1, 150),
    more=st.sampled_from((-1, 0, 1, 1000)),
)
def test_one_more_token_or_row_would_not_fit(bits, batch, window, shared, tokens, some, more):
    storage = storage_of((replace(LAYER, kind="sliding-window", window=window), LAYER), bits)

    def peak(tokens, rows):
        sizes = (storage.memory(Workload(length, rows, shared)).total for length in range(1, tokens + 1))
        return max(sizes, default=0)

    workload = Workload(tokens, batch, shared)
    budget = storage.memory(workload._replace(tokens=some)).total + more
    context, rows = largest_context(storage, workload, budget), largest_batch(storage, workload, budget)
    assert peak(context, batch) <= budget < peak(context + 1, batch)
    assert rows == 0 or peak(tokens, rows) <= budget
    assert budget < peak(tokens, rows + 1)


def test_a_cache_that_does_not_grow_fits_any_context():
    layers = (replace(LAYER, kind="sliding-window", window=32), LayerShape("dummy", torch.float16))
    storage = storage_of(layers, None)
    enough = storage.memory(Workload(32, 1)).total
    assert largest_context(storage, Workload(1, 1), enough) is None
    assert largest_context(storage, Workload(1, 1), enough - 1) == 30
    assert largest_batch(storage, Workload(1000, 1), 3 * enough) == 3


@pytest.mark.parametrize(
    ("text", "tokens"), [("131072", 131_072), ("128k", 131_072), ("1M", 2**20), ("0.5k", 512), ("32K", 32_768)]
)
def test_tokens(text, tokens):
    assert parse_tokens("context", text) == tokens


@pytest.mark.parametrize("text", ["", "0", "k", "128g", "-1", "1.5", "128 kk", "1e3", "\u00b2"])
def test_wrong_tokens(text):
    with pytest.raises(EvalError, match=r"^context .* is not a number of tokens; write"):
        parse_tokens("context", text)


def test_bytes():
    assert parse_bytes("weights", "80GB") == 80 * 10**9
    assert parse_bytes("weights", "40GiB") == 40 * 2**30
    assert parse_bytes("weights", "1.5 TB") == 15 * 10**11
    assert parse_share("reserve", "10%", 80) == 8
    assert parse_share("reserve", "0%", 80) == 0
    assert parse_share("reserve", "4GiB", 80) == 4 * 2**30
    assert [format_bytes(size) for size in (0, 1023, 1024, 40 * 2**30)] == ["0 B", "1023 B", "1.00 KiB", "40.00 GiB"]


@pytest.mark.parametrize("text", ["80", "80G", "80gb", "GB", "-80GB", "0GB", "80GBs"])
def test_wrong_bytes(text):
    with pytest.raises(EvalError, match=r"^gpu-memory .* is not a size; write"):
        parse_bytes("gpu-memory", text)


@pytest.mark.parametrize(
    ("workload", "left", "expected"),
    [
        ("retrieval", 45, "full precision fits"),
        ("retrieval", 30, "8 fits"),
        ("retrieval", 12, "4 fits"),
        ("retrieval", 9, "nothing that suits fits 131,072 tokens at batch 1; 4 fits up to"),
        ("chat", 45, "4 fits"),
        ("chat", 9, "4,2 fits"),
        ("agents", 45, "8 fits and suits, since many requests begin with the same tokens"),
        ("agents", 0, "nothing fits, since weights and reserve take all"),
    ],
)
def test_advice_is_what_fits_and_suits(llama_70b, workload, left, expected):
    budget = Budget(left * 2**30, 0, 0)
    plan = make_plan("70B", llama_70b, Workload(131_072, 1), budget=budget)
    found = advice.advise(plan, workload)
    assert found.startswith(f"{workload}: {expected}")
    assert "\n" not in found
    assert ("(give --shared-prefix to count it so)" in found) == (workload == "agents" and left > 0)


def test_advice_without_memory(llama_70b):
    plan = make_plan("70B", llama_70b, Workload(1000, 1))
    assert advice.advise(plan, "chat").startswith("chat: 4 or 4,2, the first that fits, since ")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("jetmoe", "what its layers keep cannot be told without data: "),
        ("t5", "it has an encoder, whose states are cached as well"),
        ("bart", "it has an encoder"),
    ],
)
def test_models_that_cannot_be_planned_for_are_refused(family, reason):
    with pytest.raises(EvalError, match=f"^a {family} model cannot be planned for: {reason}"):
        Architecture.of(tiny_config(family))


def test_of_a_model_that_cannot_be_built_the_text_part_counts(monkeypatch):
    whole = Gemma3Config(text_config=tiny_config("gemma3_text"), vision_config={"num_hidden_layers": 1})
    assert Architecture.of(whole, torch.float32).layers == architecture_of("gemma3_text").layers

    def fail(*args, **kwargs):
        raise ImportError("it requires timm\nmore")

    monkeypatch.setattr("transformers.Gemma3ForConditionalGeneration.__init__", fail)
    found = Architecture.of(whole, torch.float32)
    assert found.layers == architecture_of("gemma3_text").layers
    assert found.num_weights == architecture_of("gemma3_text").num_weights
    assert found.notes == ("only the text part is counted, since the whole model cannot be built: it requires timm",)


def test_a_dtype_that_is_not_stated_is_assumed():
    found = Architecture.of(tiny_config("llama"))
    assert found.dtype == torch.bfloat16
    assert found.notes == ("the configuration states no dtype; bfloat16 is assumed",)
    quantized = tiny_config("llama")
    quantized.quantization_config = {"quant_method": "fp8"}
    assert "give their size with --weights" in Architecture.of(quantized, torch.float16).notes[0]


def plan(*arguments):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments))


def test_table_and_json(tiny_folder, tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["--context", "1k", "--batch", "4", "--gpu-memory", "1GB", "--workload", "chat", "--json", str(path)]
    assert plan(tiny_folder, *arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "2 x 2 layers x 2 KV heads x head_dim 16 x 4 bytes x 1,024 tokens x batch 4 = 2.00 MiB" in out
    assert "\nAdvice: chat: 4 fits" in out
    found = json.loads(path.read_text())
    assert [row["label"] for row in found["options"]] == [option.label_of(bits) for bits in CHOICES]
    assert found["options"][0]["memory"]["total"] == found["equation"][0]["size"] == 2 * 2**20
    assert found["budget"]["left"] == 10**9 - found["weights"]["bytes"] - 10**8
    for row in found["options"]:
        assert row["label"] in out
        assert f"{row['largest_context']:,}" in out


def test_sizes_only(tiny_folder, capsys):
    assert plan(tiny_folder, "--context", "2k", "--dtype", "bfloat16", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "largest context" not in out
    assert "Note: the model was made for contexts of up to 1,024 tokens." in out
    assert "2 bytes x 2,048 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "128q"], "context '128q' is not a number of tokens"),
        (["--batch", "0"], "batch '0' is not a positive whole number"),
        (["--gpu-memory", "80"], "gpu-memory '80' is not a size; write 80GB"),
        (["--gpu-memory", "80GB", "--weights", "x"], "weights 'x' is not a size"),
        (["--gpu-memory", "80GB", "--reserve", "101%"], "reserve '101%' is neither a percentage nor a size"),
        (["--weights", "1GB"], "weights are of use only with gpu-memory"),
        (["--dtype", "int8"], "dtype 'int8' is not supported; use one of bfloat16"),
        (["--context", "1k", "--shared-prefix", "2k"], "shared-prefix '2k' is longer than context '1k'"),
        (["--json", "/nowhere/plan.json"], "json '/nowhere/plan.json' cannot be written"),
    ],
)
def test_mistakes_are_told_in_one_line(tiny_folder, arguments, message, capsys):
    assert plan(tiny_folder, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvquant plan: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("model", ["/nowhere/at/all", "/nowhere/model.gguf", ""])
def test_a_missing_model_is_told_in_one_line(model, capsys):
    assert plan(model) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"kvquant plan: model {model!r} cannot be loaded")
    assert err.count("\n") == 1


def test_the_arguments_load_no_models_code():
    code = "import sys, kvquant_evals.plan.verb; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
