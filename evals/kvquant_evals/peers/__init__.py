"""Caches of others as rows of our evaluation: transformers' own ones, and published layouts in our formats."""
