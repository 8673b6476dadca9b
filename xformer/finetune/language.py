"""Tasks of language models: the next token, the tokens of a completion, hidden tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xformer.finetune.base import Example, Task, embed_of, require
from xformer.models import LanguageModel, LMHead, MaskedLMHead
from xformer.training.batch import IGNORED, Batch

MASKED, SHOWN, RANDOM = 0.15, 0.8, 0.1  # BERT's shares: of tokens; of those as a mask, as others


class Causal(Task):
    """The token after each token; texts longer than max_len are several examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model, "a causal one with an LMHead", is_causal(self.model))

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """Windows of max_len tokens, so that each token but the first is a target once."""
        ids = self._ended(fields["text"])
        starts = range(0, len(ids) - 1, self.max_len)
        pieces = [ids[start : start + self.max_len + 1] for start in starts]
        return [Example(piece[:-1], piece[1:]) for piece in pieces]


class Completion(Causal):
    """The tokens of a completion, given a prompt, for which there is no loss."""

    fields = ("prompt", "completion")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example; a completion is cut where both together exceed max_len.

        By the tokenizer's truncation_side "left" the prompt's beginning is cut instead.
        Both are one text, as a tokenizer may join them; the prompt ends where the tokens are no
        longer those of the prompt alone.
        """
        text = fields["prompt"] + fields["completion"]
        ids = self._ended(text)
        alone = np.asarray(self.tokenizer.encode(fields["prompt"]), np.int64)[: len(ids)]
        differs = np.flatnonzero(alone != ids[: len(alone)])
        n_prompt = int(differs[0]) if len(differs) else len(alone)
        kept = self._cut(text, self.max_len + 1)
        if self.tokenizer.truncation_side == "left":
            n_prompt -= len(ids) - len(kept)
        if n_prompt > self.max_len:
            raise ValueError(
                f"the prompt's {n_prompt} tokens leave no room for a completion: at most "
                f"{self.max_len} tokens are read"
            )
        targets = np.where(np.arange(1, len(kept)) < n_prompt, IGNORED, kept[1:])
        if not (targets != IGNORED).any():
            raise ValueError("the completion has no token")
        return [Example(kept[:-1], targets, len(kept) < len(ids))]


class Masked(Task):
    """Tokens hidden at random (arXiv:1810.04805, section 3.1): other ones whenever a text comes.

    Of 15 % of its tokens, at least one, 80 % become the mask, 10 % any token, 10 % stay.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.model, LanguageModel) and isinstance(self.model.head, MaskedLMHead)
        require(self.model, "one with a MaskedLMHead", known)
        if self.tokenizer.mask_id is None:
            raise ValueError("the tokenizer must have a mask token")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example; its targets are the places that may be hidden."""
        ids, is_cut = self._ids(fields["text"])
        places = np.flatnonzero(~np.isin(ids, list(self.tokenizer.special_ids)))
        return [Example(ids, places, is_cut)] if len(places) else []

    def batch(self, examples: Sequence[Example], rng: np.random.Generator) -> Batch:
        """Examples with tokens hidden."""
        return super().batch([self._hidden(example, rng) for example in examples], rng)

    def _hidden(self, example: Example, rng: np.random.Generator) -> Example:
        ids, places, _ = example
        n = max(1, round(MASKED * len(places)))
        chosen = rng.permutation(places)[:n]
        targets = np.full_like(ids, IGNORED)
        targets[chosen] = ids[chosen]
        ids, draw = ids.copy(), rng.random(n)
        others = rng.integers(0, embed_of(self.model).vocab_size, n)
        ids[chosen] = np.where(draw < SHOWN + RANDOM, others, ids[chosen])
        ids[chosen[draw < SHOWN]] = self.tokenizer.mask_id
        return Example(ids, targets)


def is_causal(model: Any) -> bool:
    """Whether a model gives the token after each token."""
    known = isinstance(model, LanguageModel) and isinstance(model.head, LMHead)
    return known and model.causal
