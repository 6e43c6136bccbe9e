"""A small flow for SU(3) gauge fields on a lattice: where its samples come from, what it does to them, what it costs.

A field has a 3 x 3 complex matrix, unitary with determinant 1, on each link: shape (batch, 4, 4, 4, 4, 4, 3, 3) for
four lattice axes of length 4 and four link directions.
"""

from __future__ import annotations

import torch
from torch import nn

LENGTH, DIRECTIONS, COLORS = 4, 4, 3
PLANES = [(mu, nu) for mu in range(DIRECTIONS) for nu in range(DIRECTIONS) if mu != nu]


def ginibre(batch: int, device: str) -> torch.Tensor:
    """Matrices of independent complex normal numbers, one per link."""
    return torch.randn(batch, *[LENGTH] * 4, DIRECTIONS, COLORS, COLORS, dtype=torch.complex64, device=device)


def haar_qr(batch: int, device: str = "cpu") -> torch.Tensor:
    """Gauge fields whose links are evenly distributed over SU(3) (the Haar measure), by a QR decomposition of each."""
    q, r = torch.linalg.qr(ginibre(batch, device))
    # the decomposition is unique, and evenly distributed, only with a positive diagonal of r
    phases = r.diagonal(dim1=-2, dim2=-1)[..., :2].sgn()
    two = q[..., :2] * phases.unsqueeze(-2)
    third = torch.linalg.cross(two[..., 0], two[..., 1], dim=-1).conj()  # makes the determinant 1
    return torch.cat([two, third.unsqueeze(-1)], dim=-1)


def haar_gram_schmidt(batch: int, device: str = "cpu") -> torch.Tensor:
    """The same fields, with the two steps of Gram and Schmidt that a 3 x 3 matrix needs written out."""
    # components first, so that every operation below runs over whole rows of memory
    columns = ginibre(batch, device).movedim((-1, -2), (0, 1))[:2].contiguous()
    first = normalized(columns[0])
    second = normalized(columns[1] - first * (first.conj() * columns[1]).sum(0))
    columns = torch.stack([first, second, torch.linalg.cross(first, second, dim=0).conj()])
    return columns.movedim((0, 1), (-1, -2)).contiguous()


def normalized(column: torch.Tensor) -> torch.Tensor:
    """Vectors, their components along the first axis, scaled to length 1."""
    return column * torch.view_as_real(column).square().sum((0, -1)).rsqrt()


def loops(links: torch.Tensor, mu: int, nu: int) -> torch.Tensor:
    """Diagonals of the smallest loops in the plane of `mu` and `nu`, those that begin at even sites; (batch, …, 3)."""
    along, across = links[..., mu, :, :], links[..., nu, :, :]
    here, beyond = along.unflatten(1 + nu, (-1, 2)).unbind(2 + nu)  # even sites, and their neighbours in `nu`
    ahead = across.roll(-1, 1 + mu).unflatten(1 + nu, (-1, 2)).select(2 + nu, 0)
    side = across.unflatten(1 + nu, (-1, 2)).select(2 + nu, 0)
    rest = ahead @ beyond.mH @ side.mH
    return (rest * here.mT).sum(-1)


class Flow(nn.Module):
    """Turns every other link of a plane so that its loops shrink; how far is learned, one number for each plane."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(len(PLANES)))

    def forward(self, links: torch.Tensor, plane: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Real parts of the loops after the flow, and the logarithm of how it changes volumes, per color."""
        before = loops(links, *PLANES[plane])
        strength = self.strength[plane].tanh()
        turned = before * torch.exp(-1j * strength * before.imag)
        return turned.real, torch.log1p(-0.99 * strength * before.real)


def reverse_kl(turned: torch.Tensor, log_volume: torch.Tensor, beta: float) -> torch.Tensor:
    """How far the flow's fields are from those of Wilson's action at coupling `beta`, up to a constant, per loop."""
    action = -beta / COLORS * turned.sum(-1)
    return (action - log_volume.sum(-1)).mean()
