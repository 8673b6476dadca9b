"""What a REPL and a notebook print: one line, a table on request."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import xformer
from xformer import backends, tree
from xformer.base import printing
from xformer.base.printing import scaled, size
from xformer.proofs.catalogue import cases

GPT = xformer.GPT(256, 2, 64, 4, max_len=64)
PARAMS = GPT.init(0)
KINDS = "Params", "Cache", "Saved", "State"


def test_parameters_are_one_line() -> None:
    assert repr(PARAMS) == "LanguageModelParams(2 blocks, 120,576 float32, 482.3 kB)"
    assert repr(PARAMS.stack.blocks[0].ffn).startswith("FeedForwardParams(33,088 float32, ")
    pair = xformer.Transformer(11, 13, 8, 2, 1, 2, 7).init(0, dtype="float64")
    assert repr(pair).startswith("EncoderDecoderParams(1 encoder block, 2 decoder blocks, ")
    assert "float64" in repr(pair) and "float32" not in repr(pair)


def test_states_and_frozen_leaves() -> None:
    state = GPT.init_state()
    assert repr(state) == "DecodeState(no arrays)"
    frozen = tree.freeze(PARAMS, "embed.*")
    assert repr(frozen) == repr(PARAMS)
    assert repr(xformer.optim.adamw_init(PARAMS)) == "AdamState(241,152 float32, 964.6 kB)"


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.group}-{case.name}")
def test_every_cache_is_one_line(case: Any) -> None:
    fn, args = case.build(backends.get(), "float32")
    _, cache = fn(*args)
    said = repr(cache)
    assert "\n" not in said and len(said) < 120
    assert said.startswith(f"{type(cache).__name__}(")


def test_a_table_by_name() -> None:
    lines = printing.table(PARAMS).splitlines()
    assert lines[0] == repr(PARAMS) and lines[1].split() == ["name", "shape", "dtype", "size"]
    assert len(lines) == 2 + len(tree.flatten(PARAMS))
    assert lines[2].split() == ["embed.table", "256", "x", "64", "float32", "65.5", "kB"]
    said = printing.table({"a": np.ones((), np.int64), "b": "text", "c": None})
    assert [line.split() for line in said.splitlines()[2:]] == [
        ["a", "()", "int64", "8", "B"],
        ["b", "str", "'text'"],
    ]


def test_a_table_in_a_notebook() -> None:
    said = PARAMS._repr_html_()
    assert said.count("<tr>") == 1 + len(tree.flatten(PARAMS))
    assert "<td>stack.blocks.1.attn.q.w</td><td>64 x 64</td>" in said
    assert "&lt;" in type(PARAMS)._repr_html_(PARAMS._replace(head="<b>"))


def test_no_type_of_the_library_was_forgotten() -> None:
    """Parameters, caches and states are NamedTuples with this `repr`."""
    forgotten = []
    for module in pkgutil.walk_packages(xformer.__path__, "xformer."):
        if ".backends." in module.name or module.name.endswith("__main__"):
            continue
        if module.name == "xformer.distributed.world.mpi" and find_spec("mpi4py") is None:
            continue
        for name, kind in vars(import_module(module.name)).items():
            if not inspect.isclass(kind) or kind.__module__ != module.name:
                continue
            is_tree = issubclass(kind, tuple) and name.endswith(KINDS)
            if is_tree and "printing" not in kind.__repr__.__module__:
                forgotten.append(kind)
    assert not forgotten


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1049, "1.0 kB"),
        (1051, "1.1 kB"),
        (999_900, "999.9 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (1_000_000, "1.0 MB"),
        (999_949_999, "999.9 MB"),
        (999_999_999, "1.0 GB"),
        (46_702_792_704, "46.7 GB"),
        (10**12, "1.0 TB"),
        (10**19, "10,000.0 PB"),
    ],
)
def test_sizes_are_in_decimal_units(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
    assert scaled(nbytes, "FLOP") == text.replace("B", "FLOP")
