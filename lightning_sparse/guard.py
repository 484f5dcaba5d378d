"""Guard: finds out by measuring whether plain DDP would be faster than the exchange, and says when to change over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from lightning_sparse.ladder import Ladder

_WARMUP, _WINDOW = 10, 40
_TRIAL_WARMUP, _TRIAL = 5, 15
_RECHECK = 1000
# what DDP might gain must be worth the change; a link must differ by this factor to be another link
_MARGIN, _OTHER_LINK = 1.02, 1.3


class Guard:
    """Watches the time of steps. Every rank has one, fed alike, and all of them decide alike.

    After 50 steps with the exchange it predicts, in DDP's favour, what DDP would take: the computation alone, or the
    all-reduce of all gradients alone, whichever is longer. If that is faster, DDP is tried for 20 steps, and what was
    measured decides. Every 1000 steps it looks again, and tries again where the link has become another one.

    Args:
        cycle: steps from one exchange to the next.
        link: seconds that an all-reduce of all gradients takes now, the same number on every rank. Every rank calls it.
        agree: the mean over ranks of some numbers. Every rank calls it.
        say: is told each decision once.
        ladder: what the exchange may send; None leaves that as it is.
        may_leave: whether DDP may take over.
    """

    def __init__(
        self,
        cycle: int,
        link: Callable[[], float],
        agree: Callable[[Sequence[float]], list[float]],
        say: Callable[[str], None],
        ladder: Ladder | None = None,
        may_leave: bool = True,
    ) -> None:
        self.is_dense = False
        self.measured: dict[str, float] = {}
        self._cycle = cycle
        self._link = link
        self._agree = agree
        self._say = say
        self._ladder = ladder
        self._may_leave = may_leave
        self._is_trial = False
        self._tried: float | None = None
        self._forget()

    def lap(self, seconds: float, busy: float) -> bool:
        """After a step: whether to change over now, from the exchange to DDP or back; ``is_dense`` says to which.

        Args:
            seconds: since the end of the step before.
            busy: the part of it that the exchange took at most, what ran beside the computation included.
        """
        self._count += 1
        if self._count == self._next - self._window:
            self._laps.clear()
        self._laps.append((seconds, busy))
        if self._count < self._next:
            return False
        own, busy = self._agree([self._typical(0), self._typical(1)])
        self._laps.clear()
        self._next += max(_RECHECK, 2 * self._window)
        if self._is_trial:
            return self._judge(own)
        return self._look_at_ddp(own) if self.is_dense else self._look_at_ours(own, busy)

    def refused(self, reason: str) -> None:
        """The change over that ``lap`` asked for is not possible: the exchange goes on for good."""
        self.is_dense = self._is_trial = False
        self._tried = 0.0
        self._forget()
        self._say(f"goes on with the exchange, as {reason}")

    @property
    def _window(self) -> int:
        # whole cycles, since only one step of each holds an exchange
        return (_TRIAL if self._is_trial else _WINDOW) * (1 if self.is_dense else self._cycle)

    def _forget(self) -> None:
        self._count, self._laps = 0, list[tuple[float, float]]()
        self._next = (_TRIAL_WARMUP if self._is_trial else _WARMUP) + self._window

    def _typical(self, which: int) -> float:
        """The median over cycles of the mean step."""
        size = 1 if self.is_dense else self._cycle
        laps = [lap[which] for lap in self._laps]
        return median(sum(laps[i : i + size]) / size for i in range(0, len(laps) - size + 1, size))

    def _look_at_ours(self, own: float, busy: float) -> bool:
        link = self._link()
        ddp = max(own - busy, link)
        self.measured |= {"step": own, "exchange": busy, "all_reduce": link, "ddp_at_best": ddp}
        found = (
            f"a step takes {own:.4f} s, of which the exchange {busy:.4f} s; an all-reduce of all gradients would take"
            f" {link:.4f} s"
        )
        if self._ladder is not None and self._ladder.move(own - busy, busy, link):
            self._say(f"{found}: {self._ladder.rung} from here on")
            self._forget()
            return False
        if not self._may_leave:
            return False
        is_new = self._tried is None or link * _OTHER_LINK < self._tried
        if ddp * _MARGIN > own or not is_new:
            if self._tried is None:
                self._tried = link
                self._say(f"{found}: goes on with the exchange")
            return False
        self._tried = link
        self._say(f"{found}: tries DDP for {_TRIAL_WARMUP + _TRIAL} steps")
        self.is_dense = self._is_trial = True
        self._forget()
        return True

    def _judge(self, dense: float) -> bool:
        own, self._is_trial = self.measured["step"], False
        self.measured["ddp"] = dense
        self.is_dense = dense < own
        self._say(
            f"a step takes {own:.4f} s with the exchange and {dense:.4f} s with DDP: goes on with"
            f" {'DDP' if self.is_dense else 'the exchange'}; guard=False forces the exchange"
        )
        if not self.is_dense:
            self._forget()
            self._next += _RECHECK
        return not self.is_dense

    def _look_at_ddp(self, dense: float) -> bool:
        link, before = self._link(), self.measured["all_reduce"]
        if link < before * _OTHER_LINK or dense < self.measured["step"] * _MARGIN:
            return False
        self.measured["all_reduce"] = link
        self._say(
            f"an all-reduce of all gradients takes {link:.4f} s, {before:.4f} s before, and a step with DDP"
            f" {dense:.4f} s: goes back to the exchange"
        )
        self.is_dense, self._tried = False, None
        self._forget()
        return True
