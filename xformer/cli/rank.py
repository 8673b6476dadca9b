"""`xformer rank`: rank texts by a query with a cross-encoder."""

from __future__ import annotations

import argparse
import json
import sys

from xformer.cli.open_model import opened
from xformer.cli.parser import Parser
from xformer.cli.texts import add_options, given, shown, texts_of, watched
from xformer.sentences import Ranked, rank, rank_settings
from xformer.sentences.rank import in_order
from xformer.sentences.settings import ACTIVATIONS


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer rank`."""
    parser.description = "Print the scores of texts for a query, by a cross-encoder, best first."
    parser.add_argument("query", help="a question or other text that the texts are compared with")
    add_options(parser)
    parser.add_argument("--top", type=int, metavar="N", help="print the N best (default: all)")
    how = "of the score (default: the model's setting)"
    parser.add_argument("--activation", choices=ACTIVATIONS, help=how)


def run(args: argparse.Namespace) -> int:
    """Print score, number and text of each text; with --json, one JSON object a text."""
    texts = texts_of(args)
    options = rank_settings(args.model)._asdict() | given(args, "activation", "max_len")
    options["batch_size"] = args.batch
    done: list[Ranked] = []
    try:
        with watched("ranking", len(texts)) as progress:
            model, params, tokenizer, *_ = opened(args)
            options |= {"finished": lambda _, ranked: done.extend(ranked), **progress}
            rank(model, params, tokenizer, args.query, texts, **options)
    except KeyboardInterrupt:
        if done:
            what = f"the first {len(done):,} of {len(texts):,} texts are ranked"
            print(f"xformer: warning: {what}", file=sys.stderr)
            _show(args, done, len(texts))
        raise
    _show(args, done, len(texts))
    return 0


def _show(args: argparse.Namespace, documents: list[Ranked], n_texts: int) -> None:
    """Print the documents, the best first. n_texts: of all, also those without a score."""
    width = len(str(n_texts))
    for one in in_order(documents, args.top):
        if args.json:
            print(json.dumps(one._asdict()))
        else:
            print(f"{one.score:8.4f}  {one.index + 1:>{width}}  {shown(one.text)}")
