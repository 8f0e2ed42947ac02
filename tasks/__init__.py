"""Synthetic tasks with a query each, all under one contract (`Task`).

Importing the package registers every task here under its name for `Task.from_json`.
"""

from __future__ import annotations

from hooked_ssm.tasks.associative_recall import AssociativeRecall
from hooked_ssm.tasks.associative_treecall import AssociativeTreecall
from hooked_ssm.tasks.base import IGNORE_INDEX, Task, TaskBatch
from hooked_ssm.tasks.grammar import Grammar, Rule, random_grammar
from hooked_ssm.tasks.induction import InductionSequences
from hooked_ssm.tasks.multi_query import MultiQueryAssociativeRecall
from hooked_ssm.tasks.paper import PAPER_TASKS, paper_task
from hooked_ssm.tasks.selective_copying import SelectiveCopying
from hooked_ssm.tasks.streams import FixedSet, Stream, TaskStream

__all__ = [
    "IGNORE_INDEX",
    "PAPER_TASKS",
    "AssociativeRecall",
    "AssociativeTreecall",
    "FixedSet",
    "Grammar",
    "InductionSequences",
    "MultiQueryAssociativeRecall",
    "Rule",
    "SelectiveCopying",
    "Stream",
    "Task",
    "TaskBatch",
    "TaskStream",
    "paper_task",
    "random_grammar",
]
