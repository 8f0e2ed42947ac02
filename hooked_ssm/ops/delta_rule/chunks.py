"""A sequence cut into chunks, and what the delta rule needs to know of each chunk beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_ssm.ops.decayed_pattern import segment_sums


def chunk_size(length: int, most: int) -> int:
    """The size of equal chunks of at most `most` positions that pads the sequence least."""
    return -(-length // -(-length // most))


def cut(x: Tensor, size: int) -> Tensor:
    """Cut positions into chunks, padded with zeros. [batch, pos, head, ...] -> [b, h, n, c, ...]"""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, -x.shape[1] % size))
    return x.unflatten(1, (-1, size)).movedim(3, 1)


def join(x: Tensor, length: int) -> Tensor:
    """Undo `cut`. [b, h, n, c, ...] -> [batch, pos, head, ...]"""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


@dataclass(frozen=True)
class Chunks:
    """Keys, betas and decays in chunks; b batch, h head, n chunk, c position in the chunk.

    A padded position has k = beta = g = 0: it neither writes, erases nor decays.

    Attributes:
        k: Keys. [b, h, n, c, d_key]
        beta: Write strengths. [b, h, n, c]
        within: exp(g[s+1] + .. + g[t]) for s <= t in the same chunk, 0 above.
            [b, h, n, c (t), c (s)]
        since_start: exp(g summed from the chunk's first position to t, both included).
            [b, h, n, c, 1]
    """

    k: Tensor
    beta: Tensor
    within: Tensor
    since_start: Tensor

    @classmethod
    def of(cls, k: Tensor, beta: Tensor, log_decay: Tensor | None, size: int) -> Chunks:
        """Cut [batch, pos, head, d_key], [batch, pos, head, 1] and [batch, pos, head]."""
        keys = cut(k, size)
        if log_decay is None:  # every decay is 1; [1, 1, n, ...] views broadcast over batch, head
            within = keys.new_ones(size, size).tril().expand(1, 1, keys.shape[2], size, size)
            since_start = keys.new_ones(1).expand(1, 1, keys.shape[2], size, 1)
        else:
            g = cut(log_decay, size)
            within = segment_sums(g).exp()
            since_start = g.cumsum(-1).exp().unsqueeze(-1)
        return cls(keys, cut(beta.squeeze(-1), size), within, since_start)

    @property
    def whole(self) -> Tensor:
        """Decay over the whole chunk. [b, h, n, 1, 1]"""
        return self.since_start[..., -1:, :]

    def weights(self, q: Tensor) -> Tensor:
        """beta[s] decay(s -> t) q[t].k[s], 0 for s > t. [b, h, n, c (t), c (s)]"""
        return (q @ self.k.mT) * self.within * self.beta.unsqueeze(-2)

    def solve(self, right: Tensor) -> Tensor:
        """(I + M)^-1 right, with M the weights of the keys on the keys strictly before them."""
        # unitriangular: the diagonal counts as ones and only what lies below it is read
        return torch.linalg.solve_triangular(
            self.weights(self.k), right, upper=False, unitriangular=True
        )

    def writes(self, error: Tensor) -> Tensor:
        """sum_s decay(s -> end) beta[s] k[s] error[s]^T: what a chunk adds to the state.

        [b, h, n, c, d_head] -> [b, h, n, d_key, d_head]
        """
        to_end = self.within[..., -1, :] * self.beta
        return (self.k * to_end.unsqueeze(-1)).mT @ error
