# SPDX-License-Identifier: Apache-2.0
"""PowerSGD from its definition: plain torch in float64, all ranks in one process. Nothing of bagua is used."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def drawn(parameter: int, columns: int, rank: int, *, step: int = 0, seed: int = 0) -> Tensor:
    """The Q that a parameter begins with, as algorithms/powersgd/README.md says; (columns, rank)."""
    spread = 1_000_003
    key = (seed * spread + step) * spread + parameter
    return torch.randn(columns, rank, generator=torch.Generator().manual_seed(key), device="cpu")


def torch_hooks_draws(shapes: Sequence[tuple[int, int]], rank: int, *, batched: bool, seed: int = 0) -> list[Tensor]:
    """What torch's powerSGD_hook draws for the matrices of its first bucket, in the bucket's order; (columns, rank)."""
    generator = torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(1_000_000_000)))
    draws: dict[int, Tensor] = {}
    for shape in dict.fromkeys(shapes):  # matrices of one shape after another
        places = [place for place, other in enumerate(shapes) if other == shape]
        size = (shape[1], min(*shape, rank))
        # One by one, or all at once.
        for count in [len(places)] if batched else [1] * len(places):
            for drawn_matrix in torch.randn(count, *size, generator=generator, device="cpu"):
                draws[places.pop(0)] = drawn_matrix
    return [draws[place] for place in range(len(shapes))]


def matrix_shape(gradient: Tensor, rank: int, min_compression: float = 2.0) -> tuple[int, int] | None:
    if gradient.dim() < 2 or gradient.numel() == 0:
        return None
    rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
    factors = (rows + columns) * min(rows, columns, rank)
    return (rows, columns) if factors * min_compression < rows * columns else None


class Reference:
    """`reduced()` is one step, of the gradients of all ranks by parameter: what each rank's become."""

    def __init__(
        self,
        rank: int,
        *,
        error_feedback: bool = True,
        warm_start: bool = True,
        min_compression: float = 2.0,
        starts: dict[int, Tensor] | None = None,
    ) -> None:
        self.rank = rank
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.min_compression = min_compression
        self.q = {parameter: start.double() for parameter, start in (starts or {}).items()}
        self.residuals: dict[int, list[Tensor]] = {}

    def reduced(self, gradients: Sequence[Sequence[Tensor]], step: int) -> list[Tensor]:
        by_parameter = enumerate(zip(*gradients, strict=True))
        return [self._reduced(parameter, [g.double() for g in ranks], step) for parameter, ranks in by_parameter]

    def _reduced(self, parameter: int, gradients: list[Tensor], step: int) -> Tensor:
        shape = matrix_shape(gradients[0], self.rank, self.min_compression)
        if shape is None:
            return torch.stack(gradients).mean(0)
        sums = [gradient.reshape(shape) for gradient in gradients]
        if self.error_feedback and parameter in self.residuals:
            sums = [own + rest for own, rest in zip(sums, self.residuals[parameter], strict=True)]
        mean = torch.stack(sums).mean(0)
        start = self.q.get(parameter) if self.warm_start else None
        if start is None:
            start = drawn(parameter, shape[1], min(*shape, self.rank), step=0 if self.warm_start else step).double()
        # Of the factors only what they span counts, so that a QR decomposition does.
        p = torch.linalg.qr(mean @ torch.linalg.qr(start).Q).Q
        self.q[parameter] = mean.T @ p
        product = p @ self.q[parameter].T
        self.residuals[parameter] = [own - product for own in sums]
        return product.view_as(gradients[0])
