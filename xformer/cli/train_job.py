"""What a run of `xformer train` trains, and on what."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from xformer import backends
from xformer.cli import train_from
from xformer.cli.models import enable_float64
from xformer.cli.progress import each, progress
from xformer.cli.train_options import config_of
from xformer.models import GPT
from xformer.training import (
    Batch,
    Bytes,
    Characters,
    Corpus,
    Loss,
    TrainConfig,
    Windows,
    load_corpus,
    load_vocabulary,
    loss_of,
    named_vocabulary,
    unigram_loss,
)

PROMPT = "def "  # for a sample of Python's source
PROMPT_LENGTH = 8  # tokens of the validation text, for one of other text
UNITS: dict[type, str] = {Bytes: "byte", Characters: "character"}  # else token


class Job(NamedTuple):
    """What is trained, on what."""

    model: Any  # a GPT; of --from also a LanguageModel
    loss: Loss
    corpus: Corpus
    source: Windows
    validation: Windows
    held_out: Held
    config: TrainConfig
    place: backends.Backend
    prompt: str
    baseline: float  # of a unigram model

    @property
    def unit(self) -> str:
        """What a token is."""
        return UNITS.get(type(self.corpus.vocabulary), "token")


class Held:
    """Batches to validate on, with a bar where that takes long."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        yield from each(self.batches, "validating", "batches")


def job_of(options: argparse.Namespace) -> Job:
    """The job of settled options. ValueError, OSError where there is not text enough."""
    enable_float64(options.backend, options.dtype)
    place = backends.get(options.backend, options.device)
    if options.precision is not None:
        place.require_precision(options.precision)
    if options.deterministic:
        place.deterministic()  # only asked for: where there is none, nothing has been begun
    config = config_of(options)
    found = None if options.origin is None else train_from.origin(options)
    words = _words(options) if found is None else found.vocabulary
    with progress() as report:
        corpus = load_corpus(options.data, words, progress=report)
        source, validation = (_windows(corpus, i, options) for i in (0, 1))
        baseline = unigram_loss(corpus, report)  # which finds damaged tokens, before any folder
    sizes = (options.layers, options.d_model, options.heads, options.max_len)
    model: Any = None if found is None else found.model
    if model is None:
        model = GPT(corpus.vocabulary.size, *sizes, dropout=options.dropout)
    prompt = PROMPT
    if options.data is not None:
        prompt = corpus.vocabulary.decode(corpus.validation[:PROMPT_LENGTH].tolist())
    loss = loss_of(
        dataclasses.replace(model, activation_checkpointing=options.activation_checkpointing)
    )
    held_out = Held(list(validation.held_out(config.eval_batches)))
    rest = (held_out, config, place, prompt, baseline)
    return Job(model, loss, corpus, source, validation, *rest)


def _words(options: argparse.Namespace) -> Any:
    """The vocabulary that is named, as a run that goes on has it; None: the usual one."""
    if options.tokenizer is None:
        return None
    if options.resume is not None:
        try:
            return load_vocabulary(options.resume)
        except FileNotFoundError:  # stopped before it was there
            pass
    return named_vocabulary(options.tokenizer)


def _windows(corpus: Corpus, i: int, options: argparse.Namespace) -> Windows:
    """Windows of the part to train on, or of that to validate on."""
    tokens, name = corpus[:2][i], ("training", "validation")[i]
    if not len(tokens):
        raise ValueError(
            f"the {name} part of {corpus.description} is empty: there must be text enough for "
            "both parts, and where it was prepared a --validation-fraction above 0"
        )
    sha256 = None if corpus.sha256 is None else corpus.sha256[i]
    try:
        return Windows(tokens, options.max_len, options.batch, options.seed, sha256)
    except ValueError as error:
        if len(tokens) > options.max_len:
            raise
        raise ValueError(f"{error} (the {name} part; --max-len makes it shorter)") from error
