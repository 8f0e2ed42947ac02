"""Induction models with hand-made weights: what they do, and where, is known.

The residual stream is four blocks of one-hots: the token itself, the token before (or two before),
the token to copy, and the prediction.
"""

from __future__ import annotations

import torch

from hooked_ssm import HookedModel, ModelConfig

VOCAB = 12
TOKEN, BEFORE, COPIED, PREDICTED = (slice(i * VOCAB, (i + 1) * VOCAB) for i in range(4))


def induction_model() -> HookedModel:
    """Layer 0, attention: each token's place gets the token before. Layer 1: match and copy."""
    model = _model(["attention", "attention"], [TOKEN, COPIED])
    with torch.no_grad():
        first = model.blocks[0].mixer
        first.v_proj.weight[TOKEN, TOKEN] = torch.eye(VOCAB).double()
        first.out_proj.weight[BEFORE, TOKEN] = torch.eye(VOCAB).double()

    def previous(scores: torch.Tensor, hook: object) -> torch.Tensor:
        return scores + 100 * torch.ones_like(scores).tril(-1).triu(-1)

    model.blocks[0].mixer.hook_attn_scores.add_hook(previous, is_permanent=True)
    return model


def convolution_model(reach: int = 1) -> HookedModel:
    """As `induction_model`, but a convolution (BaseConv's) moves tokens on, and `reach` places.

    reach=1: the value's place gets the key. reach=2: the place behind the value gets the key from
    two before, and from one before the value to copy. The mixer adds what was before and takes
    the token itself away: (before - 2 now) + now, now being added back by the residual.
    """
    base_conv = {"mixer": "base_conv", "kernel_size": reach + 1}
    model = _model([base_conv, "attention"], [TOKEN, BEFORE, COPIED])
    with torch.no_grad():
        # The norm only centres: its weight takes the division by the spread back.
        model.blocks[0].ln1.weight.fill_(float(model.embed.weight[0].std(unbiased=False)))
        first = model.blocks[0].mixer
        first.projection.bias.fill_(1)
        first.conv.weight[:, -1] = -1
        for block, before in ((BEFORE, reach), (COPIED, reach - 1)):
            if before:
                first.conv.weight[block, -1] = -2
                first.conv.weight[block, -1 - before] = 1
    return model


def _model(mixers: list, embedded: list[slice]) -> HookedModel:
    """Zero weights but for the embedding and layer 1: look for BEFORE = TOKEN, predict COPIED."""
    cfg = ModelConfig(
        mixers=mixers, d_model=4 * VOCAB, d_vocab=VOCAB, n_ctx=24, d_mlp=0, norm="layer",
        positions="learned", tie_embeddings=False,
    )  # fmt: skip
    model = HookedModel(cfg).double().eval()
    one = torch.eye(VOCAB).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in [model.ln_final, *(block.ln1 for block in model.blocks)]:
            norm.weight.fill_(1)
        for block in embedded:
            model.embed.weight[:, block] = one
        second = model.blocks[1].mixer
        second.q_proj.weight[TOKEN, TOKEN] = 20 * one
        second.k_proj.weight[TOKEN, BEFORE] = 20 * one
        second.v_proj.weight[TOKEN, COPIED] = one
        second.out_proj.weight[PREDICTED, TOKEN] = one
        model.unembed.weight[:, PREDICTED] = 10 * one
    return model
