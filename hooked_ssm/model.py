"""HookedModel: embedding, blocks of any mixers, final norm, unembedding; hooks on everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_ssm import initialisation, summary
from hooked_ssm.block import Block, residual_hook, select
from hooked_ssm.checks import Count, check_value
from hooked_ssm.config import ModelConfig
from hooked_ssm.devices import placing
from hooked_ssm.errors import ShapeError
from hooked_ssm.generation import generate
from hooked_ssm.inputs import (
    MaskLike,
    Past,
    check_past,
    check_residual,
    check_tokens,
    locate,
    padding_of,
)
from hooked_ssm.layers import Linear, Norm, TiedUnembed
from hooked_ssm.lens_weights import LensWeights
from hooked_ssm.loss import next_token_loss
from hooked_ssm.mixers import Carried, Segment
from hooked_ssm.reach import check_layers, listened, refuse_left_out, refuse_out_of_reach
from hooked_ssm.root import HookRoot, NamedHook, NamesFilter
from hooked_ssm.sizes import activation_bytes
from hooked_ssm.tokens import Tokenising


class HookedModel(Tokenising, LensWeights, HookRoot):
    """A sequence model of any architecture, with transformer-lens hooks on everything.

    Args:
        cfg: Its description.
        initialise: False leaves all parameters unset, on the CPU and in float32, for a loader
            that assigns every one of them.
    """

    def __init__(self, cfg: ModelConfig, *, initialise: bool = True):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(
            cfg.d_vocab, cfg.d_model, _weight=_empty(cfg.d_vocab, cfg.d_model)
        )
        self.hook_embed = residual_hook("hook_embed")
        if cfg.positions == "learned":
            self.pos_embed = nn.Embedding(
                cfg.n_ctx, cfg.d_model, _weight=_empty(cfg.n_ctx, cfg.d_model)
            )
            self.hook_pos_embed = residual_hook("hook_pos_embed")
        n_layers = int(cfg.n_layers or 0)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(n_layers))
        self.ln_final = Norm(cfg.d_model, cfg.final_norm, cfg.norm_eps)
        self.unembed: Linear | TiedUnembed = (
            TiedUnembed(self.embed)
            if cfg.tie_embeddings
            else Linear(cfg.d_model, cfg.d_vocab, bias=False)
        )
        self.setup()
        if initialise:
            initialisation.initialise(self.modules(), cfg, torch.Generator().manual_seed(cfg.seed))
            self.place()

    # Running.

    def forward(
        self,
        tokens: Tensor | str | Sequence[Any],
        return_type: str | None = "logits",
        *,
        attention_mask: MaskLike | None = None,
        logit_positions: Tensor | None = None,
        loss_per_token: bool = False,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Run the model on whole sequences.

        Args:
            tokens: Token ids, or what `to_tokens` takes; a residual stream with start_at_layer.
            return_type: "logits", "loss" (mean next-token cross-entropy over real tokens), "both",
                or None for nothing.
            attention_mask: False (0) at padding, which may stand on either side. [batch, pos]
            logit_positions: Where to compute logits: a mask [batch, pos] -> [selected, d_vocab],
                or indices [batch, k] -> [batch, k, d_vocab]; everywhere if None.
            loss_per_token: Return the loss at each position instead. [batch, pos-1]
            start_at_layer: Take `tokens` as the residual stream entering this layer.
            stop_at_layer: Return the residual stream entering this layer. [batch, pos, d_model]

        Raises:
            ShapeError: Tokens, mask or length do not fit the model.
            HookUnavailableError: Somebody listens to a position beyond the sequence.
        """
        if return_type not in ("logits", "loss", "both", None):
            raise ShapeError(
                f"return_type={return_type!r}; allowed: 'logits', 'loss', 'both', None"
            )
        check_layers(len(self.blocks), start_at_layer, stop_at_layer)
        if stop_at_layer is not None and (return_type == "loss" or logit_positions is not None):
            raise ShapeError(
                "stop_at_layer returns a residual stream: it goes with neither return_type='loss' "
                "nor logit_positions"
            )
        if loss_per_token and return_type not in ("loss", "both"):
            raise ShapeError("loss_per_token needs return_type='loss' or 'both'")
        ids = None
        if start_at_layer is None:
            ids = self._ids(tokens)
            segment = self._segment(ids.shape, ids.device, attention_mask)
        else:
            resid = check_residual(tokens, self.embed.weight)
            segment = self._segment(resid.shape[:2], resid.device, attention_mask)
        segment = replace(segment, last=True)
        refuse_out_of_reach(self.families, 0, segment.length)
        resid = resid if ids is None else self._embed(ids, segment)
        first = start_at_layer or 0
        early = logit_positions is not None and self._may_select_early(first, stop_at_layer)
        only_at = logit_positions if early else None
        resid, _ = self._run_blocks(resid, segment, None, first, stop_at_layer, only_at)
        if stop_at_layer is not None:
            return resid
        if return_type is None:
            self.ln_final(resid)
            return None
        logits = self.logits_at(self.ln_final(resid), None if early else logit_positions)
        if return_type == "logits":
            return logits
        if ids is None or logit_positions is not None:
            raise ShapeError("a loss needs tokens at all positions: no start_at_layer, no "
                             "logit_positions; compute it from the logits instead")  # fmt: skip
        loss = next_token_loss(logits, ids, segment.real, loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def run_with_hooks(  # type: ignore[override]
        self,
        *model_args: Any,
        fwd_hooks: Sequence[NamedHook] = (),
        bwd_hooks: Sequence[NamedHook] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Run the model with hooks that are removed afterwards; other arguments as `forward`.

        Raises:
            HookNameError: A name matches nothing.
            HookUnavailableError: A hook named cannot fire: beyond the sequence, on a layer left out
                by start_at_layer or stop_at_layer, or backward where no gradient is recorded.
        """
        span = [model_kwargs.get(f"{end}_at_layer") for end in ("start", "stop")]
        check_layers(len(self.blocks), *span)
        pairs = [hook for hook in (*fwd_hooks, *bwd_hooks) if isinstance(hook, tuple | list)]
        named = (self.find_hook(hook[0]) for hook in pairs if isinstance(hook[0], str))
        refuse_left_out(named, len(self.blocks), *span)
        return super().run_with_hooks(
            *model_args,
            fwd_hooks=list(fwd_hooks),
            bwd_hooks=list(bwd_hooks),
            reset_hooks_end=reset_hooks_end,
            clear_contexts=clear_contexts,
            **model_kwargs,
        )

    def step(
        self,
        tokens: Int[Tensor, "batch pos"],
        past: Past | None = None,
        *,
        attention_mask: MaskLike | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_vocab"], Past]:
        """Run on the next tokens (one or more), going on from what the last call handed over.

        The same hook points fire as in `forward`, once per call; per-position ones keep counting
        from the start of the sequence.

        Args:
            tokens: The next tokens. [batch, pos]
            past: What the last call returned; None at the start.
            attention_mask: False at left padding, first call only. [batch, pos]

        Returns:
            Logits at these tokens, and what to hand to the next call.

        Raises:
            ShapeError: Tokens, mask, length or past do not fit the model or each other.
            HookUnavailableError: Somebody listens to a position that an earlier call has run.
        """
        ids = self._ids(tokens)
        if past is not None:
            check_past(past, self.cfg, ids)
        segment = self._segment(ids.shape, ids.device, attention_mask, past)
        if segment.real is not None and (past is not None or not bool(segment.real[:, -1].all())):
            raise ShapeError(
                "step: padding is allowed on the left of the first call only; pad prompts on the "
                "left so that every document ends at the same column"
            )
        fired = {} if past is None else past.fired
        stop = segment.start + segment.length
        refuse_out_of_reach(self.families, segment.start, None, fired)
        resid, layers = self._run_blocks(self._embed(ids, segment), segment, past)
        logits = self.logits_at(self.ln_final(resid))
        offset = past.offset if past is not None else padding_of(segment)
        heard = listened(self.families, segment.start, stop)
        fired = {**fired, **{str(point.name): point.attached for point in heard}}
        return logits, Past(stop, offset, layers, self.cfg, fired)

    def generate(
        self,
        tokens: Tensor | str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        attention_mask: MaskLike | None = None,
    ) -> Int[Tensor, "batch longer"]:
        """Append tokens one by one, hooks acting in every step; see `hooked_ssm.generation`.

        Raises:
            ShapeError: Tokens or mask do not fit, or the model ends before the last token.
            HookUnavailableError: Somebody listens to a position that no step will run.
        """
        return generate(
            self.step,
            self._ids(tokens),
            max_new_tokens,
            temperature=temperature,
            generator=generator,
            attention_mask=attention_mask,
            check_length=self._check_length,
        )

    def logits_at(
        self, normalised: Float[Tensor, "*place d_model"], positions: Tensor | None = None
    ) -> Tensor:
        """Unembed the final norm's output, everywhere or only where wanted (see `forward`)."""
        kept = normalised if positions is None else select(normalised, positions)
        return F.linear(kept, self.W_U.T)

    def _ids(self, tokens: Any) -> Tensor:
        weight = self.embed.weight
        return check_tokens(self.to_tokens(tokens), self.cfg.d_vocab, weight.device)

    def _embed(self, ids: Tensor, segment: Segment) -> Tensor:
        resid = self.hook_embed(self.embed(ids))
        if self.cfg.positions == "learned":
            # Indexing copies, so that an edit in place at the hook cannot reach the parameter.
            added = self.pos_embed(segment.positions).expand_as(resid)
            resid = resid + self.hook_pos_embed(added.contiguous())
        return resid

    def _run_blocks(
        self,
        resid: Tensor,
        segment: Segment,
        past: Past | None,
        start: int = 0,
        stop: int | None = None,
        only_at: Tensor | None = None,
    ) -> tuple[Tensor, list[Carried]]:
        layers = []
        for layer in range(len(self.blocks))[start:stop]:
            carried = None if past is None else past.layers[layer]
            last = layer == len(self.blocks) - 1
            resid, handed_on = self.blocks[layer](
                resid, segment, carried, only_at if last else None
            )
            layers.append(handed_on)
        return resid, layers

    def _may_select_early(self, first: int, stop: int | None) -> bool:
        """Whether the last layer may skip positions nobody reads: it runs, and nobody listens."""
        if stop is not None or first >= len(self.blocks):
            return False
        final = (self.ln_final.hook_scale, self.ln_final.hook_normalized)
        last: Block = self.blocks[-1]  # type: ignore[assignment]
        return not (last.listened_after_mixing() or any(hook.listened for hook in final))

    def _segment(
        self,
        shape: torch.Size,
        device: torch.device,
        mask: MaskLike | None,
        past: Past | None = None,
    ) -> Segment:
        segment = locate(shape, device, mask, past)
        self._check_ctx(segment.start + segment.length)
        return segment

    def _check_length(self, total: int) -> None:
        """Refuse to run so many tokens one by one: too many, or hooks beyond them."""
        self._check_ctx(total)
        refuse_out_of_reach(self.families, 0, total)

    def _check_ctx(self, total: int) -> None:
        limits: list[int] = [b.mixer.max_length for b in self.blocks if b.mixer.max_length]  # type: ignore[misc]
        if self.cfg.positions == "learned":
            limits.append(self.cfg.n_ctx)
        if limits and total > min(limits):
            raise ShapeError(
                f"the sequence has {total} tokens, but learned positions or long filters of "
                f"{self.title} end at n_ctx={self.cfg.n_ctx}; shorten it or build with a larger "
                "n_ctx"
            )

    # Names and weights.

    @property
    def title(self) -> str:
        """Architecture and size, for messages."""
        names = (self.cfg.mixer_name(layer) for layer in range(len(self.blocks)))
        return f"{self.cfg.architecture or '+'.join(names)} model"

    def summary(self) -> pd.DataFrame:
        """Return one row per part: kind, parameters, hook points, state handed on; and the total.

        See `hooked_ssm.summary.summary`.
        """
        return summary.summary(self)

    def __repr__(self) -> str:
        """Return the summary as text."""
        return summary.as_text(self)

    def _repr_html_(self) -> str:
        return summary.as_html(self)

    def place(self) -> HookedModel:
        """Move and cast the model to what its config says.

        Raises:
            ConfigError: This machine, or this torch, has no such device.
        """
        cfg = self.cfg
        with placing(cfg.device):
            return self.to(device=cfg.device, dtype=cfg.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> HookedModel:
        """Move or cast (`to`, `double`, `cuda`, ...); `cfg.device` and `cfg.dtype` follow."""
        super()._apply(fn, recurse)
        weight = self.embed.weight
        self.cfg = self.cfg.with_(device=weight.device, dtype=weight.dtype)
        return self

    def cache_size(self, batch: int, length: int, names_filter: NamesFilter = None) -> int:
        """Return the bytes a cache of these activations would take, without running anything."""
        for name, value in (("batch", batch), ("length", length)):
            check_value(f"cache_size: {name}", value, Count, ShapeError)
        points = self._matching(names_filter)
        return sum(activation_bytes(self, point, batch, length) for point in points)

    # Files.

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors, atomically. Returns the folder."""
        from hooked_ssm.loading import save_pretrained  # loading builds models: it stands above

        return save_pretrained(self, Path(folder))

    @classmethod
    def from_pretrained(cls, folder_or_name: str | Path, **kwargs: Any) -> HookedModel:
        """Load a model saved by `save_pretrained`, or a Hugging Face folder or name."""
        from hooked_ssm.loading import from_pretrained

        return from_pretrained(folder_or_name, **kwargs)

    @classmethod
    def from_state_dict(
        cls, state_dict: Mapping[str, Tensor], cfg: ModelConfig, layout: str = "hooked_ssm"
    ) -> HookedModel:
        """Build a model from weights in one of the known layouts; see `hooked_ssm.loading`."""
        from hooked_ssm.loading import from_state_dict

        return from_state_dict(state_dict, cfg, layout)

    @classmethod
    def from_hf(cls, hf_model: nn.Module) -> HookedModel:
        """Build a model from a Hugging Face model in memory, which is left as it is."""
        from hooked_ssm.loading import from_hf

        return from_hf(hf_model)


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape)
