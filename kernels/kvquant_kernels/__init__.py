"""Kernels that read packed pages. Optional: kvquant is complete without them."""
