"""Bytes that a collective moves: sent + received by one rank."""

from __future__ import annotations


def ring_bytes(nbytes: int, world_size: int) -> int:
    """When a ring all-reduce moves a buffer of ``nbytes`` bytes."""
    return 4 * (world_size - 1) * nbytes // world_size


def gather_bytes(nbytes: int, world_size: int) -> int:
    """When every rank sends ``nbytes`` bytes to every other."""
    return 2 * (world_size - 1) * nbytes


def broadcast_bytes(nbytes: int, world_size: int, rank: int) -> int:
    """When rank 0 sends ``nbytes`` bytes to every other."""
    return (world_size - 1) * nbytes if rank == 0 else nbytes
