"""Triton's interpreter made right for small floats, which it keeps as bit patterns and computes with as such.

Of triton 3.6 to 3.9: bfloat16 arithmetic and products take bits for integers, casts to bfloat16 truncate, casts to FP8
lose carries. Here casts go through torch, and arithmetic on such numbers through float32.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_AS_BITS = (tl.float8e4nv, tl.float8e5, tl.bfloat16)
_ON_BITS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
_Handle = interpreter.TensorHandle


def _numbers(handle):
    """The data of a handle as a torch tensor of its dtype."""
    data, dtype = np.ascontiguousarray(handle.data), handle.dtype.scalar
    if dtype not in _AS_BITS:
        return torch.from_numpy(data)
    return torch.from_numpy(data.view(np.uint8 if data.itemsize == 1 else np.int16)).view(_TORCH[dtype])


def _handle(numbers, dtype):
    if dtype not in _AS_BITS:
        return _Handle(numbers.numpy(), dtype)
    bits = numbers.view(torch.uint8 if numbers.element_size() == 1 else torch.int16).numpy()
    return _Handle(bits.view(interpreter._get_np_dtype(dtype)), dtype)


def _cast(handle, dtype):
    """A float handle as another float dtype, rounded to nearest even; FP8 e4m3 saturates, as the hardware's cast."""
    numbers = _numbers(handle)
    if dtype == tl.float8e4nv:
        numbers = numbers.float().clamp(-448.0, 448.0)
    return _handle(numbers.to(_TORCH[dtype]).reshape(handle.data.shape), dtype)


def _widened(handle):
    return _cast(handle, tl.float32) if handle.dtype.scalar in _AS_BITS else handle


def _narrowed(data, dtype):
    return _cast(_Handle(np.asarray(data, dtype=np.float32), tl.float32), dtype)


def install() -> None:
    """Repairs the interpreter of this process; once is enough."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "is_repaired", False):
        return
    cast, binary, unary, dot = builder.cast_impl, builder.binary_op, builder.unary_op, builder.create_dot

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or (source not in _AS_BITS and target not in (*_AS_BITS, tl.float16)):
            return cast(self, src, dst_type)
        if source in _TORCH and target in _TORCH:
            return _cast(src, target)
        if target in _AS_BITS:  # from an integer
            return _narrowed(src.data, target)
        return cast(self, _widened(src), dst_type)

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar not in _AS_BITS or op in _ON_BITS:
            return binary(self, lhs, rhs, op)
        data = binary(self, _widened(lhs), _widened(rhs), op).data
        return _Handle(data, lhs.dtype.scalar) if data.dtype == np.bool_ else _narrowed(data, lhs.dtype.scalar)

    def unary_op(self, arg, op):
        if arg.dtype.scalar not in _AS_BITS:
            return unary(self, arg, op)
        return _narrowed(op(_widened(arg).data), arg.dtype.scalar)

    def create_dot(self, a, b, d, *options):
        return dot(self, _widened(a), _widened(b), d, *options)

    builder.cast_impl, builder.binary_op, builder.unary_op, builder.create_dot = (
        cast_impl,
        binary_op,
        unary_op,
        create_dot,
    )
    builder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: _cast(src, dst_type.scalar)
    _refuse_reductions()
    _let_tensors_index()
    builder.is_repaired = True


def _refuse_reductions() -> None:
    """Reductions of what is kept as bits would be wrong, and no kernel of ours needs them."""

    def refusing(reduce):
        def checked(self, data, *args, **options):
            first = data[0] if isinstance(data, tuple) else data
            if first.dtype.scalar in _AS_BITS:
                raise NotImplementedError(f"a reduction in {first.dtype.scalar}; widen it to float32 first")
            return reduce(self, data, *args, **options)

        return checked

    interpreter.ReduceOps.sum = refusing(interpreter.ReduceOps.sum)
    interpreter.ReduceOps.min_max = refusing(interpreter.ReduceOps.min_max)


def _let_tensors_index() -> None:
    """Bounds of loops are tensors of one element, which numpy 2.4 and later no longer takes for numbers."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9):
        return
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, *options):
        patch(tensor, *options)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_lang_tensor
