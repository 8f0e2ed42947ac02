"""Synthetic tasks with a query each, all under one contract (`Task`)."""

from __future__ import annotations

from hooked_ssm.tasks.associative_recall import AssociativeRecall
from hooked_ssm.tasks.associative_treecall import AssociativeTreecall
from hooked_ssm.tasks.base import IGNORE_INDEX, Task, TaskBatch
from hooked_ssm.tasks.grammar import Grammar, Rule, random_grammar
from hooked_ssm.tasks.streams import FixedSet, Stream, TaskStream

__all__ = [
    "IGNORE_INDEX",
    "AssociativeRecall",
    "AssociativeTreecall",
    "FixedSet",
    "Grammar",
    "Rule",
    "Stream",
    "Task",
    "TaskBatch",
    "TaskStream",
    "random_grammar",
]
