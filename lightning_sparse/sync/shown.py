"""Shown: the module shows the anchor where everybody looks, and this rank's own weights while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from lightning_sparse.reducer import Reducer
from lightning_sparse.sync.buffers import average
from lightning_sparse.sync.group import Group


class Shown:
    """Puts the anchor into the module, for a while or for good.

    Args:
        groups: of all optimizers.
        merge: waits for a group's exchange in flight and merges it.
        share_rest: makes everything else of the module equal on all ranks.
    """

    def __init__(
        self, groups: Mapping[int, Group], merge: Callable[[Group], None], share_rest: Callable[[], None]
    ) -> None:
        self._groups = groups
        self._merge = merge
        self._share_rest = share_rest
        self._set_aside = False
        self._finished = False

    @property
    def is_shown(self) -> bool:
        return self._set_aside or self._finished

    @torch.no_grad()
    def enter(self, together: bool) -> None:
        """Show the anchor until ``leave``.

        Args:
            together: every rank does so, so that buffers can be shared and exchanges waited for.
        """
        if self.is_shown:
            return
        self._set_aside = True
        self._show(keep=True, together=together)

    @torch.no_grad()
    def leave(self) -> None:
        """Return to this rank's own weights."""
        if not self._set_aside:
            return
        self._set_aside = False
        for group in self._groups.values():
            for view, own in zip(group.views(group.parameters), group.own, strict=True):
                view.copy_(own)
            group.own = []

    @torch.no_grad()
    def end(self, together: bool) -> None:
        """Show the anchor for good."""
        if self._finished:
            return
        self.leave()
        self._show(keep=False, together=together)
        self._finished = True

    def restart(self) -> None:
        """The module holds other weights now, which are everybody's."""
        self._set_aside = self._finished = False

    def _show(self, keep: bool, together: bool) -> None:
        for group in self._groups.values():
            if together:
                self._merge(group)
            group.own = [view.clone() for view in group.views(group.parameters)] if keep else []
            for view, anchor in group.pairs():
                view.copy_(anchor)
        if together:
            self._share_rest()


@torch.no_grad()
def settle(groups: Iterable[Group], reducer: Reducer) -> None:
    """Average weights over ranks if they are no longer the anchor on any of them. Every rank calls it."""
    weights, moved = [], torch.zeros(1)
    for group in groups:
        for view, anchor in group.pairs():
            weights.append(view)
            moved += not torch.equal(view, anchor.to(view.dtype))
    device = weights[0].device if weights else None
    transport = reducer.transport

    def agree() -> None:
        if bool(transport.all_reduce_mean_(moved.to(device)).any()):
            average(weights, transport)

    reducer.call(agree)
