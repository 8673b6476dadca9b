"""`xformer tag`: label the parts of texts with a token classifier."""

from __future__ import annotations

import argparse
import json
from typing import Any

from xformer.cli.open_model import opened
from xformer.cli.parser import Parser
from xformer.cli.texts import add_options, printed, shown, texts_of, watched
from xformer.sentences import Tag, tag
from xformer.sentences.tag import AGGREGATIONS


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer tag`."""
    parser.description = (
        "Print the labelled parts of each text, such as names of persons or places."
    )
    add_options(parser)
    what = f"how tokens become parts: {', '.join(AGGREGATIONS)} (default: simple)"
    choices: Any = {"choices": AGGREGATIONS, "metavar": "NAME"}
    parser.add_argument("--aggregation", **choices, default="simple", help=what)
    what = "read long texts in windows, each with N tokens of the one before, instead of cutting"
    parser.add_argument("--stride", type=int, metavar="N", help=what)


def run(args: argparse.Namespace) -> int:
    """Print each text and its parts; with --json, one JSON object a text."""
    texts = texts_of(args)

    def lines(i: int, tags: list[Tag]) -> str:
        if args.json:
            return json.dumps({"text": texts[i], "tags": [one._asdict() for one in tags]})
        width = max((len(shown(one.label)) for one in tags), default=0)
        rows = [f"  {shown(t.label):{width}}  {t.score:.4f}  {shown(t.text)}" for t in tags]
        return "\n".join([shown(texts[i]), *rows])

    with watched("labelling", len(texts), prints=True) as progress:
        model, params, tokenizer, *_ = opened(args)
        options: Any = {n: getattr(args, n) for n in ("aggregation", "max_len", "stride")}
        options |= {"batch_size": args.batch, "finished": printed(lines), **progress}
        tag(model, params, tokenizer, texts, **options)
    return 0
