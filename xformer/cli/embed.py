"""`xformer embed`: print the similarities of texts, or their embeddings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer.cli.open_model import opened
from xformer.cli.parser import Parser
from xformer.cli.texts import add_options, given, printed, shown, texts_of, watched
from xformer.sentences import embed, settings, similarity, similarity_name
from xformer.sentences.embed import POOLINGS

MOST = 20  # texts in a table
# Options that override the model's settings.
GIVEN = ("pooling", "normalize", "max_len", "prompt", "truncate_dim")


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer embed`."""
    parser.description = "Print the similarities of texts, or their embeddings with --json."
    add_options(parser)
    add_pooling(parser.add_argument)
    add = parser.add_mutually_exclusive_group().add_argument
    what = "a prompt of the model before each text, such as query (default: the model's setting)"
    add("--prompt-name", metavar="NAME", help=what)
    add("--prompt", metavar="TEXT", help="a text before each text, such as an instruction")
    what = "cut embeddings to N numbers, before they are scaled"
    parser.add_argument("--truncate-dim", type=int, metavar="N", help=what)


def add_pooling(add: Callable[..., Any]) -> None:
    """Add --pooling and --normalize by `add`, the method of a parser or of a group."""
    what = f"{', '.join(POOLINGS)} (default: the model's setting)"
    add("--pooling", choices=POOLINGS, metavar="NAME", help=what)
    what = "scale embeddings to length 1 (default: the model's setting)"
    add("--normalize", action=argparse.BooleanOptionalAction, help=what)


def run(args: argparse.Namespace) -> int:
    """Print the table of similarities; with --json, one JSON object a text."""
    texts = texts_of(args)
    if len(texts) > MOST and not args.json:
        raise ValueError(f"a table shows at most {MOST} texts, got {len(texts)}: add --json")
    options = settings(args.model, prompt_name=args.prompt_name)._asdict() | given(args, *GIVEN)
    options["batch_size"] = args.batch
    if args.json:
        options["finished"] = printed(
            lambda i, row: json.dumps({"text": texts[i], "embedding": numbers(row)})
        )
    with watched("embedding", len(texts), prints=args.json) as progress:
        model, params, tokenizer, *_ = opened(args)
        vectors = embed(model, params, tokenizer, texts, **options, **progress)
    if not args.json:
        print(table(texts, similarity(vectors, name=similarity_name(args.model))))
    return 0


def table(texts: Sequence[str], similarities: np.ndarray) -> str:
    """The similarities as a table: a row and a column for each text, numbered from 1."""
    width = len(str(len(texts)))
    cells = [[f"{s:.4f}" for s in row] for row in similarities]
    wide = max(7, *(len(cell) for row in cells for cell in row))
    heads = [f"{i + 1:>{wide}}" for i in range(len(texts))]
    lines = [" ".join([" " * width, *heads])]
    for i, text in enumerate(texts):
        own = [f"{cell:>{wide}}" for cell in cells[i]]
        lines.append(" ".join([f"{i + 1:>{width}}", *own, f" {shown(text)}"]))
    return "\n".join(lines)


def numbers(row: np.ndarray) -> list[float]:
    """The numbers of `row` as floats, each with the fewest digits that identify it in its dtype."""
    return [float(str(x)) for x in row]
