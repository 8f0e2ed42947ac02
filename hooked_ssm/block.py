"""One layer: norm -> mixer -> residual (-> norm -> MLP -> residual). Only here are residuals added.

With `parallel_attn_mlp` (GPT-NeoX) the MLP reads what the mixer reads, the stream that enters the
block, through a norm of its own, and there is no `hook_resid_mid`.

The norm's output is what the mixer reads: `hook_mixer_in` is `ln1.hook_normalized`'s successor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import ShapeError
from hooked_ssm.hook_names import spec
from hooked_ssm.hook_points import SpecHookPoint
from hooked_ssm.layers import MLP, Norm
from hooked_ssm.mixers import Carried, Mixer, Segment, find_mixer

AFTER_MIXING = ("hook_resid_mid", "ln2.", "mlp.", "hook_mlp_out", "hook_resid_post")
"""Hook points at which a position no longer acts on others within the layer."""

_RESIDUAL = "batch pos d_model"


def residual_hook(name: str) -> SpecHookPoint:
    """Return a hook point on something as wide as the residual stream."""
    return SpecHookPoint(spec(name, _RESIDUAL))


def check_positions(positions: Tensor, x: Tensor) -> None:
    """Refuse positions that torch would broadcast or read as something else.

    Raises:
        ShapeError: Neither a mask [batch, pos] nor indices [batch, k] of positions there are.
    """
    allowed = f"a bool mask {list(x.shape[:2])}, or int64 indices [{len(x)}, k]"
    if not isinstance(positions, Tensor):
        raise ShapeError(f"logit_positions: got {positions!r}; allowed: a tensor, {allowed}")
    fits = (
        positions.shape == x.shape[:2]
        if positions.dtype == torch.bool
        else positions.dtype == torch.int64 and positions.ndim == 2 and len(positions) == len(x)
    )
    if not fits:
        raise ShapeError(
            f"logit_positions: got {positions.dtype} of shape {list(positions.shape)}; allowed: "
            f"{allowed}"
        )
    if positions.dtype == torch.bool or positions.is_cuda or not positions.numel():
        return  # asking a GPU for the values would wait for it
    low, high = positions.aminmax()
    if low < -x.shape[1] or high >= x.shape[1]:
        raise ShapeError(
            f"logit_positions run from {int(low)} to {int(high)}; allowed: 0..{x.shape[1] - 1}, or "
            f"-{x.shape[1]}..-1 from the end"
        )


def select(x: Tensor, positions: Tensor) -> Tensor:
    """Return x at some positions.

    Args:
        x: [batch, pos, ...]
        positions: A mask [batch, pos] -> [selected, ...]; or indices [batch, k] -> [batch, k, ...].
    """
    check_positions(positions, x)
    if positions.dtype == torch.bool:
        return x[positions]
    return x[torch.arange(len(x), device=x.device)[:, None], positions]


class Block(nn.Module):
    """One layer of a `HookedModel`."""

    hook_out_is_single_residual_stream = True
    """What TransformerLens' readout tools ask of a block before they unembed its output."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        kind, eps = config.block_norm(layer), config.norm_eps
        d_model, d_mlp = config.d_model, config.block_d_mlp(layer)
        self.hook_resid_pre = residual_hook("hook_resid_pre")
        self.ln1 = Norm(d_model, kind, eps, reach="later")
        self.hook_mixer_in = residual_hook("hook_mixer_in")
        mixer = find_mixer(config.mixer_name(layer))
        self.mixer: Mixer = mixer(d_model, config.n_ctx, config.mixer_options(layer))
        self.hook_mixer_out = residual_hook("hook_mixer_out")
        self.has_mlp, self.parallel = d_mlp > 0, config.parallel_attn_mlp
        if self.has_mlp:
            if not self.parallel:
                self.hook_resid_mid = residual_hook("hook_resid_mid")
            self.ln2 = Norm(d_model, kind, eps)
            self.mlp = MLP(d_model, d_mlp, config.act, gated=config.gated_mlp, bias=config.mlp_bias)
            self.hook_mlp_out = residual_hook("hook_mlp_out")
        self.hook_resid_post = residual_hook("hook_resid_post")

    def listened_after_mixing(self) -> bool:
        """Whether somebody listens to what follows `hook_mixer_out`, at positions nobody reads."""
        return any(
            point.listened
            for name, point in self.named_modules()
            if isinstance(point, SpecHookPoint) and name.startswith(AFTER_MIXING)
        )

    @property
    def attn(self) -> Mixer:
        """The mixer, under TransformerLens' name."""
        return self.mixer

    def forward(
        self,
        resid: Tensor,
        segment: Segment,
        carried: Carried | None = None,
        only_at: Tensor | None = None,
    ) -> tuple[Tensor, Carried]:
        """Return the residual stream after the layer, and what its mixer carries on.

        Args:
            only_at: Positions that anybody needs of the result (see `select`); what follows the
                mixer is computed only there. None: all.
        """
        resid = self.hook_resid_pre(resid)
        mixed, carried = self.mixer(self.hook_mixer_in(self.ln1(resid)), segment, carried)
        mixed = self.hook_mixer_out(mixed)
        if only_at is not None:
            resid, mixed = select(resid, only_at), select(mixed, only_at)
        if not self.has_mlp:
            resid = resid + mixed
        elif self.parallel:
            resid = resid + mixed + self.hook_mlp_out(self.mlp(self.ln2(resid)))
        else:
            resid = self.hook_resid_mid(resid + mixed)
            resid = resid + self.hook_mlp_out(self.mlp(self.ln2(resid)))
        return self.hook_resid_post(resid), carried
