"""How `xformer generate` chooses tokens: by its options, the model's files, or its own default."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer.generation import samplers
from xformer.generation.constraints import no_repeat_ngram
from xformer.generation.samplers import Filter
from xformer.generation.settings import DEFAULTS, Settings

TEMPERATURE = 0.8
SHOWN = 60  # letters of a value
DRAWING = ("temperature", "top_k", "top_p", "min_p")
# In the order in which they are applied.
FILTERS = ("repetition_penalty", *DRAWING)
# Keys of a model's files that say how tokens are chosen.
CHOOSING = ("do_sample", *FILTERS, "no_repeat_ngram_size", "num_beams")
SEARCHING = ("length_penalty", "early_stopping")
# Keys that no option overrides.
KEPT = (
    *("min_new_tokens", "min_length", "stop_strings", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
)
NEUTRAL = {"repetition_penalty": 1, "top_k": 0, "top_p": 1, "min_p": 0}


class Choice(NamedTuple):
    """How tokens are chosen, and the keys of the model's files that take part."""

    values: dict[str, Any]  # of FILTERS; of DRAWING none for a search
    no_repeat_ngram_size: int
    beams: int | None
    search: dict[str, Any]  # options of `beam_search`
    keys: tuple[str, ...]

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are the likeliest, and logits stay as they are."""
        return self.values == {"temperature": 0} and not self.no_repeat_ngram_size

    def filters(self, constraints: Filter | None) -> Filter | None:
        """All that is done to logits; None where nothing is. constraints: of the model's files."""
        if self.is_greedy and constraints is None:
            return None
        made: list[Filter] = []
        if "repetition_penalty" in self.values:
            made.append(samplers.repetition_penalty(self.values["repetition_penalty"]))
        if self.no_repeat_ngram_size:
            made.append(no_repeat_ngram(self.no_repeat_ngram_size))
        if constraints is not None:
            made.append(constraints)
        made += [getattr(samplers, n)(self.values[n]) for n in DRAWING if n in self.values]
        return samplers.compose(*made) if made else None


def choice(args: argparse.Namespace, settings: Settings) -> Choice:
    """What options say comes before what the model's files say. ValueError for bad options."""
    given = _given(args)
    told = {name: v for name in CHOOSING if (v := getattr(settings, name)) is not None}
    beams, is_drawn = args.beams, bool(given.keys() & set(DRAWING))
    if beams is None and not is_drawn and told.get("num_beams", 1) > 1:
        beams = told["num_beams"]
    names: Sequence[str] = FILTERS[:1]
    usual: dict[str, Any] = {}
    if beams is None and (is_drawn or told.get("do_sample", not told)):
        names = FILTERS
        usual = _drawn_by_default(told)
    elif beams is None:
        usual = {"temperature": 0}
    theirs = {name: told[name] for name in names if name in told and name not in given}
    values = usual | {n: v for n, v in theirs.items() if v != NEUTRAL.get(n)} | given
    if values.get("temperature") == 0:  # the likeliest is left, whatever else is filtered
        values = {n: v for n, v in values.items() if n not in DRAWING[1:]}
    search = {n: v for n in SEARCHING if (v := getattr(settings, n)) is not None}
    by_file = {"do_sample": beams is None and not is_drawn, "num_beams": beams != args.beams}
    keys = [name for name, is_followed in by_file.items() if is_followed and name in told]
    keys += [*theirs, *(search if beams is not None else ())]
    ngram = told.get("no_repeat_ngram_size", 0)
    keys += ["no_repeat_ngram_size"] * bool(ngram)
    return Choice(values, ngram, beams, search, tuple(keys))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that filter. ValueError for bad ones."""
    given = {name: value for name in FILTERS if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        getattr(samplers, name)(value)
    drawing = [f"--{name.replace('_', '-')}" for name in given if name in DRAWING]
    if args.beams is not None and drawing:
        raise ValueError(f"--beams draws nothing, and goes without {', '.join(drawing)}")
    return given


def _drawn_by_default(told: dict[str, Any]) -> dict[str, Any]:
    """Where the files ask for sampling, transformers' defaults; else the command's."""
    if told.get("do_sample", False):
        return {name: DEFAULTS[name] for name in ("temperature", "top_k") if name not in told}
    return {"temperature": TEMPERATURE}


def announce(args: argparse.Namespace, settings: Settings, chosen: Choice) -> None:
    """Print what is done as the model's files say, and warn of what is not. On stderr."""
    keys = [*chosen.keys, *KEPT]
    if args.max_new_tokens is None:
        keys.append("max_length" if settings.max_new_tokens is None else "max_new_tokens")
    values = {key: v for key in keys if (v := getattr(settings, key)) not in (None, ())}
    if values:
        texts = ((key, json.dumps(value)) for key, value in values.items())
        line = ", ".join(f"{key} {t[:SHOWN]}{'...' * (len(t) > SHOWN)}" for key, t in texts)
        print(f"{settings.where}: {line}", file=sys.stderr)
    ignored = [*settings.not_followed]
    if settings.do_sample and chosen.beams is not None:
        ignored.append("do_sample")
    if ignored:
        names = ", ".join(ignored)
        warnings.warn(f"{settings.where}: not followed: {names}", UserWarning, stacklevel=2)
