"""Speculative decoding: a small model guesses a few tokens, a large one reads them at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from xformer.checks import require_sizes
from xformer.generation.prefix import beside, fitting, network_of, opened, prefill, stop_ids
from xformer.generation.samplers import Filter, pick, probabilities, temperature
from xformer.typing import Array


def speculative(
    model: Any,
    params: Any,
    draft: Any,
    draft_params: Any,
    prompt: Sequence[int],
    *,
    k: int,
    max_new: int,
    sampler: Filter | None = None,
    stop: Collection[int] = (),
    seed: int = 0,
) -> Iterator[list[int]]:
    """The ids that continue a prompt, in rounds of 1 to k + 1 of them.

    In a round the draft, a model of the same vocabulary, proposes k tokens, one after another. The
    model reads them all at once. Of its probability p(x) and the draft's q(x), a proposal x is kept
    with probability min(1, p(x) / q(x)). In the place of the first that is not comes a token drawn
    from max(p - q, 0), after the last that is one from p: every token has the distribution that the
    model alone would give it (arXiv:2211.17192). sampler: as in `stream`, of both; without one the
    ids are those of greedy decoding. max_new, stop, seed: as in `stream`. ValueError as there, and
    where the vocabularies differ.
    """
    network, small = (network_of("speculative", m) for m in (model, draft))
    require_sizes("speculative", 1, k=k)
    require_sizes("speculative", 0, max_new=max_new, seed=seed)
    stops = stop_ids("speculative", stop)
    sizes = [_vocab_size(one) for one in (network, small)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"speculative: draft must have the {sizes[0]} tokens of model, {sizes[1]}")
    for one in (network, small):
        fitting("speculative", one, [prompt], max_new)
    sampler = temperature(0) if sampler is None else sampler

    def rounds() -> Iterator[list[int]]:
        text = _Text(_Reader(network, params, prompt), _Reader(small, draft_params, prompt), ...)
        rng = np.random.default_rng([seed, 0])
        left = max_new
        while left:
            new = text.round(min(k, left - 1), sampler, rng)
            end = next((i + 1 for i, x in enumerate(new) if x in stops), len(new))
            yield new[:end]
            left = left - end if end == len(new) and new[-1] not in stops else 0

    return rounds()
