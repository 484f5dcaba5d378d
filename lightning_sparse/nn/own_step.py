"""OwnStep: a layer's own step counter, which travels in the metadata of its `state_dict`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class OwnStep(nn.Module):
    """Keeps ``step`` beside the parameters, so that the keys of a `state_dict` stay those of the layer it replaces."""

    step: int = 0
    _graph_was_made = True

    def take_step(self) -> int | None:
        """The number of this pass among those in training that make a graph, counted from 0; None for all others.

        A pass that backward repeats, for activation checkpointing, has the number of the one it repeats, if that is the
        last one. Where checkpointing is reentrant, the repetition is the one that makes a graph.
        """
        if not self.training:
            return None
        repeats = torch._C._current_graph_task_id() != -1
        if not repeats:
            self._graph_was_made = torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            return None
        if not (repeats and self._graph_was_made):
            self.step += 1
        return self.step - 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["step"] = self.step

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.step = local_metadata.get("step", self.step)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
