"""How `xformer generate` chooses tokens: by options, the model's files, or the defaults."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from xformer.dispatch.checks import require_sizes
from xformer.generation import samplers
from xformer.generation.constraints import no_repeat_ngram
from xformer.generation.samplers import Filter
from xformer.generation.settings import DEFAULTS, Settings

TEMPERATURE = 0.8
SHOWN = 60  # most characters of a value in `announce`
DRAWING = ("temperature", "top_k", "top_p", "min_p")
# Applied in this order.
FILTERS = ("repetition_penalty", *DRAWING)
# Keys of a model's files that say how tokens are chosen; options override them.
CHOOSING = ("do_sample", *FILTERS, "no_repeat_ngram_size", "num_beams")
SEARCHING = ("length_penalty", "early_stopping")
# Keys that no option overrides.
KEPT = (
    *("min_new_tokens", "min_length", "stop_strings", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"),
)
NEUTRAL = {"repetition_penalty": 1, "top_k": 0, "top_p": 1, "min_p": 0}


class Choice(NamedTuple):
    """How tokens are chosen: greedily, by sampling, or by beam search."""

    values: dict[str, Any]  # of the keys FILTERS; without DRAWING for a beam search
    no_repeat_ngram_size: int  # 0: not applied
    beams: int | None  # None: no beam search
    search: dict[str, Any]  # options of `beam_search`
    keys: tuple[str, ...]  # keys of the model's files that were used

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy and the logits are not changed."""
        return self.values == {"temperature": 0} and not self.no_repeat_ngram_size

    def filters(self, constraints: Filter | None) -> Filter | None:
        """All filters of the logits as one filter; None if there are none.

        constraints: the filter that the model's files ask for.
        """
        if self.is_greedy and constraints is None:
            return None
        filters: list[Filter] = []
        if "repetition_penalty" in self.values:
            filters.append(samplers.repetition_penalty(self.values["repetition_penalty"]))
        if self.no_repeat_ngram_size:
            filters.append(no_repeat_ngram(self.no_repeat_ngram_size))
        if constraints is not None:
            filters.append(constraints)
        filters += [getattr(samplers, n)(self.values[n]) for n in DRAWING if n in self.values]
        return samplers.compose(*filters) if filters else None


def choice(args: argparse.Namespace, settings: Settings) -> Choice:
    """The choice by the options, else by the model's files. ValueError for bad options."""
    options = _options(args)
    in_files = {name: v for name in CHOOSING if (v := getattr(settings, name)) is not None}
    beams, is_drawn = args.beams, bool(options.keys() & set(DRAWING))
    if beams is None and not is_drawn and in_files.get("num_beams", 1) > 1:
        beams = in_files["num_beams"]
    names: Sequence[str] = FILTERS[:1]
    defaults: dict[str, Any] = {}
    if beams is None and (is_drawn or in_files.get("do_sample", not in_files)):
        names = FILTERS
        defaults = {"temperature": TEMPERATURE}
        if in_files.get("do_sample", False):  # then the defaults of transformers
            unset = [name for name in ("temperature", "top_k") if name not in in_files]
            defaults = {name: DEFAULTS[name] for name in unset}
    elif beams is None:
        defaults = {"temperature": 0}
    used = {name: in_files[name] for name in names if name in in_files and name not in options}
    values = defaults | {n: v for n, v in used.items() if v != NEUTRAL.get(n)} | options
    if values.get("temperature") == 0:  # greedy: these filters never remove the most likely token
        values = {n: v for n, v in values.items() if n not in DRAWING[1:]}
    _require_samples(args.num_samples, beams, is_drawn=values.get("temperature") != 0)
    search = {n: v for n in SEARCHING if (v := getattr(settings, n)) is not None}
    by_file = {"do_sample": beams is None and not is_drawn, "num_beams": beams != args.beams}
    keys = [name for name, is_followed in by_file.items() if is_followed and name in in_files]
    keys += [*used, *(search if beams is not None else ())]
    ngram = in_files.get("no_repeat_ngram_size", 0)
    keys += ["no_repeat_ngram_size"] * bool(ngram)
    return Choice(values, ngram, beams, search, tuple(keys))


def _require_samples(n_samples: int, beams: int | None, *, is_drawn: bool) -> None:
    """ValueError unless so many different texts can be generated."""
    require_sizes("generate", 1, **{"--num-samples": n_samples})
    if n_samples == 1:
        return
    if beams is not None and n_samples > beams:
        raise ValueError(f"--num-samples must be at most the {beams} beams, got {n_samples}")
    if beams is None and not is_drawn:
        raise ValueError(
            f"--num-samples {n_samples} needs sampling, as greedy decoding gives one text: give a "
            f"temperature above 0, such as --temperature {TEMPERATURE}, or --beams {n_samples}"
        )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The filters that the command line names, with their values. ValueError for bad values."""
    options = {name: value for name in FILTERS if (value := getattr(args, name)) is not None}
    for name, value in options.items():
        getattr(samplers, name)(value)
    drawing = [f"--{name.replace('_', '-')}" for name in options if name in DRAWING]
    if args.beams is not None and drawing:
        raise ValueError(f"--beams does not sample: it excludes {', '.join(drawing)}")
    return options


def announce(args: argparse.Namespace, settings: Settings, chosen: Choice) -> None:
    """Print the used settings of the model's files on stderr, and warn of unused settings."""
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
