"""A model with integer weights and no norms, small enough to work its effects out by hand.

d_model 4, tokens 0..3 are embedded as unit vectors times 1, so the residual stream of a document
is read off at sight. Layer l's mixer has two heads: head 0 copies the token before through
`copy[l]`, head 1 this token through `stay[l]`; both matrices are integers. The unembedding is the
identity. The MLP, where there is one, is `act(x) * 2`, with act the identity or ReLU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hooked_ssm import HookedModel, ModelConfig
from hooked_ssm.hook_names import spec
from hooked_ssm.layers import Linear, Norm
from hooked_ssm.mixers import MIXERS, Carried, Mixer, MixerOptions, Segment

D = 4


@dataclass(frozen=True, kw_only=True)
class MicroOptions(MixerOptions):
    """It has none."""


class Micro(Mixer):
    """y[t] = x[t-1] copy + x[t] stay."""

    Options = MicroOptions

    def __init__(self, d_model: int, n_ctx: int, options: MixerOptions):
        super().__init__(d_model, n_ctx, options)
        self.heads = torch.nn.ModuleList(Linear(d_model, d_model, bias=False) for _ in range(2))

    def axis_sizes(self) -> dict[str, int]:
        return {"head": 2, "d_model": self.d_model}

    def hook_specs(self):
        return (
            spec("hook_x", "batch pos d_model", "value"),
            spec("hook_result", "batch pos head d_model", "mixed", heavy=False),
        )

    def forward(
        self, x: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        x = self.hook_x(x)
        last = x.new_zeros(len(x), 1, self.d_model) if carried is None else carried["last"]
        before = torch.cat([last, x[:, :-1]], dim=1)
        result = torch.stack([self.heads[0](before), self.heads[1](x)], dim=2)
        return self.hook_result(result).sum(2), {"last": x[:, -1:]}


class NoNorm(Norm):
    """The identity, with a norm's hook points."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_normalized(x.clone())


def micro(
    copy: list[list[list[int]]],
    stay: list[list[list[int]]],
    *,
    mlp: str | None = None,
) -> HookedModel:
    """Build the model from one pair of matrices per layer.

    The mixer is registered only while it is built: tests over the registry see the library's own.
    """
    MIXERS["micro"] = Micro
    try:
        return _built(copy, stay, mlp)
    finally:
        del MIXERS["micro"]


def _built(
    copy: list[list[list[int]]], stay: list[list[list[int]]], mlp: str | None
) -> HookedModel:
    cfg = ModelConfig(
        mixers=["micro"] * len(copy), d_model=D, d_vocab=D, n_ctx=8, positions="none",
        d_mlp=D if mlp else 0, mlp_bias=False, act="relu", dtype=torch.float64,
        tie_embeddings=False,
    )  # fmt: skip
    model = HookedModel(cfg)
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(D))
        model.unembed.weight.copy_(torch.eye(D))
        for layer, block in enumerate(model.blocks):
            for head, matrix in zip(block.mixer.heads, (copy[layer], stay[layer]), strict=True):
                head.weight.copy_(torch.tensor(matrix, dtype=torch.float64).T)
            block.ln1 = NoNorm(D, "rms")
            if mlp:
                block.ln2 = NoNorm(D, "rms")
                block.mlp.fc_in.weight.copy_(torch.eye(D))
                block.mlp.fc_out.weight.copy_(2 * torch.eye(D))
                if mlp == "linear":
                    block.mlp.act = lambda x: x
    model.ln_final = NoNorm(D, "rms")
    model.to(torch.float64)
    model.setup()
    return model.eval()


def unit(row: int, column: int, value: int = 1) -> list[list[int]]:
    """A matrix that is zero but for one entry: what it reads, what it writes."""
    return [[value if (i, j) == (row, column) else 0 for j in range(D)] for i in range(D)]


NOTHING = [[0] * D for _ in range(D)]
