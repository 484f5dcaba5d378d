"""Record: the figures of one ``fit``, taken every so many steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean

from rich.table import Table
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_sparse.callbacks.layers import LayerDensity, count_layers, density
from lightning_sparse.callbacks.table import make_table
from lightning_sparse.callbacks.window import Window
from lightning_sparse.job import Picked
from lightning_sparse.strategy import SparseDDP
from lightning_sparse.sync.updates_tap import UpdatesTap

_RATIO = {"gradients": "residual_over_gradient", "updates": "unshared_over_update"}


class Record:
    """Looks at a strategy and remembers what the table at the end needs.

    Args:
        strategy: connected to a tap, before its first step.
        names: of the parameters.
        every: steps between looks; 0 for none.
        ahead: of the tap's counter of steps is the one that looks are in phase with.
    """

    def __init__(self, strategy: SparseDDP, names: Sequence[str], every: int, ahead: int = 0) -> None:
        assert strategy.tap is not None
        self._tap, self._strategy = strategy.tap, strategy
        self._every, self._ahead = every, ahead
        self._seen = strategy.tap.steps + ahead
        self._since, self._whole = Window(strategy), Window(strategy)
        # never synchronised: a report must not make ranks meet
        self._sent, self._asked, self._ratio = (MeanMetric("ignore", sync_on_compute=False) for _ in range(3))
        self._layers = LayerDensity(names)
        self._dense: set[str] = set()
        strategy.tap.watch = self._is_watched

    def is_due(self) -> bool:
        """Whether a multiple of ``every`` steps was reached since the last look."""
        steps = self._tap.steps + self._ahead
        return self._every > 0 and steps // self._every > self._seen // self._every

    def look(self, per_layer: bool) -> dict[str, float | Tensor]:
        """What there is to log now. Figures of exchanges are missing while none has ended."""
        self._seen = self._tap.steps + self._ahead
        figures: dict[str, float | Tensor] = {}
        norms = self._tap.norms()
        if norms["input"] > 0:
            # weighted, so that the mean is not that of the few steps that hardly moved
            figures[_RATIO[self._tap.name]] = self._ratio(norms["left"] / norms["input"], norms["input"])
        if isinstance(self._tap, UpdatesTap) and (scales := self._tap.lr_scales()):
            figures["lr_scale"] = fmean(scales.values())
        if self._strategy.skipped:
            figures["skipped"] = float(self._strategy.skipped)
        traffic = self._since.look()
        if traffic is None:
            return figures
        figures["bytes_per_step"] = traffic.bytes_per_step
        figures["bytes_over_dense"] = traffic.bytes_per_step / max(1, traffic.dense_bytes_per_step)
        figures |= {f"share_{stage}": share for stage, share in traffic.shares.items()}
        return figures | self._count(traffic.last.values(), per_layer)

    def pause(self) -> None:
        """Stop the clock, for validation."""
        self._since.pause()
        self._whole.pause()

    def resume(self) -> None:
        """Let the clock run on."""
        self._since.resume()
        self._whole.resume()

    def table(self) -> Table | None:
        """The whole run; None if nothing was exchanged. Call it when no exchange is in flight any more."""
        traffic = self._whole.look()
        if traffic is None:
            return None
        if not self._sent.update_called:
            self._count(traffic.last.values(), per_layer=False)
        summary = self._strategy.summary()
        title = f"{summary['exchange']} over {summary['world_size']} ranks, {traffic.steps:.0f} steps"
        rows = zip(self._layers.names, self._layers.compute().tolist(), strict=True)
        layers = {name: value for name, value in rows if name not in self._dense and not math.isnan(value)}
        ratio = float(self._ratio.compute()) if self._ratio.update_called else None
        label = _RATIO[self._tap.name].replace("_over_", " / ")
        asked, sent = float(self._asked.compute()), float(self._sent.compute())
        return make_table(title, traffic, asked, sent, label, ratio, layers)

    def _is_watched(self, step: int) -> bool:
        return self._every > 0 and (step + 1 + self._ahead) % self._every == 0

    def _count(self, exchanges: Collection[Picked], per_layer: bool) -> dict[str, float | Tensor]:
        layers = count_layers(exchanges)
        if not layers:
            return {}
        self._layers.update(layers)
        self._dense |= {name for name, layer in layers.items() if layer.is_dense}
        newest = max(exchanges, key=lambda picked: picked.job.step)
        numel = sum(layer.numel for layer in layers.values())
        figures: dict[str, float | Tensor] = {
            "density": self._sent(density(layers.values()), numel),
            "density_asked": self._asked(newest.density),
        }
        if per_layer:
            figures |= {f"density/{name}": layer.entries / layer.numel for name, layer in layers.items()}
        return figures
