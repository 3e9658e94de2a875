"""Kernels for GPUs, in Triton. What needs triton to be imported lives in ops/, which is imported when first used."""
