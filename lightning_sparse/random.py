"""Counter-based random numbers: every draw is a pure function of (seed, step, name), equal on every rank."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_Word = TypeVar("_Word", int, Tensor)


@dataclass(frozen=True)
class Draw:
    """A stream of numbers keyed by (seed, step, name); the same key gives the same numbers everywhere, for ever.

    Source: the 32-bit finaliser of MurmurHash3 (public domain) over a Weyl sequence; the name enters by crc32.

    Example:
        >>> Draw(seed=0, step=1, name="layer.weight").below(10) == Draw(0, 1, "layer.weight").below(10)
        True
    """

    seed: int
    step: int
    name: str

    def bits(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """[count] int64 tensor of integers in [0, 2**32)."""
        position = torch.arange(count, dtype=torch.int64, device=device)
        return _mix((position * 0x9E3779B9 + self._key()) & _MASK)

    def word(self, position: int) -> int:
        """The entry of `bits` at one position, on the host."""
        return _mix((position * 0x9E3779B9 + self._key()) & _MASK)

    def below(self, high: int) -> int:
        """One integer in [0, high), on the host. Raises ValueError if high < 1."""
        if high < 1:
            raise ValueError(f"Draw.below: high must be at least 1, got {high}")
        # two words, so that high may exceed 2**32
        return ((self.word(0) << 32) | self.word(1)) % high

    def _key(self) -> int:
        mixed = 0
        for word in (zlib.crc32(self.name.encode()), self.seed & _MASK, self.step & _MASK):
            mixed = _mix((mixed * 31 + word) & _MASK)
        return mixed


def _mix(x: _Word) -> _Word:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
