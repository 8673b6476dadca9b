"""The documentation site: formulas of docstrings, and what the page Install must name."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from typing import Any

import pages
import pytest

from xformer import ops
from xformer.dispatch import Overridable

EXTENSION = pages.ROOT / "docs/extensions/formulas.py"
INSTALL = pages.text_of("docs/install.md")


def set_in_tex(text: str, known: set[str]) -> list[str]:
    """The formulas of a text."""
    if not EXTENSION.exists():
        pytest.skip("docs/extensions is not in a source distribution")
    spec: Any = importlib.util.spec_from_file_location("formulas", EXTENSION)
    formulas = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(formulas)
    pieces = list(formulas.parts(text, known))
    assert all(piece in text for is_tex, piece in pieces if not is_tex)
    return [piece for is_tex, piece in pieces if is_tex]


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("y = x w + b over the last axis.", r"y = x \, w + b"),
        ("y = 1 / (1 + exp(-x)), elementwise", r"y = \frac{1}{1 + e^{-x}}"),
        ("S_t = a_t S_{t-1} + k_t^T u_t, a", r"S_{t} = a_{t} \, S_{t-1} + k_{t}^{\top} \, u_{t}"),
        ("dx = dy * (Phi(x) + x * Phi'(x)).", r"dx = dy \cdot"),
        (
            "loss = mean over i of lse_i - logits_ii, logits",
            r"\operatorname*{mean}_{i} \left( \mathrm{lse}_{i} - \mathrm{logits}_{ii} \right)",
        ),
        ("y = exp(log_rate) x", r"y = e^{\mathrm{log\_rate}} \, x"),
        ("P(x) = (1 + t) / 2 = sigmoid(u).", r"\frac{1 + t}{2} = \mathrm{sigmoid}\left( u \right)"),
        ("y = 2 * integral of exp(-t^2) from 0 to x.", r"\int_{0}^{x} e^{-t^{2}} \, dt"),
    ],
)
def test_a_formula_is_set(text: str, tex: str) -> None:
    (found,) = set_in_tex(text, {"log_rate"})
    assert tex in found.replace(r"\mathrm{dx}", "dx").replace(r"\mathrm{dy}", "dy")


@pytest.mark.parametrize(
    "text",
    [
        "at most max_len = 64 tokens fit",
        "True = may attend.",
        "with x = a scalar of the library",
        'approximate="none", the default',
        "a == b + c if so",
        "lr = 3e-4 or --lr=1",
        "y = f(x, and so on",
    ],
)
def test_prose_is_no_formula(text: str) -> None:
    assert set_in_tex(text, set()) == []


def test_the_formula_of_every_op_is_set() -> None:
    named = {name: getattr(ops, name) for name in dir(ops)}
    texts = {
        name: " ".join(inspect.cleandoc(op.__doc__ or "").split("\n\n")[0].split("\n"))
        for name, op in named.items()
        if isinstance(op, Overridable)
    }
    begins = {name: text for name, text in texts.items() if re.match(r"\w+ = ", text)}
    assert len(begins) > 30
    bare = [name for name, text in begins.items() if not set_in_tex(text, {"alpha", "lse"})]
    assert bare == ["index_add"]  # a program of two lines


@pytest.mark.parametrize("page", ["CHANGELOG", "benchmarks/results/one/two", "docs/install"])
def test_the_search_leaves_out_changes_and_results(page: str) -> None:
    kept = ("CHILDREN", "NO_SEARCH", "complete")
    conf = ast.parse(pages.text_of("docs/conf.py"))
    conf.body = [n for n in conf.body if any(name in ast.unparse(n)[:20] for name in kept)]
    names: dict[str, Any] = {"Sphinx": object, "repository": ""}
    exec(compile(conf, "conf.py", "exec"), names)
    source = ["text"]
    names["complete"](None, page, source)
    assert ("no-search: true" in source[0]) is (page != "docs/install")


def test_install_names_every_extra() -> None:
    extras = pages.project()["optional-dependencies"]
    of_others = {name for name in extras if name.startswith("test-")} | {"dev", "truths", "test"}
    beside = {"nvmath", "cudnn", "cudnn-cu12", "nccl", "nccl-cu12"}  # docs/cuda.md has these
    assert set(extras) - of_others - beside <= set(re.findall(r"`([\w-]+)`", INSTALL))


def test_install_tells_where_models_and_data_come_from() -> None:
    """What the commands and programs of pages open and do not make."""
    table = INSTALL.partition("## Models and data")[2].partition("\n## ")[0]
    told = set(re.findall(r"`([\w./-]+)`", table))
    for name in pages.pages():
        for block in pages.blocks(name):
            used = re.findall(r"--(?:model|from|data) ([\w./-]+)", block.code)
            used += re.findall(r'(?:folder = |load\()"([\w./-]+)"', block.code)
            made = {
                "tokens",
                "base",
                "neox",
                "runs/books",
                "runs/fox",
                "tuned",
                "FOLDER",
                "/shared/books",
            }
            made |= {"pairs.csv", "reranker"}  # which the page describes
            assert set(used) - made <= told, name
