"""States against an oracle that keeps plain lists of tokens, under every operation in random order."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn import functional as F
from transformers import DynamicCache

from kvquant import FORMATS, QuantCache, QuantConfig
from kvquant.formats import IDENTITY, INT4_PER_TOKEN
from kvquant.layout import PagePart, PlainLayout, StateShape
from kvquant.pages import PagePool
from kvquant.states import LayerStates

HEADS, HEAD_DIM, VALUE_DIM = 2, 8, 12
MAX_TOKENS, MAX_ROWS = 150, 6


def config_for(fmt, **options):
    fields = {"sinks": 2, "residual_length": 5, "page_size": 8} | options
    return QuantConfig(key=fmt, value=fmt, **fields)


class OracleRow:
    """One row as a list of the values its tokens are read as: sealed one page at a time, from the whole history."""

    def __init__(self, config):
        self.config, self.pages, self.tokens = config, 0, ([], [])

    def extend(self, key, value):  # [H, t, D]
        for held, new in zip(self.tokens, (key, value), strict=True):
            held.extend(new.unbind(1))
        size = self.config.page_size
        while len(self.tokens[0]) - self.config.sinks - self.pages * size >= self.config.residual_length + size:
            first = self.config.sinks + self.pages * size
            for part, held in enumerate(self.tokens):
                codec = self.config.codec(part)
                page = torch.stack(held[first : first + size], dim=1)
                held[first : first + size] = codec.restore(codec.decode(codec.encode(page))).unbind(1)
            self.pages += 1

    def crop(self, count):
        keep = max(0, len(self.tokens[0]) - count)
        for held in self.tokens:
            del held[keep:]
        self.pages = min(self.pages, max(0, keep - self.config.sinks) // self.config.page_size)

    def states(self, part):
        like = torch.empty(HEADS, 0, (HEAD_DIM, VALUE_DIM)[part])
        return torch.stack(self.tokens[part], dim=1) if self.tokens[part] else like


class CacheMachine(RuleBasedStateMachine):
    """A one-layer cache, the oracle and DynamicCache do the same. Padding is learned from attention, as in a model."""

    config: QuantConfig

    @initialize(rows=st.integers(1, 3), seed=st.integers(0, 1000))
    def start(self, rows, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.cache, self.exact = QuantCache(quant=self.config), DynamicCache()
        self.rows = [OracleRow(self.config) for _ in range(rows)]
        self.starts = [0] * rows
        self.copies = []

    @property
    def length(self):
        return self.exact.get_seq_length()

    def states(self, tokens, dim):
        x = torch.randn(len(self.rows), HEADS, tokens, dim, generator=self.random)
        x[..., 0] *= 30  # an outlier channel
        return x

    @rule(tokens=st.sampled_from([1, 2, 3, 7, 8, 9, 20, 45]), padding=st.integers(0, 6), attends=st.booleans())
    def update(self, tokens, padding, attends):
        if self.length + tokens > MAX_TOKENS:
            return
        key, value = self.states(tokens, HEAD_DIM), self.states(tokens, VALUE_DIM)
        first_column = self.length
        lazy = self.cache.update(key, value, 0)
        full = self.exact.update(key, value, 0)
        if attends:
            self.attend(lazy, full, tokens, padding)
        for i, row in enumerate(self.rows):
            start = max(0, self.starts[i] - first_column)
            row.extend(key[i, :, start:], value[i, :, start:])

    def attend(self, lazy, full, tokens, padding):
        """An attention call whose mask hides `padding` leading columns of the rows that hold no token yet."""
        starts = list(self.starts)
        for i, row in enumerate(self.rows):
            if not row.tokens[0]:
                starts[i] = min(self.length, self.length - tokens + (padding * (i + 1)) % (tokens + 1))
        mask = torch.arange(self.length) >= torch.tensor(starts)[:, None]
        F.scaled_dot_product_attention(self.states(1, HEAD_DIM), *lazy, attn_mask=mask[:, None, None])
        self.starts = starts

    @rule(count=st.sampled_from([0, 1, 3, 8, 17, 60]))
    def crop(self, count):
        if count >= self.length:
            return
        self.cache.crop(-count)
        self.exact.crop(-count)
        for i, row in enumerate(self.rows):
            row.crop(count)
            self.starts[i] = min(self.starts[i], self.length)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(
            st.lists(st.integers(0, len(self.rows) - 1), min_size=len(self.rows), max_size=len(self.rows))
        )
        for cache in (self.cache, self.exact):
            cache.reorder_cache(torch.tensor(order))
        self.pick(order)

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def select(self, data):
        order = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=MAX_ROWS))
        for cache in (self.cache, self.exact):
            cache.batch_select_indices(torch.tensor(order))
        self.pick(order)

    @precondition(lambda self: self.length and 2 * len(self.rows) <= MAX_ROWS)
    @rule()
    def repeat(self):
        for cache in (self.cache, self.exact):
            cache.batch_repeat_interleave(2)
        self.pick([i // 2 for i in range(2 * len(self.rows))])

    def pick(self, order):
        self.rows = [copy.deepcopy(self.rows[i]) for i in order]
        self.starts = [self.starts[i] for i in order]

    @rule()
    def branch(self):
        """Goes on with a deep copy; the original is kept and must not change."""
        self.copies = [*self.copies[-1:], (self.cache, self.read(self.cache))]
        self.cache = copy.deepcopy(self.cache)

    @rule()
    def reset(self):
        self.cache.reset()
        self.exact.reset()
        self.rows = [OracleRow(self.config) for _ in self.rows]
        self.starts = [0] * len(self.rows)

    def read(self, cache):
        layers = cache.layers
        return (
            [layers[0].keys.materialize(), layers[0].values.materialize()] if layers and cache.get_seq_length() else []
        )

    @invariant()
    def same_length(self):
        if hasattr(self, "cache"):
            assert self.cache.get_seq_length() == self.exact.get_seq_length()
            assert self.cache.get_mask_sizes(3, 0) == self.exact.get_mask_sizes(3, 0)

    @precondition(lambda self: self.length)
    @invariant()
    def same_states(self):
        self.cache.layers[0].settle()
        for part, read in enumerate(self.read(self.cache)):
            exact = (self.exact.layers[0].keys, self.exact.layers[0].values)[part]
            for i, row in enumerate(self.rows):
                assert torch.equal(read[i, :, self.starts[i] :], row.states(part))
                assert (read[i, :, : self.starts[i]] == 0).all()
                if self.config.is_exact:
                    assert torch.equal(read[i, :, self.starts[i] :], exact[i, :, self.starts[i] :])

    @invariant()
    def copies_stay_as_they_were(self):
        for cache, before in getattr(self, "copies", []):
            for read, then in zip(self.read(cache), before, strict=True):
                assert torch.equal(read, then)

    @precondition(lambda self: self.length)
    @invariant()
    def every_page_in_use_is_owned_once(self):
        states = self.cache.layers[0].states.snapshot()
        if states.pool is None:
            return
        used = {page.index for row in states.rows for page in row.pages}
        assert not used & set(states.pool.free_slots)
        assert len(set(states.pool.free_slots)) == len(states.pool.free_slots)


@pytest.mark.parametrize(
    "fmt",
    [pytest.param(fmt, marks=[] if i % 4 == 0 else [pytest.mark.broad]) for i, fmt in enumerate(FORMATS)],
    ids=lambda fmt: fmt.name,
)
def test_every_operation_in_random_order(fmt):
    machine = type("Machine", (CacheMachine,), {"config": config_for(fmt.clipped() if fmt.bits == 2 else fmt)})
    examples = 200 if fmt is IDENTITY else 40
    run = settings(
        max_examples=examples, stateful_step_count=20, deadline=None, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=run)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("options", [{}, {"sinks": 0}, {"residual_length": 0}, {"rotation": False}], ids=str)
def test_streaming_append_equals_one_shot(fmt, options):
    key, value = torch.randn(2, HEADS, 101, HEAD_DIM), torch.randn(2, HEADS, 101, VALUE_DIM)
    config = config_for(fmt, **options)
    at_once, streamed = LayerStates(config, key, value), LayerStates(config, key, value)
    at_once.append(key, value)
    at_once.settle()
    for first, last in ((0, 1), (1, 2), (2, 40), (40, 41), (41, 64), (64, 101)):
        streamed.append(key[:, :, first:last], value[:, :, first:last])
    streamed.settle()
    assert len(at_once.snapshot().rows[0].pages) == (101 - config.sinks - config.residual_length) // 8
    for part in (0, 1):
        assert torch.equal(streamed.snapshot().columns(part), at_once.snapshot().columns(part))


def test_sinks_and_most_recent_tokens_are_exact_and_the_rest_is_not():
    key = torch.randn(1, HEADS, 60, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[-2]), key, key)
    states.append(key, key)
    states.settle()
    changed = (states.snapshot().columns(0) != key).any(dim=-1).any(dim=1)[0]
    pages = (60 - 2 - 5) // 8
    assert changed.tolist() == [False] * 2 + [True] * (8 * pages) + [False] * (60 - 2 - 8 * pages)


def test_the_chunk_itself_is_read_exactly_however_long():
    key = torch.randn(1, HEADS, 100, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    snapshot = states.append(key, key)
    assert torch.equal(snapshot.columns(0), key)
    states.settle()
    assert not torch.equal(states.snapshot().columns(0), key)
    assert torch.equal(snapshot.columns(0), key)


def test_deep_copy_allocates_no_pages_and_both_go_on_alone():
    key = torch.randn(1, HEADS, 100, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    states.append(key, key)
    states.settle()
    other = copy.deepcopy(states)
    pool = states.snapshot().pool
    assert other.snapshot().pool is pool
    used = pool.capacity - len(pool.free_slots)
    assert used == 11
    before = states.snapshot().columns(0)
    other.append(-key, -key)
    other.settle()
    states.append(key[:, :, :1], key[:, :, :1])
    states.settle()
    assert torch.equal(states.snapshot().columns(0)[:, :, :100], before)
    assert torch.equal(other.snapshot().columns(0)[:, :, :90], before[:, :, :90])  # what was sealed before
    del other
    assert pool.capacity - len(pool.free_slots) == used


def test_beam_reorder_writes_no_page():
    key = torch.randn(3, HEADS, 100, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    states.append(key, key)
    states.settle()
    records = states.snapshot().pool.records
    before = records.clone()
    states.select(torch.tensor([2, 2, 0]))
    assert states.snapshot().pool.records is records
    assert torch.equal(records, before)
    pages = [row.pages for row in states.snapshot().rows]
    assert pages[0] is pages[1]


def test_pool_is_allocated_at_once_for_max_length():
    key = torch.randn(2, HEADS, 40, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2], max_length=400), key, key)
    for _ in range(10):
        states.append(key, key)
    states.settle()
    assert states.snapshot().pool.capacity == 2 * 400 // 8


def test_chunk_that_does_not_continue_the_cache_is_refused():
    key = torch.randn(2, HEADS, 4, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    states.append(key, key)
    with pytest.raises(ValueError, match=r"key_states of shape \(1, 2, 4, 8\) and torch.float32 do not continue"):
        states.append(key[:1], key[:1])
    with pytest.raises(ValueError, match=r"value_states .* torch.bfloat16 do not continue"):
        states.append(key, key.to(torch.bfloat16))


def test_after_a_choice_of_rows_a_chunk_of_the_former_batch_is_refused():
    key = torch.randn(2, HEADS, 4, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    states.append(key, key)
    states.select([1])
    with pytest.raises(ValueError, match=r"key_states of shape \(2, 2, 4, 8\) and torch.float32 do not continue"):
        states.append(key, key)
    assert states.append(key[:1], key[:1]).kv_len == 8


def test_states_made_in_inference_mode_can_be_used_outside_it():
    key = torch.randn(1, HEADS, 100, HEAD_DIM)
    with torch.inference_mode():
        inside = key + 0
        states = LayerStates(config_for(FORMATS[2], max_length=1000), inside, inside)
        states.append(inside, inside)
        states.settle()
    states.append(key[:, :, :2], key[:, :, :2])
    states.append(key[:, :, :30], key[:, :, :30])
    states.settle()
    assert states.snapshot().columns(0).shape[2] == 132


def test_keys_and_values_may_differ_in_dtype():
    key, value = torch.randn(1, HEADS, 60, HEAD_DIM), torch.randn(1, HEADS, 60, VALUE_DIM, dtype=torch.bfloat16)
    for pair in ((IDENTITY, IDENTITY), (FORMATS[2], IDENTITY), (IDENTITY, FORMATS[3])):
        config = QuantConfig(key=pair[0], value=pair[1], sinks=2, residual_length=5, page_size=8)
        states = LayerStates(config, key, value)
        states.append(key, value)
        states.settle()
        for part, given in enumerate((key, value)):
            read = states.snapshot().columns(part)
            assert read.dtype == given.dtype
            assert torch.equal(read, given) == pair[part].is_exact


def test_keys_and_values_of_different_lengths_are_refused():
    key, value = torch.randn(1, HEADS, 6, HEAD_DIM), torch.randn(1, HEADS, 5, HEAD_DIM)
    with pytest.raises(ValueError, match="key_states have 6 tokens and value_states 5"):
        LayerStates(config_for(FORMATS[2]), key, value).append(key, value)


def test_group_that_does_not_fit_head_dim_is_refused_at_the_first_token():
    fmt = replace(INT4_PER_TOKEN, group_size=48)
    with pytest.raises(ValueError, match="group_size=48 of format int4_per_token does not divide 8 channels"):
        LayerStates(config_for(fmt), torch.randn(1, HEADS, 1, HEAD_DIM), torch.randn(1, HEADS, 1, HEAD_DIM))


def test_no_rows_can_be_selected():
    key = torch.randn(2, HEADS, 40, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    states.append(key, key)
    states.select([])
    assert states.snapshot().columns(0).shape == (0, HEADS, 40, HEAD_DIM)


def started_at(*positions):
    """Where the rows start that get chunks with these position ids, one list of rows per chunk."""
    rows = len(positions[0])
    key = torch.randn(rows, HEADS, 40, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    for ids in positions:
        states.append(key[:, :, : len(ids[0])], key[:, :, : len(ids[0])], torch.tensor(ids))
    states.settle()
    return [row.start for row in states.snapshot().rows]


def test_position_ids_tell_padding_only_in_a_batch_with_an_unpadded_row():
    assert started_at([[0, 0, 0, 1], [0, 1, 2, 3]]) == [2, 0]
    assert started_at([[0, 0, 0, 1]]) == [0]
    assert started_at([[0, 0, 0, 0], [0, 0, 0, 0]]) == [0, 0]


def test_a_row_of_nothing_but_padding_starts_in_a_later_chunk():
    assert started_at([[0, 0], [0, 1]], [[0, 0], [2, 3]], [[0, 1], [4, 5]]) == [4, 0]
    assert started_at([[0, 0], [0, 1]], [[1, 2], [2, 3]]) == [1, 0]  # its last zero was its first token


def test_many_threads_can_seal_pages_into_one_pool():
    key = torch.randn(1, HEADS, 40, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[0]), key, key)
    states.append(key, key)
    states.settle()
    copies = [copy.deepcopy(states) for _ in range(8)]
    chunks = [torch.randn(1, HEADS, 400, HEAD_DIM) + i for i in range(8)]

    def fill(i):
        for first in range(0, 400, 4):
            chunk = chunks[i][:, :, first : first + 4]
            copies[i].append(chunk, chunk)
            copies[i].settle()

    threads = [threading.Thread(target=fill, args=(i,)) for i in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    for i, (held, chunk) in enumerate(zip(copies, chunks, strict=True)):
        alone = LayerStates(config_for(FORMATS[0]), key, key)
        alone.append(key, key)
        alone.append(chunk, chunk)
        alone.settle()
        assert torch.equal(held.snapshot().columns(0), alone.snapshot().columns(0)), i


def test_pool_grows_geometrically():
    pool = PagePool(PlainLayout(*2 * (PagePart(IDENTITY, StateShape(1, 8, 8)),)), torch.device("cpu"))
    record = torch.zeros(1, pool.layout.page_bytes, dtype=torch.uint8)
    kept, sizes = [], set()
    for _ in range(1000):
        kept += pool.write(record)
        sizes.add(pool.capacity)
    assert len(sizes) < 60  # by an eighth each time, after the first few
    assert pool.capacity <= 1125


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_states_come_back_with_pages_of_their_own(protocol):
    key = torch.randn(1, HEADS, 100, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    states.append(key, key)
    states.settle()
    states.snapshot()  # which states keep
    back = pickle.loads(pickle.dumps(states, protocol))
    assert back.snapshot().pool is not states.snapshot().pool
    assert torch.equal(back.snapshot().columns(0), states.snapshot().columns(0))
    back.append(key, key)
    back.settle()
    assert back.num_seen == 200


def test_what_waits_in_memory_after_prefill_is_not_the_prompt():
    key = torch.randn(1, HEADS, 2000, HEAD_DIM)
    states = LayerStates(config_for(FORMATS[2]), key, key)
    states.append(key, key)
    states.settle()
    held = states.snapshot()
    kept = max(t.untyped_storage().nbytes() for t in (*held.tail, *held.chunk, *held.sinks))
    assert kept <= 4 * HEADS * HEAD_DIM * (2 + 5 + 8)


def test_a_batch_of_no_rows_goes_on():
    states = LayerStates(QuantConfig.preset(4), torch.zeros(0, 2, 1, 64), torch.zeros(0, 2, 1, 64))
    for _ in range(2):
        states.append(torch.zeros(0, 2, 400, 64), torch.zeros(0, 2, 400, 64))
        states.settle()
    assert states.num_seen == 800
    assert states.snapshot().columns(0).shape == (0, 2, 800, 64)


def test_what_was_unpickled_inside_inference_mode_can_be_used_outside():
    states = LayerStates(QuantConfig.preset(4), torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64))
    states.append(torch.randn(1, 2, 400, 64), torch.randn(1, 2, 400, 64))
    states.settle()
    with torch.inference_mode():
        back = pickle.loads(pickle.dumps(states))
    more = torch.randn(1, 2, 200, 64)
    for each in (back, states):
        each.append(more, more)
        each.settle()
    assert torch.equal(back.snapshot().columns(0), states.snapshot().columns(0))
