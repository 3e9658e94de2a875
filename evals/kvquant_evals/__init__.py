"""Evaluations of a KV cache on a real model, always through the cache. Uses only the public kvquant."""
