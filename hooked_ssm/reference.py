"""The hook reference of an architecture, made from the vocabulary, for command line and docs."""

from __future__ import annotations

from hooked_ssm.config import STACKS, ModelConfig
from hooked_ssm.model import HookedModel

REACH = {"later": "this and later positions", "position": "this position only"}


def hook_table(architecture: str, n_layers: int | None = None) -> list[tuple[str, ...]]:
    """Return (name, axes, roles, reach of an edit, weight, meaning) per hook point.

    In execution order. Reach is what an edit does within its own layer.

    Raises:
        ConfigError: Unknown architecture, or n_layers < 1.
    """
    layers = len(STACKS.get(architecture, ((),))) if n_layers is None else n_layers
    model = HookedModel(
        ModelConfig(architecture=architecture, n_layers=layers, d_model=8, d_vocab=8, n_ctx=8)
    )
    return [
        (
            name,
            " ".join(spec.axes),
            ", ".join(spec.roles),
            REACH[spec.reach],
            "heavy" if spec.heavy else "",
            spec.meaning,
        )
        for name, spec in model.hook_specs().items()
    ]
