"""SparseProgressBar: Lightning's rich progress bar with a column for what is exchanged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import ProgressColumn, Task
from rich.text import Text

from lightning_sparse.callbacks.layers import count_layers, density
from lightning_sparse.callbacks.window import Window
from lightning_sparse.callbacks.words import against, percent, size
from lightning_sparse.strategy import SparseDDP


class TrafficBar:
    """``RichProgressBar`` with one more column while training: density, bytes per step, and how much less than dense.

    The figures are rank zero's since the column was last renewed, about once a second. The column is empty with one
    rank and with any other strategy. Arguments are those of ``RichProgressBar``.

    Example:
        >>> from lightning_sparse import SparseProgressBar
        >>> bar = SparseProgressBar()
    """

    _PERIOD = 1.0
    """Seconds."""

    _column: _TrafficColumn | None = None
    _window: Window | None = None
    _renewed = 0.0

    def configure_columns(self, trainer: Any) -> list[Any]:
        self._column = _TrafficColumn(lambda: self.train_progress_bar_id)  # type: ignore[attr-defined]
        return [*super().configure_columns(trainer), self._column]  # type: ignore[misc]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        strategy = trainer.strategy
        connected = isinstance(strategy, SparseDDP) and strategy.tap is not None
        self._window = Window(strategy) if connected and self.is_enabled else None  # type: ignore[attr-defined]
        self._renewed = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._renew()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)  # type: ignore[misc]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)  # type: ignore[misc]
        self._column = self._window = None

    def _renew(self) -> None:
        now = time.monotonic()
        if self._window is None or self._column is None or now - self._renewed < self._PERIOD:
            return
        if (traffic := self._window.look()) is None:
            return
        self._renewed = now
        sent = density(count_layers(traffic.last.values()).values())
        saved = against(traffic.bytes_per_step, traffic.dense_bytes_per_step)
        self._column.words = (percent(sent), f"{size(traffic.bytes_per_step)}/step", saved)


class _TrafficColumn(ProgressColumn):
    """Shows words that the training loop prepares: the thread that draws must not read what training changes."""

    def __init__(self, task_id: Callable[[], Any]) -> None:
        super().__init__()
        self.words: tuple[str, ...] = ()
        self._task_id = task_id

    def render(self, task: Task) -> _Words:
        return _Words(self.words if task.id == self._task_id() else ())


class _Words:
    """As many words as there is room for, from the last."""

    def __init__(self, words: Sequence[str]) -> None:
        self._forms = [" · ".join(words[start:]) for start in range(len(words))] or [""]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(cell_len(self._forms[-1]), cell_len(self._forms[0]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitting = (form for form in self._forms if cell_len(form) <= options.max_width)
        yield Text(next(fitting, self._forms[-1]), style="dim", no_wrap=True, overflow="ellipsis")
