"""kvquant: a packed KV cache for Hugging Face transformers."""

from kvquant.attention import AttentionCall, attend
from kvquant.cache import QuantCache, cache_memory
from kvquant.codec import Quantized, dequantize, quantize
from kvquant.config import QuantConfig
from kvquant.formats import FORMATS, QuantFormat
from kvquant.interface import register
from kvquant.layer import QuantLayer
from kvquant.layout import pack, unpack
from kvquant.memory import MemoryReport
from kvquant.substitution import default
from kvquant.summary import CacheSummary
from kvquant.version import __version__

__all__ = [
    "FORMATS",
    "AttentionCall",
    "CacheSummary",
    "MemoryReport",
    "QuantCache",
    "QuantConfig",
    "QuantFormat",
    "QuantLayer",
    "Quantized",
    "__version__",
    "attend",
    "cache_memory",
    "default",
    "dequantize",
    "pack",
    "quantize",
    "register",
    "unpack",
]
