"""Search in the texts of a folder by the vectors of their passages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.checks import require_sizes
from xformer.sentences.batches import longest, require_language_model
from xformer.sentences.embed import embed, similarity
from xformer.sentences.index import Index, Stamp, digests, model_files, stamps, texts_in
from xformer.sentences.passages import Passage, passages

DOCUMENT = ("document", "passage", "corpus")  # names of a prompt before passages


class Hit(NamedTuple):
    """A passage that was found."""

    score: float  # cosine similarity
    file: str  # path in the folder, with "/"
    line: int  # from 1
    text: str


def prompt_names(known: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The names of the prompts before a query and before a passage, among a model's `prompts`.

    They are "query", and "document", "passage" or "corpus", as in sentence-transformers; None: the
    model's default prompt.
    """
    passage = next((name for name in DOCUMENT if name in known), None)
    return ("query" if "query" in known else None), passage


def make_index(
    model: Any,
    params: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    *,
    model_folder: str | os.PathLike[str],
    options: Mapping[str, Any],
    old: Index | None = None,
    batch_size: int = 32,
    progress: Callable[[int, int], Any] | None = None,
) -> Index:
    """The index of the texts in a folder (`texts_in`), in passages (`passages`).

    model, params, tokenizer: of `embed`
    model_folder: the model's files, by whose digests the index knows the model again
    options: of `embed`, for passages: `settings(model_folder)._asdict()`
    old: an index of the folder: a file that has not changed since is not embedded again
    progress: called with the number of embedded passages, and of all to embed, after each batch

    A file that is not UTF-8 is left out, with a warning. ValueError if there is no text, and if
    `old` is of another model or has other options. Other errors: see `embed`.
    """
    require_language_model("embed", model)
    of_model = stamps(model_folder, model_files(model_folder), {} if old is None else old.model)
    if not os.path.samefile(tokenizer.where, model_folder):
        own = Path(tokenizer.where)
        names = model_files(own) if own.is_dir() else [own.name]
        beside = stamps(own if own.is_dir() else own.parent, names, {})
        of_model |= {f"tokenizer/{name}": stamp for name, stamp in beside.items()}
    described = describe(options)
    if old is not None:
        require_same(old, of_model, described)
    files = stamps(folder, texts_in(folder), {} if old is None else old.files)
    kept = {} if old is None else _kept(old, files)
    limit, prompt = longest("embed", model, options.get("max_len")), options.get("prompt", "")

    def fits(text: str) -> bool:
        return len(tokenizer.encode(prompt + text)) <= limit

    new = {name: _cut(folder, name, fits) for name in files if name not in kept}
    if unread := [name for name, parts in new.items() if parts is None]:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        warnings.warn(f"search: not UTF-8, left out: {unread[0]}{more}", stacklevel=2)
    texts = [text for parts in new.values() for _, text in parts or ()]
    done = 0

    def report(n: int) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, len(texts))

    vectors = embed(
        model, params, tokenizer, texts, **options, batch_size=batch_size, progress=report
    ).astype(np.float32)
    rows = iter(vectors)
    tables, arrays = [np.empty((0, 4), np.int64)], [vectors[:0]]
    for number, name in enumerate(files):
        if name in kept:
            table, array = kept[name]
        else:
            spans = [span for span, _ in new[name] or ()]
            table = np.asarray([(0, *span) for span in spans], np.int64).reshape(-1, 4)
            array = np.asarray([next(rows) for _ in spans], np.float32).reshape(
                -1, vectors.shape[1]
            )
        table[:, 0] = number
        tables.append(table)
        arrays.append(array)
    index = Index(np.concatenate(arrays), np.concatenate(tables), files, of_model, described)
    if not len(index.vectors):
        raise ValueError(f"search: {folder} has no text in files named *.txt or *.md")
    return index


def search(
    index: Index, folder: str | os.PathLike[str], vectors: np.ndarray, *, top: int = 5
) -> list[list[Hit]]:
    """The passages that are most similar to each vector (Q, D), the most similar first.

    folder: of the index, whose texts have not changed since it was made
    top: the most hits of a query
    """
    (top,) = require_sizes("search", 1, top=top)
    names, texts = list(index.files), dict[int, str]()
    hits: list[list[Hit]] = []
    for row in similarity(vectors.astype(np.float32), index.vectors):
        hits.append([])
        for i in np.argsort(-row, kind="stable")[:top]:
            number, line, start, end = index.passages[i].tolist()
            if number not in texts:
                texts[number] = decoded(folder, names[number])
            hits[-1].append(Hit(float(row[i]), names[number], line, texts[number][start:end]))
    return hits


def describe(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `embed` as JSON has them. Dense modules are files of the model."""
    made = {name: value for name, value in options.items() if name != "modules"}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in made.items() if v is not None}


def require_same(old: Index, model: Mapping[str, Stamp], options: Mapping[str, Any]) -> None:
    """ValueError, which says what differs, if `old` is of another model or has other options."""
    names = sorted(
        name for name in {*old.options, *options} if old.options.get(name) != options.get(name)
    )
    what = "another model" if digests(old.model) != digests(model) else ""
    what = what or (f"another {' and '.join(names)}" if names else "")
    if what:
        raise ValueError(f"search: the index was made with {what}; to make a new index: --rebuild")


def decoded(folder: str | os.PathLike[str], name: str) -> str:
    """The text of a file, without a byte order mark. UnicodeDecodeError if it is not UTF-8."""
    return Path(folder, name).read_bytes().decode("utf-8-sig")


def _cut(
    folder: str | os.PathLike[str], name: str, fits: Callable[[str], bool]
) -> list[tuple[Passage, str]] | None:
    """The passages of a file, and their texts; None if it is not UTF-8."""
    try:
        text = decoded(folder, name)
    except UnicodeDecodeError:
        return None
    return [(span, text[span.start : span.end]) for span in passages(text, fits)]


def _kept(old: Index, files: Mapping[str, Stamp]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The passages in `old`, and their vectors, of each file that has not changed."""
    ends = np.searchsorted(old.passages[:, 0], np.arange(len(old.files) + 1))
    return {
        name: (old.passages[start:end].copy(), old.vectors[start:end])
        for (name, stamp), start, end in zip(old.files.items(), ends[:-1], ends[1:], strict=True)
        if name in files and files[name].digest == stamp.digest
    }
