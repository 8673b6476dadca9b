"""Packages that import their names when they are asked for."""

from __future__ import annotations

import ast
import importlib
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
from test_dispatch import python

import xformer
from xformer import layers, models, ops

PACKAGES = (xformer, layers, models, ops)


def _promised(package: ModuleType) -> dict[str, str]:
    """What a type checker is told of each name: the module that it comes from, or that it is."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != "xformer.later":
            found |= {alias.name: str(node.module) for alias in node.names}
    found.pop("TYPE_CHECKING")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_names_are_those_that_type_checkers_are_told_of(package: ModuleType) -> None:
    promised = _promised(package)
    assert sorted(promised) == sorted(set(package.__all__) - {"__version__"})
    for name, place in promised.items():
        if place == package.__name__:  # a module of the package
            assert getattr(package, name) is importlib.import_module(f"{place}.{name}")
        else:
            assert getattr(package, name) is getattr(importlib.import_module(place), name)
    assert dir(package) == sorted(package.__all__)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_another_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'no'"):
        package.no  # noqa: B018
    assert not hasattr(package, "_no")


def test_a_file_may_be_imported_before_what_has_its_name(tmp_path: Path) -> None:
    code = """
import json, xformer.ops.gelu, xformer.layers.norm
from xformer.layers import rotary
from xformer.models import heads
import xformer as xf
names = xf.ops.gelu, xf.layers.norm, rotary, xf.gradcheck, xf.tree, heads, xf.models.Pooler
print(json.dumps([type(name).__name__ for name in names]))
"""
    kinds = ["Overridable", "function", "function", "function", "module", "module", "type"]
    assert python(code, tmp_path) == kinds


def test_a_model_is_loaded_without_what_it_does_not_use(tmp_path: Path) -> None:
    code = """
import json, sys, xformer
alone = sorted(name for name in sys.modules if name.startswith(("xformer", "numpy")))
from xformer import pretrained
sizes = {"vocab_size": 11, "n_embd": 4, "n_head": 2, "n_layer": 1, "n_positions": 8}
model = pretrained.model({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
model.extend(model.init(0), xformer.backends.get("numpy").asarray([[1, 2]]), model.start())
unused = "layers.rotary", "layers.experts", "models.heads", "ops.cross_entropy", "optim"
print(json.dumps([alone, [name for name in unused if f"xformer.{name}" in sys.modules]]))
"""
    assert python(code, tmp_path) == [["xformer", "xformer.later"], []]


@pytest.mark.parametrize("kind", [layers.BlockConfig, models.LanguageModel, models.GPT])
def test_types_of_fields_can_be_asked_for(kind: type) -> None:
    hints = get_type_hints(kind)
    assert all(field.name in hints for field in fields(kind))
    if kind is models.LanguageModel:
        assert hints["rotary"] == layers.RopeConfig | None
        assert hints["head"] == models.Head | None
