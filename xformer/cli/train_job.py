"""The model, data and configuration of a run of `xformer train`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from xformer import backends, training
from xformer.cli import train_from
from xformer.cli.open_model import enable_float64
from xformer.cli.progress import each, progress
from xformer.cli.run_options import config_of
from xformer.cli.train_options import TrainOptions
from xformer.dispatch.checks import require_memory
from xformer.distributed.launcher import launched
from xformer.models import GPT, LanguageModel
from xformer.models.precision import require_reducible
from xformer.pretrained.matching import shapes_of
from xformer.training.dashboards import require_dashboard

PROMPT = "def "  # prompt of the samples if the text is Python's source
PROMPT_LENGTH = 8  # otherwise the prompt is the first tokens of the validation text
# Of a vocabulary; otherwise "token".
UNITS: dict[type, str] = {training.Bytes: "byte", training.Characters: "character"}


class Job(NamedTuple):
    """A model to train, its data and the configuration of training."""

    model: LanguageModel
    loss: training.Loss
    corpus: training.Corpus
    source: training.Windows | training.Streams
    validation: training.Windows | training.Streams
    held_out: Held
    config: training.TrainConfig
    backend: backends.Backend
    prompt: str
    baseline: float  # validation loss of a unigram model, nats a token

    @property
    def unit(self) -> str:
        """The name of one token: "byte", "character" or "token"."""
        return UNITS.get(type(self.corpus.vocabulary), "token")


class Held:
    """Batches to validate on. Iterating shows progress if it takes long."""

    def __init__(self, batches: list[training.Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[training.Batch]:
        yield from each(self.batches, "validating", "batches")


def job_of(options: TrainOptions) -> Job:
    """The job of the options that `settled` returned.

    ValueError if there is too little text or an option is impossible; OSError if a file is missing.
    """
    enable_float64(options.backend, options.dtype)
    backend = backends.get(options.backend, options.device)
    if options.precision is not None:
        backend.require_precision(options.precision)
    if options.deterministic:
        backend.deterministic()  # raises if the backend has none, before anything is written
    if options.log_to != "none":
        require_dashboard(options.log_to)
    config = config_of(options)
    origin = None if options.origin is None else train_from.origin(options)
    words = _words(options) if origin is None else origin.vocabulary
    # A GPT of one token refuses sizes before text is read.
    model = _gpt(options, 1) if origin is None else origin.model
    memory = model.memory_len
    if options.backend in backends.WITH_NUMPY:
        _require_memory(model, options)
    with progress() as report:
        corpus = training.load_corpus(options.data, words, progress=report)
        source, validation = (_source(corpus, i, options, memory) for i in (0, 1))
        # Raises for damaged tokens, before a folder is made.
        baseline = training.unigram_loss(corpus, report)
    if origin is None:
        model = _gpt(options, corpus.vocabulary.size)
    require_reducible("--precision", model, options.precision)
    prompt = PROMPT
    if options.data is not None:
        prompt = corpus.vocabulary.decode(corpus.validation[:PROMPT_LENGTH].tolist())
    trained = dataclasses.replace(model, activation_checkpointing=options.activation_checkpointing)
    loss = training.loss_of(trained) if memory is None else training.segment_loss_of(trained)
    held_out = Held(list(validation.held_out(config.eval_batches)))
    fields = (model, loss, corpus, source, validation, held_out, config)
    return Job(*fields, backend, prompt, baseline)


def _gpt(options: TrainOptions, vocab_size: int) -> LanguageModel:
    sizes = (options.layers, options.d_model, options.heads, options.max_len)
    names = ("positions", "position_mode", "norm_placement", "residual_scale", "reversible")
    chosen: Any = {name: getattr(options, name) for name in (*names, "dropout")}
    return GPT(vocab_size, *sizes, memory_len=options.memory, **chosen)


def _require_memory(model: Any, options: TrainOptions) -> None:
    """MemoryError if parameters and gradients, or what one step saves, cannot fit.

    At least the input of each block is saved; reversible blocks save the last one.
    """
    itemsize = 8 if options.dtype == "float64" else 4
    n_params = sum(map(math.prod, shapes_of(model).values()))
    require_memory("parameters and gradients", 2 * n_params * itemsize)
    blocks = model.blocks
    n_saved = 1 if blocks[0].reversible else len(blocks)
    n_tokens = options.batch * options.max_len // launched()
    what = f"the activations of --batch {options.batch} texts of {options.max_len} tokens"
    require_memory(what, n_tokens * blocks[0].d_model * n_saved * itemsize)


def _words(options: TrainOptions) -> Any:
    """The vocabulary of --tokenizer; of the run if it is resumed. None: the default one."""
    if options.tokenizer is None:
        return None
    if options.resume is not None:
        try:
            return training.load_vocabulary(options.resume)
        except FileNotFoundError:  # the run stopped before the vocabulary was saved
            pass
    return training.named_vocabulary(options.tokenizer)


def _source(
    corpus: training.Corpus, i: int, options: TrainOptions, memory: int | None
) -> training.Windows | training.Streams:
    """Windows of the training part (i = 0) or the validation part (i = 1) of the corpus.

    memory: None unless the model has a segment memory, which needs streams
    """
    tokens, name = corpus[:2][i], ("training", "validation")[i]
    if not len(tokens):
        raise ValueError(
            f"the {name} part of {corpus.description} is empty: give more text; if the text was "
            "prepared, use a --validation-fraction above 0"
        )
    sha256 = None if corpus.sha256 is None else corpus.sha256[i]
    try:
        if memory is None:
            return training.Windows(tokens, options.max_len, options.batch, options.seed, sha256)
        return training.Streams(tokens, options.max_len, options.batch, sha256)
    except ValueError as error:
        n_rows, hint = (1, "") if memory is None else (options.batch, " or --batch")
        if len(tokens) > options.max_len * n_rows:
            raise
        raise ValueError(f"{error} (the {name} part; reduce --max-len{hint})") from error
