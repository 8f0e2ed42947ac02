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

from hooked_ssm.checks import checked
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
        d_vocab: The smallest vocabulary that has its answers.
        exact: Whether no larger vocabulary fits either, as where distributions are compared.
    """

    name: str
    documents: int
    function: MetricFunction = field(repr=False)
    d_vocab: int = 1
    exact: bool = False

    def __call__(self, logits: Float[Tensor, "batch d_vocab"]) -> Float[Tensor, " batch"]:
        """Return the metric of each document.

        Raises:
            ShapeError: It is built for another number of documents, or a larger vocabulary.
        """
        if logits.ndim != 2 or len(logits) != self.documents:
            raise ShapeError(
                f"metric {self.name!r} is built for {self.documents} documents: it takes logits "
                f"[{self.documents}, d_vocab], got {list(logits.shape)}"
            )
        _check_vocabulary(self, self.name, logits.shape[1])
        return self.function(logits)


@checked
def logit_difference(
    answers: Int[Tensor, " batch"], wrong: Int[Tensor, "batch *choices"]
) -> Metric:
    """logit(answer) - logit(wrong answer), or less the mean logit of several wrong ones."""
    answers, wrong = _ids(answers, "answers"), _ids(wrong, "wrong")
    choices = wrong.reshape(len(wrong), -1)

    def difference(logits: Tensor) -> Tensor:
        return _pick(logits, answers) - logits.gather(1, choices.to(logits.device)).mean(1)

    return Metric("logit_difference", len(answers), difference, _d_vocab(answers, choices))


@checked
def log_probability(answers: Int[Tensor, " batch"]) -> Metric:
    """log softmax(logits)[answer]."""
    answers = _ids(answers, "answers")

    def log_odds(logits: Tensor) -> Tensor:
        return _pick(torch.log_softmax(_wide(logits), dim=-1), answers)

    return Metric("log_probability", len(answers), log_odds, _d_vocab(answers))


@checked
def probability(answers: Int[Tensor, " batch"]) -> Metric:
    """softmax(logits)[answer].

    Examples:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 100.0]])
        >>> probability(torch.tensor([0, 1]))(logits)
        tensor([0.5000, 1.0000])
    """
    log = log_probability(answers)
    return Metric("probability", len(answers), lambda x: log.function(x).exp(), log.d_vocab)


@checked
def kl(reference: Float[Tensor, "batch d_vocab"]) -> Metric:
    """KL(reference || patched) = sum_v p_ref(v) (log p_ref(v) - log p(v)), in nats."""
    log_reference = _lasting(torch.log_softmax(_wide(reference.detach()), dim=-1))

    def divergence(logits: Tensor) -> Tensor:
        ours = torch.log_softmax(_wide(logits), dim=-1)
        ref = log_reference.to(logits.device)
        terms = ref.exp() * (ref - ours)
        # 0 where the reference has no probability, as in the limit
        return terms.where(ref > -torch.inf, terms.new_zeros(())).sum(-1)

    return Metric("kl", len(reference), divergence, reference.shape[1], exact=True)


@checked
def rank(answers: Int[Tensor, " batch"]) -> Metric:
    """How many tokens have a higher logit than the answer: 0 is the most likely."""
    answers = _ids(answers, "answers")

    def higher(logits: Tensor) -> Tensor:
        own = _pick(logits, answers)
        above = (logits > own[:, None]).sum(-1).to(own.dtype)
        return above.where(~logits.isnan().any(-1), own.new_tensor(float("nan")))

    return Metric("rank", len(answers), higher, _d_vocab(answers))


@checked
def accuracy(answers: Int[Tensor, " batch"]) -> Metric:
    """1 where the answer is the most likely token, else 0."""
    answers = _ids(answers, "answers")

    def right(logits: Tensor) -> Tensor:
        return (logits.argmax(-1) == answers.to(logits.device)).to(logits.dtype)

    return Metric("accuracy", len(answers), right, _d_vocab(answers))


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


def named_metrics(
    metric: Metrics, documents: int, d_vocab: int | None = None
) -> dict[str, MetricFunction]:
    """Return metrics by name; a function goes by its own.

    Raises:
        ConfigError: Neither a function nor a non-empty mapping of functions.
        ShapeError: One is built for another number of documents, or has answers beyond d_vocab.
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
        if d_vocab is not None:
            _check_vocabulary(function, name, d_vocab)
    return named


