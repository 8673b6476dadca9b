"""`xformer prepare`: tokenise text into a folder, to train on more than fits into memory."""

from __future__ import annotations

import argparse
import shlex

from xformer.base.printing import size
from xformer.cli.parser import Parser
from xformer.cli.paths import nonempty
from xformer.cli.progress import progress
from xformer.training import named_vocabulary, prepare


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer prepare`."""
    add = parser.add_argument
    what = "a UTF-8 file, a folder of UTF-8 files, or a .jsonl file"
    add("text", metavar="TEXT", type=nonempty, help=what)
    add("folder", metavar="FOLDER", type=nonempty, help="a new folder, for xformer train --data")
    kinds = "bytes, characters, bpe:SIZE, or a folder with a tokenizer (default: bytes)"
    add("--tokenizer", metavar="NAME", default="bytes", help=kinds)
    add("--field", default="text", help="field of the .jsonl objects to read (default: text)")
    most = "fraction of the documents, or of a single one, that is held out (default: 0.1)"
    add("--validation-fraction", type=float, default=0.1, help=most)


def run(args: argparse.Namespace) -> int:
    """Write the folder and print its contents in numbers."""
    words = named_vocabulary(args.tokenizer)
    options = {"field": args.field, "share": args.validation_fraction}
    with progress() as report:
        corpus = prepare(args.text, args.folder, words, **options, progress=report)
    sizes = f"{len(corpus.train):,} tokens to train on, {len(corpus.validation):,} to validate on"
    nbytes = size(corpus.train.nbytes + corpus.validation.nbytes)
    print(f"{corpus.description}\n{sizes}, vocabulary size {corpus.vocabulary.size:,} ({nbytes})")
    folder = shlex.quote(args.folder)
    print(f"saved to {args.folder}; to train on it: xformer train --data {folder}")
    return 0
