"""Tasks of language models: the next token, a completion, masked tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xformer.finetune.base_task import Example, Task, embed_of, require
from xformer.models import LanguageModel, LMHead, MaskedLMHead
from xformer.training.batch import IGNORED, Batch

# BERT's fractions: of chosen tokens; of these, replaced by the mask, and by a random token.
MASKED, SHOWN, RANDOM = 0.15, 0.8, 0.1


class Causal(Task):
    """Predict the next token. A text longer than max_len becomes several examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.model, LanguageModel) and isinstance(self.model.head, LMHead)
        require(self.model, "a causal language model", known and self.model.causal)

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """Windows of max_len tokens, so that each token but the first is a target once."""
        ids = self._ended(fields["text"])
        starts = range(0, len(ids) - 1, self.max_len)
        pieces = [ids[start : start + self.max_len + 1] for start in starts]
        return [Example(piece[:-1], piece[1:]) for piece in pieces]


class Completion(Causal):
    """Predict the tokens of a completion after a prompt. The prompt has no loss."""

    fields = ("prompt", "completion")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example, of at most max_len tokens.

        The completion is cut at its end; with truncation_side "left" of the tokenizer, the prompt
        at its beginning. Prompt and completion are encoded as one text, since a tokenizer may join
        them. The prompt ends at the first token that differs from the prompt encoded alone.
        """
        text = fields["prompt"] + fields["completion"]
        ids = self._ended(text)
        alone = np.asarray(self.tokenizer.encode(fields["prompt"]), np.int64)[: len(ids)]
        differs = np.flatnonzero(alone != ids[: len(alone)])
        n_prompt = int(differs[0]) if len(differs) else len(alone)
        cut = self._truncated(text, self.max_len + 1)
        if self.tokenizer.truncation_side == "left":
            n_prompt -= len(ids) - len(cut)
        if n_prompt > self.max_len:
            raise ValueError(
                f"the prompt's {n_prompt} tokens leave no room for a completion: at most "
                f"{self.max_len} tokens are read"
            )
        targets = np.where(np.arange(1, len(cut)) < n_prompt, IGNORED, cut[1:])
        if not (targets != IGNORED).any():
            raise ValueError("the completion has no token")
        return [Example(cut[:-1], targets, len(cut) < len(ids))]


class Masked(Task):
    """Predict masked tokens (arXiv:1810.04805, section 3.1).

    Each time a text is in a batch, 15 % of its tokens are chosen at random, at least one. Of these,
    80 % become the mask, 10 % a random token, and 10 % stay.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        known = isinstance(self.model, LanguageModel) and isinstance(self.model.head, MaskedLMHead)
        require(self.model, "a masked language model", known)
        if self.tokenizer.mask_id is None:
            raise ValueError("the tokenizer must have a mask token")

    def examples(self, fields: Mapping[str, Any]) -> list[Example]:
        """One example. Its targets are the indices of tokens that may be chosen."""
        ids, is_cut = self._ids(fields["text"])
        indices = np.flatnonzero(~np.isin(ids, list(self.tokenizer.special_ids)))
        return [Example(ids, indices, is_cut)] if len(indices) else []

    def batch(self, examples: Sequence[Example], rng: np.random.Generator) -> Batch:
        """A batch of examples with masked tokens, chosen by `rng`."""
        return super().batch([self._masked(example, rng) for example in examples], rng)

    def _masked(self, example: Example, rng: np.random.Generator) -> Example:
        ids, indices, _ = example
        n = max(1, round(MASKED * len(indices)))
        chosen = rng.permutation(indices)[:n]
        targets = np.full_like(ids, IGNORED)
        targets[chosen] = ids[chosen]
        ids, draw = ids.copy(), rng.random(n)
        random_ids = rng.integers(0, embed_of(self.model).vocab_size, n)
        ids[chosen] = np.where(draw < SHOWN + RANDOM, random_ids, ids[chosen])
        ids[chosen[draw < SHOWN]] = self.tokenizer.mask_id
        return Example(ids, targets)
