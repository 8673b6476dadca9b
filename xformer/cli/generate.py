"""`xformer generate`: continue a prompt, the text as it comes."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from xformer import backends
from xformer.checks import require_id
from xformer.cli.models import Found, opened, start_id
from xformer.cli.output import is_lost
from xformer.cli.paths import nonempty
from xformer.cli.sampling import TEMPERATURE, Choice, announce, choice
from xformer.generation import PrefilledPrompt, beam_search, decoded, prefill, stream, until
from xformer.generation.constraints import constraints
from xformer.generation.prefix import network_of
from xformer.generation.settings import Settings, settings_of
from xformer.generation.text import ends_of, hidden_ids
from xformer.generation.token_ids import n_tokens
from xformer.models import EncoderDecoder
from xformer.shapes import STORED

MAX_NEW = 300


def add_parser(subparsers: Any) -> None:
    """Add `xformer generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        description="Values in the model's generation_config.json come before the defaults below. "
        "Those that are used are printed on stderr.",
    )
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        type=nonempty,
        required=True,
        help="a folder of Hugging Face's format or made by xformer train, or a llama2.c .bin",
    )
    add("--tokenizer", metavar="PATH", type=nonempty, help="where it does not lie beside the model")
    add("--prompt", required=True, help="the text to continue; of an encoder-decoder the source")
    most = f"tokens to generate (default: of the model's files, or {MAX_NEW}, within its context)"
    add("--max-new-tokens", type=int, metavar="N", help=most)
    add("--temperature", type=float, help=f"0 takes the likeliest (default: {TEMPERATURE})")
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    add("--top-p", type=float, metavar="P", help="from those that together have probability P")
    add("--min-p", type=float, metavar="P", help="from those at least P times as likely as the top")
    add("--repetition-penalty", type=float, metavar="X", help="above 1: repeat less")
    add("--beams", type=int, metavar="N", help="search with N beams, draw nothing")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this; repeatable")
    add(
        "--stop-id",
        action="append",
        default=[],
        type=int,
        metavar="ID",
        help="end before this token, beside those of the model's files; repeatable",
    )
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the text as it comes, or at the end (default: as it comes)",
    )
    compiled = "a token is one call of the library where that can be (default: on backend numba)"
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help=compiled)
    add("--backend", default="numpy", choices=backends.NAMES)
    add("--device", help="of the backend: cuda, for torch")
    add("--dtype", default="float32", choices=("float32", "float64"))
    add("--precision", choices=STORED, help="of weights and keys in memory, on backend cupy")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, then on stderr the tokens per second."""
    choice(args, Settings())  # refuses bad options before a model is read
    _require_precision(args)
    found = _rounded(opened(args), args)
    network = network_of("generate", found.model)
    settings = settings_of(network)
    chosen, ends = choice(args, settings), _ends(args, found, network)
    prompt = found.prompt(args.prompt)
    is_target = isinstance(network, EncoderDecoder)
    first = start_id(found) if is_target else None
    start = time.perf_counter()
    ids_read = prompt[-network.context :] if found.slides else prompt
    try:
        text = prefill(network, found.params, [ids_read], start_id=first)
    except TypeError as error:
        if args.precision is None:
            raise
        raise ValueError(f"--precision {args.precision} is not for this model: {error}") from error
    read = time.perf_counter()
    new: list[int] = []
    ids = _new_ids(args, found, network, text, chosen, settings, ends)
    before, hidden = () if is_target else prompt, hidden_ids(found.tokenizer, ends)
    written = decoded(found.tokenizer, _recorded(ids, new, ends), before, hidden=hidden)
    pieces = until(written, [*settings.stop_strings, *args.stop])
    announce(args, settings, chosen)
    write(pieces if args.stream else ["".join(pieces)], "" if is_target else args.prompt)
    rate = len(new) / (time.perf_counter() - read)
    print(
        f"{len(prompt)} tokens read in {read - start:.2f} s, "
        f"{len(new)} written, {rate:.1f} tokens/s",
        file=sys.stderr,
    )
    return 0


def _require_precision(args: argparse.Namespace) -> None:
    """ValueError, before a model is read, for a --precision that cannot be."""
    if args.precision is not None:
        backends.get(args.backend, args.device).require_precision(args.precision)
        if args.dtype != "float32":
            raise ValueError(f"--precision goes with --dtype float32, got {args.dtype}")


def _rounded(found: Found, args: argparse.Namespace) -> Found:
    """The model with its parameters in --precision."""
    place = backends.get(args.backend, args.device)
    return found._replace(params=place.cast_params(found.params, args.precision))


def write(pieces: Iterable[str], prompt: str) -> None:
    """Print a prompt, and pieces of text behind it as they come, while somebody reads them."""
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
        if is_lost():
            break
    print()


def _ends(args: argparse.Namespace, found: Found, network: Any) -> frozenset[int]:
    """The ids that end the text: of the model's files, and of --stop-id, which are checked."""
    for i in args.stop_id:
        require_id("--stop-id", n_tokens(network), id=i)
    return ends_of(found.tokenizer, network).union(args.stop_id)


def _new_ids(
    args: argparse.Namespace,
    found: Found,
    network: Any,
    text: PrefilledPrompt,
    chosen: Choice,
    settings: Settings,
    stops: frozenset[int],
) -> Iterator[int]:
    """The ids that come, with the one of `stops` that ends the text."""
    max_new_tokens = _max_new(args, found, network, text, settings)
    ends = ends_of(found.tokenizer, network)
    filters = chosen.filters(constraints(settings, ends, text.width, max_new_tokens))
    if chosen.beams is None:
        options: Any = {"sampler": filters, "seed": args.seed, "sliding_context": found.slides}
        options["compiled"] = args.compile
        steps = stream(
            network, found.params, text, max_new_tokens=max_new_tokens, stop=stops, **options
        )
        return (i for (i,) in steps if i is not None)
    if args.compile:
        warnings.warn("--compile: a search is not compiled", RuntimeWarning, stacklevel=2)
    options = {"n_beams": chosen.beams, "max_new_tokens": max_new_tokens, "stop": stops}
    options |= {"filters": filters, **chosen.search}
    ((best, *_),) = beam_search(network, found.params, text, **options)
    return iter(best.ids)


def _max_new(
    args: argparse.Namespace, found: Found, network: Any, text: PrefilledPrompt, settings: Settings
) -> int:
    """How many tokens may come. ValueError where the prompt leaves no room for one."""
    if args.max_new_tokens is not None:
        return int(args.max_new_tokens)
    most = MAX_NEW if settings.max_new_tokens is None else settings.max_new_tokens
    if settings.max_new_tokens is None and settings.max_length is not None:
        most = settings.max_length - text.width
        if most < 1:
            raise ValueError(
                f"{settings.where}: max_length is {settings.max_length}, and the prompt has "
                f"{text.width} tokens: --max-new-tokens says how many may follow it"
            )
    fits = network.context is not None and not found.slides
    return min(most, network.context - text.width + 1) if fits else most


def _recorded(ids: Iterable[int], seen: list[int], ends: Collection[int]) -> Iterator[int]:
    for i in ids:
        if i not in ends:
            seen.append(i)
        yield i
