"""Generation, token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_ssm.inputs import Past

Step = Callable[..., tuple[Tensor, Past]]
"""`HookedModel.step`: (tokens, past, attention_mask=) -> (logits, past)."""


@torch.no_grad()
def generate(
    step: Step,
    prompts: Int[Tensor, "batch pos"],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    attention_mask: Tensor | None = None,
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

    Returns:
        Prompts with what was appended. [batch, pos + max_new_tokens]

    Raises:
        ValueError: A negative temperature, or a positive one without a generator.
    """
    if temperature < 0 or (temperature > 0 and generator is None):
        raise ValueError(
            f"generate: temperature={temperature} with generator={generator}; allowed: 0, or "
            "a positive temperature with an explicit torch.Generator"
        )
    if max_new_tokens < 0:
        raise ValueError(f"generate: max_new_tokens={max_new_tokens}; allowed: 0 or more")
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
