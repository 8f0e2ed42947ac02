"""Text to tokens and back, for models with a tokenizer, a task's vocabulary, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hooked_ssm.errors import ShapeError, TaskError


class Tokenising(nn.Module):
    """What a model knows about text. No token is ever added on its own: `<bos>` only if you say so.

    Attributes:
        tokenizer: A Hugging Face tokenizer, or None.
        token_names: A name per token id, such as a task's; text is then split at blanks. Or None.
    """

    tokenizer: Any = None
    token_names: Sequence[str] | None = None
    embed: nn.Embedding

    def to_tokens(self, text: Any, prepend_bos: bool = False) -> Tensor:
        """Return token ids. [batch, pos]

        Args:
            text: Ids (a tensor or lists; one document may come without its batch axis), a string,
                or a list of strings of equal length in tokens.
            prepend_bos: Put the tokenizer's (or the vocabulary's) `<bos>` in front.

        Raises:
            TaskError: Text, but no tokenizer and no token names; or an unknown token.
            ShapeError: Neither text nor ids of documents of one length.
        """
        if isinstance(text, Tensor) or not _holds_text(text):
            ids = as_tensor("tokens", text, self.embed.weight.device)
            ids = ids[None] if ids.ndim == 1 else ids
        else:
            rows = [self._encode(t) for t in ([text] if isinstance(text, str) else text)]
            if len({len(row) for row in rows}) > 1:
                raise ShapeError(
                    f"to_tokens: texts have {sorted({len(r) for r in rows})} tokens; pass texts of "
                    "one length, or pad ids yourself and give attention_mask"
                )
            ids = torch.tensor(rows, device=self.embed.weight.device)
        if not prepend_bos:
            return ids
        bos = ids.new_full((ids.shape[0], 1), self._bos_id())
        return torch.cat([bos, ids], dim=1)

    def to_str_tokens(self, text: Any, prepend_bos: bool = False) -> list[str]:
        """Return the names of the tokens of one document.

        Raises:
            ShapeError: Several documents, or an id without a name.
        """
        rows = self.to_tokens(text, prepend_bos)
        if rows.ndim != 2 or len(rows) != 1:
            raise ShapeError(
                f"to_str_tokens takes one document, got tokens of shape {list(rows.shape)}; pass "
                "tokens[i]"
            )
        ids = rows[0].tolist()
        if self.tokenizer is not None:
            return [self.tokenizer.decode([i]) for i in ids]
        if self.token_names is None:
            return [str(i) for i in ids]
        nameless = [i for i in ids if not 0 <= i < len(self.token_names)]
        if nameless:
            raise ShapeError(
                f"token {nameless[0]} has no name; model.token_names has {len(self.token_names)}"
            )
        return [self.token_names[i] for i in ids]

    def to_single_token(self, text: str) -> int:
        """Return the id of a text that is exactly one token."""
        ids = self._encode(text)
        if len(ids) != 1:
            raise TaskError(f"{text!r} is {len(ids)} tokens, wanted exactly one")
        return ids[0]

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TaskError(f"a text must be a string, got {text!r}; ids go in lists of their own")
        if self.tokenizer is not None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        if self.token_names is None:
            raise TaskError(
                f"cannot turn {text!r} into tokens: the model has no tokenizer; set "
                "model.tokenizer, or model.token_names = task.token_names, or pass token ids"
            )
        index = {name: i for i, name in enumerate(self.token_names)}
        unknown = [word for word in text.split() if word not in index]
        if unknown:
            raise TaskError(f"unknown token {unknown[0]!r}; known ones: model.token_names")
        return [index[word] for word in text.split()]

    def _bos_id(self) -> int:
        if self.tokenizer is not None and self.tokenizer.bos_token_id is not None:
            return int(self.tokenizer.bos_token_id)
        if self.token_names is not None and "<bos>" in self.token_names:
            return list(self.token_names).index("<bos>")
        raise TaskError("prepend_bos: neither a tokenizer nor token names know a <bos>")


def as_tensor(what: str, value: Any, device: torch.device) -> Tensor:
    """Return a tensor as it is, and lists or arrays as a tensor on the device.

    Raises:
        ShapeError: No numbers, or lists of different lengths.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(getattr(value, "tokens", None), Tensor):
        raise ShapeError(f"{what}: got a {type(value).__name__}; pass its tokens: batch.tokens")
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(
            f"{what}: cannot make a tensor of this {type(value).__name__} ({error}); pass integers "
            "[batch, pos], documents of different lengths padded on the left and an attention_mask"
        ) from error


def _holds_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str)
    )
