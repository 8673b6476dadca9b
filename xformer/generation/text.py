"""Token ids to text as they come, up to a string that ends it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, Protocol

from xformer import renamed
from xformer.generation.constraints import constrained, constraints
from xformer.generation.generate import stream
from xformer.generation.prefix import is_iterable, network_of, stop_ids
from xformer.generation.samplers import Filter
from xformer.generation.settings import settings_of
from xformer.generation.token_ids import n_tokens, token_id, token_ids
from xformer.models import EncoderDecoder

BROKEN = (
    "\N{REPLACEMENT CHARACTER}"  # what a decoder gives for bytes that are no letter, or not yet
)
MOST_BYTES = 4  # of a letter in UTF-8
HELD = 8  # ids before others on which their text may depend


class Hidden(str):
    """The spelling of a token that is no text: stop strings may hold it, and it is not shown."""


class Codec(Protocol):
    """What is asked of a tokenizer; `pretrained.tokenizer` has such ones."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


@renamed.arguments(max_new="max_new_tokens", slide="sliding_context")
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
    """Pieces of the text that continues a prompt, or of the target of a source, as they come.

    stop: strings and ids that end the text and are no part of it. They are added to the ids of
    `ends_of` and to the stop_strings of the model's generation_config.json. A string may hold
    special tokens as the tokenizer spells them, which are not shown. No piece runs ahead into a
    stop string, however the tokens cut it. max_new_tokens, sampler, options: as in `stream`. The
    `constraints` of the model's generation_config.json come before the sampler. An empty prompt
    is the token of `prompt_ids`. ValueError where there is none, and as `stream`.
    """
    network = network_of("stream_text", model)
    if isinstance(stop, str | bytes) or not (stop is None or is_iterable(stop)):
        raise TypeError(f"stream_text: stop must be a list of strings and ids, got {stop!r:.60}")
    stop = [] if stop is None else list(stop)
    ids = prompt_ids(tokenizer, network, prompt)
    settings, ends = settings_of(network), ends_of(tokenizer, network)
    before = () if isinstance(network, EncoderDecoder) else ids
    own = constraints(settings, ends, len(before) or 1, max_new_tokens)
    ends |= stop_ids("stream_text", [i for i in stop if not isinstance(i, str)])
    options |= {"sampler": constrained(own, sampler), "stop": ends}
    steps = stream(model, params, [ids], max_new_tokens=max_new_tokens, **options)
    new = (i for (i,) in steps if i is not None)
    strings = [*settings.stop_strings, *(s for s in stop if isinstance(s, str))]
    return until(decoded(tokenizer, new, before, hidden=hidden_ids(tokenizer, ends)), strings)


def ends_of(tokenizer: Codec, model: Any) -> frozenset[int]:
    """The ids after which a text is over: the model's eos_token_id, or else the tokenizer's eos_id.

    An eos_id that the tokenizer only guesses (`Tokenizer.guessed`) ends no text, nor does an id
    outside the model's vocabulary. PretrainedError as `token_ids`.
    """
    return frozenset(_ends(tokenizer, model))


def end_of(tokenizer: Codec, model: Any) -> int | None:
    """The id that a text to learn from ends with, so that generated texts end: one of `ends_of`.

    The tokenizer's eos_id where it is one of them, or else the model's first. None without any.
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
    """The ids of a prompt, at least one: an empty prompt is the token that begins texts.

    That is the model's bos_token_id, or else the tokenizer's bos_id. what: the prompt's name in
    the ValueError that is raised where there is neither.
    """
    if not isinstance(prompt, str):
        raise TypeError(f"the {what} must be a string, got {type(prompt).__name__}")
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    bos = token_id(model, "bos_token_id")
    bos = tokenizer.bos_id if bos is None else bos
    if bos is None:
        raise ValueError(
            f"the {what} must hold at least one token: the tokenizer has none that begins a text"
        )
    return [bos]


def hidden_ids(tokenizer: Codec, ends: Collection[int]) -> frozenset[int]:
    """The ids that are not shown: of the tokenizer's special tokens, and those that end a text."""
    special: frozenset[int] = getattr(tokenizer, "special_ids", frozenset())
    return special.union(ends)


