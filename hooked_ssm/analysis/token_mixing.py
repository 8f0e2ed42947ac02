"""The exact token-mixing matrix of any layer: which position reads how much of which, signed.

    matrix @ values + offset = mixed

Softmax attention, Based, H3, Mamba-2, GLA and the delta nets have a matrix per head; Mamba,
Hyena and BaseConv one per channel. The reconstruction error against the model's own fast path is
stated with every result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.analysis.attribution import refuse_inference_weights
from hooked_ssm.analysis.metrics import check_ids
from hooked_ssm.analysis.resume import read_positions
from hooked_ssm.analysis.value_path import affine_map, value_path
from hooked_ssm.checks import AttentionMask, Count, Indices, checked
from hooked_ssm.errors import ConfigError, HookNameError, ShapeError
from hooked_ssm.html_table import titled_table
from hooked_ssm.mixers import Mixer
from hooked_ssm.model import HookedModel

Through = Literal["values", "mixer"]
Weight = Literal["none", "norm", "logit"]
MOST_DRAWN = 6


@dataclass(frozen=True)
class TokenMixing:
    """Result of `token_mixing`.

    Attributes:
        matrix: How much query position q takes of key position k, signed.
        values: What is mixed; one wide for channels.
        offset: What the outputs hold beside matrix @ values (zero for most mixers).
        error: max |matrix @ values + offset - output| / max |output|, where the output is the one
            the model computes when nobody looks at its matrix.
        unit: What the matrices are of.
        layer: Of the model.
        through: "values" or "mixer", as asked for.
        labels: Readable tokens of the first document.
    """

    matrix: Float[Tensor, "batch unit query_pos key_pos"]
    values: Float[Tensor, "batch key_pos unit width"]
    offset: Float[Tensor, "batch query_pos unit width"]
    error: float
    unit: Literal["head", "channel"]
    layer: int
    through: Through
    labels: list[str] = field(repr=False)
    _gradient: Callable[[Tensor, Tensor], Tensor] = field(repr=False)

    @checked
    def reduce(
        self,
        weight: Weight = "none",
        groups: int | None = None,
        *,
        at: Int[Tensor, " batch"] | None = None,
        token: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch group query_pos key_pos"]:
        """Return the matrices weighted by what they move, and gathered in groups; signed.

        - "none": as they are; groups are averaged.
        - "norm": matrix[q, k] |values[k]|, how much is moved; groups are summed.
        - "logit": sum_w matrix[q, k] values[k, w] d logit / d output[q, w]: to first order, what
          key k adds to the logit of `token` read at position `at` by way of query q (of all the
          later layers); groups are summed.

        Args:
            weight: See above.
            groups: How many groups of consecutive heads or channels; None keeps each by itself.
            at: "logit": the position where each document's logit is read. [batch]
            token: "logit": whose logit. [batch]

        Raises:
            ConfigError: Unknown weight, "logit" without `at` and `token`, or too many groups.
        """
        units = self.matrix.shape[1]
        if groups is not None and not 1 <= groups <= units:
            raise ConfigError(
                f"groups={groups}: there are {units} {self.unit}s; allowed 1..{units}"
            )
        weighted = self.matrix
        if weight == "norm":
            weighted = self.matrix * self.values.norm(dim=-1).transpose(1, 2)[:, :, None, :]
        elif weight == "logit":
            if at is None or token is None:
                raise ConfigError("reduce('logit') needs at= and token=: whose logit, read where")
            gradient = self._gradient(at, token)
            added = torch.einsum("bqcw,bkcw->bcqk", gradient, self.values.to(gradient.dtype))
            weighted = self.matrix * added
        if groups is None:
            return weighted
        parts = weighted.tensor_split(groups, dim=1)
        gathered = [p.mean(1) if weight == "none" else p.sum(1) for p in parts]
        return torch.stack(gathered, dim=1)

    @checked
    def strongest(self, most: Count = MOST_DRAWN) -> list[int]:
        """Return the heads or channels that move most, by the norm-weighted matrix."""
        moved = self.reduce("norm").abs().sum((0, 2, 3))
        return moved.argsort(descending=True)[:most].tolist()

    @checked
    def plot(self, document: int = 0, units: Indices | None = None) -> Any:
        """Return the plotly figure of one document's matrices, the strongest if not told which.

        Raises:
            ShapeError: There is no such document, head or channel.
        """
        from hooked_ssm import plots

        units = self.strongest() if units is None else list(units)
        batch, count = self.matrix.shape[:2]
        for what, given, size in (("document", [document], batch), (self.unit, units, count)):
            if not all(-size <= i < size for i in given):
                raise ShapeError(f"{what}s {given}: there are {size}; allowed 0..{size - 1}")
        return plots.pattern(
            self.matrix[document, units],
            self.labels if document == 0 else None,
            names=[f"{self.unit} {i}" for i in units],
            kind=self.unit,
            title=f"Token mixing of layer {self.layer}",
        )

    def _repr_html_(self) -> str:
        batch, units, queries, _ = self.matrix.shape
        negative = float((self.matrix < 0).double().mean())
        through = "values" if self.through == "values" else "whole mixer"
        return titled_table(
            f"Token mixing of layer {self.layer}, through the {through}",
            detail=f"{units} {self.unit}s, {batch} documents of {queries} tokens; reconstruction "
            f"error {self.error:.1e}; {negative:.0%} of the weights negative; strongest "
            f"{self.unit}s {', '.join(map(str, self.strongest()))}",
        )


@checked
@torch.no_grad()
def token_mixing(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    layer: int,
    *,
    through: Through = "values",
    attention_mask: AttentionMask | None = None,
) -> TokenMixing:
    """Return the exact token-mixing matrix of a layer.

    Args:
        model: Any `HookedModel`; run in its own mode.
        tokens: Documents.
        layer: Negative counts from the last.
        through: "values": from the values to the mixed values. "mixer": the whole way of the
            values, from what enters the short convolution to what the output projection reads,
            per channel, given the gates (see `hooked_ssm.analysis.value_path`).
        attention_mask: False at padding. [batch, pos]

    Raises:
        HookNameError: The layer does not exist or has no matrix (BaseConv with activations).
        HookUnavailableError: through="mixer" on a mixer of the user's own.
    """
    run = _Run(model, tokens, layer, attention_mask)
    matrix = run.pattern()
    units = matrix.shape[1]
    values, mixed = _by_unit(run.values(), units), _by_unit(run.role("mixed"), units)
    values = _per_unit(values, units)
    offset = run.offset()
    offset = _by_unit(offset, units) if isinstance(offset, Tensor) else mixed.new_zeros(()) + offset
    end = model.hook_name(layer, "mixed")
    path = value_path(run.mixer, run.activation) if through == "mixer" else None
    if path is not None:
        width = values.shape[-1]
        matrix = matrix.repeat_interleave(width, dim=1)
        matrix, offset = affine_map(path, matrix, _flat(offset, mixed))
        output = run.activation(path.output).flatten(2)
        inputs = run.keep_real(path.inputs)  # what stands at padding enters no convolution
        values, offset, mixed = (x[..., None] for x in (inputs, offset, output))
        end = run.prefix + path.output
    offset = offset.expand_as(mixed).to(matrix.dtype)
    return TokenMixing(
        matrix=matrix,
        values=values,
        offset=offset,
        error=_error(matrix, values, offset, mixed, attention_mask),
        unit="head" if path is None and (run.has_heads or units == 1) else "channel",
        layer=layer % len(model.blocks),
        through=through,
        labels=model.to_str_tokens(tokens[0]),
        _gradient=lambda at, token: _gradient(
            model, tokens, attention_mask, end, at, token
        ).reshape(mixed.shape),
    )


class _Run:
    """Cached activations of one layer; what is asked for later is computed by another forward."""

    def __init__(self, model: HookedModel, tokens: Tensor, layer: int, mask: Tensor | None):
        self.model, self.tokens, self.layer, self.mask = model, tokens, layer, mask
        self.pattern_name = model.hook_name(layer, "pattern")
        self.mixer: Mixer = model.blocks[layer].mixer  # type: ignore[assignment]
        self.prefix = self.pattern_name.removesuffix("hook_pattern")
        self.has_heads = "head" in model.find_hook(self.pattern_name).spec.axes
        self._cache: dict[str, Tensor] = {}

    def pattern(self) -> Tensor:
        # In a run of its own: whoever looks at the pattern has the mixer compute through it.
        return self._run(self.pattern_name)

    def role(self, role: str) -> Tensor:
        return self._cached(self.model.hook_name(self.layer, role))

    def values(self) -> Tensor:
        try:
            values = self.role("value")
        except HookNameError:  # BaseConv mixes its own input
            values = self.activation("input")
        return values

    def offset(self) -> Tensor | float:
        return self.mixer.pattern_offset(self.activation)

    def activation(self, name: str) -> Tensor:
        if name != "input":
            return self._cached(self.prefix + name)
        return self.keep_real(self._cached(self.model.hook_name(self.layer, "mixer_in")))

    def keep_real(self, x: Tensor) -> Tensor:
        return x if self.mask is None else x * self.mask[..., None]

    def _cached(self, name: str) -> Tensor:
        if name not in self._cache:
            self._cache[name] = self._run(name)
        return self._cache[name]

    def _run(self, name: str) -> Tensor:
        _, cache = self.model.run_with_cache(
            self.tokens,
            return_type=None,
            names_filter=name,
            attention_mask=self.mask,
            return_cache_object=False,
        )
        return cache[name]


def _by_unit(x: Tensor, units: int) -> Tensor:
    """[batch, pos, channel] -> [batch, pos, unit, channel of it]; heads stay as they are.

    A unit is a channel, or all of them where one matrix mixes the whole mixer.
    """
    return x.unflatten(-1, (units, -1)) if x.ndim == 3 else x


def _per_unit(values: Tensor, units: int) -> Tensor:
    """Repeat the values of shared heads for every head that reads them."""
    return values.repeat_interleave(units // values.shape[2], dim=2)


def _flat(offset: Tensor, mixed: Tensor) -> Tensor:
    return offset.expand_as(mixed).flatten(2)


def _error(
    matrix: Tensor, values: Tensor, offset: Tensor, mixed: Tensor, mask: Tensor | None
) -> float:
    rebuilt = torch.einsum("bcqk,bkcw->bqcw", matrix, values.to(matrix.dtype)) + offset
    wrong = (rebuilt - mixed).abs()
    if mask is not None:
        wrong, mixed = wrong[mask.bool()], mixed[mask.bool()]
    largest = float(mixed.abs().max())
    return float(wrong.max()) / largest if largest else float(wrong.max())


def _gradient(
    model: HookedModel, tokens: Tensor, mask: Tensor | None, name: str, at: Tensor, token: Tensor
) -> Tensor:
    """d logit / d the activation `name`. [batch, pos, ...]"""
    if token.shape != tokens.shape[:1]:
        raise ShapeError(
            f"token {tuple(token.shape)} must be one id for each of the {len(tokens)} documents"
        )
    check_ids(token, "token", model.cfg.d_vocab)
    refuse_inference_weights(model, "reduce('logit')")
    at = read_positions(tokens, at)
    leaves: list[Tensor] = []

    def cut(activation: Tensor, hook: Any) -> Tensor:
        leaves.append(activation.detach().requires_grad_(True))
        return leaves[0].clone()

    # A caller's inference mode would leave no gradients.
    with torch.inference_mode(False), torch.enable_grad():
        logits = model.run_with_hooks(
            tokens.clone(),
            fwd_hooks=[(name, cut)],
            attention_mask=None if mask is None else mask.clone(),
            logit_positions=at[:, None].clone(),
        )
        logit = logits[:, 0].gather(-1, token.clone().to(tokens.device)[:, None]).sum()
        (gradient,) = torch.autograd.grad(logit, leaves)
    return gradient
