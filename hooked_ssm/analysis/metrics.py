"""What a patched run is judged by: one number per document, from its logits where they are read.

A metric is any function of logits [batch d_vocab] that returns [batch]; those here are built with
the answers of the documents they will see, in order. `kl`, `log_probability`, `probability` and
`logit_difference` have gradients, so attribution patching takes them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.errors import ConfigError, ShapeError

MetricFunction = Callable[[Tensor], Tensor]
Metrics = MetricFunction | Mapping[str, MetricFunction]


@dataclass(frozen=True)
class Metric:
    """A named metric of a known number of documents.

    Attributes:
        name: What frames and plots call it.
        documents: How many documents it is built for.
        function: Logits [batch d_vocab] -> [batch].
    """

    name: str
    documents: int
    function: MetricFunction = field(repr=False)

    def __call__(self, logits: Float[Tensor, "batch d_vocab"]) -> Float[Tensor, " batch"]:
        """Return the metric of each document.

        Raises:
            ShapeError: It is built for another number of documents.
        """
        if logits.ndim != 2 or len(logits) != self.documents:
            raise ShapeError(
                f"metric {self.name!r} is built for {self.documents} documents: it takes logits "
                f"[{self.documents}, d_vocab], got {list(logits.shape)}"
            )
        return self.function(logits)


def logit_difference(
    answers: Int[Tensor, " batch"], wrong: Int[Tensor, "batch *choices"]
) -> Metric:
    """logit(answer) - logit(wrong answer), or less the mean logit of several wrong ones."""
    answers = _ids(answers, "answers")
    if len(wrong) != len(answers):
        raise ShapeError(f"{len(answers)} answers, but wrong answers for {len(wrong)} documents")
    choices = _lasting(wrong.reshape(len(wrong), -1))

    def difference(logits: Tensor) -> Tensor:
        return _pick(logits, answers) - logits.gather(1, choices.to(logits.device)).mean(1)

    return Metric("logit_difference", len(answers), difference)


def log_probability(answers: Int[Tensor, " batch"]) -> Metric:
    """log softmax(logits)[answer]."""
    answers = _ids(answers, "answers")

    def log_odds(logits: Tensor) -> Tensor:
        return _pick(torch.log_softmax(_wide(logits), dim=-1), answers)

    return Metric("log_probability", len(answers), log_odds)


def probability(answers: Int[Tensor, " batch"]) -> Metric:
    """softmax(logits)[answer].

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 100.0]])
        >>> probability(torch.tensor([0, 1]))(logits)
        tensor([0.5000, 1.0000])
    """
    log_odds = log_probability(answers).function
    return Metric("probability", len(answers), lambda logits: log_odds(logits).exp())


def kl(reference: Float[Tensor, "batch d_vocab"]) -> Metric:
    """KL(reference || patched) = sum_v p_ref(v) (log p_ref(v) - log p(v)), in nats."""
    log_reference = _lasting(torch.log_softmax(_wide(reference.detach()), dim=-1))

    def divergence(logits: Tensor) -> Tensor:
        ours = torch.log_softmax(_wide(logits), dim=-1)
        ref = log_reference.to(logits.device)
        return (ref.exp() * (ref - ours)).sum(-1)

    return Metric("kl", len(reference), divergence)


def rank(answers: Int[Tensor, " batch"]) -> Metric:
    """How many tokens have a higher logit than the answer: 0 is the most likely."""
    answers = _ids(answers, "answers")

    def higher(logits: Tensor) -> Tensor:
        return (logits > _pick(logits, answers)[:, None]).sum(-1).to(logits.dtype)

    return Metric("rank", len(answers), higher)


def accuracy(answers: Int[Tensor, " batch"]) -> Metric:
    """1 where the answer is the most likely token, else 0."""
    answers = _ids(answers, "answers")

    def right(logits: Tensor) -> Tensor:
        return (logits.argmax(-1) == answers.to(logits.device)).to(logits.dtype)

    return Metric("accuracy", len(answers), right)


def normalised_recovery(
    patched: Float[Tensor, "*cells batch"],
    base: Float[Tensor, " batch"],
    source: Float[Tensor, " batch"],
) -> Float[Tensor, "*cells"]:
    """(patched - base) / (source - base), means over documents taken first.

    0: the patch did nothing; 1: it brought the metric of the source run (of the clean run, when
    denoising). Means first, since single documents may have no difference to recover.
    """
    return (patched.mean(-1) - base.mean()) / (source.mean() - base.mean())


def named_metrics(metric: Metrics, documents: int) -> dict[str, MetricFunction]:
    """Return metrics by name; a function goes by its own.

    Raises:
        ConfigError: Neither a function nor a non-empty mapping of functions.
        ShapeError: One is built for another number of documents.
    """
    if isinstance(metric, Mapping):
        named = dict(metric)
    else:
        own = getattr(metric, "name", None) or getattr(metric, "__name__", "metric")
        named = {str(own): metric}
    if not named or not all(callable(function) for function in named.values()):
        raise ConfigError(
            f"metric is {metric!r}; allowed: a function of logits [batch, d_vocab] that returns "
            "[batch], or a mapping from names to such functions; see hooked_ssm.analysis.metrics"
        )
    for name, function in named.items():
        built_for = getattr(function, "documents", documents)
        if built_for != documents:
            raise ShapeError(
                f"metric {name!r} is built for {built_for} documents, but {documents} are run"
            )
    return named


def measure(
    metrics: Mapping[str, MetricFunction], logits: Float[Tensor, "batch d_vocab"]
) -> Float[Tensor, "metric batch"]:
    """Evaluate the metrics on one batch of logits.

    Raises:
        ShapeError: A metric does not return one number per document.
    """
    rows: list[Tensor] = []
    for name, function in metrics.items():
        value = torch.as_tensor(function(logits))
        if value.shape != logits.shape[:1]:
            raise ShapeError(
                f"metric {name!r} returned shape {list(value.shape)}, want one number for each of "
                f"the {len(logits)} documents: [{len(logits)}]"
            )
        rows.append(value.to(logits.dtype))
    return torch.stack(rows)


def _ids(answers: Tensor, what: str) -> Tensor:
    if answers.ndim != 1 or answers.is_floating_point():
        raise ShapeError(
            f"{what} must be one token id per document, integers [batch]; got {answers.dtype} of "
            f"shape {list(answers.shape)}"
        )
    return _lasting(answers.long())


def _lasting(values: Tensor) -> Tensor:
    """A copy that gradients can use, also of tensors made in inference mode."""
    with torch.inference_mode(False):
        return values.clone()


def _pick(logits: Tensor, answers: Tensor) -> Tensor:
    return logits.gather(1, answers.to(logits.device)[:, None])[:, 0]


def _wide(logits: Tensor) -> Tensor:
    """At least float32: probabilities do not survive in less."""
    return logits if logits.dtype == torch.float64 else logits.float()
