"""`gradcheck`: passes what is right, catches what is wrong, and says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import xformer
from xformer import GradientError, gradcheck, layers, ops
from xformer.backends import Backend
from xformer.layers import LinearParams

Fn = Callable[..., tuple[Any, Any]]


class Cache(NamedTuple):
    """The backward of an op under test."""

    run: Callable[..., Any]

    def backward(self, *douts: Any) -> Any:
        return self.run(*douts)


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return rng().normal(size=shape)


def elementwise(f: Callable[[Any], Any], df: Callable[[Any], Any]) -> Fn:
    """The op y = f(x) with the derivative df, right or wrong."""

    def op(x: Any) -> tuple[Any, Cache]:
        return f(x), Cache(lambda dy: dy * df(x))

    return op


def product(x: Any, w: Any, error: Callable[..., Any] = lambda dx, dw: (dx, dw)) -> Any:
    return x @ w, Cache(lambda dy: error(dy @ w.T, x.T @ dy))


def row(report: Any, name: str) -> Any:
    return next(r for r in report.rows if r.name == name)


# ---- What is right passes ----


def test_right_op(library: Backend) -> None:
    x, w, b = (library.asarray(normal(*shape)) for shape in ((2, 5, 3), (3, 7), (7,)))
    report = gradcheck(ops.linear, x, w, b)
    assert report.ok, report
    assert report.require() is report
    assert report.function == "linear"
    assert report.worst < 1e-7
    assert [r.name for r in report.rows] == [
        "all inputs together",
        *("x", "x, each element", "w", "w, each element", "b", "b, each element"),
        "backward called twice",
        "inputs left untouched",
    ]


def test_absent_arguments_and_single_inputs() -> None:
    x, w = normal(5, 3), normal(3, 7)
    assert gradcheck(ops.linear, x, w, None).ok
    assert gradcheck(ops.linear, x, w).ok
    assert gradcheck(ops.tanh, x).ok
    assert gradcheck(ops.tanh, np.float64(0.3)).ok
    assert gradcheck(ops.tanh, np.zeros((0, 3))).ok
    assert gradcheck(ops.mse, x, x + 0.5).ok


def test_your_own_op(library: Backend) -> None:
    x = library.asarray(normal(3, 4))
    assert gradcheck(elementwise(lambda x: x * x * x, lambda x: 3 * x * x), x).ok


def test_layer_with_parameters_and_tuple_output() -> None:
    params = layers.FeedForwardParams(
        LinearParams(normal(3, 5), normal(5)), LinearParams(normal(5, 3), None)
    )
    report = gradcheck(
        lambda x, p: layers.feed_forward(x, p, activation="silu"), normal(2, 3), params
    )
    assert report.ok, report
    assert "p.up.b" in {r.name for r in report.rows}

    key_value = layers.KeyValueParams(params.up, LinearParams(normal(3, 10), normal(10)))
    two = gradcheck(lambda x, p: layers.key_value(x, p, n_kv_heads=5), normal(2, 4, 3), key_value)
    assert two.ok, two


def test_output_that_may_be_absent() -> None:
    config = layers.EmbedConfig(vocab_size=5, width=4, d_model=4, max_len=6, positions="learned")
    params = layers.EmbedParams(normal(5, 4), normal(6, 4), None)
    ids = np.array([[1, 1, 4]])
    report = gradcheck(lambda p: layers.embed(p, ids=ids, config=config), params)
    assert report.ok, report


def test_model() -> None:
    gpt = xformer.GPT(vocab_size=5, n_layers=1, d_model=4, n_heads=2, max_len=3)
    tokens = np.array([[1, 2, 0], [3, 3, 4]])
    params = gpt.init(dtype="float64")
    report = gradcheck(lambda p: gpt.loss(p, tokens, tokens), params, elementwise=8)
    assert report.ok, report
    assert "p.stack.blocks.0.attn.q.w" in {r.name for r in report.rows}


# ---- What is wrong fails, and the report says where ----


def test_wrong_gradient_of_one_input_is_named() -> None:
    fn = lambda x, w: product(x, w, lambda dx, dw: (dx, 1.001 * dw))  # noqa: E731
    report = gradcheck(fn, normal(5, 3), normal(3, 7))
    failed = [r.name for r in report.failures]
    assert failed == ["all inputs together", "w", "w, each element"]
    assert row(report, "w").error == pytest.approx(1e-3, rel=1e-2)
    assert report.worst == pytest.approx(1e-3, rel=1)
    with pytest.raises(GradientError, match=r"GRADIENTS DISAGREE") as caught:
        report.require()
    text = str(caught.value)
    assert "w, each element" in text
    assert "x, each element" not in text  # only what disagrees
    assert isinstance(caught.value, AssertionError)


def test_wrong_element_is_named() -> None:
    def spoil(dx: Any, dw: Any) -> Any:
        dx = dx.copy()
        dx[3, 1] += 0.01
        return dx, dw

    report = gradcheck(lambda x, w: product(x, w, spoil), normal(5, 3), normal(3, 7))
    elements = row(report, "x, each element")
    assert elements.remark == "disagrees at (3, 1)"
    assert elements.analytic - elements.numeric == pytest.approx(0.01, rel=1e-6)
    assert "<- disagrees at (3, 1)" in str(report)
    assert row(report, "w, each element").error < 1e-7


@pytest.mark.parametrize(
    ("name", "fn"),
    {
        "sign": elementwise(np.sin, lambda x: -np.cos(x)),
        "factor": elementwise(np.square, lambda x: x),
        "other function": elementwise(np.tanh, lambda x: 1 - np.tanh(x)),
        "zero": elementwise(np.exp, lambda x: 0 * x),
        "a little": elementwise(np.exp, lambda x: np.exp(x) * (1 + 1e-5)),
        "transposed": elementwise(np.sin, lambda x: np.cos(x).T),
    }.items(),
)
def test_wrong_gradients_are_caught(name: str, fn: Fn) -> None:
    report = gradcheck(fn, normal(5, 5))
    assert {"all inputs together", "x", "x, each element"} == {r.name for r in report.failures}
    assert all(r.remark.startswith("disagrees") for r in report.failures)


def test_gelu_forms_mixed_up_are_caught() -> None:
    """The derivative of one form with the forward of the other: 1e-3 apart."""

    def mixed(x: Any) -> Any:
        return ops.gelu(x)[0], ops.gelu(x, approximate="tanh")[1]

    assert not gradcheck(mixed, normal(4, 5)).ok


def test_nan_is_a_failure() -> None:
    report = gradcheck(elementwise(np.sin, lambda x: np.cos(x) * np.nan), normal(3))
    assert not report.ok
    assert report.worst == np.inf
    assert row(report, "x").remark == "not finite"
    assert row(report, "backward called twice").error == 0  # NaN twice is no change


def test_edge_of_the_domain() -> None:
    """Steps that leave the domain are too long; shorter ones tell."""

    def log(x: Any) -> Any:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.log(x), Cache(lambda dy: dy / x)

    x = np.array([1.0, 2.0, 1e-3])
    assert gradcheck(log, x).ok
    report = gradcheck(elementwise(lambda x: log(x)[0], lambda x: 1.01 / x), x)
    assert [r.remark[:9] for r in report.failures] == ["disagrees"] * 3
    report = gradcheck(elementwise(lambda x: x * np.nan, lambda x: x), x)
    assert row(report, "x").remark == "not finite"


# ---- Kinks ----


@pytest.mark.parametrize(
    "fn",
    [
        ops.relu,
        elementwise(np.abs, lambda x: np.where(x < 0, -1.0, 1.0)),
        elementwise(lambda x: np.maximum(x, 2 * x), lambda x: np.where(x > 0, 2.0, 1.0)),
    ],
)
def test_kink_is_called_not_smooth(fn: Fn) -> None:
    x = normal(7)
    x[2] = 0.0
    report = gradcheck(fn, x)
    assert row(report, "x, each element").remark == "not smooth at (2,)"
    assert not report.ok


def test_kink_nearby_does_no_harm() -> None:
    for distance in (1e-2, 1e-3, 1e-4):
        x = normal(7)
        x[[2, 5]] = distance, -distance
        report = gradcheck(ops.relu, x)
        assert report.ok, report


def test_wrong_gradient_near_a_kink_is_caught() -> None:
    x = normal(7)
    x[[2, 5]] = 1e-3, -1e-3
    report = gradcheck(elementwise(lambda x: np.maximum(x, 0), lambda x: 1.01 * (x > 0)), x)
    assert "x, each element" in {r.name for r in report.failures}


def test_jump_is_called_not_smooth() -> None:
    x = np.array([0.7, 0.0, -0.3])
    report = gradcheck(elementwise(lambda x: x + (x > 0), lambda x: 1 + 0 * x), x)
    assert row(report, "x, each element").remark.startswith("not smooth")


# ---- Magnitudes ----

SCALES = {
    "small inputs": (elementwise(np.sin, np.cos), 1e-3),
    "tiny inputs": (elementwise(lambda x: np.sin(1e6 * x), lambda x: 1e6 * np.cos(1e6 * x)), 1e-6),
    "large inputs": (elementwise(np.square, lambda x: 2 * x), 1e3),
    "large inputs, fast": (elementwise(np.sin, np.cos), 1e3),
    "huge inputs": (elementwise(lambda x: np.sin(x / 1e6), lambda x: np.cos(x / 1e6) / 1e6), 1e6),
    "large outputs": (elementwise(lambda x: 1e6 * np.sin(x), lambda x: 1e6 * np.cos(x)), 1.0),
    "small outputs": (elementwise(lambda x: 1e-9 * np.sin(x), lambda x: 1e-9 * np.cos(x)), 1.0),
    "steep": (elementwise(lambda x: 1 / x, lambda x: -1 / x**2), 1.0),
    "large offset": (elementwise(lambda x: 1e6 + np.sin(x), np.cos), 1.0),
}


@pytest.mark.parametrize("case", SCALES)
def test_magnitudes(case: str) -> None:
    fn, size = SCALES[case]
    x = size * normal(5, 7)
    assert gradcheck(fn, x).ok

    def wrong(x: Any, place: Any) -> Any:
        y, cache = fn(x)
        factor = np.ones_like(x)
        factor[place] = 1.01
        return y, Cache(lambda dy: factor * cache.backward(dy))

    assert not gradcheck(lambda x: wrong(x, ...), x).ok
    y, cache = fn(x)
    steepest = np.unravel_index(np.argmax(np.abs(cache.backward(np.ones_like(y)))), x.shape)
    assert not gradcheck(lambda x: wrong(x, steepest), x).ok


def test_magnitudes_of_layer_norm() -> None:
    x, w, b = normal(5, 7), 1 + 0.1 * normal(7), normal(7)
    for shifted in (1e3 + x, 1e3 * x, 1e-3 * x):
        report = gradcheck(lambda x, w, b: ops.layer_norm(x, w, b, eps=1e-12), shifted, w, b)
        assert report.ok, report


def test_direction_without_effect() -> None:
    """Softmax ignores a shift of its input: both derivatives are rounding."""
    report = gradcheck(lambda s: _shifted_softmax(normal(5, 7), s), normal(5, 1))
    assert report.ok, report


def _shifted_softmax(x: Any, s: Any) -> Any:
    y, cache = ops.softmax(x + s)
    return y, Cache(lambda dy: cache.backward(dy).sum(axis=-1, keepdims=True))


def test_constant_function() -> None:
    assert gradcheck(elementwise(lambda x: 0 * x + 3, lambda x: 0 * x), normal(3)).ok
    assert not gradcheck(elementwise(lambda x: 0 * x + 3, lambda x: 0 * x + 1e-3), normal(3)).ok


# ---- Arguments and gradients of the wrong kind ----


def test_float32_is_refused_by_name(library: Backend) -> None:
    x, w = library.asarray(normal(5, 3)), library.asarray(normal(3, 7), "float32")
    message = r"^gradcheck of product: w must be a float64 array, got float32 of shape \(3, 7\)$"
    with pytest.raises(TypeError, match=message):
        gradcheck(product, x, w)
    params = layers.FeedForwardParams(LinearParams(x, None), LinearParams(w, None))
    with pytest.raises(TypeError, match=r": params\.down\.w must be a float64 array, got float32"):
        gradcheck(layers.feed_forward, x, params)
    with pytest.raises(TypeError, match=r"^gradcheck of tanh: x must be a float64 array, got int"):
        gradcheck(ops.tanh, library.asarray([1, 2]))
    with pytest.raises(TypeError, match=r"^gradcheck of tanh: x must be a float64 array, got flo"):
        gradcheck(ops.tanh, 1.0)


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda dx, dw: dx, r"backward must return 2 gradients, got 5"),
        (lambda dx, dw: (dx,), r"backward must return 2 gradients, got 1"),
        (lambda dx, dw: (dx, dw, dw), r"backward must return 2 gradients, got 3"),
        (lambda dx, dw: (dw, dx), r"the gradient of x must be float64 of shape \(5, 3\), got fl"),
        (lambda dx, dw: (dx, dw.T), r"the gradient of w must be .* \(3, 7\), got .* \(7, 3\)"),
        (lambda dx, dw: (dx, None), r"the gradient of w must be .* \(3, 7\), got none"),
        (lambda dx, dw: (dx, 0.0), r"the gradient of w must be .* \(3, 7\), got float"),
        (
            lambda dx, dw: (dx, dw.astype("f4")),
            r"the gradient of w must be float64 of .*, got float32 of",
        ),
        (lambda dx, dw: (dx, LinearParams(dw, dw)), r"backward returned a gradient of w\.w, whi"),
    ],
)
def test_gradients_of_wrong_structure(backward: Any, message: str) -> None:
    def fn(x: Any, w: Any) -> Any:
        return product(x, w, backward)

    with pytest.raises(ValueError, match=f"^fn: {message}"):
        gradcheck(fn, normal(5, 3), normal(3, 7))


def test_gradient_of_an_absent_parameter() -> None:
    def fn(x: Any, p: LinearParams) -> Any:
        y, cache = ops.linear(x, *p)
        return y, Cache(lambda dy: (cache.backward(dy)[0], LinearParams(x.T @ dy, dy.sum(axis=0))))

    with pytest.raises(ValueError, match=r"^fn: backward returned a gradient of p\.b, which was"):
        gradcheck(fn, normal(5, 3), LinearParams(normal(3, 7), None))


def test_function_that_does_not_follow_the_protocol() -> None:
    with pytest.raises(TypeError, match=r"^gradcheck of sin: it must return \(y, cache\), got ar"):
        gradcheck(np.sin, normal(3))
    with pytest.raises(AttributeError, match=r"backward"):
        gradcheck(lambda x: (x, None), normal(3))
    with pytest.raises(ValueError, match=r"^gradcheck: rtol must be positive, got 0$"):
        gradcheck(ops.tanh, normal(3), rtol=0)


# ---- Caches and inputs that are written to ----


def test_backward_that_changes_its_cache_is_caught() -> None:
    class Changing(NamedTuple):
        x: Any

        def backward(self, dy: Any) -> Any:
            dx = 2 * self.x * dy
            self.x[0] = 0.0
            return dx

    report = gradcheck(lambda x: (x**2, Changing(x.copy())), normal(3))
    assert [r.name for r in report.failures] == ["backward called twice"]
    assert "<- backward changed its cache: x" in str(report)


def test_op_that_writes_to_an_input_is_caught() -> None:
    def fn(x: Any, w: Any) -> Any:
        y, cache = ops.linear(x, w)
        w *= 1.0
        w[0, 0] += 1e-9
        return y, cache

    report = gradcheck(fn, normal(5, 3), normal(3, 7))
    assert row(report, "inputs left untouched").remark == "an input was written to: w"
    assert not report.ok


def test_backward_that_writes_to_an_input_is_caught() -> None:
    def fn(x: Any) -> Any:
        def backward(dy: Any) -> Any:
            dx = 2 * x * dy
            x[1] += 1e-9
            return dx

        return x**2, Cache(backward)

    report = gradcheck(fn, normal(3))
    assert "inputs left untouched" in {r.name for r in report.failures}


# ---- The report ----


def test_report_reads_well() -> None:
    text = str(gradcheck(ops.softmax, normal(2, 3))).splitlines()
    assert text[0] == "softmax: gradients agree (relative error at most 1e-07)"
    assert text[1].split() == ["what", "by", "hand", "numerical", "error"]
    assert text[2].startswith("  all inputs together")
    assert len(text) == 7
    assert len({len(line) for line in text[1:]}) == 1  # columns
    assert all("<-" not in line for line in text)


def test_numbers_of_the_report_are_derivatives() -> None:
    report = gradcheck(lambda x: (3 * x, Cache(lambda dy: 3 * dy)), 50 * np.ones(2))
    numeric = row(report, "x, each element").numeric
    assert abs(numeric) <= 3  # 3 * dy with dy in (-1, 1), whatever the unit of the steps


def test_options() -> None:
    x, w = normal(5, 3), normal(3, 7)
    names = [r.name for r in gradcheck(product, x, w, elementwise=16).rows]
    assert "x, each element" in names
    assert "w, each element" not in names
    names = [r.name for r in gradcheck(product, x, w, alone=False).rows]
    assert names == ["all inputs together", "backward called twice", "inputs left untouched"]
    wrong = elementwise(np.sin, lambda x: np.cos(x) * (1 + 1e-5))
    assert not gradcheck(wrong, x).ok
    assert gradcheck(wrong, x, rtol=1e-4).ok
    a, b, c = (row(gradcheck(ops.tanh, x, seed=s), "x").analytic for s in (1, 1, 2))
    assert a == b != c
