"""What a model is made of: one frozen description, checked and completed when it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from hooked_ssm.errors import ConfigError, unknown
from hooked_ssm.layers import ACTIVATIONS
from hooked_ssm.mixers import MIXERS, MixerOptions, find_mixer

# Architectures that are stacks of different layers, repeated to n_layers (PAPER.md, Models).
STACKS: dict[str, tuple[dict[str, Any], ...]] = {
    "based": ({"mixer": "base_conv", "kernel_size": 3}, {"mixer": "based"}),
    "base_conv": (
        {"mixer": "base_conv", "kernel_size": 3},
        {"mixer": "base_conv", "kernel_size": "long"},
    ),
}

NORMS = ("layer", "rms")
POSITIONS = ("learned", "rotary", "none")
INITS = ("paper", "uniform")
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Description of a `HookedModel`.

    Attributes:
        architecture: A mixer's name, stacked n_layers times ("based" and "base_conv" alternate two
            kinds of layer, as in the paper). Give this or `mixers`.
        mixers: One mixer per layer: a name, or a mapping {"mixer": name, **settings}.
        options: Settings of the architecture's mixers, such as {"d_state": 8}; each goes to the
            layers whose mixer has it.
        d_model: Width of the residual stream.
        n_layers: Number of layers; may be left out when `mixers` is given.
        d_vocab: Number of tokens.
        n_ctx: Longest sequence for learned positions and long filters; others take any length.
        n_heads: Heads of every mixer that has heads.
        d_mlp: Hidden width of the MLP after each mixer; 0 for none. None: 4 d_model, or none after
            mixers that have none in the paper (Mamba, Mamba-2).
        act: The MLP's nonlinearity, "gelu" (exact), "gelu_tanh" (GPT-2's), "relu" or "silu".
        gated_mlp: Whether the MLP multiplies the activated branch by a linear one (Llama).
        mlp_bias: Whether the MLP's layers have biases.
        parallel_attn_mlp: Whether mixer and MLP read the same residual stream (GPT-NeoX).
        norm: "layer" or "rms" before each mixer and MLP. None: as in the paper (Mamba: rms).
        norm_eps: Added inside the norms' root.
        final_norm: "layer" or "rms" before the unembedding.
        positions: "learned" (added to the embedding), "rotary" (in attention) or "none". None: as
            in the paper (attention: learned, the others: none).
        tie_embeddings: Whether the unembedding is the transposed embedding.
        init: "paper" (normal, std 0.02; residual outputs smaller by sqrt(2 n_layers); Mamba's own
            kept) or "uniform" (torch's default for linear layers, embeddings with std
            1/sqrt(d_model): small recall models learn much sooner).
        seed: Of the generator that draws the parameters.
        dtype: Of the parameters (decay, step size and state are float32 under any).
        device: Where the model is; not saved.
    """

    d_model: int
    d_vocab: int
    n_ctx: int
    architecture: str | None = None
    mixers: Sequence[str | Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    n_layers: int | None = None
    n_heads: int = 1
    d_mlp: int | None = None
    act: str = "gelu"
    gated_mlp: bool = False
    mlp_bias: bool = True
    parallel_attn_mlp: bool = False
    norm: str | None = None
    norm_eps: float = 1e-5
    final_norm: str = "layer"
    positions: str | None = None
    tie_embeddings: bool = True
    init: str = "paper"
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        for name in ("d_model", "d_vocab", "n_ctx", "n_heads"):
            self._at_least_one(name)
        self._one_of("act", ACTIVATIONS)
        self._one_of("norm", (*NORMS, None))
        self._one_of("final_norm", NORMS)
        self._one_of("positions", (*POSITIONS, None))
        self._one_of("init", INITS)
        layers = tuple(self._layers())
        set_ = object.__setattr__
        set_(self, "mixers", layers)
        set_(self, "options", {})
        set_(self, "n_layers", len(layers))
        if self.positions is None:
            wanted = [find_mixer(layer["mixer"]).block_defaults.positions for layer in layers]
            set_(self, "positions", next((p for p in wanted if p != "none"), "none"))
        set_(self, "mixers", tuple(self._completed(layers)))
        for layer in range(len(layers)):
            self.mixer_options(layer)

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}; allowed: an int >= 1")

    def _one_of(self, name: str, allowed: Any) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(unknown(name, value, [a for a in allowed if a is not None]))

    def _layers(self) -> list[dict[str, Any]]:
        """One mapping per layer, from `mixers` or from the architecture."""
        if not self.mixers and not self.architecture:
            raise ConfigError(
                "give architecture='mamba' (or another) with n_layers, or mixers=[...]; "
                f"architectures: {', '.join(MIXERS)}"
            )
        if self.mixers:  # also in a completed config, which holds the architecture's name too
            layers = [{"mixer": m} if isinstance(m, str) else dict(m) for m in self.mixers]
            if self.n_layers not in (None, len(layers)):
                raise ConfigError(
                    f"n_layers={self.n_layers}, but mixers lists {len(layers)} layers; leave "
                    "n_layers out"
                )
            for layer in layers:
                if "mixer" not in layer:
                    raise ConfigError(f"mixers: {layer!r} names no mixer: add {{'mixer': ...}}")
        else:
            self._at_least_one("n_layers")
            find_mixer(str(self.architecture))
            stack = STACKS.get(str(self.architecture), ({"mixer": self.architecture},))
            layers = [dict(stack[i % len(stack)]) for i in range(int(self.n_layers or 0))]
        return self._with_options(layers)

    def _with_options(self, layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for name, value in self.options.items():
            takers = [layer for layer in layers if name in _setting_names(layer["mixer"])]
            if not takers:
                allowed = sorted({n for layer in layers for n in _setting_names(layer["mixer"])})
                raise ConfigError(unknown("option", name, allowed))
            for layer in takers:
                layer[name] = value
        return layers

    def _completed(self, layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Hand n_heads and rotary positions to the mixers that have them."""
        completed = []
        for layer in layers:
            names = _setting_names(layer["mixer"])
            given = {"n_heads": self.n_heads} if "n_heads" in names else {}
            if self.positions == "rotary" and "rotary" in names:
                given["rotary"] = True
            completed.append({**given, **layer})
        if self.positions == "rotary" and not any(layer.get("rotary") for layer in completed):
            raise ConfigError(
                "positions='rotary', but no mixer of this model rotates queries and keys; "
                "allowed here: 'learned', 'none'"
            )
        return completed

    def mixer_options(self, layer: int) -> MixerOptions:
        """Return the complete settings of a layer's mixer."""
        settings = dict(self.mixers[layer])  # type: ignore[arg-type]
        name = settings.pop("mixer")
        return find_mixer(name).Options.read(name, settings)

    def mixer_name(self, layer: int) -> str:
        """Return the name of a layer's mixer."""
        return self.mixers[layer]["mixer"]  # type: ignore[index]

    def block_norm(self, layer: int) -> str:
        """Return the norm before a layer's mixer and MLP."""
        return self.norm or find_mixer(self.mixer_name(layer)).block_defaults.norm

    def block_d_mlp(self, layer: int) -> int:
        """Return the hidden width of a layer's MLP, 0 for none."""
        if self.d_mlp is not None:
            return self.d_mlp
        has = find_mixer(self.mixer_name(layer)).block_defaults.mlp
        return 4 * self.d_model if has else 0

    # What follows are TransformerLens' names for derived values, read by its tools.

    @property
    def d_head(self) -> int:
        """Width of an attention head."""
        own = {int(layer["d_head"]) for layer in self.mixers if layer.get("d_head")}  # type: ignore[union-attr,index,call-overload]
        return own.pop() if len(own) == 1 else self.d_model // self.n_heads

    @property
    def n_key_value_heads(self) -> int | None:
        """Key and value heads where they are fewer than n_heads, else None."""
        shared = {layer.get("n_kv_heads") for layer in self.mixers} - {None}  # type: ignore[union-attr]
        return shared.pop() if len(shared) == 1 else None

    @property
    def attn_only(self) -> bool:
        """Whether no layer has an MLP."""
        return not any(self.block_d_mlp(layer) for layer in range(int(self.n_layers or 0)))

    @property
    def normalization_type(self) -> str:
        """The final norm's kind: "LN" or "RMS"; `HookedCache` knows each block's own."""
        return "LN" if self.final_norm == "layer" else "RMS"

    @property
    def act_fn(self) -> str:
        """The MLP's nonlinearity."""
        return self.act

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able description from which `from_dict` builds an equal config."""
        described = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "device"}
        described["mixers"] = [dict(m) for m in self.mixers]  # type: ignore[arg-type]
        described["options"] = dict(self.options)
        described["dtype"] = str(self.dtype).removeprefix("torch.")
        return described

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> ModelConfig:
        """Build a config from what `to_dict` returned.

        Raises:
            ConfigError: It holds an unknown field.
        """
        allowed = [f.name for f in fields(cls)]
        for name in description:
            if name not in allowed:
                raise ConfigError(unknown("config field", name, allowed))
        dtype = description.get("dtype", torch.float32)
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise ConfigError(unknown("dtype", dtype, DTYPES))
            dtype = DTYPES[dtype]
        return cls(**{**description, "dtype": dtype})

    def with_(self, **changes: Any) -> ModelConfig:
        """Return a copy with some fields changed, checked again."""
        return replace(self, **changes)


def _setting_names(mixer: str) -> list[str]:
    return [f.name for f in fields(find_mixer(mixer).Options)]
