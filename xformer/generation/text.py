"""Streamed text: decode token ids piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, Protocol

from xformer.dispatch.checks import require_utf8
from xformer.generation.constraints import constrained, constraints
from xformer.generation.generate import stream
from xformer.generation.prefix import is_iterable, require_writer, stop_ids
from xformer.generation.samplers import Filter
from xformer.generation.settings import n_tokens, settings_of, token_id, token_ids
from xformer.models import EncoderDecoder

# A decoder writes this for bytes that are not a character, or not yet a whole one.
BROKEN = "\N{REPLACEMENT CHARACTER}"
MOST_BYTES = 4  # most bytes of a character in UTF-8
HELD = 8  # the text of an id may depend on this many ids before it


class Hidden(str):
    """The spelling of a token that is not shown. Stop strings may contain it."""


class Codec(Protocol):
    """The methods of a tokenizer that generation needs. `pretrained.tokenizer` returns one."""

    @property
    def bos_id(self) -> int | None:
        """The id of the token that begins a text; None if there is none."""

    @property
    def eos_id(self) -> int | None:
        """The id of the token that ends a text; None if there is none."""

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""


def stream_text(
    model: Any,
    params: Any,
    tokenizer: Codec,
    prompt: str,
    *,
    max_new_tokens: int,
    stop: Collection[str | int] | None = (),
    sampler: Filter | None = None,
    **options: Any,
) -> Iterator[str]:
    """Yield the text that continues a prompt, piece by piece as it is generated.

    prompt: the text; for an encoder-decoder the source. An empty prompt becomes the token that
        begins texts (`prompt_ids`).
    tokenizer: a `Codec`, such as `pretrained.tokenizer` returns.
    max_new_tokens: the most token ids that continue the prompt.
    stop: strings and ids that end the text and are not part of it, in addition to the ids of
        `ends_of` and the stop_strings of the model's generation_config.json. A string may contain
        special tokens as the tokenizer spells them; they are not shown. A piece never contains the
        beginning of a stop string.
    sampler: applied after the `constraints` of the model's generation_config.json; None: greedy
        decoding.
    options: of `stream`.

    ValueError if an empty prompt has no such token, and if `stream` raises it. TypeError for a bad
    stop.
    """
    require_writer("stream_text", model)
    if isinstance(stop, str | bytes) or not (stop is None or is_iterable(stop)):
        raise TypeError(f"stream_text: stop must be a list of strings and ids, got {stop!r:.60}")
    stop = [] if stop is None else list(stop)
    ids = prompt_ids(tokenizer, model, prompt)
    settings, ends = settings_of(model), ends_of(tokenizer, model)
    before = () if isinstance(model, EncoderDecoder) else ids
    constraint = constraints(settings, ends, len(before) or 1, max_new_tokens)
    ends |= stop_ids("stream_text", [i for i in stop if not isinstance(i, str)])
    options |= {"sampler": constrained(constraint, sampler), "stop": ends}
    steps = stream(model, params, [ids], max_new_tokens=max_new_tokens, **options)
    new = (i for (i,) in steps if i is not None)
    strings = [*settings.stop_strings, *(s for s in stop if isinstance(s, str))]
    return until(decoded(tokenizer, new, before, hidden=hidden_ids(tokenizer, ends)), strings)


def ends_of(tokenizer: Codec, model: Any) -> frozenset[int]:
    """The ids that end a text: the model's eos_token_id, else the tokenizer's eos_id.

    Left out are an eos_id that the tokenizer only guesses (`Tokenizer.guessed`), and ids outside
    the model's vocabulary. PretrainedError if the model's files have an invalid eos_token_id.
    """
    return frozenset(_ends(tokenizer, model))


def end_of(tokenizer: Codec, model: Any) -> int | None:
    """The id that ends a training text, so that the model learns to end texts; None if none.

    It is one of `ends_of`: the tokenizer's eos_id if that is among them, else the model's first.
    """
    ends = _ends(tokenizer, model)
    return tokenizer.eos_id if tokenizer.eos_id in ends else next(iter(ends), None)


def _ends(tokenizer: Codec, model: Any) -> tuple[int, ...]:
    size, end = n_tokens(model), tokenizer.eos_id
    ids = tuple(i for i in token_ids(model, "eos_token_id") if i < size)
    is_guess = "eos_token" in getattr(tokenizer, "guessed", ())
    if ids or is_guess or end is None or end >= size:
        return ids
    return (end,)


def prompt_ids(tokenizer: Codec, model: Any, prompt: str, what: str = "prompt") -> list[int]:
    """The token ids of a prompt, at least one.

    An empty prompt becomes the model's bos_token_id, else the tokenizer's bos_id. ValueError if
    there is neither, and if the prompt has no UTF-8; TypeError if it is not a string.

    what: the prompt's name in errors
    """
    if not isinstance(prompt, str):
        raise TypeError(f"the {what} must be a string, got {type(prompt).__name__}")
    require_utf8(f"the {what}", prompt)
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    bos = token_id(model, "bos_token_id")
    bos = tokenizer.bos_id if bos is None else bos
    if bos is None:
        raise ValueError(
            f"the {what} must hold at least one token: the tokenizer has no token to begin a text"
        )
    return [bos]


def hidden_ids(tokenizer: Codec, ends: Collection[int]) -> frozenset[int]:
    """The ids that are not shown: the tokenizer's special tokens and `ends`."""
    special: frozenset[int] = getattr(tokenizer, "special_ids", frozenset())
    return special.union(ends)


