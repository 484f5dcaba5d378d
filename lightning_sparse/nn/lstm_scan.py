"""One direction of one LSTM layer over time, with a backward pass over the gate gradients that are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_sparse.nn.first_order import first_order
from lightning_sparse.nn.gate_selection import GateSelection
from lightning_sparse.nn.work import Work


def lstm_scan(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Tensor | None,
    selection: GateSelection,
    work: Work,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of all steps, and the last hidden and cell state.

    The forward pass is exact. In the backward pass the gradients of pre-activations that ``selection`` drops count as
    zero in every matrix product, and in the bias; the path through the cell state stays dense.

    Args:
        x: [t, b, i] float, t at least 1. Weights and states have its dtype.
        h0, c0: [b, h].
        w_ih, w_hh: [4 h, i] and [4 h, h], gates in torch's order: input, forget, cell, output.
        bias: [4 h], or None.
        work: counts the products of backward passes.

    Returns:
        [t, b, h], [b, h] and [b, h].
    """
    return _Scan.apply(x, h0, c0, w_ih, w_hh, bias, selection, work)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        bias: Tensor | None,
        selection: GateSelection,
        work: Work,
    ) -> tuple[Tensor, Tensor, Tensor]:
        t, b, _ = x.shape
        h = w_hh.shape[1]
        x = x.contiguous()
        rows = x.view(t * b, -1)
        gates = rows @ w_ih.t() if bias is None else torch.addmm(bias, rows, w_ih.t())
        gates = gates.view(t, b, 4 * h)
        hidden, cells = (x.new_empty(t + 1, b, h) for _ in range(2))
        hidden[0], cells[0] = h0, c0
        squashed = x.new_empty(t, b, h)
        recurrent = w_hh.t().contiguous()
        for gate, last_h, last_c, next_h, next_c, tanh in zip(
            gates, hidden[:-1], cells[:-1], hidden[1:], cells[1:], squashed, strict=True
        ):
            gate.addmm_(last_h, recurrent)
            gate[:, : 2 * h].sigmoid_()
            gate[:, 2 * h : 3 * h].tanh_()
            gate[:, 3 * h :].sigmoid_()
            i, f, g, o = gate.split(h, 1)
            torch.mul(last_c, f, out=next_c).addcmul_(i, g)
            torch.mul(torch.tanh(next_c, out=tanh), o, out=next_h)
        ctx.save_for_backward(x, w_ih, w_hh, gates, hidden, cells, squashed)
        ctx.selection, ctx.work = selection, work
        return hidden[1:], hidden[-1].clone(), cells[-1].clone()

    @staticmethod
    @first_order("SparseLSTM", "nn.LSTM")
    def backward(ctx: Any, grad: Tensor, grad_h: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        x, w_ih, w_hh, gates, hidden, cells, squashed = ctx.saved_tensors
        t, b, h = squashed.shape
        needs_x, _, _, needs_ih, needs_hh, needs_bias = ctx.needs_input_grad[:6]
        dx = torch.empty_like(x) if needs_x else None
        dw_ih, dw_hh = (torch.zeros_like(w) if needed else None for w, needed in ((w_ih, needs_ih), (w_hh, needs_hh)))
        dbias = w_ih.new_zeros(4 * h) if needs_bias else None
        step = _Step(gates, cells, squashed)
        dh, dc = grad_h, grad_c.clone()
        arrivals = _arrivals(grad)
        end = t
        while end:
            begin = max(0, end - ctx.selection.chunk, *(arrival for arrival in arrivals if arrival < end))
            delta = x.new_empty(end - begin, b, 4 * h)
            step.backward(end - 1, grad[end - 1] + dh, dc, delta[-1])
            columns, lasts = ctx.selection.columns(delta[-1])
            if not lasts:
                begin, delta = end - 1, delta[-1:]
            recurrent, kept = w_hh, delta
            if columns is not None:
                recurrent = w_hh.index_select(0, columns)
                kept = x.new_empty(end - begin, b, columns.numel())
            for at in range(end - 1, begin - 1, -1):
                # columns are copied out, so that one slot serves all steps
                full = delta[-1 if columns is not None else at - begin]
                if at < end - 1:
                    step.backward(at, grad[at] + dh, dc, full)
                if columns is None:
                    ctx.selection.mask_(full)
                else:
                    torch.index_select(full, 1, columns, out=kept[at - begin])
                dh = kept[at - begin] @ recurrent
            flat = kept.flatten(0, 1)  # [chunk * b, k]
            if dx is not None:
                inputs = w_ih if columns is None else w_ih.index_select(0, columns)
                torch.mm(flat, inputs, out=dx[begin:end].flatten(0, 1))
            if dw_ih is not None:
                _add_rows_(dw_ih, columns, flat, x[begin:end])
            if dw_hh is not None:
                _add_rows_(dw_hh, columns, flat, hidden[begin:end])
            if dbias is not None:
                _add_rows_(dbias, columns, flat, None)
            for count, width in (
                (ctx.work.input_gradient, x.shape[2] * needs_x + h),
                (ctx.work.weight_gradient, x.shape[2] * needs_ih + h * needs_hh),
            ):
                count.add(flat.shape[0], flat.shape[1] * width, 4 * h * width)
            end = begin
        return dx, dh, dc, dw_ih, dw_hh, dbias, None, None


class _Step:
    """The elementwise part of a backward step."""

    def __init__(self, gates: Tensor, cells: Tensor, squashed: Tensor) -> None:
        self.gates, self.cells, self.squashed = gates, cells, squashed
        self.product = torch.empty_like(squashed[0])

    def backward(self, at: int, dh: Tensor, dc: Tensor, delta: Tensor) -> None:
        """Writes the gradients of the pre-activations to ``delta``, and takes ``dc`` one step back in place."""
        gate, tanh, h = self.gates[at], self.squashed[at], dh.shape[1]
        i, f, g, o = gate.split(h, 1)
        d_i, d_f, d_g, d_o = delta.split(h, 1)
        sigmoid_, tanh_ = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input
        torch.mul(dh, tanh, out=d_o)
        tanh_(torch.mul(dh, o, out=self.product), tanh, grad_input=self.product)
        dc += self.product
        torch.mul(dc, g, out=d_i)
        torch.mul(dc, self.cells[at], out=d_f)
        torch.mul(dc, i, out=d_g)
        sigmoid_(delta[:, : 2 * h], gate[:, : 2 * h], grad_input=delta[:, : 2 * h])
        tanh_(d_g, g, grad_input=d_g)
        sigmoid_(d_o, o, grad_input=d_o)
        dc *= f


def _arrivals(grad: Tensor) -> list[int]:
    """One past the last step of each sample that has a gradient of its own: choices made behind it know nothing of it.

    Args:
        grad: [t, b, h].
    """
    past = torch.arange(1, len(grad) + 1, device=grad.device)[:, None]
    return ((grad != 0).any(2) * past).amax(0).unique().tolist()


def _add_rows_(total: Tensor, columns: Tensor | None, delta: Tensor, factor: Tensor | None) -> None:
    """Adds delta^T @ factor, or the sums of delta's columns, to the rows of the gates that delta holds."""
    rows = delta.sum(0) if factor is None else delta.t() @ factor.flatten(0, 1)
    if columns is None:
        total += rows
    else:
        total.index_add_(0, columns, rows)
