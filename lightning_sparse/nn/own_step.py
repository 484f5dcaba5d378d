"""OwnStep: a layer's own step counter, which travels in the metadata of its `state_dict`."""

from __future__ import annotations

from typing import Any

from torch import nn


class OwnStep(nn.Module):
    """Keeps ``step`` beside the parameters, so that the keys of a `state_dict` stay those of the layer it replaces."""

    step: int = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["step"] = self.step

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.step = local_metadata.get("step", self.step)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
