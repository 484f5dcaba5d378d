"""What is exchanged, and when do ranks meet? One way a file."""

from lightning_sparse.sync.gradients import Gradients
from lightning_sparse.sync.updates import Updates

__all__ = ["Gradients", "Updates"]
