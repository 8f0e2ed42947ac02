"""HookedModel: embedding, blocks of any mixers, final norm, unembedding; hooks on everything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_ssm.block import Block, residual_hook, select
from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import HookNameError, HookUnavailableError, ShapeError
from hooked_ssm.layers import Linear, Norm
from hooked_ssm.mixers import Carried, Segment
from hooked_ssm.root import HookRoot, NamesFilter
from hooked_ssm.tokens import Tokenising


class Past(NamedTuple):
    """What a run hands over to the run on the tokens that follow.

    Attributes:
        length: Tokens so far, padding included.
        offset: Padding so far per document, if any. [batch]
        layers: What each layer's mixer carries on.
    """

    length: int
    offset: Tensor | None
    layers: list[Carried]


class HookedModel(Tokenising, HookRoot):
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
        if not cfg.tie_embeddings:
            self.unembed = Linear(cfg.d_model, cfg.d_vocab, bias=False)
        self.setup()
        if initialise:
            self._initialise(torch.Generator().manual_seed(cfg.seed))
            self.to(device=cfg.device, dtype=cfg.dtype)

    def _initialise(self, generator: torch.Generator) -> None:
        cfg = self.cfg
        std = 0.02 if cfg.init == "paper" else 1 / math.sqrt(cfg.d_model)
        with torch.no_grad():
            for table in (m for m in self.modules() if isinstance(m, nn.Embedding)):
                table.weight.normal_(0, std, generator=generator)
        own = {id(m) for b in self.blocks if b.mixer.keeps_own_init for m in b.mixer.modules()}
        for block in self.blocks:
            block.mixer.initialise(generator)
        for layer in (m for m in self.modules() if isinstance(m, Linear) and id(m) not in own):
            if cfg.init == "paper":
                depth = math.sqrt(2 * len(self.blocks)) if layer.writes_residual else 1
                layer.reset_normal(0.02 / depth, generator)
            else:
                layer.reset_parameters(generator)

    # Running.

    def forward(
        self,
        tokens: Tensor | str | Sequence[Any],
        return_type: str | None = "logits",
        *,
        attention_mask: Tensor | None = None,
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
        ids = None
        if start_at_layer is None:
            ids = self._check_tokens(self.to_tokens(tokens))
            segment = self._segment(ids.shape, ids.device, attention_mask)
            resid = self._embed(ids, segment)
        else:
            resid = self._check_residual(tokens)
            segment = self._segment(resid.shape[:2], resid.device, attention_mask)
        self._refuse_unreachable(segment.length)
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

    def step(
        self,
        tokens: Int[Tensor, "batch pos"],
        past: Past | None = None,
        *,
        attention_mask: Tensor | None = None,
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
        """
        ids = self._check_tokens(self.to_tokens(tokens))
        if attention_mask is not None and (
            past is not None or not bool(attention_mask[:, -1].all())
        ):
            raise ShapeError(
                "step: padding is allowed on the left of the first call only; pad prompts on the "
                "left so that every document ends at the same column"
            )
        segment = self._segment(ids.shape, ids.device, attention_mask, past)
        resid, layers = self._run_blocks(self._embed(ids, segment), segment, past)
        logits = self.logits_at(self.ln_final(resid))
        offset = past.offset if past is not None else _padding(segment.real)
        return logits, Past(segment.start + segment.length, offset, layers)

    def generate(
        self,
        tokens: Int[Tensor, "batch pos"] | str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        attention_mask: Tensor | None = None,
    ) -> Int[Tensor, "batch longer"]:
        """Append tokens one by one; hooks attached to the model act in every step.

        Args:
            tokens: The prompts. [batch, pos]
            max_new_tokens: How many to append.
            temperature: 0 takes the most likely token; above, one is drawn from
                softmax(logits / temperature) with the generator.
            generator: Required where something is drawn.
            attention_mask: False at left padding. [batch, pos]

        Returns:
            Prompts with what was appended. [batch, pos + max_new_tokens]
        """
        if temperature < 0 or (temperature > 0 and generator is None):
            raise ValueError(
                f"generate: temperature={temperature} with generator={generator}; allowed: 0, or "
                "a positive temperature with an explicit torch.Generator"
            )
        ids = new = self.to_tokens(tokens)
        past = None
        with torch.no_grad():
            for _ in range(max_new_tokens):
                logits, past = self.step(new, past, attention_mask=attention_mask)
                attention_mask = None
                if temperature > 0:
                    odds = torch.softmax(logits[:, -1].float() / temperature, dim=-1)
                    new = torch.multinomial(odds, 1, generator=generator)
                else:
                    new = logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, new], dim=1)
        return ids

    def logits_at(
        self, normalised: Float[Tensor, "*place d_model"], positions: Tensor | None = None
    ) -> Tensor:
        """Unembed the final norm's output, everywhere or only where wanted (see `forward`)."""
        kept = normalised if positions is None else select(normalised, positions)
        return F.linear(kept, self.W_U.T)

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

    # Checks.

    def _check_tokens(self, ids: Tensor) -> Tensor:
        if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim != 2 or ids.shape[1] == 0:
            raise ShapeError(
                f"tokens: got {ids.dtype} of shape {tuple(ids.shape)}, want integers [batch, pos] "
                "with at least one position"
            )
        if ids.device != self.embed.weight.device:
            raise ShapeError(
                f"tokens are on {ids.device}, the model on {self.embed.weight.device}; "
                "move them: tokens.to(model.cfg.device)"
            )
        if ids.device.type == "cpu" and ids.numel():
            low, high = ids.aminmax()
            if low < 0 or high >= self.cfg.d_vocab:
                raise ShapeError(
                    f"token ids run from {int(low)} to {int(high)}, but d_vocab="
                    f"{self.cfg.d_vocab}: allowed 0..{self.cfg.d_vocab - 1}"
                )
        return ids

    def _check_residual(self, resid: Any) -> Tensor:
        if not isinstance(resid, Tensor) or resid.ndim != 3 or resid.shape[2] != self.cfg.d_model:
            got = tuple(resid.shape) if isinstance(resid, Tensor) else type(resid).__name__
            raise ShapeError(
                f"start_at_layer takes a residual stream [batch, pos, {self.cfg.d_model}], "
                f"got {got}"
            )
        return resid

    def _segment(
        self,
        shape: torch.Size,
        device: torch.device,
        mask: Tensor | None,
        past: Past | None = None,
    ) -> Segment:
        start, length = 0 if past is None else past.length, shape[1]
        limits: list[int] = [b.mixer.max_length for b in self.blocks if b.mixer.max_length]  # type: ignore[misc]
        if self.cfg.positions == "learned":
            limits.append(self.cfg.n_ctx)
        if limits and start + length > min(limits):
            raise ShapeError(
                f"the sequence has {start + length} tokens, but learned positions or long filters "
                f"of {self.title} end at n_ctx={self.cfg.n_ctx}; shorten it or build with a "
                "larger n_ctx"
            )
        positions = torch.arange(start, start + length, device=device)[None]
        real = None
        if mask is not None:
            if tuple(mask.shape) != tuple(shape):
                raise ShapeError(
                    f"attention_mask has shape {tuple(mask.shape)}, tokens {tuple(shape)}"
                )
            real = mask.bool()
            positions = (real.cumsum(1) - 1).clamp(min=0)
        elif past is not None and past.offset is not None:
            positions = positions - past.offset[:, None]
        return Segment(start, length, positions, real)

    def _refuse_unreachable(self, length: int) -> None:
        """Per-position hooks beyond the sequence would never fire: say so before running."""
        for name, family in self.families.items():
            beyond = family.listened_at(length)
            if beyond:
                raise HookUnavailableError(
                    f"{name}.{beyond[0]} cannot fire: the sequence has positions 0..{length - 1}"
                )

    # Names and weights.

    @property
    def title(self) -> str:
        """Architecture and size, for messages."""
        names = (self.cfg.mixer_name(layer) for layer in range(len(self.blocks)))
        return f"{self.cfg.architecture or '+'.join(names)} model"

    def hook_name(self, layer: int, role: str, position: int | None = None) -> str:
        """Return the name of a layer's hook point with a role, or of a block-level one.

        Args:
            layer: Negative counts from the last.
            role: A role ("query", "state", ...) or a block-level word ("resid_pre", "mixer_out").
            position: For roles with one hook point per position ("carry").

        Raises:
            HookNameError: No such layer, role, or position.
        """
        n_layers = len(self.blocks)
        if not -n_layers <= layer < n_layers:
            raise HookNameError(f"layer {layer} does not exist: allowed 0..{n_layers - 1}")
        prefix = f"blocks.{layer % n_layers}"
        for direct in (f"{prefix}.hook_{role}", f"{prefix}.mlp.hook_{role}"):
            if direct in self.hook_dict:
                return direct
        mixer = self.blocks[layer].mixer
        family = isinstance(getattr(mixer, f"hook_{role}", None), nn.Module)
        short = f"hook_{role}" if family else mixer.hook_for(role)
        name = f"{prefix}.mixer.{short}"
        if name not in self.families:
            return name
        if position is None:
            raise HookNameError(
                f"{name} has one hook point per position: pass position=, such as "
                f"hook_name({layer}, {role!r}, position=7)"
            )
        return f"{name}.{position}"

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding."""
        return self.embed.weight

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding."""
        return self.embed.weight.T if self.cfg.tie_embeddings else self.unembed.weight.T

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding's bias: there is none, so zeros."""
        return self.W_U.new_zeros(self.cfg.d_vocab)

    def tokens_to_residual_directions(self, tokens: Any) -> Tensor:
        """Return the directions whose dot product with the scaled residual gives a token's logit.

        The final norm's weight is folded in, so that `ActivationCache.logit_attrs` of all parts of
        the residual stream adds up to the logit less what the norm's bias contributes.
        """
        ids = torch.as_tensor(self.to_single_token(tokens) if isinstance(tokens, str) else tokens)
        directions = self.W_U.T[ids.to(self.W_U.device)] * self.ln_final.weight
        return directions

    def accumulated_bias(self, layer: int, mlp_input: bool = False, **_: Any) -> Tensor:
        """Return the sum of the output biases of the layers below. [d_model]"""
        total = self.W_U.new_zeros(self.cfg.d_model)
        for index, block in enumerate(self.blocks):
            mixer_counts = index < layer or (mlp_input and index == layer)
            bias = getattr(getattr(block.mixer, "out_proj", None), "bias", None)
            if mixer_counts and bias is not None:
                total = total + bias
            if index < layer and block.has_mlp and block.mlp.fc_out.bias is not None:
                total = total + block.mlp.fc_out.bias
        return total

    def to(self, *args: Any, **kwargs: Any) -> HookedModel:
        """Move or cast the model; `cfg.device` and `cfg.dtype` follow."""
        super().to(*args, **kwargs)
        weight = self.embed.weight
        self.cfg = self.cfg.with_(device=weight.device, dtype=weight.dtype)
        return self

    def cache_size(self, batch: int, length: int, names_filter: NamesFilter = None) -> int:
        """Return the bytes a cache of these activations would take, without running anything."""
        sizes = {"batch": batch, "pos": length, "query_pos": length, "key_pos": length, "one": 1}
        sizes["d_model"] = self.cfg.d_model
        total = 0
        for point in self._matching(names_filter):
            parts = str(point.name).split(".")
            own: dict[str, int] = dict(sizes)
            if parts[0] == "blocks":
                block = self.blocks[int(parts[1])]
                own.update(block.mixer.axis_sizes())
                own["d_mlp"] = int(block.mlp.fc_in.out_features) if block.has_mlp else 0  # type: ignore[arg-type]
                own["tap"] = min(own.get("tap", 0), length)
            numbers = math.prod(own[axis] for axis in point.spec.axes)
            total += numbers * point.spec.bytes_per_number(self.cfg.dtype)
        return total

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


def next_token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    real: Tensor | None = None,
    per_token: bool = False,
) -> Tensor:
    """Cross-entropy of each next token; its mean over pairs of real tokens, or each of them."""
    if logits.shape[1] < 2:
        raise ShapeError("a next-token loss needs at least two tokens, got one")
    core = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs = F.log_softmax(logits[:, :-1].to(core), dim=-1)
    losses = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    if real is None:
        return losses if per_token else losses.mean()
    counts = real[:, 1:] & real[:, :-1]
    losses = losses.masked_fill(~counts, 0)
    return losses if per_token else losses.sum() / counts.sum()


def _padding(real: Tensor | None) -> Tensor | None:
    return None if real is None else (~real).sum(1)


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape)
