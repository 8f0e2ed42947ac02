"""The paper's task settings, by the paper's names. Source: Arora et al., arXiv 2505.15105."""

from __future__ import annotations

from typing import Any

from hooked_ssm.errors import TaskError, unknown
from hooked_ssm.tasks.associative_recall import AssociativeRecall
from hooked_ssm.tasks.associative_treecall import AssociativeTreecall
from hooked_ssm.tasks.base import Task

# the authors' code draws the target first by default, and no setting says otherwise
_TREECALL: dict[str, Any] = {"task": AssociativeTreecall.name, "sample_first": "target"}

# specs of Task.from_json; what they leave out is the task's default, which is the paper's
PAPER_TASKS: dict[str, dict[str, Any]] = {
    "ar_32": {"task": AssociativeRecall.name, "num_kv": 8192, "num_pairs": 16},
    "ar_gen": {"task": AssociativeRecall.name, "num_kv": 8192, "num_pairs": 16, "holdout": 0.2},
    "pcfg_easy": _TREECALL,
    "pcfg_easy_8192": {
        **_TREECALL,
        "num_terminals": 8192,
        "terminal_occurrence_factor": 20.0,
    },
    "pcfg_medium": {**_TREECALL, "max_rhs_len": 10},
    "sibling": {**_TREECALL, "query_types": ["sibling"]},
}
"""The settings of the paper's experiments, by name."""


def paper_task(setting: str, **changes: Any) -> Task:
    """Return the task of one of the paper's settings, with fields changed if wanted.

    Raises:
        TaskError: Unknown setting or field.

    Examples:
        >>> paper_task("ar_32", num_pairs=4).chance
        0.25
    """
    if setting not in PAPER_TASKS:
        raise TaskError(unknown("paper setting", setting, PAPER_TASKS))
    return Task.from_json({**PAPER_TASKS[setting], **changes})