def measure(
    metrics: Mapping[str, MetricFunction], logits: Float[Tensor, "batch d_vocab"]
) -> Float[Tensor, "metric batch"]:
    """Evaluate the metrics on one batch of logits, in float32 or, where those are, float64.

    Each is given logits of its own, so that none sees what another does to them.

    Raises:
        ShapeError: A metric does not return one number per document.
    """
    rows: list[Tensor] = []
    for name, function in metrics.items():
        value = function(_wide(logits).clone())
        if not isinstance(value, Tensor):
            raise ShapeError(
                f"metric {name!r} returned a {type(value).__name__}, want a tensor with one number "
                f"for each of the {len(logits)} documents"
            )
        if value.shape != logits.shape[:1]:
            raise ShapeError(
                f"metric {name!r} returned shape {list(value.shape)}, want one number for each of "
                f"the {len(logits)} documents: [{len(logits)}]"
            )
        rows.append(value.to(_wide(logits).dtype))
    return torch.stack(rows)


def measure_run(
    metrics: Mapping[str, MetricFunction], logits: Float[Tensor, "batch d_vocab"], run: str
) -> Float[Tensor, "metric batch"]:
    """Evaluate the metrics on a run without a patch, where each must be a number.

    Args:
        run: What the message calls it.

    Raises:
        ShapeError: As `measure`; also if a metric is NaN for a document.
    """
    values = measure(metrics, logits)
    for name, row in zip(metrics, values, strict=True):
        wrong = row.isnan().nonzero()[:, 0].tolist()
        if wrong:
            raise ShapeError(
                f"metric {name!r} is NaN for {len(wrong)} of {len(row)} documents of the {run} "
                f"run, the first of them {wrong[0]}: nothing can be compared with it. Look at the "
                "logits there, or leave those documents out"
            )
    return values


def _check_vocabulary(metric: MetricFunction, name: str, d_vocab: int) -> None:
    needed = getattr(metric, "d_vocab", 1)
    if getattr(metric, "exact", False) and needed != d_vocab:
        raise ShapeError(
            f"metric {name!r} compares with a distribution over {needed} tokens, but the model's "
            f"vocabulary has {d_vocab}: build it from logits of this model"
        )
    if needed > d_vocab:
        raise ShapeError(
            f"metric {name!r} has answers up to {needed - 1}, but the model's vocabulary {d_vocab} "
            f"tokens: allowed 0..{d_vocab - 1}"
        )


def check_ids(ids: Tensor, name: str, d_vocab: int | None = None) -> Tensor:
    """Return token ids if they are in the vocabulary; where it is not known, at least not below.

    Raises:
        ShapeError: One is not.
    """
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or (d_vocab is not None and high >= d_vocab):
        last = "" if d_vocab is None else d_vocab - 1
        raise ShapeError(f"{name} has token ids from {low} to {high}; allowed 0..{last}")
    return ids


def _ids(answers: Tensor, what: str) -> Tensor:
    return _lasting(check_ids(answers, what).long())


def _d_vocab(*ids: Tensor) -> int:
    return 1 + max(int(some.max()) for some in ids)


def _lasting(values: Tensor) -> Tensor:
    """A copy that gradients can use, also of tensors made in inference mode."""
    with torch.inference_mode(False):
        return values.clone()


def _pick(logits: Tensor, answers: Tensor) -> Tensor:
    return logits.gather(1, answers.to(logits.device)[:, None])[:, 0]


def _wide(logits: Tensor) -> Tensor:
    """At least float32: probabilities do not survive in less."""
    return logits if logits.dtype == torch.float64 else logits.float()
