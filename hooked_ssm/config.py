"""What a model is made of: one frozen description, checked and completed when it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import torch

from hooked_ssm.checks import Count, Natural, NonNegative, check_fields
from hooked_ssm.devices import Device
from hooked_ssm.errors import ConfigError, unknown
from hooked_ssm.layers import ACTIVATIONS
from hooked_ssm.mixers import MIXERS, MixerOptions, find_mixer
from hooked_ssm.rules import Rule, is_integer

# Architectures that are stacks of different layers, repeated to n_layers (PAPER.md, Models).
STACKS: dict[str, tuple[dict[str, Any], ...]] = {
    "based": ({"mixer": "base_conv", "kernel_size": 3}, {"mixer": "based"}),
    "base_conv": (
        {"mixer": "base_conv", "kernel_size": 3},
        {"mixer": "base_conv", "kernel_size": "long"},
    ),
}

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def _names_mixer(layer: Any) -> bool:
    return isinstance(layer, str) or all(isinstance(setting, str) for setting in layer)


NormKind = Literal["layer", "rms"]
Activation = Annotated[
    str, Rule(", ".join(ACTIVATIONS), ACTIVATIONS.__contains__, choices=tuple(ACTIVATIONS))
]
Layers = Annotated[
    Sequence[str | Mapping[str, Any]],
    Rule(
        "a list with a mixer's name, or a mapping {'mixer': name, setting: value}, per layer",
        lambda value: all(map(_names_mixer, value)),
    ),
]
SeedNumber = Annotated[
    int, Rule("an integer of 64 bits, such as 0", lambda value: -(2**63) <= value < 2**64)
]
Dtype = Annotated[
    torch.dtype,
    Rule(", ".join(f"torch.{name}" for name in DTYPES), lambda value: value in DTYPES.values()),
]


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
            mixers that have none in the paper (Mamba, Mamba-2); it then reads as the largest.
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

    Raises:
        ConfigError: A value has the wrong type, is out of range or contradicts another.

    Examples:
        >>> cfg = ModelConfig(architecture="based", n_layers=2, d_model=8, d_vocab=9, n_ctx=9)
        >>> [cfg.mixer_name(layer) for layer in range(2)]
        ['base_conv', 'based']
        >>> cfg.with_(d_model=16).block_d_mlp(0)
        64
    """

    d_model: Count
    d_vocab: Count
    n_ctx: Count
    architecture: str | None = None
    mixers: Layers = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    n_layers: Count | None = None
    n_heads: Count = 1
    d_mlp: Natural | None = None
    act: Activation = "gelu"
    gated_mlp: bool = False
    mlp_bias: bool = True
    parallel_attn_mlp: bool = False
    norm: NormKind | None = None
    norm_eps: NonNegative = 1e-5
    final_norm: NormKind = "layer"
    positions: Literal["learned", "rotary", "none"] | None = None
    tie_embeddings: bool = True
    init: Literal["paper", "uniform"] = "paper"
    seed: SeedNumber = 0
    dtype: Dtype = torch.float32
    device: Device = "cpu"
    has_default_d_mlp: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        layers = tuple(self._layers())
        set_ = object.__setattr__
        set_(self, "mixers", layers)
        set_(self, "options", {})
        set_(self, "n_layers", len(layers))
        if self.positions is None:
            wanted = [find_mixer(layer["mixer"]).block_defaults.positions for layer in layers]
            set_(self, "positions", next((p for p in wanted if p != "none"), "none"))
        set_(self, "mixers", tuple(self._completed(layers)))
        set_(self, "mixers", tuple(map(self._checked, range(len(layers)))))
        if self.d_mlp is None:
            set_(self, "has_default_d_mlp", True)
            set_(self, "d_mlp", max(map(self.block_d_mlp, range(len(layers)))))

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
                find_mixer(layer["mixer"])
            named = [layer["mixer"] for layer in layers]
            meant = [layer["mixer"] for layer in self._stack(len(layers))]
            if self.architecture and named != meant:
                raise ConfigError(
                    f"architecture={self.architecture!r} has the layers {meant}, but mixers lists "
                    f"{named}; give one of the two (with_: architecture=None)"
                )
        else:
            if self.n_layers is None:
                raise ConfigError(
                    "n_layers=None; allowed: an integer >= 1, unless mixers are given"
                )
            layers = self._stack(self.n_layers)
        return self._with_options(layers)

    def _stack(self, n_layers: int) -> list[dict[str, Any]]:
        """The layers of the architecture; none if there is none."""
        if not self.architecture:
            return []
        find_mixer(str(self.architecture))
        stack = STACKS.get(str(self.architecture), ({"mixer": self.architecture},))
        return [dict(stack[i % len(stack)]) for i in range(n_layers)]

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

    def _checked(self, layer: int) -> dict[str, Any]:
        """A layer's settings as its options hold them: numpy's numbers become Python's."""
        options = self.mixer_options(layer)
        settings = {n: getattr(options, n) for n in self.mixers[layer] if n != "mixer"}
        return {"mixer": self.mixer_name(layer), **settings}

    def mixer_options(self, layer: int) -> MixerOptions:
        """Return the complete settings of a layer's mixer.

        Raises:
            ConfigError: There is no such layer.
        """
        settings = dict(self._layer(layer))
        name = settings.pop("mixer")
        return find_mixer(name).Options.read(name, settings)

    def mixer_name(self, layer: int) -> str:
        """Return the name of a layer's mixer.

        Raises:
            ConfigError: There is no such layer.
        """
        return str(self._layer(layer)["mixer"])

    def _layer(self, layer: int) -> Mapping[str, Any]:
        n_layers = len(self.mixers)
        if not is_integer(layer) or not -n_layers <= layer < n_layers:
            raise ConfigError(
                f"layer={layer!r}; allowed: 0..{n_layers - 1}, or -{n_layers}..-1 from the end"
            )
        return self.mixers[layer]  # type: ignore[return-value]

    def block_norm(self, layer: int) -> str:
        """Return the norm before a layer's mixer and MLP."""
        return self.norm or find_mixer(self.mixer_name(layer)).block_defaults.norm

    def block_d_mlp(self, layer: int) -> int:
        """Return the hidden width of a layer's MLP, 0 for none."""
        if self.d_mlp is not None and not self.has_default_d_mlp:
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
        described = {f.name: getattr(self, f.name) for f in _given_fields() if f.name != "device"}
        described["mixers"] = [dict(m) for m in self.mixers]  # type: ignore[arg-type]
        described["options"] = dict(self.options)
        described["dtype"] = str(self.dtype).removeprefix("torch.")
        described["d_mlp"] = None if self.has_default_d_mlp else self.d_mlp
        return described

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> ModelConfig:
        """Build a config from what `to_dict` returned.

        Raises:
            ConfigError: It lacks a field, holds an unknown one, or a value that does not fit.
        """
        if not isinstance(description, Mapping):
            raise ConfigError(
                f"a config's description is a mapping from field to value, got {description!r}"
            )
        allowed = [f.name for f in _given_fields()]
        for name in description:
            if name not in allowed:
                raise ConfigError(unknown("config field", name, allowed))
        required = [f.name for f in _given_fields() if f.default is f.default_factory is MISSING]
        missing = [name for name in required if name not in description]
        if missing:
            raise ConfigError(f"the config lacks {', '.join(missing)}; required: {required}")
        dtype = description.get("dtype", torch.float32)
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise ConfigError(unknown("dtype", dtype, DTYPES))
            dtype = DTYPES[dtype]
        return cls(**{**description, "dtype": dtype})

    def with_(self, **changes: Any) -> ModelConfig:
        """Return a copy with some fields changed, checked again."""
        left_out = {"d_mlp": None} if self.has_default_d_mlp else {}
        return replace(self, **{**left_out, **changes})


def _given_fields() -> list[Field]:
    """The fields that whoever builds a config may give."""
    return [f for f in fields(ModelConfig) if f.init]


def _setting_names(mixer: str) -> list[str]:
    return [f.name for f in fields(find_mixer(mixer).Options)]
