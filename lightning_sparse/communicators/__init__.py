"""How do ranks average? One exchange a file."""

from lightning_sparse.communicators.all_gather import AllGather
from lightning_sparse.communicators.checked import Checked
from lightning_sparse.communicators.compressed_all_reduce import CompressedAllReduce
from lightning_sparse.communicators.process_group import ProcessGroup
from lightning_sparse.communicators.virtual_ranks import VirtualRanks

__all__ = ["AllGather", "Checked", "CompressedAllReduce", "ProcessGroup", "VirtualRanks"]
