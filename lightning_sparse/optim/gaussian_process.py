"""A Gaussian process on a line: what a smooth function may be, seen through noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# ratios of noise to signal that are tried; the smallest keeps every matrix positive definite
_RATIOS = torch.logspace(-6, 4, 201, dtype=torch.float64)


@dataclass(frozen=True)
class GaussianProcess:
    """A constant plus a function of squared-exponential covariance, seen through white noise.

    Args:
        lengthscale: of the function, in units of x.
        constant: its expectation.
        signal, noise: variances of the function and of what is added to it.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, equations 2.25, 2.26 and 5.8,
        http://gaussianprocess.org/gpml.
    """

    lengthscale: float
    constant: float
    signal: float
    noise: float

    def posterior(self, x: Tensor, y: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Expectation of the function on a grid, and variance of its difference from the grid's last value.

        Args:
            x, y: [n] float64, where something was seen, and what.
            grid: [m] float64.

        Returns:
            [m] float64 each.
        """
        seen = self.signal * _kernel(x, x, self.lengthscale)
        seen.diagonal().add_(self.noise)
        factor = torch.linalg.cholesky(seen)
        across = self.signal * _kernel(x, grid, self.lengthscale)  # [n, m]
        weights = torch.cholesky_solve((y - self.constant).unsqueeze(1), factor)
        mean = self.constant + (across.T @ weights).squeeze(1)
        # of a difference, the covariances are differences as well
        known = torch.linalg.solve_triangular(factor, across - across[:, -1:], upper=False)
        prior = 2 * self.signal * (1 - _kernel(grid, grid[-1:], self.lengthscale).squeeze(1))
        return mean, (prior - known.square().sum(0)).clamp_(min=0.0)


def fit(x: Tensor, y: Tensor, lengthscale: float) -> GaussianProcess:
    """The process of greatest likelihood: one eigendecomposition, then closed forms for each ratio of noise to signal.

    Args:
        x, y: [n] float64, n at least 2.
        lengthscale: is given.
    """
    values, vectors = torch.linalg.eigh(_kernel(x, x, lengthscale))
    ones, seen = vectors.T @ torch.ones_like(x), vectors.T @ y  # [n]
    inverse = 1 / (values.clamp(min=0.0) + _RATIOS.unsqueeze(1))  # [ratios, n]
    constants = (inverse * ones * seen).sum(1) / (inverse * ones.square()).sum(1)  # [ratios]
    left = seen - constants.unsqueeze(1) * ones  # [ratios, n]
    signals = (inverse * left.square()).mean(1).clamp(min=1e-12 * float(y.square().mean()) + 1e-300)
    likelihood = -len(x) * signals.log() + inverse.log().sum(1)
    best = int(likelihood.argmax())
    signal = float(signals[best])
    return GaussianProcess(lengthscale, float(constants[best]), signal, signal * float(_RATIOS[best]))


def probability_below(mean: Tensor, variance: Tensor, slack: float) -> float:
    """The largest probability that the function is lower at a point of the grid than at its last one.

    Args:
        mean, variance: [m] float64 each, as ``GaussianProcess.posterior`` gives them.
        slack: is added to variances.
    """
    scores = (mean[-1] - mean[:-1]) / (variance[:-1] + slack).sqrt()
    return 0.5 * (1 + math.erf(float(scores.max()) / math.sqrt(2)))


def _kernel(a: Tensor, b: Tensor, lengthscale: float) -> Tensor:
    return torch.exp(-0.5 * ((a.unsqueeze(1) - b) / lengthscale).square())
