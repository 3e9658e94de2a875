"""What a file holds of a layer gives the layer back, bit for bit, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from contents import SMALL_PAGES, TOKENS, assert_same, attention, bits, content, fill, random_states, small_cache
from families import tiny_config
from native import has_library
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import EncoderDecoderCache

from kvquant import FORMATS, QuantCache, QuantConfig, QuantLayer, storage
from kvquant.layout import PlainLayout

VERSION_1 = Path(__file__).parent / "data" / "cache_v1.safetensors"


def saved_and_loaded(cache, path, **options):
    cache.save(path)
    return QuantCache.load(path, **options)


class TestRoundTrip:
    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    @pytest.mark.parametrize("dims", [(64, 64), (40, 24)], ids=str)
    def test_every_format(self, fmt, dims, path):
        cache = fill(QuantCache(quant=QuantConfig(key=fmt, value=fmt, **SMALL_PAGES)), dims=dims)
        assert_same(saved_and_loaded(cache, path), cache)

    @pytest.mark.parametrize("width", [16, 8, 4, 3, 2, "fp8", (8, 4), (4, 2)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_every_preset_and_dtype(self, width, dtype, path):
        cache = fill(QuantCache(bits=width, **SMALL_PAGES), dtype=dtype)
        assert_same(saved_and_loaded(cache, path), cache)

    @pytest.mark.parametrize(
        "options",
        [{"sinks": 0}, {"residual_length": 0}, {"rotation": False}, {"max_length": 1000}, {"clip": True}],
        ids=str,
    )
    def test_every_option(self, options, path):
        cache = fill(QuantCache(bits=4, **(SMALL_PAGES | options)))
        assert_same(saved_and_loaded(cache, path), cache)

    @pytest.mark.parametrize("tokens", [1, 5, 38, 39, 40, 71])
    def test_few_tokens(self, tokens, path):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES), tokens)
        cache.save(path)
        assert content(QuantCache.load(path)) == content(cache)

    def test_keys_and_values_may_differ_in_dtype(self, path):
        cache = QuantCache(bits=(4, 16), **SMALL_PAGES)
        cache.update(random_states(2, TOKENS), random_states(2, TOKENS, 24, dtype=torch.bfloat16), 0)
        assert_same(saved_and_loaded(cache, path), cache)

    def test_numbers_that_are_none(self, path):
        states = random_states(2, TOKENS)
        states[0, 0, 50, 3] = torch.nan
        states[1, 1, 60, 3] = torch.inf
        for width in (4, 16):
            cache = QuantCache(bits=width, **SMALL_PAGES)
            cache.update(states, states, 0)
            cache.save(path)
            assert content(QuantCache.load(path)) == content(cache)

    def test_layers_with_formats_of_their_own(self, path):
        cache = QuantCache(bits=4, **SMALL_PAGES)
        cache.layers = [QuantLayer(QuantConfig.preset(width, **SMALL_PAGES)) for width in (8, 2)]
        assert_same(saved_and_loaded(fill(cache), path), cache)

    def test_a_chunk_that_waits_is_settled(self, path):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES))
        assert cache.layers[1].states.snapshot().chunk.num_tokens == TOKENS
        cache.save(path)
        assert cache.layers[1].states.snapshot().chunk.num_tokens == 0
        assert QuantCache.load(path).memory().codes == cache.memory().codes > 0

    def test_keys_that_are_the_values_and_need_gradients(self, path):
        cache, states = QuantCache(bits=4, **SMALL_PAGES), random_states(2, 50).requires_grad_() * 2
        cache.update(states, states, 0)
        assert content(saved_and_loaded(cache, path)) == content(cache)

    @pytest.mark.parametrize("started", [False, True])
    def test_a_cache_without_tokens(self, started, path):
        cache = QuantCache(bits=4, config=tiny_config("llama"))
        if started:
            cache.early_initialization(2, 2, 64, torch.bfloat16, torch.device("cpu"))
        loaded = saved_and_loaded(cache, path, config=tiny_config("llama") if not started else None)
        assert [type(layer) for layer in loaded.layers] == [QuantLayer] * 2
        assert loaded.is_initialized == started
        assert fill(loaded, dtype=torch.bfloat16).get_seq_length() == TOKENS

    def test_a_cache_without_layers_takes_some(self, path):
        assert len(fill(saved_and_loaded(QuantCache(bits=4), path)).layers) == 2

    def test_a_batch_of_no_rows(self, path):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES), rows=0)
        assert content(saved_and_loaded(cache, path)) == content(cache)

    def test_rows_share_their_pages(self, path):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES))
        cache.batch_repeat_interleave(3)
        cache.crop(-60)
        cache.batch_select_indices(torch.tensor([1, 5, 0]))
        loaded = saved_and_loaded(cache, path)
        with safe_open(path, "pt") as file:
            assert file.get_slice("layers.0.pages").get_shape()[0] == 2 * ((TOKENS - 60 - 2) // 32)
        rows = loaded.layers[0].states.snapshot().rows
        assert rows[0].pages == rows[2].pages  # the same objects
        for each in (loaded, cache):
            each.batch_select_indices(torch.tensor([2, 1]))
        assert_same(loaded, cache)

    def test_what_is_loaded_is_saved_to_the_same_bytes(self, path, tmp_path):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES))
        saved_and_loaded(cache, path).save(tmp_path / "again")
        cache.save(tmp_path / "twice")
        assert path.read_bytes() == (tmp_path / "again").read_bytes() == (tmp_path / "twice").read_bytes()

    def test_the_size_is_that_of_the_memory(self, path):
        cache = fill(QuantCache(bits=4), tokens=4000)
        cache.save(path)
        # Beside the header, layouts differ in what they leave empty between parts of a page.
        assert path.stat().st_size == pytest.approx(cache.memory().total, rel=0.02)

    def test_both_halves_of_an_encoder_decoder_cache(self, path, tmp_path):
        halves = [fill(QuantCache(bits=4, **SMALL_PAGES), tokens) for tokens in (50, 70)]
        both = EncoderDecoderCache(*(saved_and_loaded(half, path) for half in halves))
        assert both.get_seq_length() == 50
        assert both.is_updated == {0: True, 1: True}


class TestElsewhere:
    @pytest.mark.parametrize("width", [8, 4, 2, "fp8"])
    def test_pages_take_the_layout_of_the_kernels_that_are_there(self, width, path, monkeypatch):
        caches = {}
        for here in ("on", "off"):
            monkeypatch.setenv("KVQUANT_KERNELS", here)
            torch.manual_seed(0)
            caches[here] = fill(QuantCache(bits=width, **SMALL_PAGES | {"page_size": 64}), dtype=torch.bfloat16)
            caches[here].layers[1].settle()
        for here, there in (("on", "off"), ("off", "on"), ("on", "on")):
            monkeypatch.setenv("KVQUANT_KERNELS", here)
            caches[here].save(path)
            monkeypatch.setenv("KVQUANT_KERNELS", there)
            loaded = QuantCache.load(path)
            is_plain = [isinstance(layer.states.snapshot().layout, PlainLayout) for layer in loaded.layers]
            assert is_plain == [there == "off" or not has_library] * 2
            assert content(loaded) == content(caches[there])
            assert_same(loaded, QuantCache.load(path))

    def test_another_number_of_threads(self, path):
        fill(QuantCache(bits=4, **SMALL_PAGES)).save(path)
        outs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(attention(QuantCache.load(path)))
        torch.set_num_threads(1)
        assert [bits(out) for out in outs[0]] == [bits(out) for out in outs[1]]

    def test_a_cache_loaded_in_inference_mode_goes_on_outside(self, path):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES))
        with torch.inference_mode():
            loaded = saved_and_loaded(cache, path)
        assert_same(loaded, cache)

    def test_what_was_loaded_in_inference_mode_can_take_part_in_gradients(self, path):
        with torch.inference_mode():
            loaded = saved_and_loaded(small_cache(), path)
        held = [*loaded.layers[0].states.snapshot().sinks, loaded.layers[1].keys, loaded.layers[1].values]
        assert not any(x.is_inference() for x in held)

    def test_the_file_may_be_replaced_while_the_cache_lives(self, path):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES))
        loaded = saved_and_loaded(cache, path)
        path.write_bytes(bytes(path.stat().st_size))
        assert_same(loaded, cache)

    def test_files_of_version_1_stay_readable(self, path):
        cache = version_1()
        assert content(QuantCache.load(VERSION_1)) == content(cache)
        cache.save(path)
        assert path.read_bytes() == VERSION_1.read_bytes()


def version_1():
    """A cache of numbers that every machine computes alike. VERSION_1 is what it was first saved to."""
    cache = QuantCache(bits=(4, 2), sinks=1, residual_length=3, page_size=8, clip=False)
    states = ((torch.arange(2 * 2 * 23 * 16) * 37 % 101 - 50) / 16).view(2, 2, 23, 16)
    cache.update(states, -states, 0)
    cache.reorder_cache(torch.tensor([0, 0]))
    return cache


def rewrite(path, edit):
    """Edits the description and the tensors of a file, which gets the right checksum: written wrongly, not damaged."""
    with safe_open(path, "pt") as file:
        entry = file.metadata()["kvquant"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    description = json.loads(entry.split(" ", 2)[2])
    edited = edit(description, tensors)
    text = edited if isinstance(edited, str) else json.dumps(description)
    save_file(tensors, path, {"kvquant": f"1 {storage._checksum(text, tensors)} {text}"})


def put(name, change):
    def edit(description, tensors):
        tensors[f"layers.0.{name}"] = change(tensors[f"layers.0.{name}"])

    return edit


def describe(change, layer=0):
    def edit(description, tensors):
        change(description["layers"][layer])

    return edit


def first_is(number):
    return lambda x: torch.cat((torch.tensor([number], dtype=x.dtype), x[1:]))


class TestFilesWrittenWrongly:
    """Their checksum is right, so that only the checks of the content are left."""

    def refuses(self, path, edit, pattern):
        small_cache().save(path)
        rewrite(path, edit)
        with pytest.raises(ValueError, match=f"prefix.safetensors cannot be loaded: {pattern}"):
            QuantCache.load(path)

    def test_rewriting_alone_does_no_harm(self, path):
        small_cache().save(path)
        before = path.read_bytes()
        rewrite(path, lambda description, tensors: None)
        assert path.read_bytes() == before

    def test_every_tensor_is_needed_and_of_one_dtype_and_shape(self, path):
        small_cache().save(path)
        with safe_open(path, "pt") as file:
            names = list(file.keys())
        assert len(names) == 10
        for name in names:
            label = f"layer {name[7]}: tensor {name[9:]}"
            self.refuses(path, lambda _, tensors, name=name: tensors.__delitem__(name), f"{label} is missing")
            for change in (
                lambda x: x.to(torch.int64),
                lambda x: x.flatten()[:-1].clone(),
                lambda x: x[None].clone(),
                lambda x: x[..., :-1].clone(),
            ):

                def edit(_, tensors, name=name, change=change):
                    tensors[name] = change(tensors[name])

                self.refuses(path, edit, "layer [01]: ")

    @pytest.mark.parametrize(
        ("edit", "pattern"),
        [
            (put("page_table", first_is(6)), "layer 0: its page table does not name each of 6 pages, and no other"),
            (put("page_table", first_is(-1)), "layer 0: its page table does not name each of 6 pages"),
            (put("page_table", first_is(2**31 - 1)), "layer 0: its page table does not name"),
            (put("page_table", lambda x: x * 0), "layer 0: its page table does not name"),
            (put("starts", first_is(-1)), "layer 0: a row that starts at column -1 and has 3 pages does not fit 30"),
            (put("starts", first_is(30)), "layer 0: a row that starts at column 30 and has 3 pages does not fit 30"),
            (put("num_pages", lambda x: torch.tensor([-1, 7, 3, 3], dtype=x.dtype)), "layer 0: a row .* has -1 pages"),
            (describe(lambda plain: plain.update(tokens=31)), "layer 0: a tail of 4 tokens does not fit rows"),
            (describe(lambda plain: plain.update(tokens=-1)), "layer 0: tokens=-1 in its description is not between"),
            (describe(lambda plain: plain.update(tokens=2**40)), "layer 0: tokens=1099511627776 in its"),
            (describe(lambda plain: plain.update(tokens=30.0)), "layer 0: tokens=30.0 in its .* type int"),
            (describe(lambda plain: plain.update(kind="x")), "layer 0: its kind 'x' is none of packed, packed_sliding"),
            (describe(lambda plain: plain.update(kind=["x"])), "layer 0: kind=.* is not of type str"),
            (describe(lambda plain: plain.clear()), "layer 0: kind=None in its description is not of type str"),
            (describe(lambda plain: plain.update(is_initialized=1)), "layer 0: is_initialized=1 in its description"),
            (describe(lambda plain: plain.update(is_initialized=False)), "layer 0: tensors .* belong to nothing"),
            (describe(lambda plain: plain["key"].update(heads=3)), "layer 0: tensor tail.key is torch.bfloat16"),
            (describe(lambda plain: plain["key"].update(dtype="int4")), "layer 0: the dtype 'int4' of its key"),
            (describe(lambda plain: plain["value"].pop("head_dim")), "layer 0: head_dim=None in its description"),
            (describe(lambda plain: plain["quant"].update(page_size=7)), "layer 0: page_size=7 must be at least 8"),
            (describe(lambda plain: plain["quant"].update(page_size="8")), "layer 0: quant=.* is no configuration"),
            (describe(lambda plain: plain["quant"].update(sinks=1)), "layer 0: a tail of 4 tokens does not fit rows"),
            (describe(lambda plain: plain["quant"].update(new=1)), "layer 0: unknown fields of QuantConfig: new"),
            (describe(lambda plain: plain["quant"].pop("key")), "layer 0: quant=.* KeyError"),
            (describe(lambda plain: plain["quant"]["key"].update(name="int9")), "layer 0: format name='int9' is unkn"),
            (describe(lambda plain: plain["quant"]["key"].update(group_size=8.0)), "layer 0: quant=.* TypeError"),
            (describe(lambda plain: plain["quant"]["value"].update(clip=5)), "layer 0: quant=.* TypeError"),
            (describe(lambda plain: plain.update(tokens=29), 1), "layer 1: tensor states.key is torch.bfloat16"),
            (describe(lambda plain: plain.update(kind="sliding"), 1), "layer 1: sliding_window=None in its descr"),
            (lambda description, _: description.update(quant=None), "quant=None in its .* type dict"),
            (lambda description, _: description.update(layers={}), "layers={} in its .* type list"),
            (lambda description, _: description.update(layers=[1, 2]), "layer 0: kind=None in its description"),
            (lambda description, _: description["layers"].pop() and None, "tensors layers.1.* belong to nothing"),
            (lambda _, tensors: tensors.update(more=torch.zeros(1)), "tensors more belong to nothing"),
            (lambda *_: "[1]", "quant=None in its .* type dict"),
            (lambda *_: "{", "Expecting property name"),
            (lambda *_: "[" * 100_000, "its description is nested too deeply"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_together(self, edit, pattern, path):
        self.refuses(path, edit, pattern)

    def test_tensors_of_dtypes_that_no_cache_has(self, path):
        for dtype, size in (("C64", 8), ("BOOL", 1), ("F8_E4M3", 1), ("F8_E8M0", 1), ("U64", 8), ("F4", 1)):
            header = json.dumps(
                {
                    "__metadata__": {"kvquant": "1 0 {}"},
                    "x": {"dtype": dtype, "shape": [2 if dtype == "F4" else 1], "data_offsets": [0, size]},
                }
            ).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
            with pytest.raises(ValueError, match=r"prefix.safetensors cannot be loaded: "):
                QuantCache.load(path)
