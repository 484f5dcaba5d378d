"""Which entries of the accumulator are sent? One algorithm a file."""

from lightning_sparse.compressors.sampled_top_k import SampledTopK
from lightning_sparse.compressors.top_k import TopK
from lightning_sparse.compressors.weight_blocks import WeightBlocks

__all__ = ["SampledTopK", "TopK", "WeightBlocks"]
