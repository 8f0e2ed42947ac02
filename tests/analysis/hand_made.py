"""Induction models with hand-made weights: what they do, and where, is known."""

from __future__ import annotations

import torch

from hooked_ssm import HookedModel, ModelConfig

VOCAB = 12


def induction_model() -> HookedModel:
    """Layer 0, attention: each token's place gets the token before. Layer 1: match and copy."""
    model = _empty(["attention", "attention"])
    one, none = torch.eye(VOCAB).double(), torch.zeros(VOCAB, VOCAB).double()
    with torch.no_grad():
        model.embed.weight.copy_(torch.cat([one, none, none], dim=1))
        first = model.blocks[0].mixer
        first.v_proj.weight[:VOCAB, :VOCAB] = one
        first.out_proj.weight[VOCAB : 2 * VOCAB, :VOCAB] = one
    _match_and_copy(model)

    def previous(scores: torch.Tensor, hook: object) -> torch.Tensor:
        return scores + 100 * torch.ones_like(scores).tril(-1).triu(-1)

    model.blocks[0].mixer.hook_attn_scores.add_hook(previous, is_permanent=True)
    return model


def convolution_model() -> HookedModel:
    """As `induction_model`, but a convolution of width 2 (BaseConv's) moves the token on.

    The embedding holds each token twice. On the second copy the mixer adds the token before and
    takes the token itself away: (before - 2 now) + now, now being added back by the residual.
    """
    model = _empty([{"mixer": "base_conv", "kernel_size": 2}, "attention"])
    one, none = torch.eye(VOCAB).double(), torch.zeros(VOCAB, VOCAB).double()
    with torch.no_grad():
        model.embed.weight.copy_(torch.cat([one, one, none], dim=1))
        # The norm only centres: its weight takes the division by the spread back.
        model.blocks[0].ln1.weight.fill_(float(model.embed.weight[0].std(unbiased=False)))
        first = model.blocks[0].mixer
        first.projection.bias.fill_(1)
        first.conv.weight[:, -1] = -1
        first.conv.weight[VOCAB : 2 * VOCAB, -1] = -2
        first.conv.weight[VOCAB : 2 * VOCAB, -2] = 1
    _match_and_copy(model)
    return model


def _empty(mixers: list) -> HookedModel:
    cfg = ModelConfig(
        mixers=mixers, d_model=3 * VOCAB, d_vocab=VOCAB, n_ctx=24, d_mlp=0, norm="layer",
        positions="learned", tie_embeddings=False,
    )  # fmt: skip
    model = HookedModel(cfg).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in [model.ln_final, *(block.ln1 for block in model.blocks)]:
            norm.weight.fill_(1)
    return model


def _match_and_copy(model: HookedModel) -> None:
    """Layer 1 looks for the places whose token before is the current one; it copies theirs."""
    second, one = model.blocks[1].mixer, torch.eye(VOCAB).double()
    with torch.no_grad():
        second.q_proj.weight[:VOCAB, :VOCAB] = 20 * one
        second.k_proj.weight[:VOCAB, VOCAB : 2 * VOCAB] = 20 * one
        second.v_proj.weight[:VOCAB, :VOCAB] = one
        second.out_proj.weight[2 * VOCAB :, :VOCAB] = one
        model.unembed.weight[:, 2 * VOCAB :] = 10 * one
