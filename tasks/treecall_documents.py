"""Documents of the treecall task: a sentence, its tree, and the query that is asked of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hooked_ssm.errors import TaskError
from hooked_ssm.tasks.trees import Sentence

QueryType = Literal["parent", "child", "sibling"]


@dataclass(frozen=True)
class Query:
    """A query of a sentence: positions of the queried token and of its answer."""

    kind: QueryType
    query: int
    target: int


@dataclass(frozen=True)
class TreeDocument:
    """A sentence and the query asked of it."""

    sentence: Sentence
    query: Query

    def draw(self) -> str:
        """Return the tree as text, with the query and the answer marked."""
        words = f"query: its {self.query.kind}?"
        return self.sentence.draw({self.query.target: "answer", self.query.query: words})


def possible_queries(
    sentence: Sentence, kinds: Sequence[QueryType], unambiguous: bool
) -> Iterator[Query]:
    """Yield every query that can be asked.

    parent: a token's head. child: any token whose head is the queried one. sibling: the rightmost
    other token with the same head (in the authors' code the rightmost of them answers itself).

    Args:
        kinds: The query types to ask.
        unambiguous: Ask only for the rightmost occurrence of a terminal; for "sibling" the answer
            must be the rightmost occurrence of its terminal too.
    """
    children = sentence.children()
    last = {terminal: position for position, terminal in enumerate(sentence.terminals)}
    rightmost = [last[terminal] == i for i, terminal in enumerate(sentence.terminals)]
    for query, parent in enumerate(sentence.parents):
        if unambiguous and not rightmost[query]:
            continue
        if parent >= 0 and "parent" in kinds:
            yield Query("parent", query, parent)
        if "child" in kinds:
            yield from (Query("child", query, child) for child in children[query])
        if parent >= 0 and "sibling" in kinds and len(children[parent]) > 1:
            target = max(other for other in children[parent] if other != query)
            if rightmost[target] or not unambiguous:
                yield Query("sibling", query, target)


def document_statistics(documents: Sequence[TreeDocument]) -> dict[str, Any]:
    """Describe a sample of documents.

    Returns:
        length, depth, distance: mean sentence length, tree depth, and tokens between query and
        answer (positive: the answer stands to the right); longest; distinct: mean number of
        different terminals; recurring: share of queried terminals that occur more than once;
        adjacent: share of answers right after the query; majority: accuracy of always giving the
        commonest answer; last_token: accuracy of giving the last token of the sentence; kinds:
        share of each query type.

    Raises:
        TaskError: No documents.
    """
    if not documents:
        raise TaskError("documents is an empty list; give at least one document")
    count = len(documents)
    sentences = [document.sentence for document in documents]
    queries = [document.query for document in documents]
    pairs = list(zip(sentences, queries, strict=True))
    answers = [sentence.terminals[query.target] for sentence, query in pairs]
    distances = [query.target - query.query for query in queries]
    asked = [sentence.terminals.count(sentence.terminals[query.query]) for sentence, query in pairs]
    return {
        "documents": count,
        "length": sum(map(len, sentences)) / count,
        "longest": max(map(len, sentences)),
        "depth": sum(sentence.depth for sentence in sentences) / count,
        "distinct": sum(len(set(sentence.terminals)) for sentence in sentences) / count,
        "distance": sum(distances) / count,
        "adjacent": distances.count(1) / count,
        "recurring": sum(times > 1 for times in asked) / count,
        "majority": Counter(answers).most_common(1)[0][1] / count,
        "last_token": sum(
            answer == sentence.terminals[-1]
            for answer, sentence in zip(answers, sentences, strict=True)
        )
        / count,
        "kinds": {kind: n / count for kind, n in Counter(q.kind for q in queries).items()},
    }
