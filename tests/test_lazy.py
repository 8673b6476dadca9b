"""Packages that import their names when they are asked for."""

from __future__ import annotations

import ast
import importlib
import pickle
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
import pytest
from block_configs import block_config
from test_dispatch import python

import xformer
from xformer import finetune, generation, layers, models, ops, pretrained, sentences, training
from xformer.pretrained.family import decoder_head

PACKAGES = (xformer, layers, models, ops, generation, sentences, training, finetune)


def _promised(package: ModuleType) -> dict[str, str]:
    """What a type checker is told of each name: the module that it comes from, or that it is."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != "xformer.base.lazy":
            found |= {alias.name: str(node.module) for alias in node.names}
    found.pop("TYPE_CHECKING")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_names_are_those_that_type_checkers_are_told_of(package: ModuleType) -> None:
    promised = _promised(package)
    assert sorted(promised) == sorted(package.__all__)
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
from xformer.layers import rope_tables
from xformer.models import heads
import xformer as xf
names = xf.ops.gelu, xf.layers.norm, rope_tables, xf.gradcheck, xf.tree, heads, xf.models.Pooler
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
model.decode(model.init(0), xformer.backends.get("numpy").asarray([[1, 2]]), model.init_state())
unused = "layers.rotary", "layers.experts", "models.heads", "ops.cross_entropy", "optim"
print(json.dumps([alone, [name for name in unused if f"xformer.{name}" in sys.modules]]))
"""
    assert python(code, tmp_path) == [["xformer", "xformer.base", "xformer.base.lazy"], []]


@pytest.mark.parametrize("kind", [layers.BlockConfig, models.LanguageModel])
def test_types_of_fields_can_be_asked_for(kind: type) -> None:
    hints = get_type_hints(kind)
    assert all(field.name in hints for field in fields(kind))
    if kind is models.LanguageModel:
        one = layers.RopeConfig | None
        assert hints["rotary"] == one | tuple[one, ...]
        assert hints["head"] == models.Head | None


def test_annotations_of_functions_too() -> None:
    hints = [get_type_hints(fn) for fn in (pretrained.inspect, decoder_head, layers.attention)]
    assert hints[1]["return"] == models.LMHead | models.Classifier | None
    assert hints[2]["config"] is layers.AttentionConfig and hints[2]["context"] is layers.Context


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_a_package_is_pickled_by_its_name(package: ModuleType) -> None:
    assert pickle.loads(pickle.dumps(package)) is package


def test_what_a_user_binds_stays(tmp_path: Path) -> None:
    code = """
import json, xformer
xformer.ops.relu_squared = "mine"
import xformer.ops.relu_squared
print(json.dumps(xformer.ops.relu_squared))
"""
    assert python(code, tmp_path) == "mine"


def test_a_name_that_is_not_in_its_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_later").mkdir()
    text = """
from typing import TYPE_CHECKING
from xformer.base.lazy import later
if TYPE_CHECKING:
    from some_later.part import there as there, absent as absent
later(__name__, "whole")
"""
    (tmp_path / "some_later" / "__init__.py").write_text(text)
    (tmp_path / "some_later" / "part.py").write_text("there = 1\n")
    (tmp_path / "some_later" / "whole.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    package: Any = importlib.import_module("some_later")
    assert package.there == 1 and package.whole is importlib.import_module("some_later.whole")
    with pytest.raises(AttributeError, match="absent"):
        package.absent  # noqa: B018


def test_a_head_of_one_s_own_needs_only_what_is_called() -> None:
    class Head:
        def init(self, rng: Any, width: int, embed: Any, *, draw: Any = None) -> None:
            return None

        def forward(self, x: Any, params: Any, table: Any, **_: Any) -> tuple[Any, None]:
            return x, None

    embed = layers.EmbedConfig(vocab_size=5, width=4, d_model=4, max_len=8)
    block = block_config(d_model=4, n_heads=2, d_ff=8)
    head: Any = Head()
    model = models.LanguageModel(embed, (block,), head=head)
    tokens = np.asarray([[1, 2, 3]])
    y, _ = model.forward(model.init(0), tokens)
    assert y.shape == (1, 3, 4)
    with pytest.raises(ValueError, match="a head that gives logits, got Head"):
        model.loss(model.init(0), tokens, tokens)
