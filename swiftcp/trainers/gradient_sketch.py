"""Gradients as a few numbers each, so that two runs can be compared without keeping either's gradients.

A sketch is the gradient's norm and its products with random signs. For vectors a and b and random signs s, the mean of
(s.a - s.b)^2 is |a - b|^2 (Alon, Matias and Szegedy 1996), so sketches tell how far apart two gradients are, not only how long.

Importing this imports no torch, for the comparing process needs none.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NUM_PRODUCTS = 16
"""Random sign vectors; the distance is then known to about a third, which is enough beside a tolerance."""
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Sketch:
    norm: float
    products: list[float]

    def distance(self, other: Sketch) -> float:
        """Estimate of the length of the difference of the two gradients."""
        differences = [(mine - theirs) ** 2 for mine, theirs in zip(self.products, other.products, strict=True)]
        return math.sqrt(sum(differences) / len(differences))


def sketch(name: str, gradient: Tensor) -> Sketch:
    """The sketch of one parameter's gradient; the signs depend on the name and the place alone."""
    import torch

    flat = gradient.detach().flatten()
    products = torch.zeros(NUM_PRODUCTS, dtype=torch.float64, device=flat.device)
    for number, part in enumerate(flat.split(_CHUNK)):
        generator = torch.Generator(device=flat.device).manual_seed(zlib.crc32(f"{name} {number}".encode()))
        for product in range(NUM_PRODUCTS):
            signs = torch.randint(0, 2, part.shape, generator=generator, device=flat.device, dtype=torch.int8)
            products[product] += (part.double() * (2 * signs - 1)).sum()
    return Sketch(flat.double().norm().item(), products.tolist())
