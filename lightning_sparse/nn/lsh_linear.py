"""LSHLinear: a wide output layer that trains on the classes that hash tables find."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.nn.active_softmax import Active, active_cross_entropy
from lightning_sparse.nn.adopt import adopt
from lightning_sparse.nn.crossover import Crossover, Switch, rounded_up
from lightning_sparse.nn.eager import eager
from lightning_sparse.nn.lsh_tables import LSHTables
from lightning_sparse.nn.lsh_timing import lsh_crossover
from lightning_sparse.nn.own_step import OwnStep
from lightning_sparse.nn.work import Work
from lightning_sparse.protocols import Schedule, Transport
from lightning_sparse.random import Draw


class LSHLinear(OwnStep, nn.Linear):
    """`nn.Linear` for very many classes, whose training loss looks only at classes that are likely, and a few others.

    `forward` gives all logits, as `nn.Linear` does. `loss` is the cross-entropy; in training it is estimated: tables of
    hashed rows find the classes whose rows point where a sample points, and these, with the samples' targets, count
    as they are; classes drawn at random stand for all others, with the weight that makes the normaliser unbiased.
    Gradients of weight and bias are sparse COO tensors of the rows that took part, as `nn.Embedding(sparse=True)`
    makes them: for `torch.optim.SparseAdam`, `SGD` or `Adagrad`. What is drawn follows from ``seed`` and ``step``.

    Where the whole softmax was measured to be faster than the part that is active, all rows take part and the loss is
    exact; `crossover.pinned(1)` forces the estimate, so that no timing decides.

    With a ``transport`` rank r holds the rows of the classes r, r + w, r + 2 w, ..., and each rank brings its own
    samples, equally many. Every rank must call `loss`, its backward pass and `predict`; `forward` gives the logits of
    the rank's own classes. A step moves the samples, their gradients and a few numbers for each sample, whatever the
    number of classes. Keep the layer's parameters out of DDP, which would average them: their gradients already are
    those of the mean loss (`DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` names them).

    Args:
        in_features, out_features, bias, device, dtype: as for `nn.Linear`; classes of all ranks.
        tables: number of hash tables.
        bits: bits of a hash code; by default buckets hold half of ``bucket`` rows on average.
        bucket: rows taken of each bucket, at most; by default one for every 6000 rows of the rank, 8 to 64.
        tail: classes drawn at random in each step, on each rank; 0 leaves out what the tables do not find, which
            underestimates the normaliser, as SLIDE does. By default one for every 32 rows, 2048 at most.
        shared: whether every sample of a batch competes against what all of them found, at no further cost.
        rebuild: steps from one hashing of all rows to the next, or a schedule of it.
        redraw: hashings until the hash functions are drawn anew.
        sparse: False makes dense gradients, which strategies with DDP, ``sparse_ddp`` among them, need.
        seed: of all draws.
        transport: such as `communicators.ProcessGroup`, made after the default process group; None for one rank.

    Attributes:
        step: losses computed in training so far, those without a graph left out; `state_dict` carries it in its
            metadata, with the tables, so that a run goes on as it would have.
        work: multiply-adds of training; those of hashing count as done in the forward pass.

    Raises:
        ValueError: an argument out of range.

    Source: Chen et al., "SLIDE", https://arxiv.org/abs/1903.03129, and Yan et al., "Distributed SLIDE Enables Training
    Large Neural Networks on Low Bandwidth and Simple CPU-Clusters via Model Parallelism and Sparsity",
    https://arxiv.org/abs/2201.12667. Ours are SimHash in sorted tables, the shared set, and the weight of the tail.

    Example:
        >>> layer = LSHLinear(16, 5000)
        >>> x, target = torch.zeros(4, 16, requires_grad=True), torch.tensor([3, 1, 4, 1])
        >>> layer.loss(x, target).backward()
        >>> layer.weight.grad.is_sparse, layer(x).shape
        (True, torch.Size([4, 5000]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tables: int = 8,
        bits: int | None = None,
        bucket: int | None = None,
        tail: int | None = None,
        shared: bool = True,
        rebuild: int | Schedule = 50,
        redraw: int = 20,
        sparse: bool = True,
        seed: int = 0,
        transport: Transport | None = None,
    ) -> None:
        world_size, rank = (1, 0) if transport is None else (transport.world_size, transport.rank)
        if out_features < world_size:
            raise ValueError(f"LSHLinear: expected a class for each of {world_size} ranks, got {out_features}")
        rows = (out_features - rank + world_size - 1) // world_size
        bucket = min(64, max(8, rows // 6000)) if bucket is None else bucket
        tail = min(2048, -(-rows // 32)) if tail is None else tail
        for name, value, least in (("bucket", bucket, 1), ("tail", tail, 0), ("redraw", redraw, 1)):
            if value < least:
                raise ValueError(f"LSHLinear: {name} must be at least {least}, got {value}")
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.transport = transport if world_size > 1 else None
        super().__init__(in_features, rows, bias, device, dtype)
        self.out_features = out_features
        bits = min(20, max(1, round(math.log2(max(2, 2 * rows / bucket))))) if bits is None else bits
        self.bucket, self.tail, self.shared, self.rebuild, self.redraw = bucket, tail, shared, rebuild, redraw
        self.sparse = sparse
        self.tables = LSHTables(in_features, tables, bits, seed)
        self.work = Work()
        self._next, self._built, self._dense_until = -1, 0, -1
        self._switch = Switch()
        self._interval(self.step)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LSHLinear:
        """The layer on one rank with the parameters of a dense one, the same objects; ``options`` as for the class."""
        bias = linear.bias is not None
        if (transport := options.get("transport")) is not None and transport.world_size > 1:
            raise ValueError(
                f"LSHLinear: expected one rank to take over a dense layer, got {transport.world_size}: make one with"
                " LSHLinear(..., transport=...) and load each rank's rows"
            )
        return adopt(cls(linear.in_features, linear.out_features, bias, "meta", **options), linear)

    def reset_parameters(self) -> None:
        """As `nn.Linear`; ranks that share the classes draw from generators of their own."""
        if self.world_size == 1:
            return super().reset_parameters()
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        seed = Draw(self.seed, self.rank, "initial rows").below(2**63)
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        return None

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, tables={self.tables.tables}, bits={self.tables.bits}, bucket={self.bucket},"
            f" tail={self.tail}, shared={self.shared}, rank={self.rank}, world_size={self.world_size}"
        )

    @eager
    def loss(self, x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """The cross-entropy, estimated in training and exact in evaluation and without a graph.

        Args:
            x: [..., in_features] float.
            target: [...] int64, classes.
            reduction: "mean" over this rank's samples: a number; or "none": [...].

        Raises:
            ValueError: shapes, classes or the reduction do not fit; on every rank, if numbers of samples differ.
            TypeError: targets are no integers.
            RuntimeError: gradients would be sparse, which DDP cannot exchange for this layer.
        """
        self._check(x, target, reduction)
        flat, wanted = x.reshape(-1, self.in_features).to(self.weight.dtype), target.reshape(-1)
        everyone, targets = self._gathered(flat, wanted)
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < self.out_features:
            raise ValueError(
                f"LSHLinear: targets must be in [0, {self.out_features}), got {int(targets.min())} to"
                f" {int(targets.max())}: leave out samples without a class"
            )
        step = self.take_step()
        active = self._all(targets) if step is None else self._active(everyone, targets, step)
        with torch.autocast(x.device.type, enabled=False):
            work = Work() if step is None else self.work
            losses = active_cross_entropy(
                flat, everyone, self.weight, self.bias, active, self.transport, work, self.sparse
            )
        return losses.mean() if reduction == "mean" else losses.view(target.shape)

    def _check(self, x: Tensor, target: Tensor, reduction: str) -> None:
        if reduction not in ("mean", "none"):
            raise ValueError(f"LSHLinear: reduction must be 'mean' or 'none', got {reduction!r}")
        if x.dim() == 0 or x.shape[:-1] != target.shape or x.shape[-1] != self.in_features:
            raise ValueError(
                f"LSHLinear: expected x [..., {self.in_features}] and targets [...], got {tuple(x.shape)} and"
                f" {tuple(target.shape)}"
            )
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise TypeError(f"LSHLinear: expected targets of torch.int64, got {target.dtype}")
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is None or not (self.sparse and torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        if any(parameter is self.weight for parameter in ddp._module_parameters):
            raise RuntimeError(
                "LSHLinear: expected dense gradients under DDP, which exchanges no others for this layer, got"
                " sparse=True: make it with sparse=False"
            )

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """The class of the largest logit of all ranks, the lowest of equals on one rank: [...] int64 for [..., h]."""
        flat = x.reshape(-1, self.in_features).to(self.weight.dtype)
        everyone = flat if self.transport is None else self._exchanged(flat)
        best, row = F.linear(everyone, self.weight, self.bias).max(1)
        winner = row * self.world_size + self.rank
        if self.transport is not None:
            bests = self.transport.all_gather(best)  # [w, w b]
            winners = self.transport.all_gather(winner)
            winner = winners.gather(0, bests.argmax(0, keepdim=True)).view(self.world_size, -1)[self.rank]
        return winner.view(x.shape[:-1])

    def refresh(self) -> None:
        """Hash all rows now, as after a change of the weights from outside."""
        self._hash(self.step)

    def _hash(self, step: int) -> None:
        self.tables.build(
            self.weight.detach(), self.bias if self.bias is None else self.bias.detach(), self._functions()
        )
        self._built += 1
        self._next = step + self._interval(step)
        self._count_hashing(self.weight)

    def _count_hashing(self, x: Tensor) -> None:
        self.work.forward.add(len(x), self.in_features * self.tables.tables * self.tables.bits, 0)

    def _functions(self) -> int:
        return self._built // self.redraw

    def _interval(self, step: int) -> int:
        steps = self.rebuild(step) if callable(self.rebuild) else self.rebuild
        if steps < 1:
            raise ValueError(f"LSHLinear: rebuild must be at least 1 step, got {steps} at step {step}")
        return int(steps)

    def _gathered(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Samples and targets of all ranks, in rank order."""
        if self.transport is None:
            return x.detach(), target
        return self._exchanged(x.detach()), self.transport.all_gather(target.contiguous()).view(-1)

    def _exchanged(self, x: Tensor) -> Tensor:
        assert self.transport is not None
        sizes = self.transport.all_gather(torch.tensor([len(x)], device=x.device)).view(-1).tolist()
        if len(set(sizes)) > 1:
            raise ValueError(
                f"LSHLinear: expected equally many samples on every rank, got {sizes}: drop the last batch"
            )
        return self.transport.all_gather(x.contiguous().view(-1)).view(-1, self.in_features)

    def _all(self, targets: Tensor) -> Active:
        return Active(None, torch.where(self._owned(targets), targets // self.world_size, -1), None)

    def _owned(self, targets: Tensor) -> Tensor:
        return targets % self.world_size == self.rank

    @torch.no_grad()
    def _active(self, x: Tensor, targets: Tensor, step: int) -> Active:
        if step < self._dense_until:
            return self._all(targets)
        if step >= self._next or self.tables.order.device != self.weight.device:
            self._hash(step)
        draw = Draw(self.seed, step, f"rank {self.rank}")
        rows, device = len(self.weight), self.weight.device
        bits = draw.bits(self.tables.tables + self.tail, device)
        found = self.tables.query(x, self.bucket, bits[: self.tables.tables])  # [w b, tables * bucket]
        self._count_hashing(x)
        owned = self._owned(targets)
        own = torch.where(owned, targets // self.world_size, -1)
        # one place behind the rows takes what is not there
        likely, drawn = torch.zeros(2, rows + 1, dtype=torch.bool, device=device)
        likely[found.flatten()] = True
        likely[own] = True
        drawn[bits[self.tables.tables :] % rows] = True
        chosen = (likely | drawn)[:rows].nonzero().view(-1)  # [u]
        if not self._switch.takes_sparse(len(chosen) / rows, self._crossover(len(x), step)):
            # what is likely is not looked for meanwhile
            self._dense_until = step + self._interval(step)
            return self._all(targets)
        target = torch.where(owned, torch.searchsorted(chosen, own.clamp(min=0)), -1)
        if self.shared:
            certain = likely[chosen]  # [u]
        else:
            certain = torch.zeros(len(x), rows + 1, dtype=torch.bool, device=device)
            certain.scatter_(1, torch.cat([found, own[:, None]], 1).remainder(rows + 1), True)
            certain = certain[:, chosen]  # [w b, u]
        return Active(chosen, target, _offset(certain, drawn[chosen], rows, self.weight.dtype))

    def _crossover(self, batch: int, step: int) -> Crossover:
        return lsh_crossover(self.weight.detach(), self.tables, rounded_up(batch), self.bucket, self._interval(step))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            counters = {"next": self._next, "built": self._built, "dense_until": self._dense_until}
            hashing = counters | self.tables.state_dict()
            destination._metadata[prefix[:-1]]["hashing"] = hashing

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        hashing = local_metadata.get("hashing")
        if hashing and self.tables.load_state_dict(hashing, len(self.weight), self.weight.device):
            self._next, self._built, self._dense_until = (hashing[name] for name in ("next", "built", "dense_until"))
        else:
            # the tables are of other rows
            self._next = self._dense_until = -1


def _offset(certain: Tensor, drawn: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """What is added to logits: 0 where certain, log of the classes each stands for where drawn, else minus infinity."""
    tail = drawn & ~certain
    # in float32: more classes than float16 can count
    others = (rows - certain.sum(-1, keepdim=True)).to(torch.promote_types(dtype, torch.float32))
    stands_for = (others / tail.sum(-1, keepdim=True).clamp(min=1)).log()
    return torch.where(certain, 0.0, torch.where(tail, stands_for, -torch.inf)).to(dtype)
