"""Whether a mixer keeps the laws that every analysis builds on, tried on a small random model.

For mixers of one's own: what the library's tests demand of its mixers, in one call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import pad

from hooked_ssm.analysis.token_mixing import token_mixing
from hooked_ssm.checks import Count, Positive, Seed, checked
from hooked_ssm.config import ModelConfig
from hooked_ssm.errors import ContractError, HookedSSMError
from hooked_ssm.hook_names import HookSpec
from hooked_ssm.model import HookedModel
from hooked_ssm.rules import Rule
from hooked_ssm.sizes import activation_shape

BATCH, D_VOCAB = 2, 19
OUTPUT = "blocks.0.hook_mixer_out"
Length = Annotated[int, Rule("an integer >= 4", lambda value: value >= 4)]


@checked
def check_mixer(
    name: str,
    *,
    length: Length = 7,
    d_model: Count = 12,
    seed: Seed = 0,
    tolerance: Positive = 1e-4,
    **options: Any,
) -> pd.DataFrame:
    """Try a mixer's laws; return a row per law: what it says, and how far it is off.

    Args:
        name: As in `MIXERS`; one of your own is registered first (`register_mixer`).
        length: Tokens per document: at least 4, for something on either side of an edit.
        d_model: Width of the model.
        seed: Of parameters and documents.
        tolerance: The largest error allowed, as a share of the largest output.
        options: Settings of the mixer.

    Raises:
        ContractError: A law does not hold; names every one, and where.
        ConfigError: Unknown mixer or setting.
    """
    trial = _Trial(name, options, length, d_model, seed)
    rows, broken = [], []
    for law, find in LAWS.items():
        try:
            error, where = max(find(trial), default=(0.0, ""))
        except HookedSSMError as problem:
            error, where = math.inf, str(problem)
        rows.append({"law": law, "says": " ".join((find.__doc__ or "").split()), "error": error})
        if not error <= tolerance:
            broken.append(f"- {law}: {rows[-1]['says']} Off by {error:.2g}: {where}")
    if broken:
        raise ContractError(f"mixer {name!r} breaks {len(broken)} laws:\n" + "\n".join(broken))
    return pd.DataFrame(rows)


Errors = Iterator[tuple[float, str]]
"""How far a law is off, as a share of the largest output (infinite where it is not a number), and
where."""


class _Trial:
    """A model of one layer, documents, and what the mixer puts out."""

    def __init__(self, name: str, options: dict[str, Any], length: int, d_model: int, seed: int):
        layer = {"mixer": name, **options}
        cfg = ModelConfig(
            mixers=[layer], d_model=d_model, d_vocab=D_VOCAB, n_ctx=2 * length, init="uniform",
            seed=seed,
        )  # fmt: skip
        self.model = HookedModel(cfg).eval()
        self.length, self.middle = length, length // 2
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(D_VOCAB, (BATCH, length), generator=generator)
        self.plain = self.output(self.tokens)
        self.scale = float(self.plain.abs().max()) or 1.0

    @torch.no_grad()
    def output(self, tokens: Tensor, mask: Tensor | None = None, hooks: Any = ()) -> Tensor:
        """What the mixer adds to the residual stream. [batch, pos, d_model]"""
        with self.model.hooks(fwd_hooks=list(hooks)):
            _, cache = self.model.run_with_cache(tokens, names_filter=OUTPUT, attention_mask=mask)
        return cache[OUTPUT]

    def off(self, got: Tensor, want: Tensor) -> float:
        """The largest difference, as a share of the largest output; infinite for NaN."""
        if not got.numel():
            return 0.0
        return float((got - want).abs().max().nan_to_num(math.inf, math.inf)) / self.scale

    def hooks(self) -> Iterator[tuple[str, HookSpec]]:
        """The mixer's hook names; of those per position, the one in the middle."""
        for name, hook in self.model.blocks[0].mixer.specs.items():
            at = f".{self.middle}" if hook.per_position else ""
            yield f"blocks.0.mixer.{name}{at}", hook


def hooks_fire_once(trial: _Trial) -> Errors:
    """Each hook fires once, shaped as its axes say."""
    names = [name for name, _ in trial.hooks()]
    fired: Counter[str] = Counter()
    wrong: dict[str, tuple[int, ...]] = {}

    def look(value: Tensor, hook: Any) -> None:
        fired[hook.name] += 1
        want = activation_shape(trial.model, hook, BATCH, trial.length)
        if tuple(value.shape) != want:
            wrong[hook.name] = tuple(value.shape)

    trial.output(trial.tokens, hooks=[(name, look) for name in names])
    for name in names:
        if fired[name] != 1:
            yield math.inf, f"{name} fired {fired[name]} times"
    for name, got in wrong.items():
        point = trial.model.find_hook(name)
        want = activation_shape(trial.model, point, BATCH, trial.length)
        axes = " ".join(point.spec.axes)
        yield math.inf, f"{name} has shape {list(got)}, its axes [{axes}] say {list(want)}"


