"""One layer: norm -> mixer -> residual (-> norm -> MLP -> residual). Only here are residuals added.

The norm's output is what the mixer reads: `hook_mixer_in` is `ln1.hook_normalized`'s successor.
"""

from __future__ import annotations

from torch import Tensor, nn

from hooked_ssm.config import ModelConfig
from hooked_ssm.hook_names import spec
from hooked_ssm.hook_points import SpecHookPoint
from hooked_ssm.layers import MLP, Norm
from hooked_ssm.mixers import Carried, Mixer, Segment, find_mixer

_RESIDUAL = "batch pos d_model"


def residual_hook(name: str) -> SpecHookPoint:
    """Return a hook point on something as wide as the residual stream."""
    return SpecHookPoint(spec(name, _RESIDUAL))


class Block(nn.Module):
    """One layer of a `HookedModel`."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        kind, eps = config.block_norm(layer), config.norm_eps
        d_model, d_mlp = config.d_model, config.block_d_mlp(layer)
        self.hook_resid_pre = residual_hook("hook_resid_pre")
        self.ln1 = Norm(d_model, kind, eps)
        self.hook_mixer_in = residual_hook("hook_mixer_in")
        mixer = find_mixer(config.mixer_name(layer))
        self.mixer: Mixer = mixer(d_model, config.n_ctx, config.mixer_options(layer))
        self.hook_mixer_out = residual_hook("hook_mixer_out")
        self.has_mlp = d_mlp > 0
        if self.has_mlp:
            self.hook_resid_mid = residual_hook("hook_resid_mid")
            self.ln2 = Norm(d_model, kind, eps)
            self.mlp = MLP(d_model, d_mlp, config.act)
            self.hook_mlp_out = residual_hook("hook_mlp_out")
        self.hook_resid_post = residual_hook("hook_resid_post")

    @property
    def attn(self) -> Mixer:
        """The mixer, under TransformerLens' name."""
        return self.mixer

    def forward(
        self, resid: Tensor, segment: Segment, carried: Carried | None = None
    ) -> tuple[Tensor, Carried]:
        """Return the residual stream after the layer, and what its mixer carries on."""
        resid = self.hook_resid_pre(resid)
        mixed, carried = self.mixer(self.hook_mixer_in(self.ln1(resid)), segment, carried)
        resid = resid + self.hook_mixer_out(mixed)
        if self.has_mlp:
            resid = self.hook_resid_mid(resid)
            resid = resid + self.hook_mlp_out(self.mlp(self.ln2(resid)))
        return self.hook_resid_post(resid), carried
