"""Search in the texts of a folder by the vectors of their passages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.dispatch.checks import require_sizes
from xformer.sentences.batches import longest, require_language_model
from xformer.sentences.embed import embed, similarity
from xformer.sentences.index import (
    Index,
    Stamp,
    digests,
    model_files,
    stamps,
    texts_in,
    tokenizer_files,
)
from xformer.sentences.passages import Passage, passages

PART = 1024  # least passages of a part, if there are more
DOCUMENT = ("document", "passage", "corpus")  # names of a prompt before passages


class Hit(NamedTuple):
    """A passage that was found."""

    score: float  # the similarity to the query
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
    save: Callable[[Index], Any] | None = None,
) -> Index:
    """The index of the texts in a folder (`texts_in`), in passages (`passages`).

    model, params, tokenizer: of `embed`
    model_folder: the model's files, by whose digests the index knows the model again
    options: of `embed`, for passages: `settings(model_folder)._asdict()`
    old: an index of the folder: a file that has not changed since is not embedded again
    progress: called with the number of embedded passages, and of all to embed, after each batch
    save: called with the index of the files that are embedded so far, after each part of about
        `PART` passages, so that interrupted work can be resumed from it as `old`

    A file that is not UTF-8 is left out, with a warning. ValueError if there is no text, and if
    `old` is of another model or has other options. Other errors: see `embed`.
    """
    require_language_model("embed", model)
    of_model = _model_stamps(model_folder, tokenizer, {} if old is None else old.model)
    described = describe(options)
    if old is not None:
        require_same(old, of_model, described)
    files = stamps(folder, texts_in(folder), {} if old is None else old.files)
    done = {} if old is None else _kept(old, files)
    # Raises for bad options, before texts are cut.
    embed(model, params, tokenizer, [], **options, batch_size=batch_size)
    limit, prompt = longest("embed", model, options.get("max_len")), options.get("prompt", "")

    def fits(text: str) -> bool:
        return len(tokenizer.encode(prompt + text)) <= limit

    new = _cut(folder, [name for name in files if name not in done], fits)
    texts = {name: [text for _, text in parts] for name, parts in new.items()}
    n_done, n_texts = 0, sum(map(len, texts.values()))

    def report(n: int) -> None:
        nonlocal n_done
        n_done += n
        if progress is not None:
            progress(n_done, n_texts)

    how = {**options, "batch_size": batch_size, "progress": report}
    for names in _groups(texts):
        rows = embed(model, params, tokenizer, [t for name in names for t in texts[name]], **how)
        ends = np.cumsum([len(texts[name]) for name in names])
        for name, own in zip(names, np.split(rows.astype(np.float32), ends[:-1]), strict=True):
            spans = [(0, *span) for span, _ in new[name]]
            done[name] = np.asarray(spans, np.int64).reshape(-1, 4), own
        if save is not None:
            save(_index(files, done, of_model, described))
    if not any(len(own) for _, own in done.values()):
        raise ValueError(f"search: {folder} has no text in files named *.txt or *.md")
    return _index(files, done, of_model, described)


def search(
    index: Index,
    folder: str | os.PathLike[str],
    vectors: np.ndarray,
    *,
    top: int = 5,
    similarity_name: str = "cosine",
) -> list[list[Hit]]:
    """The passages that are most similar to each vector (Q, D), the most similar first.

    folder: of the index, whose texts have not changed since it was made
    top: the most hits of a query
    similarity_name: of `similarity`; `similarity_name(model_folder)` has the model's
    """
    (top,) = require_sizes("search", 1, top=top)
    names, texts = list(index.files), dict[int, str]()
    hits: list[list[Hit]] = []
    for row in similarity(vectors.astype(np.float32), index.vectors, name=similarity_name):
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
    folder: str | os.PathLike[str], names: Sequence[str], fits: Callable[[str], bool]
) -> dict[str, list[tuple[Passage, str]]]:
    """The passages of each file, and their texts; none, with a warning, if it is not UTF-8."""
    found: dict[str, list[tuple[Passage, str]]] = {}
    unread = []
    for name in names:
        try:
            text = decoded(folder, name)
        except UnicodeDecodeError:
            unread.append(name)
            text = ""
        found[name] = [(span, text[span.start : span.end]) for span in passages(text, fits)]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        warnings.warn(f"search: not UTF-8, left out: {unread[0]}{more}", stacklevel=3)
    return found


def _model_stamps(
    folder: str | os.PathLike[str], tokenizer: Any, old: Mapping[str, Stamp]
) -> dict[str, Stamp]:
    """The states of a model's files, and of a tokenizer's if it is elsewhere."""
    states = stamps(folder, model_files(folder), old)
    where = Path(tokenizer.where)
    if not os.path.samefile(where, folder):
        beside = stamps(where if where.is_dir() else where.parent, tokenizer_files(where), {})
        states |= {f"tokenizer/{name}": stamp for name, stamp in beside.items()}
    return states


def _groups(texts: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Yield the names of files in groups that have `PART` texts or more, except the last one."""
    names: list[str] = []
    n = 0
    for name, own in texts.items():
        names.append(name)
        n += len(own)
        if n >= PART:
            yield names
            names, n = [], 0
    if names:
        yield names


def _index(
    files: Mapping[str, Stamp],
    done: Mapping[str, tuple[np.ndarray, np.ndarray]],
    model: Mapping[str, Stamp],
    options: Mapping[str, Any],
) -> Index:
    """The index of the files in `done`, of which each has its passages and their vectors."""
    states = {name: stamp for name, stamp in files.items() if name in done}
    tables, vectors = zip(*(done[name] for name in states), strict=True)
    numbers = np.repeat(np.arange(len(states)), [len(table) for table in tables])
    passages = np.concatenate(tables)
    passages[:, 0] = numbers
    return Index(np.concatenate(vectors), passages, states, model, options)


def _kept(old: Index, files: Mapping[str, Stamp]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The passages in `old`, and their vectors, of each file that has not changed."""
    ends = np.searchsorted(old.passages[:, 0], np.arange(len(old.files) + 1))
    return {
        name: (old.passages[start:end], old.vectors[start:end])
        for (name, stamp), start, end in zip(old.files.items(), ends[:-1], ends[1:], strict=True)
        if name in files and files[name].digest == stamp.digest
    }
