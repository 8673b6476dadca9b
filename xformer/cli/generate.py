"""`xformer generate`: continue a prompt and stream the text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from itertools import tee
from typing import Any

from xformer import backends
from xformer.base import tree
from xformer.cli.open_model import LoadedModel, opened, start_id
from xformer.cli.output import is_lost, visible
from xformer.cli.parser import Parser
from xformer.cli.paths import add_computation, add_model
from xformer.cli.sampling import TEMPERATURE, Choice, announce, choice
from xformer.dispatch.checks import require_id, require_memory, require_sizes
from xformer.dispatch.shapes import STORED
from xformer.generation import PrefilledPrompt, beam_search, decoded, prefill, stream, until
from xformer.generation.constraints import constraints
from xformer.generation.prefix import require_writer
from xformer.generation.settings import Settings, n_tokens, settings_of
from xformer.generation.text import ends_of, hidden_ids
from xformer.models import EncoderDecoder

MAX_NEW = 300


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer generate`."""
    parser.description = (
        "The model's generation_config.json overrides the defaults below. Its values that are "
        "used are printed on stderr."
    )
    add = parser.add_argument
    add_model(add)
    add("--prompt", required=True, help="text to continue; for an encoder-decoder, the source text")
    most = f"most new tokens (default: the model's setting, or {MAX_NEW}, within its context)"
    add("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", type=float, help=f"0: greedy decoding (default: {TEMPERATURE})")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    nucleus = "sample from the most likely tokens with total probability P"
    add("--top-p", type=float, metavar="P", help=nucleus)
    least = "sample from tokens at least P times as likely as the most likely one"
    add("--min-p", type=float, metavar="P", help=least)
    add("--repetition-penalty", type=float, metavar="X", help="above 1: repeat less")
    add("--beams", type=int, metavar="N", help="beam search with N beams, without sampling")
    several = (
        "generate N texts, each by other random numbers (default: 1); with --beams, the N best"
    )
    add("--num-samples", type=int, default=1, metavar="N", help=several)
    memory = "earlier tokens that are attended to, if the model has a memory (default: as trained)"
    add("--memory", type=int, metavar="N", help=memory)
    ends = "stop before this text; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=ends)
    ends = "stop before this token, in addition to the model's stop tokens; may be repeated"
    add("--stop-id", action="append", default=[], type=int, metavar="ID", help=ends)
    add("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    flag: Any = {"action": argparse.BooleanOptionalAction}
    at_once = "print the text as it is generated, not at the end (default: --stream)"
    add("--stream", **flag, default=True, help=at_once)
    compiled = "compile the decoding step if the backend can (default: on backend numba)"
    add("--compile", **flag, help=compiled)
    add_computation(add)
    stored = "storage dtype of weights and KV cache, on backend cupy"
    add("--precision", choices=STORED, help=stored)


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuations; then, on stderr, the tokens per second."""
    choice(args, Settings())  # raises for bad options before a model is read
    if args.precision is not None:  # before the model is loaded, so that it fails early
        backends.get(args.backend, args.device).require_precision(args.precision)
        if args.dtype != "float32":
            raise ValueError(f"--precision needs --dtype float32, got {args.dtype}")
    loaded = _with_memory(opened(args), args)
    backend = backends.get(args.backend, args.device)
    loaded = loaded._replace(params=backend.cast_params(loaded.params, args.precision))
    model = loaded.model
    require_writer("generate", model)
    settings = settings_of(model)
    chosen = choice(args, settings)
    for i in args.stop_id:
        require_id("--stop-id", n_tokens(model), id=i)
    ends = ends_of(loaded.tokenizer, model).union(args.stop_id)
    prompt = loaded.prompt(args.prompt)
    is_target = isinstance(model, EncoderDecoder)
    first = start_id(loaded) if is_target else None
    start = time.perf_counter()
    slides = loaded.slides and model.context is not None
    ids_read = prompt[-model.context :] if slides else prompt
    try:
        text = prefill(model, loaded.params, [ids_read], start_id=first)
    except TypeError as error:
        if args.precision is None:
            raise
        what = f"--precision {args.precision} does not work for this model"
        raise ValueError(f"{what}: {error}") from error
    read = time.perf_counter()
    new: list[int] = []
    before, hidden = () if is_target else prompt, hidden_ids(loaded.tokenizer, ends)
    samples = _new_ids(args, loaded, text, chosen, settings, ends)
    announce(args, settings, chosen)
    for i, ids in enumerate(samples, start=1):
        if len(samples) > 1:
            print(f"--- sample {i} of {len(samples)}")
        written = decoded(loaded.tokenizer, _recorded(ids, new, ends), before, hidden=hidden)
        pieces = until(written, [*settings.stop_strings, *args.stop])
        write(pieces if args.stream else ["".join(pieces)], "" if is_target else args.prompt)
        if is_lost():
            break
    rate = len(new) / (time.perf_counter() - read)
    print(
        f"{len(prompt)} prompt tokens in {read - start:.2f} s, "
        f"{len(new)} new tokens at {rate:.1f} tokens/s",
        file=sys.stderr,
    )
    return 0


def _with_memory(loaded: LoadedModel, args: argparse.Namespace) -> LoadedModel:
    """The model with a segment memory of --memory tokens. ValueError if it has none."""
    if args.memory is None:
        return loaded
    if getattr(loaded.model, "memory_len", None) is None:
        raise ValueError("--memory: the model has no memory (xformer train --positions xl)")
    require_sizes("generate", 0, **{"--memory": args.memory})
    return loaded._replace(model=dataclasses.replace(loaded.model, memory_len=args.memory))


def write(pieces: Iterable[str], prompt: str) -> None:
    """Print `prompt`, then each piece of text as it arrives, until standard output is closed."""
    print(visible(prompt), end="", flush=True)
    for piece in pieces:
        print(visible(piece), end="", flush=True)
        if is_lost():
            break
    print()


def _new_ids(
    args: argparse.Namespace,
    loaded: LoadedModel,
    text: PrefilledPrompt,
    chosen: Choice,
    settings: Settings,
    stops: frozenset[int],
) -> list[Iterator[int]]:
    """The ids of each sample as they are generated, with the one of `stops` that ends the text."""
    model = loaded.model
    max_new_tokens = _max_new(args, loaded, text.width, settings)
    n, option = max((args.num_samples, "--num-samples"), (chosen.beams or 1, "--beams"))
    require_memory(f"the states of {option} {n}", n * tree.nbytes(text))
    ends = ends_of(loaded.tokenizer, model)
    filters = chosen.filters(constraints(settings, ends, text.width, max_new_tokens))
    if chosen.beams is None:
        options: Any = {"max_new_tokens": max_new_tokens, "stop": stops, "sampler": filters}
        options |= {"seed": args.seed, "sliding_context": loaded.slides, "compiled": args.compile}
        text = text.rows((0,) * args.num_samples) if args.num_samples > 1 else text
        steps = stream(model, loaded.params, text, **options)
        return [_column(rows, i) for i, rows in enumerate(tee(steps, args.num_samples))]
    if args.compile:
        warnings.warn("--compile: beam search is not compiled", RuntimeWarning, stacklevel=2)
    options = {"n_beams": chosen.beams, "max_new_tokens": max_new_tokens, "stop": stops}
    options |= {"filters": filters, **chosen.search}
    (beams,) = beam_search(model, loaded.params, text, **options)
    return [iter(beam.ids) for beam in beams[: args.num_samples]]


def _column(steps: Iterable[list[int | None]], i: int) -> Iterator[int]:
    """The ids of text `i`, up to its end."""
    for step in steps:
        if (new := step[i]) is None:
            return
        yield new


def _max_new(args: argparse.Namespace, loaded: LoadedModel, width: int, settings: Settings) -> int:
    """The most tokens to generate after `width` tokens. ValueError if they are `max_length`."""
    if args.max_new_tokens is not None:
        return int(args.max_new_tokens)
    most = MAX_NEW if settings.max_new_tokens is None else settings.max_new_tokens
    if settings.max_new_tokens is None and settings.max_length is not None:
        most = settings.max_length - width
        if most < 1:
            raise ValueError(
                f"{settings.where}: max_length is {settings.max_length}, but the prompt has "
                f"{width} tokens: give --max-new-tokens"
            )
    context = None if loaded.slides else loaded.model.context
    return most if context is None else min(most, context - width + 1)


def _recorded(ids: Iterable[int], new: list[int], ends: Collection[int]) -> Iterator[int]:
    """The ids; those that are not in `ends` are appended to `new`."""
    for i in ids:
        if i not in ends:
            new.append(i)
        yield i
