"""Triton functions and what launches them, one file per operation. Shared pieces are in tiles.py."""
