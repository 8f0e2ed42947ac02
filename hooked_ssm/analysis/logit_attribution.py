"""Direct logit attribution and the logit lens, part by part, for every architecture.

The final norm divides by one number per position; with that number held, a logit is a sum over
everything that was added to the residual stream. A mixer's share can be split further, into what
passes through one of its activations (the scan's outputs, the convolution's) and what does not
(the skip D x, the layer's own input).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.analysis.ablation import zero
from hooked_ssm.analysis.metrics import check_ids
from hooked_ssm.analysis.resume import read_positions
from hooked_ssm.analysis.standing import refuse_standing_edits
from hooked_ssm.cache import HookedCache
from hooked_ssm.checks import AttentionMask, checked
from hooked_ssm.errors import HookNameError
from hooked_ssm.html_table import titled_table
from hooked_ssm.model import HookedModel


@dataclass(frozen=True)
class LogitAttribution:
    """Result of `logit_attribution`.

    Attributes:
        parts: Labels, in the order in which the parts are added: "embed", "pos_embed", "mixer 0",
            "mlp 0", ...; a split mixer gives "mixer 0 through SITE" and "mixer 0 beside SITE".
        values: Each part's share of the answer's logit (less the wrong answer's). [part, batch]
        bias: What the final norm's bias gives beside them. [batch]
        curvature: Per split mixer, how far it is from affine in the site: |out(2 site) -
            2 out(site) + out(0)| over |out(site)|, largest over documents. 0: the split is exact.
    """

    parts: list[str]
    values: Float[Tensor, "part batch"] = field(repr=False)
    bias: Float[Tensor, " batch"] = field(repr=False)
    curvature: dict[str, float]

    @property
    def frame(self) -> pd.DataFrame:
        """One row per part: mean over documents and its standard error."""
        error = self.values.std(-1) / self.values.shape[-1] ** 0.5
        return pd.DataFrame(
            {"part": self.parts, "logit": self.values.mean(-1).tolist(), "stderr": error.tolist()}
        )

    def _repr_html_(self) -> str:
        detail = f"and {self.bias.mean().item():.3g} of the final norm's bias"
        return titled_table("Logit attribution", self.frame, detail)


@checked
@torch.no_grad()
def logit_attribution(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    answers: Int[Tensor, " batch"],
    wrong: Int[Tensor, " batch"] | None = None,
    *,
    split: str | None = None,
    read_at: Int[Tensor, " batch"] | None = None,
    attention_mask: AttentionMask | None = None,
) -> LogitAttribution:
    """Return what every part of the model adds to the answer's logit.

    logit = sum over parts of (part / scale) . W_U[answer] + bias; exact, as scale is the run's own.

    Args:
        tokens: Documents. [batch, pos]
        answers: The token whose logit it is. [batch]
        wrong: Take this token's logit away. [batch]
        split: A role or site inside the mixers, such as "mixed" (the scan's or attention's output)
            or "conv": each mixer that has it is split into what passes through it and the rest.
        read_at: Where logits are read; the last position if None. [batch]
        attention_mask: False at padding. [batch, pos]

    Raises:
        ShapeError: Answers or positions do not fit the documents.
        HookNameError: No mixer has the site to split at.
        HookUnavailableError: A hook of the user's own is attached to the model.
    """
    for name, ids in (("answers", answers), ("wrong", wrong)):
        if ids is not None:
            check_ids(ids, name, model.cfg.d_vocab)
    refuse_standing_edits(model, "logit_attribution")
    read_at = read_positions(tokens, read_at)
    splits = _splits(model, split)
    outs = [n for n in model.hook_dict if n.endswith(("_mixer_out", "hook_mlp_out"))]
    embeds = [n for n in ("hook_embed", "hook_pos_embed") if n in model.hook_dict]
    names = [*embeds, *outs, "ln_final.hook_scale"]
    _, cache = model.run_with_cache(tokens, names_filter=names, attention_mask=attention_mask)
    parts = {n.removeprefix("hook_"): cache[n] for n in embeds}
    curvature: dict[str, float] = {}
    for layer in range(len(model.blocks)):
        label, out = f"mixer {layer}", cache[f"blocks.{layer}.hook_mixer_out"]
        if layer in splits:
            site = splits[layer]
            rest, double = _without_and_twice(model, tokens, layer, site, attention_mask)
            parts[f"{label} through {split}"] = out - rest
            parts[f"{label} beside {split}"] = rest
            bend = (double - 2 * out + rest).flatten(1).abs().amax(1)
            curvature[label] = (bend / out.flatten(1).abs().amax(1)).max().item()
        else:
            parts[label] = out
        if f"blocks.{layer}.hook_mlp_out" in outs:
            parts[f"mlp {layer}"] = cache[f"blocks.{layer}.hook_mlp_out"]
    directions, bias = _directions(model, answers, wrong)
    values = _project(model, cache, list(parts.values()), directions, read_at)  # type: ignore[arg-type]
    return LogitAttribution(list(parts), values, bias, curvature)


@checked
@torch.no_grad()
def logit_lens(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    *,
    read_at: Int[Tensor, " batch"] | None = None,
    attention_mask: AttentionMask | None = None,
) -> Float[Tensor, "layer batch d_vocab"]:
    """Return the logits that the residual stream entering each layer, and the last, would give.

    Each goes through the final norm on its own; the last entry is the model's output.
    """
    refuse_standing_edits(model, "logit_attribution")
    read_at = read_positions(tokens, read_at)
    names = [n for n in model.hook_dict if n.endswith("hook_resid_pre")]
    names.append(f"blocks.{len(model.blocks) - 1}.hook_resid_post")
    _, cache = model.run_with_cache(
        tokens, names_filter=names, return_type=None, attention_mask=attention_mask
    )
    streams: Tensor = cache.accumulated_resid(layer=-1)  # type: ignore[union-attr,assignment]
    documents = torch.arange(len(tokens), device=tokens.device)
    return model.logits_at(model.ln_final(streams[:, documents, read_at]))


def _splits(model: HookedModel, split: str | None) -> dict[int, str]:
    """The hook to split at, of each layer that has it."""
    if split is None:
        return {}
    found, refusal = {}, None
    for layer in range(len(model.blocks)):
        try:
            name = model.hook_name(layer, split)
        except HookNameError as error:
            refusal = error
            continue
        if ".mixer." in name:
            found[layer] = name
    if not found:
        raise refusal or HookNameError(
            f"split={split!r} lies outside the mixers; allowed: a role or site inside, as 'mixed'"
        )
    return found


def _without_and_twice(
    model: HookedModel, tokens: Tensor, layer: int, site: str, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A mixer's output with an activation of it zeroed, and doubled; the stream below as it is."""
    name, found = f"blocks.{layer}.hook_mixer_out", []
    for change in (zero(), lambda x, hook: 2 * x):
        cache, hooks, _ = model.get_caching_hooks([name])
        with model.hooks(fwd_hooks=[(site, change), *hooks]):
            model(tokens, attention_mask=mask, stop_at_layer=layer + 1)
        found.append(cache[name])
    return found[0], found[1]


def _directions(model: HookedModel, answers: Tensor, wrong: Tensor | None) -> tuple[Tensor, Tensor]:
    """Directions in the scaled residual stream [batch, d_model], and the norm bias's share."""
    directions = model.tokens_to_residual_directions(answers)
    rows = model.W_U.T[answers.to(model.W_U.device)]
    if wrong is not None:
        directions = directions - model.tokens_to_residual_directions(wrong)
        rows = rows - model.W_U.T[wrong.to(model.W_U.device)]
    bias = model.ln_final.bias
    return directions, rows.new_zeros(len(rows)) if bias is None else rows @ bias


def _project(
    model: HookedModel,
    cache: HookedCache,
    parts: Sequence[Tensor],
    directions: Tensor,
    read_at: Tensor,
) -> Tensor:
    """Each part through the final norm as it was, along the directions. [part, batch]"""
    scaled = cache.apply_ln_to_stack(torch.stack(list(parts)), layer=-1)
    documents = torch.arange(len(read_at), device=read_at.device)
    return torch.einsum("kbm,bm->kb", scaled[:, documents, read_at], directions)
