"""What a model is made of, part by part: as a table, as text, and as a notebook shows it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd
from torch import nn

from hooked_ssm.hook_points import HookFamily
from hooked_ssm.html_table import titled_table
from hooked_ssm.mixers import Mixer

if TYPE_CHECKING:
    from hooked_ssm.model import HookedModel


def summary(model: HookedModel) -> pd.DataFrame:
    """Return one row per part in order of execution, and their total.

    Columns:
        kind: Its class.
        parameters: Numbers it learns; weights that another part owns count there.
        hook_points: Names it has; what hands a state on from token to token counts once.
        state: Numbers per document that its hook points hand on from one token to the next: the
            recurrent state and the convolution's window. What grows with the document instead
            (attention's keys and values, the inputs of long convolutions) is not in it.
    """
    rows = {
        name: {
            "kind": type(part).__name__,
            "parameters": sum(p.numel() for p in part.parameters()),
            "hook_points": sum(hasattr(m, "spec") for m in part.modules()) - _made(part),
            "state": _state_size(part),
        }
        for name, part in _parts(model).items()
    }
    table = pd.DataFrame.from_dict(rows, orient="index")
    own = sum(p.numel() for p in model.parameters())
    hooks = len(model.hook_specs())
    table.loc["total"] = ["", own, hooks, table["state"].sum()]
    return table


def as_text(model: HookedModel) -> str:
    """Return the summary as lines of text."""
    lines = [_title(model)]
    for name, kind, parameters, hooks, state in summary(model).itertuples(name=None):
        line = f"  {name:20} {kind:14} {parameters:>12,} parameters"
        line += f"  {hooks:3} hook points" if hooks else ""
        lines.append(line + (f"  state {state:,}" if state else ""))
    return "\n".join(lines)


def as_html(model: HookedModel) -> str:
    """Return the summary as a table for a notebook."""
    return titled_table(_title(model), summary(model).map(_thousands))


def _title(model: HookedModel) -> str:
    cfg = model.cfg
    return f"HookedModel: {model.title}, d_model={cfg.d_model}, d_vocab={cfg.d_vocab}"


def _parts(model: HookedModel) -> dict[str, nn.Module]:
    parts = {n: m for n, m in model.named_children() if n in ("embed", "pos_embed")}
    for i, block in enumerate(model.blocks):
        parts |= {f"blocks.{i}.{n}": m for n, m in block.named_children() if n[:5] != "hook_"}
    return parts | {"ln_final": model.ln_final, "unembed": model.unembed}


def _made(part: nn.Module) -> int:
    """Hook points of single positions, which come into being when they are asked for."""
    return sum(len(m._modules) for m in part.modules() if isinstance(m, HookFamily))


def _state_size(part: nn.Module) -> int:
    if not isinstance(part, Mixer):
        return 0
    families = [m for m in part.modules() if isinstance(m, HookFamily)]
    sizes = {"one": 1, "d_model": part.d_model, **part.axis_sizes()}
    return sum(math.prod(sizes[axis] for axis in f.spec.axes if axis != "batch") for f in families)


def _thousands(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
