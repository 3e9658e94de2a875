"""The lazy tensor that carries a layer's states from the cache to attention.

It has the shape, dtype and device of the keys or values, and no storage. Attention on a pair of them reads the packed
states; any other operation on one gets a dequantized tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from kvquant.attention import AttentionCall, attend
from kvquant.padding import row_starts
from kvquant.snapshot import Snapshot
from kvquant.states import LayerStates


class LazyStates(Tensor):
    """Keys (part 0) or values (part 1) of a snapshot, not dequantized yet.

    shape: [B, Hkv * n_rep, T, D], each KV head repeated n_rep times for its query heads; while a model is between the
    steps of repeat_kv, [B, Hkv, n_rep, T, D].
    """

    # Slots, since every layer of every step makes two of these. Models ask for the public ones several times per layer,
    # which would otherwise take a detour through __torch_function__.
    __slots__ = ("_is_grouped", "_n_rep", "_part", "_snapshot", "_states", "device", "dtype", "shape")

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    _states: LayerStates
    _snapshot: Snapshot
    _part: int
    _n_rep: int
    _is_grouped: bool

    @staticmethod
    def __new__(
        cls, states: LayerStates, snapshot: Snapshot, part: int, n_rep: int = 1, is_grouped: bool = False
    ) -> LazyStates:
        like = snapshot.chunk[part]
        dtype, device, (batch, heads, _, dim) = like.dtype, like.device, like.shape
        tokens = snapshot.visible_len
        shape = (batch, heads, n_rep, tokens, dim) if is_grouped else (batch, heads * n_rep, tokens, dim)
        lazy: LazyStates = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        lazy.shape, lazy.dtype, lazy.device = torch.Size(shape), dtype, device
        lazy._states, lazy._snapshot, lazy._part = states, snapshot, part
        lazy._n_rep, lazy._is_grouped = n_rep, is_grouped
        return lazy

    def materialize(self) -> Tensor:
        """The dequantized tensor of the same shape and dtype."""
        full = self._snapshot.columns(self._part)
        if self._n_rep > 1 or self._is_grouped:
            full = full.unsqueeze(2).expand(-1, -1, self._n_rep, -1, -1)
        return full if self._is_grouped or self._n_rep == 1 else full.flatten(1, 2)

    def _repeated(self, n_rep: int, is_grouped: bool) -> LazyStates:
        return LazyStates(self._states, self._snapshot, self._part, n_rep, is_grouped)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **kwargs)
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        step = _REPEAT_STEPS.get(func)
        if step is not None and args and isinstance(args[0], LazyStates) and kwargs.keys() <= {"dim"}:
            lazy = step(*args, **kwargs)
            if lazy is not None:
                return lazy
        _refuse_writing(func, args, kwargs)
        return func(*_materialized(args), **_materialized(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types the base's as a disabled stub
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_materialized(args), **_materialized(kwargs or {}))


def lazy_pair(states: LayerStates, snapshot: Snapshot) -> tuple[LazyStates, LazyStates]:
    return LazyStates(states, snapshot, 0), LazyStates(states, snapshot, 1)


def paired(key: object, value: object) -> tuple[LayerStates, Snapshot] | None:
    """What a lazy key and a lazy value stand for, if they are the two halves of one snapshot."""
    if not isinstance(key, LazyStates) or not isinstance(value, LazyStates):
        return None
    if (key._part, value._part) != (0, 1) or key._snapshot is not value._snapshot:
        return None
    same_form = key._n_rep == value._n_rep and not key._is_grouped and not value._is_grouped
    return (key._states, key._snapshot) if same_form else None


def learn_starts(states: LayerStates, snapshot: Snapshot, mask: Tensor | None) -> None:
    """Moves the chunk that attention has just read into its place, past the left padding that the mask shows.

    Without a mask there is none.
    """
    starts: Sequence[int] = ()
    if states.is_open:
        seen = row_starts(mask, states.batch_size, snapshot.visible_len)
        starts = [0] * states.batch_size if seen is None else [snapshot.hidden + column for column in seen]
    states.settle(snapshot.chunk, starts)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    pair = paired(key, value)
    if pair is None or pair[1].is_exact or dropout_p > 0.0:
        # Nothing is packed: torch's kernel, called as the model called it, so that results are the same to the bit.
        key, value = _materialized((key, value))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        out = attend(pair[1], AttentionCall(query, attn_mask, is_causal, scale))
    if pair is not None:
        learn_starts(*pair, attn_mask)
    return out


def _unsqueezed(lazy: LazyStates, index: Any) -> LazyStates | None:
    """key[:, :, None, :, :], the first step of repeat_kv."""
    everything = slice(None)
    is_repeat = isinstance(index, tuple) and len(index) == 5 and index[2] is None
    is_repeat = is_repeat and all(isinstance(i, slice) and i == everything for i in index[:2] + index[3:])
    is_step = is_repeat and lazy._n_rep == 1 and not lazy._is_grouped
    return lazy._repeated(1, is_grouped=True) if is_step else None


def _expanded(lazy: LazyStates, *sizes: Any) -> LazyStates | None:
    """.expand(B, Hkv, n_rep, T, D), the second step."""
    if not lazy._is_grouped or len(sizes) != 5:
        return None
    shape = lazy.shape
    others_kept = all(sizes[i] in (-1, shape[i]) for i in (0, 1, 3, 4))
    return lazy._repeated(int(sizes[2]), is_grouped=True) if others_kept and lazy._n_rep == 1 else None


def _merged(lazy: LazyStates, *sizes: Any) -> LazyStates | None:
    """.reshape(B, Hkv * n_rep, T, D), the last step."""
    batch, heads, n_rep, tokens, dim = lazy.shape if lazy._is_grouped else (0,) * 5
    is_step = lazy._is_grouped and sizes == (batch, heads * n_rep, tokens, dim)
    return lazy._repeated(n_rep, is_grouped=False) if is_step else None


def _interleaved(lazy: LazyStates, repeats: Any = None, dim: int | None = None) -> LazyStates | None:
    """torch.repeat_interleave(key, n_rep, dim=1), which some models use instead."""
    is_step = isinstance(repeats, int) and repeats > 0 and dim == 1 and lazy._n_rep == 1 and not lazy._is_grouped
    return lazy._repeated(repeats, is_grouped=False) if is_step else None


_REPEAT_STEPS: dict[Any, Callable[..., LazyStates | None]] = {
    Tensor.__getitem__: _unsqueezed,
    Tensor.expand: _expanded,
    Tensor.reshape: _merged,
    torch.repeat_interleave: _interleaved,
    Tensor.repeat_interleave: _interleaved,
}


def _refuse_writing(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises NotImplementedError if `func` would write to a lazy tensor: only an unseen copy would change."""
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if (writes and args and isinstance(args[0], LazyStates)) or isinstance(kwargs.get("out"), LazyStates):
        raise NotImplementedError(f"{name}: keys and values of a QuantCache are read-only; call clone() on them first")


_PROPERTIES = """
    shape device dtype ndim layout requires_grad grad grad_fn is_leaf
    is_cpu is_cuda is_meta is_mps is_nested is_quantized is_sparse is_xpu
""".split()
_METHODS = """
    size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex get_device
    __len__ __hash__
""".split()
_METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS}


def _materialized(tree: Any) -> Any:
    return pytree.tree_map_only(LazyStates, lambda lazy: lazy.materialize(), tree)
