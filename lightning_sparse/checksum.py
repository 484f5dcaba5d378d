"""Checksums: are the weights of a module bit-equal on all ranks?"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn


def checksum(module: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters, in the order of ``named_parameters``."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(name.encode())
        flat = parameter.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def ranks_equal(module: nn.Module) -> bool:
    """Whether all ranks hold the same parameters, bit for bit. Every rank calls it; True without process group."""
    if not dist.is_initialized():
        return True
    sums: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, checksum(module))
    return len(set(sums)) == 1
