"""Names: an unknown one gets an error with the known names and the one that was probably meant."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import finetune, optim, pretrained
from xformer.base.choices import did_you_mean, near_path, require_one_of
from xformer.dispatch.checks import finite, require_utf8
from xformer.inspection.ledger import ledger
from xformer.training import TrainConfig, named_vocabulary

GPT = xf.GPT(11, 1, 4, 2, 8)


@pytest.mark.parametrize(
    ("value", "known", "near"),
    [
        ("adamww", ("adam", "adamw"), "adamw"),
        ("AdamW", ("adam", "adamw"), "adamw"),
        ("relu_square", ("relu", "relu_squared"), "relu_squared"),
        ("array_api_strict", ("array-api-strict",), "array-api-strict"),
        ("gpt2lmheadmodel", ("GPT2LMHeadModel",), "GPT2LMHeadModel"),
    ],
)
def test_the_nearest_name_is_named(value: str, known: tuple[str, ...], near: str) -> None:
    assert did_you_mean(value, known) == f"; did you mean {near}?"


@pytest.mark.parametrize("value", ["", "mamba", None, 3, ["adam"], "x" * 10**6])
def test_nothing_is_named_if_no_name_is_near(value: Any) -> None:
    assert did_you_mean(value, ("adam", "adamw")) == ""


@pytest.mark.parametrize("value", ["adm", None, 3, ["adam"], np.ones(2), {"adam"}])
def test_a_value_that_is_no_known_name_is_refused(value: Any) -> None:
    require_one_of("f: x", "adam", {"adam": 1})
    with pytest.raises(ValueError, match=r"^f: x must be one of adam, sgd, got ") as raised:
        require_one_of("f: x", value, ("adam", "sgd"))
    assert str(raised.value).endswith("; did you mean adam?") == isinstance(value, str)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: xf.backends.get("numby"), "numpy"),
        (lambda: xf.kernels("number").__enter__(), "numba"),
        (lambda: optim.Rule("*", "adma"), "adam"),
        (lambda: optim.schedules.wsd(1.0, 10, shape="sqrt"), "1-sqrt"),
        (lambda: TrainConfig(steps=1, optimiser="adafctor"), "adafactor"),
        (lambda: TrainConfig(steps=1, schedule="cosinus"), "cosine"),
        (lambda: TrainConfig(steps=1, precision="float61"), "float16"),
        (lambda: named_vocabulary("charcters"), "characters"),
        (lambda: named_vocabulary("byte"), "bytes"),
        (lambda: finetune.task("classfy", GPT, None), "classify"),
        (lambda: ledger(GPT, batch=1, length=2, optimiser="adamv"), "adam"),
        (lambda: pretrained.model({"model_type": "lama"}), "llama"),
        (
            lambda: pretrained.model({"model_type": "llama", "architectures": ["LlamaForCausaLM"]}),
            "LlamaForCausalLM",
        ),
        (
            lambda: xf.ops.glu(np.ones((1, 2)), np.ones((1, 2)), activation="geluu"),
            "gelu",
        ),
    ],
)
def test_errors_say_what_was_probably_meant(call: Callable[[], Any], meant: str) -> None:
    with pytest.raises(ValueError, match=f"; did you mean {meant}\\?$"):
        call()


def test_the_nearest_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it's here").touch()
    near = near_path(tmp_path / "its here")
    assert shlex.split(near.removeprefix("; did you mean ").removesuffix("?")) == [
        str(tmp_path / "it's here")
    ]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "gpt").mkdir()
    for path in ("run/gpt", "rums/gpt2", "runs/gtp"):  # any part may be wrong
        assert near_path(tmp_path / path) == f"; did you mean {tmp_path / 'runs/gpt'}?"
    # It exists; it has no folder; nothing is near.
    for path in ("it's here", "absent/it's here", "zzz", "run/absent"):
        assert near_path(tmp_path / path) == ""

    def refused(path: Any) -> Any:
        raise PermissionError(path)

    monkeypatch.setattr("os.listdir", refused)
    assert near_path(tmp_path / "its here") == ""


def test_a_text_without_utf8_is_refused() -> None:
    require_utf8("f: x", "Grüße \U0001f600")
    with pytest.raises(ValueError, match=r"^f: x must be UTF-8, got 'a\\udcff' at character 2$"):
        require_utf8("f: x", b"a\xff".decode(errors="surrogateescape"))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, np.float32("nan")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"^f: x must be finite, got -?(inf|nan)$"):
        finite("f", "x", value)
