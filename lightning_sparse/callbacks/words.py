"""Figures as people read them."""

from __future__ import annotations

from rich.filesize import decimal


def percent(fraction: float) -> str:
    """Three significant digits.

    >>> percent(0.0142), percent(1.0)
    ('1.42 %', '100 %')
    """
    return f"{100 * fraction:.3g} %"


def size(nbytes: float) -> str:
    """Decimal units.

    >>> size(209_600)
    '209.6 kB'
    """
    return decimal(round(nbytes))


def against(nbytes: float, dense: float) -> str:
    """How much less than dense.

    >>> against(10, 345), against(10, 25), against(30, 20)
    ('34x less', '2.5x less', '1.5x more')
    """
    if nbytes <= 0 or dense <= 0:
        return "nothing sent" if nbytes <= 0 else "more"
    factor, word = (dense / nbytes, "less") if nbytes <= dense else (nbytes / dense, "more")
    return f"{factor:.0f}x {word}" if factor >= 10 else f"{factor:.1f}x {word}"