def decoded(
    tokenizer: Codec,
    ids: Iterable[int],
    before: Sequence[int] = (),
    *,
    hidden: Collection[int] = (),
) -> Iterator[str]:
    """The text of ids that come after `before`, in pieces of whole letters.

    hidden: ids such as `hidden_ids`. The spelling of each comes as a piece, `Hidden`, for `until`.

    The text of a token depends on those around it: a letter may take several, and some decoders
    drop a space at the beginning. Decoded are therefore the last piece's ids and those after them,
    and what that adds to the text of the last piece is the next. Tokens without text, and bytes
    that are no letter, do not make that longer: time is linear in the ids.
    """
    silent = getattr(tokenizer, "special_ids", frozenset[int]())
    window = _context(tokenizer, [i for i in before if i not in silent])
    text = tokenizer.decode(window)
    given, n_new = len(text), 0  # letters of the window's text, ids since a piece was complete
    for i in ids:
        if i in hidden:
            if len(text) > given:  # bytes that this token keeps from becoming a letter
                yield text[given:]
                window, text, given, n_new = [], "", 0, 0
            yield Hidden(_spelling(tokenizer, i))
        if i in hidden or i in silent:
            continue
        known, text = text, tokenizer.decode([*window, i])
        if text == known and len(window) >= HELD and not text.endswith(BROKEN):
            continue  # an id without text
        window.append(i)
        n_new += 1
        n_open = _open(text, n_new)
        if len(text) - n_open > given:
            yield text[given : len(text) - n_open]
            given = len(text) - n_open
            if not n_open:
                window, n_new = window[-n_new:], 0
                text = tokenizer.decode(window)
                given = len(text)
        if len(window) > 3 * HELD:
            window = _context(tokenizer, window)
            text = tokenizer.decode(window)
            given = max(len(text) - n_open, 0)
    if len(text) > given:
        yield text[given:]


def _spelling(tokenizer: Codec, i: int) -> str:
    """How a token is written: its text, or the name of a special token."""
    name = getattr(tokenizer, "token", lambda _: None)(i)
    return tokenizer.decode([i]) or name or ""


def _open(text: str, n_new: int) -> int:
    """How many letters at the end of text may still become others, with the ids to come.

    A letter has at most 4 bytes, so that at most 3 wait for the last one; older ones wait in vain.
    """
    n = len(text) - len(text.rstrip(BROKEN))
    return n if n_new < MOST_BYTES else min(n, MOST_BYTES - 1)


def _context(tokenizer: Codec, ids: Sequence[int]) -> list[int]:
    """The last ids, enough of them to decode those that follow; they begin with a letter."""
    for n in range(HELD, HELD + MOST_BYTES):
        part = list(ids[-n:])
        if not tokenizer.decode(part).startswith(BROKEN):
            break
    return part


def until(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    """The text of pieces before the first stop string in it, however they cut it.

    First is the string that is complete first, or the longest if several are. What may be the
    beginning of one is held back until more is known. Stop strings are sought in pieces that are
    `Hidden` too, which are not given. ValueError for an empty stop string.
    """
    if isinstance(stop, str) or not all(isinstance(s, str) for s in stop):
        raise TypeError(f"until: stop must hold strings, got {stop!r:.60}")
    if "" in stop:
        raise ValueError("stop: a string that ends the text must not be empty")
    return _until(pieces, stop)


def _until(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    held, is_shown = "", list[bool]()  # of each letter
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
    """How many letters at the end of text begin a stop string, the most of all."""
    lengths = range(min(len(text), max(map(len, stop), default=0)), 0, -1)
    return next((n for n in lengths if any(s.startswith(text[-n:]) for s in stop)), 0)
