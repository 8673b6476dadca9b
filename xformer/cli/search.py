"""`xformer search`: find passages in the texts of a folder by their meaning."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from xformer.cli.errors import in_words
from xformer.cli.open_model import opened
from xformer.cli.parser import Parser
from xformer.cli.paths import nonempty
from xformer.cli.progress import progress
from xformer.cli.texts import add_options, given, shown, texts_of, watched
from xformer.sentences import (
    Hit,
    Index,
    embed,
    make_index,
    prompts,
    read_index,
    search,
    settings,
    similarity_name,
    write_index,
)
from xformer.sentences.index import require_folder
from xformer.sentences.search import prompt_names

INDEX = ".xformer-index.safetensors"
LONGEST = 1000  # characters of a line
SAVE_EVERY = 60.0  # seconds between writes of the index of the files that are finished
ABOUT = """Print the passages of the .txt and .md files in a folder that are closest
in meaning to a query. An index of the folder is stored in one file, so only
new and changed files are embedded by the next search."""


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer search`."""
    parser.description = ABOUT
    add = parser.add_argument
    add("folder", type=nonempty, help="the folder of texts; subfolders are searched too")
    add_options(parser, "query", "passage")
    add("-k", "--top", type=int, default=5, metavar="N", help="print N passages (default: 5)")
    what = f"the file of the index (default: {INDEX} in the folder)"
    add("--index", metavar="PATH", type=nonempty, help=what)
    add("--rebuild", action="store_true", help="make the index anew")
    what = "a prompt of the model before each query (default: query, if the model has it)"
    add("--query-prompt", metavar="NAME", help=what)
    what = "the same before each passage (default: document, passage or corpus)"
    add("--passage-prompt", metavar="NAME", help=what)
    add("--truncate-dim", type=int, metavar="N", help="cut vectors to N numbers")


def run(args: argparse.Namespace) -> int:
    """Bring the index up to date, and print the hits of each query; JSON: one object a hit."""
    queries = texts_of(args)
    for_query, for_passage = prompt_names(prompts(args.model))
    query = _options(args, args.query_prompt or for_query)
    passage = _options(args, args.passage_prompt or for_passage)
    path = Path(args.index or require_folder(args.folder) / INDEX)
    require_folder(path.parent)
    old = None if args.rebuild or not os.path.lexists(path) else read_index(path)
    loaded = opened(args)
    with watched("embedding", len(queries)) as options:
        options |= query | {"batch_size": args.batch}
        vectors = embed(*loaded[:3], queries, **options)  # a bad option raises here
    index = _updated(args, loaded, passage, old, path)
    if old is None or index.files != old.files or index.model != old.model:
        _store(index, path)
    how: Any = {"top": args.top, "similarity_name": similarity_name(args.model)}
    for text, hits in zip(queries, search(index, args.folder, vectors, **how), strict=True):
        if len(queries) > 1 and not args.json:
            print(shown(text))
        for hit in hits:
            _print(args, text, hit)
    return 0


def _store(index: Index, path: Path) -> None:
    """Write the index. A warning if it cannot be written: the hits need no file."""
    try:
        write_index(index, path)
    except OSError as error:
        why = f"{in_words(error)}; the next search embeds the texts again"
        print(f"xformer: warning: the index is not stored: {why}", file=sys.stderr)


def _options(args: argparse.Namespace, prompt_name: str | None) -> dict[str, Any]:
    """The options of `embed`, with a prompt."""
    options = settings(args.model, prompt_name=prompt_name)._asdict()
    return options | given(args, "max_len", "truncate_dim")


def _updated(
    args: argparse.Namespace, loaded: Any, options: Any, old: Index | None, path: Path
) -> Index:
    """The index of the folder, with a bar if that takes long.

    The index of the finished files is written to `path` once a minute, and if Ctrl-C is pressed.
    """
    model, params, tokenizer, *_ = loaded
    written, unwritten = time.monotonic(), None

    def save(part: Index) -> None:
        nonlocal written, unwritten
        unwritten = part
        if time.monotonic() - written >= SAVE_EVERY:
            written = time.monotonic()
            with suppress(OSError):  # tried again at the end, which then warns
                write_index(part, path)
                unwritten = None

    try:
        with progress("passages") as report:
            how: Any = {"model_folder": args.model, "batch_size": args.batch, "save": save}
            how["progress"] = partial(report, "embedding")
            how |= {"options": options, "old": old}
            return make_index(model, params, tokenizer, args.folder, **how)
    except KeyboardInterrupt:
        if unwritten is not None:
            _store(unwritten, path)
        raise


def _print(args: argparse.Namespace, query: str, hit: Hit) -> None:
    file = str(Path(args.folder, hit.file))
    if args.json:
        print(json.dumps({"query": query, **hit._asdict(), "file": file}))
        return
    print(f"{hit.score:.4f}  {shown(f'{file}:{hit.line}', LONGEST)}")
    for line in hit.text.splitlines():
        print(f"        {shown(line, LONGEST)}".rstrip())
