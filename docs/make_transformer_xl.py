"""Measure the table of docs/transformer-xl.md: the validation loss by the memory at evaluation.

python docs/make_transformer_xl.py

It trains two models on the source of Python's standard library, one without a memory and one with
a memory as long as a segment, and evaluates each with several memories. A few minutes on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from xformer import GPT, backends, training
from xformer.models import LanguageModel
from xformer.training import Corpus, Streams, TrainConfig

SEGMENT = 8  # tokens of a segment, T
TRAINED = (0, SEGMENT)  # memories in training
EVALUATED = (0, SEGMENT, 2 * SEGMENT, 4 * SEGMENT, 8 * SEGMENT)
ROWS = 32  # streams of a batch
STEPS = 1200
BATCHES = 100  # of validation
SIZES: dict[str, int] = {"n_layers": 2, "d_model": 64, "n_heads": 2}


def trained(corpus: Corpus, memory_len: int, steps: int) -> tuple[LanguageModel, Any]:
    """A model, and its parameters after training."""
    model = GPT(
        corpus.vocabulary.size, **SIZES, max_len=SEGMENT, positions="xl", memory_len=memory_len
    )
    config = TrainConfig(steps=steps, batch_size=ROWS, lr=4e-3, eval_every=steps)
    loss = training.segment_loss_of(model)
    state = training.start(model.init(config.seed), config, loss=loss)
    source = Streams(corpus.train, SEGMENT, ROWS, corpus.sha256 and corpus.sha256[0])
    updates = training.train(loss, state, source, config, backends.get("numpy"), donate=True)
    for step in tqdm(updates, f"memory {memory_len}", steps, disable=None):
        state = step.state
    return model, state.params


def evaluated(model: LanguageModel, params: Any, corpus: Corpus, memory_len: int) -> float:
    """The validation loss in nats a byte, after a memory of `memory_len` tokens."""
    loss = training.segment_loss_of(dataclasses.replace(model, memory_len=memory_len))
    held_out = Streams(corpus.validation, SEGMENT, ROWS).held_out(BATCHES)
    value = training.evaluate(loss, params, held_out, backends.get("numpy"))
    assert value is not None
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate, and print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    args = parser.parse_args(argv)
    corpus = training.load_corpus(None)
    print(f"{corpus.description}; {len(corpus.train):,} bytes to train on")
    columns = " | ".join(f"M = {m}" for m in EVALUATED)
    print(f"\n| trained with | {columns} |\n|---|{'---|' * len(EVALUATED)}")
    for memory_len in TRAINED:
        model, params = trained(corpus, memory_len, args.steps)
        losses = [evaluated(model, params, corpus, m) for m in EVALUATED]
        best = int(np.argmin(losses))
        cells = [f"**{x:.3f}**" if i == best else f"{x:.3f}" for i, x in enumerate(losses)]
        print(f"| M = {memory_len} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
