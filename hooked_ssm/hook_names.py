"""THE vocabulary: what every hook name means, its axes, its roles, and how far an edit reaches.

One word per thing across all architectures. A mixer builds its table of `HookSpec`s from the words
here (`spec("hook_ssm_state", "batch pos d_inner d_state", "state")`); the model adds its own. What
analyses ask for is a *role*, never an architecture: Mamba-2's C is a `query` just as attention's q.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

Role = Literal[
    "query", "key", "value", "gate", "decay", "write", "carry", "state", "conv", "pattern", "mixed"
]
ROLES: tuple[str, ...] = get_args(Role)

Reach = Literal["later", "position"]
Numbers = Literal["model", "core", "complex"]


class Word(NamedTuple):
    """A hook name's meaning.

    Attributes:
        meaning: What the activation is.
        reach: Where in time an edit at position t acts *within its layer*: "later" = at t and at
            every later position, "position" = at t only (a pattern's row counts as its position).
        heavy: Computed only when somebody listens to this very name.
        numbers: "model" = of the model's dtype; "core" = float32 under any narrower one;
            "complex" = pairs of such.
    """

    meaning: str
    reach: Reach
    heavy: bool = False
    numbers: Numbers = "model"


WORDS: dict[str, Word] = {
    # the residual stream and what surrounds the mixers
    "hook_embed": Word("token embedding", "later"),
    "hook_pos_embed": Word("position embedding, as added to the residual stream", "later"),
    "hook_resid_pre": Word("residual stream entering the block", "later"),
    "hook_resid_mid": Word("residual stream between mixer and MLP", "later"),
    "hook_resid_post": Word("residual stream leaving the block", "later"),
    "hook_scale": Word("what the norm divides by", "position", numbers="core"),
    "hook_normalized": Word("the norm's output, after its weight and bias", "position"),
    "hook_mixer_in": Word("what the mixer reads", "later"),
    "hook_mixer_out": Word("what the mixer adds to the residual stream", "position"),
    "hook_pre": Word("MLP before its nonlinearity", "position"),
    "hook_pre_linear": Word("gated MLP: what the activated branch is multiplied by", "position"),
    "hook_post": Word("MLP after its nonlinearity (and gate)", "position"),
    "hook_mlp_out": Word("what the MLP adds to the residual stream", "position"),
    # attention and its relatives
    "hook_q": Word("queries", "position"),
    "hook_k": Word("keys", "later"),
    "hook_v": Word("values", "later"),
    "hook_rot_q": Word("queries after the rotation", "position"),
    "hook_rot_k": Word("keys after the rotation", "later"),
    "hook_q_features": Word("queries after the feature map", "position"),
    "hook_k_features": Word("keys after the feature map", "later"),
    "hook_q_normed": Word("queries scaled to unit length", "position"),
    "hook_k_normed": Word("keys scaled to unit length", "later"),
    "hook_attn_scores": Word("scores before the softmax, masked with -inf", "position"),
    "hook_pattern": Word(
        "exact token-mixing matrix: pattern @ value = mixed", "position", True, numbers="core"
    ),
    "hook_normalizer": Word("what the numerator is divided by", "position", numbers="core"),
    "hook_z": Word("mixed values per head", "position"),
    "hook_result": Word("each head's share of the mixer's output", "position", True),
    # projections, convolutions, gates
    "hook_in_proj": Word("what goes into the short convolution", "later"),
    "hook_conv": Word("the convolution's output", "later"),
    "hook_conv_q": Word("queries after their short convolution", "position"),
    "hook_conv_k": Word("keys after their short convolution", "later"),
    "hook_conv_v": Word("values after their short convolution", "later"),
    "hook_conv_carry": Word(
        "the convolution's window handed on after token t", "later", numbers="core"
    ),
    "hook_filter": Word("the long convolution's filter", "later"),
    "hook_long_conv": Word("the long convolution's output", "position"),
    "hook_shift": Word("keys after the shift SSM", "later"),
    "hook_gate": Word("what the mixed values are multiplied by", "position"),
    "hook_x": Word("values entering the recurrence", "later"),
    "hook_x1": Word("the gate before the long convolution", "later"),
    "hook_x2": Word("the gate after the long convolution", "position"),
    # recurrences: h[t] = decay[t] carry[t-1] + write[t]; carry[t] = h[t]; y[t] = read(state[t])
    "hook_ssm_dt": Word("step size after softplus", "later", numbers="core"),
    "hook_ssm_B": Word("how the value is written into the state", "later"),
    "hook_ssm_C": Word("how the state is read", "position"),
    "hook_beta": Word("how strongly the delta rule writes", "later"),
    "hook_delta": Word("prediction error the delta rule writes: v - S k", "later"),
    "hook_ssm_decay": Word(
        "what the carried state is multiplied by", "later", True, numbers="core"
    ),
    "hook_ssm_write": Word(
        "what is added to the state at t; an edit re-runs it", "later", True, numbers="core"
    ),
    "hook_ssm_carry": Word(
        "the state handed on after token t; an edit propagates", "later", numbers="core"
    ),
    "hook_ssm_state": Word(
        "the state read at t; an edit changes this read only", "position", True, numbers="core"
    ),
    # outputs
    "hook_y": Word("mixed values per channel", "position"),
    "hook_y_skip": Word("mixed values plus the skip D x", "position"),
    "hook_gated": Word("after the output gate", "position"),
    "hook_normed": Word("after the output norm (and its gate)", "position"),
}

POSITION_AXES = ("pos", "query_pos")


@dataclass(frozen=True)
class HookSpec:
    """One hook point of one module.

    Attributes:
        name: Its last component, such as "hook_ssm_state".
        axes: Axis names in order.
        roles: What analyses may ask for it as.
        meaning, reach, heavy, numbers: As in `Word`.
        per_position: True for names that end in `.{t}`, one hook point per position.
    """

    name: str
    axes: tuple[str, ...]
    roles: tuple[Role, ...]
    meaning: str
    reach: Reach
    heavy: bool
    per_position: bool = False
    numbers: Numbers = "model"

    @property
    def position_axis(self) -> int | None:
        """Index of the position axis, None if there is none; declared, never guessed."""
        return next((i for i, axis in enumerate(self.axes) if axis in POSITION_AXES), None)

    def bytes_per_number(self, dtype: torch.dtype) -> int:
        """Size of one number of the activation in a model of this dtype."""
        core = max(dtype.itemsize, 4)
        return {"model": dtype.itemsize, "core": core, "complex": 2 * core}[self.numbers]

    @property
    def has_batch(self) -> bool:
        """Whether the activation's first axis is the batch."""
        return "batch" in self.axes


def spec(
    name: str,
    axes: str,
    *roles: Role,
    word: Word | None = None,
    heavy: bool | None = None,
    per_position: bool = False,
    numbers: Numbers | None = None,
    reach: Reach | None = None,
) -> HookSpec:
    """Return the spec of a hook point from the vocabulary.

    Args:
        name: A word of the vocabulary, or a new one with its own `word`.
        axes: Axis names separated by blanks.
        roles: The roles it plays in this mixer.
        word: Meaning of a name that is not in the vocabulary (a user's own mixer).
        heavy: Overrides the word's weight where a mixer has the thing at hand anyway.
        per_position: One hook point per position, made when asked for.
        numbers: Overrides the word's, where a mixer's are wider or narrower.
        reach: Overrides the word's, such as "later" for queries that a convolution spreads.

    Raises:
        KeyError: The name is not in the vocabulary and no word was given.
    """
    word = word or WORDS[name]
    weight = word.heavy if heavy is None else heavy
    return HookSpec(
        name,
        tuple(axes.split()),
        roles,
        word.meaning,
        reach or word.reach,
        weight,
        per_position,
        numbers or word.numbers,
    )


# TransformerLens' names for what is called mixer here, so that its short names and tools resolve.
ALIASES = ((re.compile(r"\.attn\."), ".mixer."), (re.compile(r"hook_attn_out$"), "hook_mixer_out"))
_IN_BLOCK = re.compile(r"^(blocks\.\d+)\.(hook_.+)$")


def spellings(name: str) -> list[str]:
    """Return the canonical names that `name` may stand for, most likely first.

    `blocks.0.attn.hook_q` is `blocks.0.mixer.hook_q`; `blocks.0.hook_ssm_state` (what
    TransformerLens' `get_act_name("ssm_state", 0)` gives) is `blocks.0.mixer.hook_ssm_state`.

    Examples:
        >>> spellings("blocks.0.attn.hook_q")
        ['blocks.0.mixer.hook_q']
    """
    plain = name
    for alias, ours in ALIASES:
        plain = alias.sub(ours, plain)
    found = [plain]
    in_block = _IN_BLOCK.match(plain)
    if in_block:
        found.append(f"{in_block[1]}.mixer.{in_block[2]}")
    return found
