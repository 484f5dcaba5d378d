"""Which bytes carry the entries? One format a file."""

from lightning_sparse.codecs.quantized import Quantized
from lightning_sparse.codecs.raw import Raw

__all__ = ["Quantized", "Raw"]
