"""Hooks that a user left attached: they act in every run, so an analysis has to allow for them."""

from __future__ import annotations

from hooked_ssm.errors import HookUnavailableError
from hooked_ssm.model import HookedModel


def standing_edits(model: HookedModel) -> list[str]:
    """Return the hook points with hooks that may edit what passes (caches only read)."""
    return [str(p.name) for p in model.hook_points() if p.listened and not p.only_read]


def refuse_standing_edits(model: HookedModel, what: str) -> None:
    """Refuse hooks that would act in some of an analysis' runs and be passed by in others.

    Raises:
        HookUnavailableError: One is attached.
    """
    found = standing_edits(model)
    if found:
        raise HookUnavailableError(
            f"{what} takes the model apart, and the hook attached to {found[0]} would act on some "
            "parts only; remove it (model.reset_hooks()), or, if it edits nothing, say so: "
            "hook.only_reads = True"
        )
