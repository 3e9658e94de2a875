"""Kernels for CPUs: a plain C++ library over ctypes."""