def looking_changes_nothing(trial: _Trial) -> Errors:
    """Whoever listens, the output is the same."""
    for name, _ in trial.hooks():
        calls: list[str] = []
        look = (name, lambda value, hook, to=calls: to.append(hook.name))
        got = trial.output(trial.tokens, hooks=[look])
        if calls != [name]:
            yield math.inf, f"{name} fired {len(calls)} times when it alone was listened to"
        yield trial.off(got, trial.plain), f"with a hook on {name}"
        got = trial.output(trial.tokens, hooks=[(name, lambda value, hook: value.clone())])
        yield trial.off(got, trial.plain), f"with a copy put in at {name}"


def edits_reach(trial: _Trial) -> Errors:
    """An edit acts where its hook says, never earlier."""
    p = trial.middle
    for name, hook in trial.hooks():
        if not hook.has_batch or 0 in activation_shape(
            trial.model, trial.model.find_hook(name), BATCH, trial.length
        ):
            continue  # a filter is of all positions; a window one wide is empty

        def edit(value: Tensor, hook: Any) -> Tensor:
            axis = hook.spec.position_axis
            changed = 1.5 * value + 0.1
            if axis is None:
                return changed
            here = torch.arange(value.shape[axis]) == p
            shape = [1] * value.ndim
            shape[axis] = -1
            return torch.where(here.view(shape), changed, value)

        change = trial.output(trial.tokens, hooks=[(name, edit)]) - trial.plain
        yield trial.off(change[:, :p], 0 * change[:, :p]), f"{name} at {p} reached earlier"
        if hook.reach == "position":
            later = change[:, p + 1 :]
            yield trial.off(later, 0 * later), f"{name} at {p} reached later positions"
        if not change[:, p:].any():
            yield math.inf, f"{name} at {p} changed nothing"


def causality(trial: _Trial) -> Errors:
    """No output depends on a later token."""
    for t in range(1, trial.length):
        other = trial.tokens.clone()
        other[:, t:] = (other[:, t:] + 1) % D_VOCAB
        yield trial.off(trial.output(other)[:, :t], trial.plain[:, :t]), f"tokens from {t} on"


def steps_equal_the_whole(trial: _Trial) -> Errors:
    """Any split into steps gives the same output."""
    for lengths in ([1] * trial.length, [trial.middle, trial.length - trial.middle]):
        past, parts = None, []
        for some in trial.tokens.split(lengths, dim=1):
            cache, hooks, _ = trial.model.get_caching_hooks(OUTPUT)
            with torch.no_grad(), trial.model.hooks(fwd_hooks=hooks):
                _, past = trial.model.step(some, past)
            parts.append(cache[OUTPUT])
        yield trial.off(torch.cat(parts, 1), trial.plain), f"in parts of {lengths} tokens"


def padding_is_as_if_absent(trial: _Trial) -> Errors:
    """Padding on either side changes no real token."""
    for side, around in (("left", (3, 0)), ("right", (0, 3))):
        mask = pad(torch.ones_like(trial.tokens), around)
        got = trial.output(pad(trial.tokens, around, value=1), mask)
        yield trial.off(got[mask.bool()].view_as(trial.plain), trial.plain), f"on the {side}"


def documents_are_apart(trial: _Trial) -> Errors:
    """Documents of a batch do not act on each other."""
    for i in range(BATCH):
        alone = trial.output(trial.tokens[i : i + 1])
        yield trial.off(alone, trial.plain[i : i + 1]), f"document {i} alone"


def the_pattern_is_exact(trial: _Trial) -> Errors:
    """pattern @ value + offset = mixed, if it has one."""
    roles = trial.model.blocks[0].mixer.roles()
    if "pattern" in roles and "mixed" in roles:
        yield token_mixing(trial.model, trial.tokens, 0).error, "token_mixing(...).error"


def gradients_reach(trial: _Trial) -> Errors:
    """Every parameter has a finite, non-zero gradient."""
    mixer = trial.model.blocks[0].mixer
    with torch.enable_grad():
        loss = trial.model(trial.tokens, "loss")
        names, parameters = zip(*mixer.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None or not gradient.any() or not bool(gradient.isfinite().all()):
            what = "none" if gradient is None else "zero, or no number"
            yield math.inf, f"the gradient of {name} is {what}"


LAWS: dict[str, Callable[[_Trial], Errors]] = {
    "hooks": hooks_fire_once,
    "looking": looking_changes_nothing,
    "reach": edits_reach,
    "causality": causality,
    "segments": steps_equal_the_whole,
    "padding": padding_is_as_if_absent,
    "documents": documents_are_apart,
    "pattern": the_pattern_is_exact,
    "gradients": gradients_reach,
}