def decoded(
    tokenizer: Codec,
    ids: Iterable[int],
    before: Sequence[int] = (),
    *,
    hidden: Collection[int] = (),
) -> Iterator[str]:
    """Yield the text of `ids`, which follow `before`, in pieces of whole characters.

    hidden: ids that are not shown (`hidden_ids`). The spelling of each is yielded as a `Hidden`
    piece, which `until` needs.

    The text of a token depends on its neighbours: a character may take several tokens, and some
    decoders drop a space at the beginning. So each step decodes the ids of the last piece and all
    later ones; the text after the last piece is the next piece. Tokens without text and
    bytes that are no character do not lengthen this window, so the time is linear in the ids.
    """
    silent = getattr(tokenizer, "special_ids", frozenset[int]())
    window = _context(tokenizer, [i for i in before if i not in silent])
    text = tokenizer.decode(window)
    n_shown, n_new = len(text), 0  # characters of `text` that were yielded; ids since a whole piece
    for i in ids:
        if i in hidden:
            if len(text) > n_shown:  # bytes that cannot become a character after this token
                yield text[n_shown:]
                window, text, n_shown, n_new = [], "", 0, 0
            yield Hidden(_spelling(tokenizer, i))
        if i in hidden or i in silent:
            continue
        known, text = text, tokenizer.decode([*window, i])
        if text == known and len(window) >= HELD and not text.endswith(BROKEN):
            continue  # an id without text
        window.append(i)
        n_new += 1
        n_open = _open(text, n_new)
        if len(text) - n_open > n_shown:
            yield text[n_shown : len(text) - n_open]
            n_shown = len(text) - n_open
            if not n_open:
                window, n_new = window[-n_new:], 0
                text = tokenizer.decode(window)
                n_shown = len(text)
        if len(window) > 3 * HELD:
            window = _context(tokenizer, window)
            text = tokenizer.decode(window)
            n_shown = max(len(text) - n_open, 0)
    if len(text) > n_shown:
        yield text[n_shown:]


def _spelling(tokenizer: Codec, i: int) -> str:
    """The text of token `i`, or the name of a special token."""
    name = getattr(tokenizer, "token", lambda _: None)(i)
    return tokenizer.decode([i]) or name or ""


def _open(text: str, n_new: int) -> int:
    """The number of characters at the end of `text` that later ids may still change.

    A character has at most 4 bytes, so at most 3 bytes are incomplete; older ones stay broken.
    """
    n = len(text) - len(text.rstrip(BROKEN))
    return n if n_new < MOST_BYTES else min(n, MOST_BYTES - 1)


def _context(tokenizer: Codec, ids: Sequence[int]) -> list[int]:
    """The last ids, enough to decode the ids that follow. They begin with a whole character."""
    for n in range(HELD, HELD + MOST_BYTES):
        part = list(ids[-n:])
        if not tokenizer.decode(part).startswith(BROKEN):
            break
    return part


def until(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    """Yield the text of `pieces` up to the first stop string, which may span several pieces.

    The first stop string is the one that is complete first; of several, the longest. Text that may
    be the beginning of a stop string is held back. `Hidden` pieces are searched but not yielded.
    ValueError for an empty stop string, TypeError if stop holds something else than strings.
    """
    if isinstance(stop, str) or not all(isinstance(s, str) for s in stop):
        raise TypeError(f"until: stop must hold strings, got {stop!r:.60}")
    if "" in stop:
        raise ValueError("stop: a string that ends the text must not be empty")
    return _until(pieces, stop)


def _until(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    held, is_shown = "", list[bool]()  # the text held back, and which characters are shown
    for piece in pieces:
        held += piece
        is_shown += [not isinstance(piece, Hidden)] * len(piece)
        ends = [(held.find(s) + len(s), -len(s)) for s in stop if s in held]
        known = sum(min(ends)) if ends else len(held) - _begun(held, stop)
        if shown := "".join(compress(held[:known], is_shown)):
            yield shown
        if ends:
            return
        held, is_shown = held[known:], is_shown[known:]
    if shown := "".join(compress(held, is_shown)):
        yield shown


def _begun(text: str, stop: Collection[str]) -> int:
    """The length of the longest end of `text` with which a stop string begins."""
    lengths = range(min(len(text), max(map(len, stop), default=0)), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stop)), 0)
