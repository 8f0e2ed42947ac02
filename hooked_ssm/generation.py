"""Generation, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.checks import Natural, NonNegative, checked
from hooked_ssm.errors import ConfigError
from hooked_ssm.inputs import MaskLike, Past

Step = Callable[..., tuple[Tensor, Past]]
"""`HookedModel.step`: (tokens, past, attention_mask=) -> (logits, past)."""


@checked
@torch.no_grad()
def generate(
    step: Step,
    prompts: Int[Tensor, "batch pos"],
    max_new_tokens: Natural,
    *,
    temperature: NonNegative = 0.0,
    generator: torch.Generator | None = None,
    attention_mask: MaskLike | None = None,
    check_length: Callable[[int], None] = lambda length: None,
) -> Int[Tensor, "batch longer"]:
    """Append tokens one by one; hooks attached to the model act in every step.

    Args:
        step: Runs the model on the next tokens.
        prompts: [batch, pos]
        max_new_tokens: How many to append.
        temperature: 0 takes the most likely token; above, one is drawn from
            softmax(logits / temperature) with the generator.
        generator: Required where something is drawn.
        attention_mask: False at left padding of the prompts. [batch, pos]
        check_length: Raises if the model cannot run so many tokens.

    Returns:
        Prompts with what was appended. [batch, pos + max_new_tokens]

    Raises:
        ConfigError: A negative number, or a positive temperature without a generator on the
            model's device.
    """
    if temperature > 0 and (generator is None or generator.device.type != prompts.device.type):
        got = "no generator" if generator is None else f"a generator on {generator.device}"
        raise ConfigError(
            f"generate: temperature={temperature} with {got}; allowed: 0, or a positive "
            f"temperature with an explicit torch.Generator({prompts.device.type!r})"
        )
    check_length(prompts.shape[1] + max_new_tokens - 1 if max_new_tokens else 0)
    ids = new = prompts
    past = None
    for _ in range(max_new_tokens):
        logits, past = step(new, past, attention_mask=attention_mask if past is None else None)
        new = _next(logits[:, -1], temperature, generator)
        ids = torch.cat([ids, new], dim=1)
    return ids


def _next(
    logits: Float[Tensor, "batch d_vocab"], temperature: float, generator: torch.Generator | None
) -> Int[Tensor, "batch one"]:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    odds = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(odds, 1, generator=generator)
