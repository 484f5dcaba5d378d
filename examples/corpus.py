"""The text the language model reads: the sources of the Python standard library, as bytes."""

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # others' code, and tests
VALIDATION_SHARE = 10  # one file in ten
VALIDATION_SEED = -1  # no training run has it: windows are the same whatever the run's seed


class Windows(Dataset):
    """Windows of a text; item i starts at an offset drawn from (seed, i) alone, so ranks and restarts agree."""

    def __init__(self, text: Tensor, width: int, seed: int, length: int) -> None:
        if text.numel() <= width:
            raise ValueError(f"Windows expected a text of more than {width} bytes, got {text.numel()}")
        self.text = text  # [n] uint8
        self.width = width
        self.seed = seed
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = offset(self.seed, index) % (self.text.numel() - self.width)
        window = self.text[start : start + self.width + 1].long()  # [width + 1]
        return window[:-1], window[1:]


def files(root: Path) -> list[str]:
    """Relative paths of the library's source files, sorted, without tests and installed packages."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if SKIPPED.isdisjoint(path.parts))


def is_validation(path: str) -> bool:
    """Whether the file with this relative path belongs to the validation text."""
    return zlib.crc32(path.encode()) % VALIDATION_SHARE == 0


def read(root: Path | None = None) -> tuple[Tensor, Tensor]:
    """Returns the training and the validation text, [n] uint8 each."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for path in files(root):
        parts[is_validation(path)] += (root / path).read_bytes()
    return torch.frombuffer(parts[False], dtype=torch.uint8), torch.frombuffer(parts[True], dtype=torch.uint8)


def offset(seed: int, index: int) -> int:
    """A 64-bit hash of (seed, index).

    Source: the SplitMix64 output function (Steele, Lea, Flood 2014), here applied to the seed and then to the index.
    """
    return _mix(_mix(seed) + index)


def _mix(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
