"""SparseLSTM: an LSTM whose backward pass multiplies only the gate gradients that matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from lightning_sparse.nn.adopt import adopt
from lightning_sparse.nn.convert import UnsuitableError
from lightning_sparse.nn.crossover import Case, Crossover, Run, Switch, crossover, rounded_up
from lightning_sparse.nn.eager import eager
from lightning_sparse.nn.gate_selection import GRANULARITIES, GateSelection
from lightning_sparse.nn.lstm_scan import lstm_scan
from lightning_sparse.nn.own_step import OwnStep
from lightning_sparse.nn.precision import cast
from lightning_sparse.nn.work import Work
from lightning_sparse.protocols import Schedule

# time steps of the crossover's measurement: the time of both paths is linear in them
_MEASURED_STEPS = 32


class SparseLSTM(OwnStep, nn.LSTM):
    """`nn.LSTM` with the same parameters, `state_dict` and results, and with structurally sparsified gate gradients.

    In every backward pass of training, a fraction of the columns of the gates' gradients is kept, and the four products
    of each time step shrink to those columns. The gradient is biased; a schedule mixes in dense steps. Steps of density
    1, evaluation, packed sequences and shapes where the sparse path was measured to be the slower one run `nn.LSTM`
    itself; ``crossover.pinned(1)`` forces the sparse path, so that no timing decides.

    Args:
        density: fraction of gate gradients kept, in (0, 1], or a schedule of it over ``step``; 0.5 by default.
        threshold: keeps what reaches this magnitude instead, summed over the batch for columns and units; or a
            schedule of it, where 0 is a dense step. Takes the sparse path always.
        granularity: "column" judges each gate of each unit over the batch, "unit" its four gates together,
            "element" each entry (to study what can be left out: no product gets smaller).
        chunk: time steps that share one choice. More make the copies of weights cheaper and the choice older, at a
            cost in loss; fewer are more exact, and slower.

    Attributes:
        step: forward passes in training so far, those without a graph left out; what schedules see. `state_dict`
            carries it in its metadata.
        work: multiply-adds of sparse backward passes; those for the hidden state count as input gradient.

    Raises:
        ValueError: an argument out of range, or `proj_size`, which is not supported.

    Source: Zhu et al., "Structurally Sparsified Backward Propagation for Faster Long Short-Term Memory Training",
    https://arxiv.org/abs/1806.00512. The rules and the sharing of a choice between time steps are ours.

    Example:
        >>> from lightning_sparse.schedules import piecewise
        >>> lstm = SparseLSTM(16, 32, batch_first=True, density=piecewise({0: 0.5, 900: 1.0}))
        >>> output, (h, c) = lstm(torch.zeros(4, 10, 16))
        >>> output.shape
        torch.Size([4, 10, 32])
    """

    def __init__(
        self,
        *args: Any,
        density: float | Schedule | None = None,
        threshold: float | Schedule | None = None,
        granularity: str = "column",
        chunk: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size:
            raise ValueError(f"SparseLSTM: proj_size must be 0, got {self.proj_size}: use nn.LSTM")
        if density is not None and threshold is not None:
            raise ValueError(f"SparseLSTM: expected a density or a threshold, got both: {density} and {threshold}")
        if granularity not in GRANULARITIES:
            raise ValueError(f"SparseLSTM: granularity must be one of {GRANULARITIES}, got {granularity!r}")
        if chunk < 1:
            raise ValueError(f"SparseLSTM: chunk must be at least 1, got {chunk}")
        self.density: float | Schedule = 0.5 if density is None else density
        self.threshold, self.granularity, self.chunk = threshold, granularity, chunk
        self.work = Work()
        self._switch = Switch()
        # a number is checked now, a schedule when it is asked
        self._selection(self.step)

    @classmethod
    def from_lstm(cls, lstm: nn.LSTM, **options: Any) -> SparseLSTM:
        """The layer with the parameters of a dense one, the same objects; ``options`` are those of this class.

        Raises:
            UnsuitableError: it has projections.
        """
        if lstm.proj_size:
            raise UnsuitableError(f"proj_size must be 0, got {lstm.proj_size}")
        form = {name: getattr(lstm, name) for name in ("num_layers", "bias", "batch_first", "dropout", "bidirectional")}
        return adopt(cls(lstm.input_size, lstm.hidden_size, device="meta", **form, **options), lstm)

    def extra_repr(self) -> str:
        rule = f"density={self.density}" if self.threshold is None else f"threshold={self.threshold}"
        return f"{super().extra_repr()}, {rule}, granularity={self.granularity}, chunk={self.chunk}"

    @eager
    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        """As `nn.LSTM`: the hidden states of the last layer, and the last hidden and cell state of all layers."""
        step = self.take_step()
        if step is None:
            return super().forward(input, hx)
        selection = self._selection(step)
        if isinstance(input, PackedSequence) or not self._takes_sparse(input, selection):
            return super().forward(input, hx)
        if input.dim() == 2:
            batch = 0 if self.batch_first else 1
            states = None if hx is None else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
            out, (h, c) = self._scan(input.unsqueeze(batch), states, selection)
            return out.squeeze(batch), (h.squeeze(1), c.squeeze(1))
        return self._scan(input, hx, selection)

    def _selection(self, step: int) -> GateSelection:
        density = self.density(step) if callable(self.density) else self.density
        threshold = self.threshold(step) if callable(self.threshold) else self.threshold
        if not 0 < density <= 1:
            raise ValueError(f"SparseLSTM: density must be in (0, 1], got {density} at step {step}")
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"SparseLSTM: threshold must be at least 0, got {threshold} at step {step}")
        return GateSelection(density, threshold, self.granularity, self.chunk)

    def _takes_sparse(self, x: Tensor, selection: GateSelection) -> bool:
        if x.numel() == 0 or selection.threshold == 0:
            return False
        if selection.threshold is not None:
            return True
        if selection.density == 1 or selection.granularity == "element":
            return selection.density < 1
        return self._switch.takes_sparse(selection.density, self._crossover(x, selection))

    def _crossover(self, x: Tensor, selection: GateSelection) -> Crossover:
        """Where `nn.LSTM` becomes the faster one for a layer of this width, forward and backward."""
        t, b = (x.shape[0], 1) if x.dim() == 2 else (x.shape[1], x.shape[0]) if self.batch_first else x.shape[:2]
        steps, batch = min(rounded_up(t), _MEASURED_STEPS), rounded_up(b)
        like, _ = cast("SparseLSTM", x, self.all_weights[0][0])
        case = Case.of("SparseLSTM", like, steps, batch, self.input_size, self.hidden_size, min(steps, self.chunk))
        shape = (steps, batch, self.input_size)
        return crossover(
            case,
            lambda: _dense_run(like.new_zeros(shape), self.hidden_size),
            lambda density: _sparse_run(like.new_zeros(shape), self.hidden_size, density, selection),
            densities=(0.25, 0.5, 1.0),
        )

    def _scan(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None, selection: GateSelection
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = input.transpose(0, 1) if self.batch_first else input  # [t, b, i]
        directions = 2 if self.bidirectional else 1
        if hx is None:
            zeros = x.new_zeros(self.num_layers * directions, x.shape[1], self.hidden_size)
            hx = (zeros, zeros)
        x, h0, c0 = cast("SparseLSTM", x, *hx)
        weights = [cast("SparseLSTM", x, *each)[1:] for each in self.all_weights]
        self.check_forward_args(input, hx, None)
        last_h, last_c = [], []
        with torch.autocast(x.device.type, enabled=False):
            for layer in range(self.num_layers):
                outs = []
                for direction in range(directions):
                    at = layer * directions + direction
                    w_ih, w_hh, *biases = weights[at]
                    bias = biases[0] + biases[1] if biases else None
                    series = x.flip(0) if direction else x
                    out, h, c = lstm_scan(series, h0[at], c0[at], w_ih, w_hh, bias, selection, self.work)
                    outs.append(out.flip(0) if direction else out)
                    last_h.append(h)
                    last_c.append(c)
                x = outs[0] if directions == 1 else torch.cat(outs, 2)
                if layer + 1 < self.num_layers:
                    x = F.dropout(x, self.dropout, self.training)
        out = x.transpose(0, 1) if self.batch_first else x
        return out, (torch.stack(last_h), torch.stack(last_c))


def _layer(x: Tensor, hidden: int) -> nn.LSTM:
    # no random numbers: measuring must not move the global generator
    lstm = nn.LSTM(x.shape[2], hidden, device="meta", dtype=x.dtype).to_empty(device=x.device)
    for weight in lstm.parameters():
        nn.init.constant_(weight, 0.01)
    x.requires_grad_()
    return lstm


def _dense_run(x: Tensor, hidden: int) -> Run:
    lstm = _layer(x, hidden)

    def run() -> None:
        with torch.enable_grad():
            lstm(x)[0].sum().backward()

    return run


def _sparse_run(x: Tensor, hidden: int, density: float, selection: GateSelection) -> Run:
    lstm, state = _layer(x, hidden), x.new_zeros(x.shape[1], hidden)
    chosen = replace(selection, density=density)

    def run() -> None:
        with torch.enable_grad():
            w_ih, w_hh, b_ih, b_hh = lstm.all_weights[0]
            lstm_scan(x, state, state, w_ih, w_hh, b_ih + b_hh, chosen, Work())[0].sum().backward()

    return run
