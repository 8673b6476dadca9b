"""The catalogue holds every op, layer and model with every option; `xformer gradcheck` runs it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from xformer import backends, layers, models, ops
from xformer.cli import gradcheck, main
from xformer.ops.layer_norm import LayerNormCache
from xformer.proofs.catalogue import Case, cases

NUMPY = backends.get("numpy")
BUILT = [(case, *case.build(NUMPY)) for case in cases()]
# Not differentiable, or without options and tested where they stand.
NO_CASE = {"Head", "RandomKey", "alibi", "random_bits", "rope_tables", "sinusoidal"}
# Of a text that grows there is no backward: tests/test_cached.py.
NO_BACKWARD = {"n_cached"}
DECODING = (layers.stack,)


def of(function: Any) -> Iterator[tuple[partial[Any], tuple[Any, ...]]]:
    """fn and args of the cases of an op or a layer."""
    return ((fn, args) for case, fn, args in BUILT if case.subject == function.__name__)


def public(room: Any) -> list[Any]:
    """The functions and models that a room exports."""
    things = [getattr(room, name) for name in room.__all__ if name not in NO_CASE]
    return [thing for thing in things if not is_data(thing)]


def is_data(thing: Any) -> bool:
    return inspect.isclass(thing) and not hasattr(thing, "init_from")


def test_names_are_unique() -> None:
    assert Counter(case.name for case in cases()).most_common(1)[0][1] == 1


@pytest.mark.parametrize("room", [ops, layers, models], ids=lambda room: room.__name__)
def test_everything_has_a_case(room: Any) -> None:
    subjects = {case.subject for case in cases() if case.group == room.__name__.split(".")[1]}
    assert subjects == {thing.__name__ for thing in public(room)}


@pytest.mark.parametrize("function", public(ops) + public(layers), ids=lambda f: f.__name__)
def test_every_option_of_a_function_is_used(function: Callable[..., Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    for i, p in enumerate(p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD):
        if p.default is None:
            given = {args[i] is not None for _, args in of(function) if i < len(args)}
            assert True in given, f"{p.name} is never given"
    for p in (p for p in parameters if p.kind is p.KEYWORD_ONLY):
        if function in DECODING and p.name in NO_BACKWARD:
            continue
        values = [fn.keywords.get(p.name, p.default) for fn, _ in of(function)]
        assert any(v is not p.default for v in values), f"{p.name} is never other than its default"


def configs(kind: type) -> list[Any]:
    """The configurations of a kind in all cases: options of a layer, or the model itself."""
    found = [
        [
            fn.keywords.get("config"),
            *fn.keywords.get("configs", ()),
            getattr(fn.func, "__self__", None),
        ]
        for _, fn, _ in BUILT
    ]
    return [config for some in found for config in some if isinstance(config, kind)]


# Fields that come from the files of pretrained models; T5 and Bart are tested with theirs.
OF_FILES = ("hf_config", "generation_config", "encoder_norm", "decoder_norm")


@pytest.mark.parametrize(
    "kind",
    [
        layers.BlockConfig,
        layers.EmbedConfig,
        layers.ExpertsConfig,
        layers.GatedDeltaNetConfig,
        layers.LatentAttentionConfig,
        layers.RelativeConfig,
        models.LanguageModel,
        models.EncoderDecoder,
    ],
    ids=lambda k: k.__name__,
)
def test_every_option_of_a_configuration_is_used(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING and field.name not in OF_FILES:
            values = {getattr(config, field.name) for config in configs(kind)}
            assert values - {field.default}, f"{field.name} is never other than its default"


def test_check_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcheck", "--backend", "numpy", "--only", "linear", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert re.match(r"\d+ checks on numpy\n", err)
    assert out.splitlines()[0].split() == ["numpy"]
    assert "linear: x (2, 5), no b" in out and "0 failed" in out


def test_check_of_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward is checked though NumPy has a kernel, and is a column by default."""
    right = LayerNormCache.backward
    twice = lambda self, dy: tuple(g if g is None else 2 * g for g in right(self, dy))  # noqa: E731
    monkeypatch.setattr(LayerNormCache, "backward", twice)
    assert main(["gradcheck", "--backend", "numpy", "--only", "layer_norm"]) == 0
    assert main(["gradcheck", "--backend", "reference", "--only", "layer_norm"]) == 1
    monkeypatch.undo()
    capsys.readouterr()
    assert main(["gradcheck", "--only", "layer_norm: eps as it is"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["reference", "numpy"]


def test_check_says_what_disagrees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cache(NamedTuple):
        x: Any

        def backward(self, dy: Any) -> Any:
            return dy * self.x  # wrong: half of it

    def square(x: Any) -> tuple[Any, Cache]:
        return x * x, Cache(x)

    def broken(x: Any) -> tuple[Any, Cache]:
        raise RuntimeError("out of order")

    def case(fn: Callable[..., Any]) -> Case:
        return Case("ops", f"{fn.__name__}: x", lambda rng, _: (partial(fn), (rng.normal((3,)),)))

    monkeypatch.setattr(gradcheck, "cases", lambda: (case(square), case(broken)))
    assert main(["gradcheck", "--backend", "numpy"]) == 1
    out, err = capsys.readouterr()
    assert "numpy: square: x: GRADIENTS DISAGREE" in out
    assert "RuntimeError: out of order" in out and "Traceback" in err
    assert "2 checks, 2 failed" in out


def test_check_of_compiled_kernels_is_in_float32(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run; and a wrong backward, or a wrong value, is a failure."""
    pytest.importorskip("numba", reason="extra numba is not installed")
    from xformer.backends.numba import single_op

    command = ["gradcheck", "--backend", "numba", "--only", "gelu: "]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "checks on numba; the first run compiles numba's kernels\n" in err
    assert "compiled kernels that ran, in float32: gelu, quick_gelu\n" in out
    forward, backward = single_op.Eager.__call__, single_op.Saved.backward

    def wrong_forward(self: Any, *args: Any, **options: Any) -> Any:
        y, cache = forward(self, *args, **options)
        return 0.9 * y, cache

    with monkeypatch.context() as patch:
        patch.setattr(single_op.Saved, "backward", lambda self, dy: 0.9 * backward(self, dy))
        assert main(command) == 1
    assert "disagrees" in capsys.readouterr().out
    monkeypatch.setattr(single_op.Eager, "__call__", wrong_forward)
    assert main(command) == 1
    assert "differ from the reference's" in capsys.readouterr().out


def test_check_wants_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcheck", "--only", "no such thing"]) == 1
    assert "no case has 'no such thing' in its name" in capsys.readouterr().err


def test_exact_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 1e-9 in a kernel is found; finite differences cannot see it."""
    assert main(["gradcheck", "--exact", "--only", "layer_norm"]) == 0
    out = capsys.readouterr().out
    assert out.split()[:2] == ["reference", "numpy"]
    errors = [float(error) for error in re.findall(r"\d\.?\d*e[-+]\d+", out)]
    assert len(errors) >= 2
    assert max(errors) < 1e-13
    assert main(["gradcheck", "--exact", "--backend", "numba", "--only", "layer_norm"]) == 1
    assert "--exact needs float64, got --backend numba" in capsys.readouterr().err
    from xformer.backends.numpy.layer_norm import NumpyLayerNormCache as cache

    right = cache.backward

    def wrong(self: Any, dy: Any) -> Any:
        dx, dw, db = right(self, dy)
        return dx, dw * (1 + 1e-9), db

    monkeypatch.setattr(cache, "backward", wrong)
    assert main(["gradcheck", "--backend", "numpy", "--only", "layer_norm: eps as"]) == 0
    assert main(["gradcheck", "--exact", "--only", "layer_norm: eps as"]) == 1
    assert "DISAGREE (relative error at most 1e-12)" in capsys.readouterr().out
