"""What `bench kernels` times: the ops, what others do in their place, and what each must make of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.accumulator import Sum, Vectors
from lightning_sparse.codecs import Raw
from lightning_sparse.compressors import SampledTopK, TopK
from lightning_sparse.compressors.sample import sample_size, sampled_threshold
from lightning_sparse.kernels.accumulate_select import accumulate_select
from lightning_sparse.kernels.difference_select import difference_select
from lightning_sparse.kernels.kth_largest import kth_largest
from lightning_sparse.kernels.moments import moments
from lightning_sparse.kernels.momentum_select import momentum_select
from lightning_sparse.kernels.select import select
from lightning_sparse.random import Draw
from lightning_sparse.vector import SparseVector

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLE = 0.01


class KernelCase:
    """Inputs of one size, density and dtype, and what the ops must make of them."""

    def __init__(self, numel: int, density: float, dtype: str, device: torch.device) -> None:
        self.numel, self.density, self.dtype, self.device = numel, density, dtype, device
        generator = torch.Generator().manual_seed(0)
        self.k = max(1, round(numel * density))
        self.x = torch.randn(numel, generator=generator).to(DTYPES[dtype]).to(device)
        self.y = (torch.randn(numel, generator=generator) * 1e-3).to(device)
        # Adding zeros leaves the residual as it is, so that every repetition picks the same entries.
        self.zeros = torch.zeros_like(self.x)
        self.residual = self.x.float()
        self.velocity = torch.zeros(numel, device=device)
        self.target = torch.zeros(numel, device=device)
        self.copy = torch.empty(numel, device=device)
        self.draw = Draw(0, 0, "bench")
        self.codec = Raw()
        # as another rank would send them
        payloads = (TopK().compress(Vectors([x]), self.k, self.draw) for x in (self.x, self.x.roll(1)))
        self.wires = [self.codec.encode(payload) for payload in payloads]
        self.threshold = self.x.float().abs().topk(self.k).values[-1]
        self.capacity = self.k + self.k // 8 + 64
        self.sampled = sample_size(numel, SAMPLE)

    def runs(self) -> dict[str, Callable[[], Any]]:
        """What is timed, by name of the op."""
        pick = self.threshold, self.capacity
        moved = [self.zeros], [self.velocity], [self.residual], 0.9, 0.5
        return {
            "memcpy": lambda: self.copy.copy_(self.residual),
            "accumulate_select": lambda: accumulate_select([self.zeros], [self.residual], *pick),
            "difference_select": lambda: difference_select([self.x], [self.y], *pick),
            "select": lambda: select([self.x], *pick),
            "momentum_select": lambda: momentum_select(*moved, *pick),
            "radix_select": lambda: kth_largest([self.x], self.k),
            "sampled_quantile": self.sampled_quantile,
            "moments": lambda: moments([self.x]),
            "top_k": lambda: TopK().compress(Sum([self.zeros], [self.residual]), self.k, self.draw),
            "sampled_top_k": lambda: SampledTopK().compress(Sum([self.zeros], [self.residual]), self.k, self.draw),
            "decode_average": self.decode_average,
            "torch_topk": lambda: self.x.abs().topk(self.k, sorted=False),
            "torch_sort": lambda: self.x.abs().sort(descending=True),
            "unfused": self.unfused,
        }

    def decode_average(self) -> None:
        """The mean of two payloads, in place of the gradient."""
        self.target.zero_()
        for wire in self.wires:
            self.codec.decode(wire, self.numel, self.k).add_to([self.target], alpha=0.5)

    def sampled_quantile(self) -> Tensor:
        """The threshold that about k entries reach."""
        return sampled_threshold(Vectors([self.x]), self.k, SAMPLE, 0.0, self.draw)

    def unfused(self) -> tuple[Tensor, Tensor]:
        """Residual + gradient, the k largest, and zeros where they were, an operation at a time."""
        total = self.residual + self.zeros
        indices = total.abs().topk(self.k, sorted=False).indices
        values = total[indices]
        total[indices] = 0
        return values, indices

    def bytes_per_element(self) -> dict[str, float]:
        """The least an op must move, for each element of the vector: what it reads counts once."""
        x = self.x.element_size()
        # Each of 2 payloads: its bytes, and its entries of the target read and written.
        payloads = 2 * (self.codec.nbytes(self.numel, self.k) + 8 * self.k) / self.numel
        return {
            "memcpy": 8.0,
            "accumulate_select": x + 8.0,
            "difference_select": x + 4.0,
            "select": float(x),
            "momentum_select": x + 16.0,
            "radix_select": float(x),
            "sampled_quantile": x * self.sampled / self.numel,
            "moments": float(x),
            "top_k": x + 8.0,
            "sampled_top_k": x + 8.0,
            "decode_average": 4.0 + payloads,
            "torch_topk": float(x),
            "torch_sort": float(x),
            "unfused": x + 8.0,
        }

    def check(self, runs: dict[str, Callable[[], Any]]) -> None:
        """Raises unless every op gives what plain torch gives."""
        x = self.x.float()
        picks = dict.fromkeys(("accumulate_select", "momentum_select", "select"), x)
        for op, u in (picks | {"difference_select": x - self.y}).items():
            values, indices, count = runs[op]()
            want = (u.abs() >= self.threshold).nonzero().view(-1)
            kept = want[: self.capacity]
            _require(op, int(count) == want.numel() and torch.equal(indices[: kept.numel()].long(), kept))
            _require(op, torch.equal(values[: kept.numel()], u[kept]) and not values[kept.numel() :].any())
        _require("momentum_select", torch.equal(self.residual, x) and not self.velocity.any())
        top, sampled = runs["top_k"](), runs["sampled_top_k"]()
        _require("top_k", torch.equal(top.values.abs().min(), self.threshold) and _is_of(top, x))
        _require("sampled_top_k", _is_of(sampled, x))
        runs["decode_average"]()
        want = torch.zeros_like(x)
        for u in (x, x.roll(1)):
            at = u.abs().topk(self.k).indices
            want[at] += 0.5 * u[at].bfloat16().float()
        _require("decode_average", torch.equal(self.target, want))
        runs["memcpy"]()
        _require("memcpy", torch.equal(self.copy, x))
        _require("radix_select", torch.equal(runs["radix_select"](), self.threshold))
        _require("torch_topk", torch.equal(runs["torch_topk"]().values.min().float(), self.threshold))
        _require("torch_sort", torch.equal(runs["torch_sort"]().values[self.k - 1].float(), self.threshold))
        values, indices = runs["unfused"]()
        _require("unfused", torch.equal(values, x[indices]) and torch.equal(values.abs().min(), self.threshold))
        self._check_estimates(runs, x[x != 0].abs().double())

    def _check_estimates(self, runs: dict[str, Callable[[], Any]], live: Tensor) -> None:
        found = runs["moments"]()
        want = live.mean(), live.var(correction=0), live.log().mean()
        close = [abs(a - b) <= 1e-5 * (1 + abs(b)) for a, b in zip(found[1:], want, strict=True)]
        _require("moments", int(found.counted) == live.numel() and all(close))
        reached = int((live >= runs["sampled_quantile"]()).sum())
        # Six standard deviations of how many of the sample belong to the k.
        slack = 1 + 6 * math.sqrt(self.numel / (self.sampled * self.k))
        _require("sampled_quantile", 2 - slack <= reached / self.k <= slack)


def _is_of(picked: SparseVector, x: Tensor) -> bool:
    live = picked.values != 0
    return torch.equal(picked.values[live], x[picked.indices[live].long()])


def _require(op: str, right: bool) -> None:
    if not right:
        raise RuntimeError(f"{op} gave a wrong result: its time would mean nothing")
