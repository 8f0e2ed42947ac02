"""The token-mixing matrix of linear attention with decay, for a chunk or a whole sequence.

    pattern[t, s] = sum over f of q[t, f] k[s, f] exp(sum over s < u <= t of log_decay[u, f])

Sums of log decays are built up over the steps between s and t, never as differences of a running
sum, and no decay is divided by: decays of exactly 0 (a log decay of -inf) are exact too, and a
huge one costs its neighbours no digits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decayed_pattern(q: Tensor, k: Tensor, log_decay: Tensor | None) -> Tensor:
    """Return the pattern, zero above the diagonal. [..., query_pos, key_pos]

    Args:
        q, k: [..., pos, feature]
        log_decay: None for no decay, [..., pos, 1] for one per position, or [..., pos, feature].
            The leading axes broadcast against those of q and k.
    """
    if log_decay is None:
        return (q @ k.mT).tril()
    if log_decay.shape[-1] == 1:
        return (q @ k.mT).tril() * segment_sums(log_decay.squeeze(-1)).exp()
    return _by_halves(q, k, log_decay)


def segment_sums(log_decay: Tensor) -> Tensor:
    """Sum over s < u <= t for every t, s; -inf above the diagonal. [..., pos] -> [..., pos, pos]"""
    length = log_decay.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=log_decay.device)
    rows = log_decay[..., :, None].expand(*log_decay.shape, length)
    sums = rows.masked_fill(ones.triu(), 0).cumsum(-2)
    return sums.masked_fill(ones.triu(1), -torch.inf)


def sums_from_start(log_decay: Tensor) -> Tensor:
    """Sum over u <= t: what a state before the first token has decayed by. [..., pos, feature]"""
    return log_decay.cumsum(-2)


def sums_to_end(log_decay: Tensor) -> Tensor:
    """Sum over u > s: what a write at s has decayed by at the end. [..., pos, feature]"""
    after = F.pad(log_decay[..., 1:, :], (0, 0, 0, 1))
    return after.flip(-2).cumsum(-2).flip(-2)


def _by_halves(q: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Per-channel decay: both halves by recursion; from the first to the second through the middle.

    exp(sum over s < u <= t) splits at the middle m into what the key decays by up to m and what
    the query's side decays by from m on: one matrix product, each factor a plain decay.
    """
    length = q.shape[-2]
    if length == 1:
        return (q * k).sum(-1, keepdim=True)
    if length % 2:
        q, k, log_decay = (F.pad(x, (0, 0, 0, 1)) for x in (q, k, log_decay))
        return _by_halves(q, k, log_decay)[..., :length, :length]
    q, k, log_decay = (x.unflatten(-2, (2, length // 2)) for x in (q, k, log_decay))
    first, second = _by_halves(q, k, log_decay).unbind(-3)
    to_middle = k[..., 0, :, :] * sums_to_end(log_decay[..., 0, :, :]).exp()
    from_middle = q[..., 1, :, :] * sums_from_start(log_decay[..., 1, :, :]).exp()
    across = from_middle @ to_middle.mT
    above = torch.cat([first, torch.zeros_like(first)], dim=-1)
    return torch.cat([above, torch.cat([across, second], dim=-1)], dim=-2)
