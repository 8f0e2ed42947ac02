"""How much of a token-mixing pattern lies where a kind of head would have it; tensors only.

The detection patterns are those of `transformer_lens.head_detector`, and with queries="all" so are
the scores, on softmax patterns. Scores here take signed matrices as well, count only the queries
that have a target (so that a perfect induction pattern scores 1, whatever precedes it), and come
with their chance level.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_ssm.checks import checked
from hooked_ssm.errors import ConfigError, ShapeError, unknown

Kind = Literal["previous_token", "duplicate_token", "induction"]
KINDS: tuple[str, ...] = get_args(Kind)
Measure = Literal["mul", "abs"]


@checked
def detection_pattern(
    tokens: Int[Tensor, "batch pos"], kind: Kind
) -> Bool[Tensor, "batch query_pos key_pos"]:
    """Return where a kind of head looks.

    - "previous_token": k = q - 1.
    - "duplicate_token": k < q with tokens[k] = tokens[q].
    - "induction": k <= q with tokens[k - 1] = tokens[q], k - 1 < q: what came after it before.

    Raises:
        ConfigError: Unknown kind.
    """
    length = tokens.shape[1]
    ones = torch.ones(length, length, dtype=torch.bool, device=tokens.device)
    if kind == "previous_token":
        return (ones.tril(-1) & ones.triu(-1)).expand(len(tokens), -1, -1)
    if kind not in KINDS:
        raise ConfigError(unknown("kind of head", kind, KINDS))
    duplicate = (tokens[:, :, None] == tokens[:, None, :]) & ones.tril(-1)
    if kind == "duplicate_token":
        return duplicate
    return torch.nn.functional.pad(duplicate[..., :-1], (1, 0))


@checked
def pattern_scores(
    matrix: Float[Tensor, "batch unit query_pos key_pos"],
    targets: Bool[Tensor, "batch query_pos key_pos"],
    *,
    queries: Literal["with_target", "all"] | Bool[Tensor, "batch query_pos"] = "with_target",
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    measure: Measure = "mul",
    pool: bool = False,
) -> Float[Tensor, "batch scored"]:
    """Score every pattern by the share of its weight that lies on the targets.

    "mul": sum matrix on targets / sum |matrix|; 1 = all there, -1 = all there with the other
    sign. "abs": 1 - mean over queries of sum_k |matrix - target|.

    Args:
        matrix: Softmax patterns or signed mixing matrices.
        targets: See `detection_pattern`.
        queries: Which rows count: those with a target, "all" (TransformerLens' choice), or a mask.
        exclude_bos: Leave out what is given to position 0.
        exclude_current_token: Leave out the diagonal.
        measure: See above; the names are TransformerLens' `error_measure`.
        pool: Score all units as one; the unit axis is then 1. "mul": sum |matrix| on targets / sum
            |matrix|, over all units, as channels of both signs would cancel; "abs": the mean.

    Returns:
        NaN where no row counts or nothing is mixed.

    Raises:
        ShapeError: Matrix, targets and queries do not fit each other.
        ConfigError: Unknown measure or queries.
    """
    if measure not in get_args(Measure):
        raise ConfigError(unknown("measure", measure, get_args(Measure)))
    rows = counted(targets, queries)
    counts = rows[:, :, None].expand_as(targets).clone()
    if exclude_bos:
        counts[..., 0] = False
    if exclude_current_token:
        counts &= ~torch.eye(counts.shape[-1], dtype=torch.bool, device=counts.device)
    counts = counts[:, None]
    hit = targets[:, None].to(matrix.dtype)
    if measure == "abs":
        missed = ((matrix - hit).abs() * counts).sum((-1, -2))
        score = 1 - missed / rows.sum(1)[:, None]
        return score.mean(1, keepdim=True) if pool else score
    matrix = matrix * counts
    if pool:
        moved = matrix.abs()
        return ((moved * hit).sum((1, 2, 3)) / moved.sum((1, 2, 3)))[:, None]
    return (matrix * hit).sum((-1, -2)) / matrix.abs().sum((-1, -2))


@checked
def chance_scores(
    targets: Bool[Tensor, "batch query_pos key_pos"],
    *,
    queries: Literal["with_target", "all"] | Bool[Tensor, "batch query_pos"] = "with_target",
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    measure: Measure = "mul",
) -> Float[Tensor, " batch"]:
    """Return the score of a uniform causal pattern, 1 / (q + 1) at each k <= q, exactly."""
    length = targets.shape[1]
    uniform = torch.ones(length, length, dtype=torch.float64, device=targets.device).tril()
    uniform = uniform / uniform.sum(-1, keepdim=True)
    return pattern_scores(
        uniform.expand(len(targets), 1, -1, -1),
        targets,
        queries=queries,
        exclude_bos=exclude_bos,
        exclude_current_token=exclude_current_token,
        measure=measure,
    )[:, 0]


def counted(
    targets: Bool[Tensor, "batch query_pos key_pos"],
    queries: Literal["with_target", "all"] | Bool[Tensor, "batch query_pos"],
) -> Bool[Tensor, "batch query_pos"]:
    """Return which rows count.

    Raises:
        ConfigError: Neither a mask nor one of the words.
        ShapeError: A mask of another shape.
    """
    if isinstance(queries, Tensor):
        if queries.shape != targets.shape[:2]:
            raise ShapeError(
                f"queries is a mask of shape {tuple(queries.shape)}, wanted [batch, query_pos] = "
                f"{tuple(targets.shape[:2])}"
            )
        return queries
    if queries == "with_target":
        return targets.any(-1)
    if queries == "all":
        return torch.ones_like(targets[..., 0])
    raise ConfigError(unknown("queries", queries, ("with_target", "all")))


@checked
def resampled(
    targets: Bool[Tensor, "batch query_pos key_pos"], generator: torch.Generator
) -> Bool[Tensor, "batch query_pos key_pos"]:
    """Draw, for every query, as many other earlier keys as it has targets.

    Where fewer are left than that, all of them. The query itself is not among them: what it holds
    counts in every mixer, so removing it is no control.
    """
    causal = torch.ones_like(targets).tril(-1)
    noise = torch.rand(targets.shape, generator=generator, device=generator.device)
    noise = noise.to(targets.device).masked_fill(~causal | targets, -1.0)
    rank = noise.argsort(dim=-1, descending=True).argsort(dim=-1)
    return (rank < targets.sum(-1, keepdim=True)) & (noise >= 0)
