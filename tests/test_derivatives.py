"""`jvp`, `hvp`, `gauss_newton`, and gradient checks on dual numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from judges import one_of_each
from libraries import only

import xformer as xf
from xformer import GradientError, backends, gradcheck, ops, tree
from xformer.arrays.dual import Dual, _namespaces, kinks
from xformer.backends import Backend
from xformer.proofs.catalogue import Case

NUMPY = backends.get("numpy")
EPS = 2.0**-52
ZERO = 1e-13  # of sums of numbers near 1
TOKENS, TARGETS = np.random.default_rng(0).integers(0, 17, (2, 3, 8))
MODELS = {
    "GPT": xf.GPT(vocab_size=17, n_layers=2, d_model=16, n_heads=2, max_len=8),
    "Transformer": xf.Transformer(17, 17, 8, 2, 1, 1, 8, activation="gelu"),
}


def tangent(like: Any, seed: int, backend: Backend = NUMPY) -> Any:
    rng = np.random.default_rng(seed)

    def draw(a: Any) -> Any:
        dtype = str(a.dtype).rpartition(".")[2]
        return backend.asarray(rng.normal(size=tuple(a.shape)).astype(dtype))

    return tree.map(draw, like)


def dot(a: Any, b: Any, backend: Backend = NUMPY) -> float:
    pairs = zip(tree.flatten({"": a}).values(), tree.flatten({"": b}).values(), strict=True)
    return sum(float(np.sum(backend.to_numpy(x) * backend.to_numpy(y))) for x, y in pairs)


def size(a: Any, b: Any) -> float:
    """The sum of |a b|, of which rounding is a part."""
    return dot(*(tree.map(np.abs, {"": x}) for x in (a, b)))


def plain(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) and not hasattr(x, "_fields") else (x,)


# ---- Every case of the catalogue ----


@pytest.mark.parametrize("case", one_of_each())
def test_derivative_is_the_gradient_to_rounding(case: Case) -> None:
    """Along one direction in all inputs; values on dual numbers have the bits of the reference."""
    fn, args = case.build(NUMPY)
    v = tangent(args, 1)
    with xf.reference_only():
        y, cache = fn(*args)
    dys = tuple(tangent(out, 2) if out is not None else None for out in plain(y))
    same, dy = xf.jvp(lambda *args: fn(*args)[0], args, v)
    for a, b in zip(tree.flatten({"": y}).values(), tree.flatten({"": same}).values(), strict=True):
        assert np.array_equal(a, b, equal_nan=True)
    grads = plain(cache.backward(*_unpacked(dys)))[: len(args)]
    by_name = tree.flatten(dict(enumerate(grads)))
    vs = {name: x for name, x in tree.flatten(dict(enumerate(v))).items() if name in by_name}
    numeric = sum(dot(d, out) for d, out in zip(plain(dy), dys, strict=True) if out is not None)
    assert abs(numeric - dot(by_name, vs)) <= 4 * EPS * size(by_name, vs)


def _unpacked(dys: tuple[Any, ...]) -> tuple[Any, ...]:
    """A NamedTuple as an output has a backward of several arguments."""
    return tuple(dys[0]) if len(dys) == 1 and isinstance(dys[0], tuple) else dys


@pytest.mark.parametrize("case", one_of_each())
def test_second_derivative_is_symmetric(case: Case) -> None:
    """w . d(backward)(v) = v . d(backward)(w): the derivative of every backward, everywhere."""
    fn, args = case.build(NUMPY)
    with xf.reference_only():
        y, _ = fn(*args)
    dys = _unpacked(tuple(tangent(o, 2) if o is not None else None for o in plain(y)))

    def gradient(*inputs: Any) -> tuple[Any, ...]:
        _, cache = fn(*inputs[: len(args)])
        return plain(cache.backward(*inputs[len(args) :]))[: len(args)]

    zeros = tree.map(lambda d: 0 * d, dys)
    v, w = tangent(args, 3), tangent(args, 4)
    hv, hw = (xf.jvp(gradient, (*args, *dys), (*x, *zeros))[1] for x in (v, w))
    names = set(tree.flatten(dict(enumerate(hv))))
    v, w = (
        {name: leaf for name, leaf in tree.flatten(dict(enumerate(x))).items() if name in names}
        for x in (v, w)
    )
    hv, hw = (tree.flatten(dict(enumerate(x))) for x in (hv, hw))
    # A token that attends only to itself has the gradient 0 but for rounding.
    slack = 4 * EPS * (size(w, hv) + size(v, hw)) + ZERO
    assert abs(dot(w, hv) - dot(v, hw)) <= slack


# ---- Models, with jax as the judge ----


def loss_of(model: Any, backend: Backend) -> Callable[[Any], tuple[Any, Any]]:
    tokens, targets = backend.asarray(TOKENS), backend.asarray(TARGETS)
    inputs = (tokens, tokens) if isinstance(model, xf.models.EncoderDecoder) else (tokens,)
    return lambda params: model.loss(params, *inputs, targets)


@pytest.mark.parametrize("name", MODELS)
def test_hvp_is_that_of_jax(name: str) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    on_jax = backends.get("jax")
    model = MODELS[name]
    params = model.init(seed=0, dtype="float64")
    v = tangent(params, 5)
    ours = xf.hvp(loss_of(model, NUMPY), params, v)
    there = loss_of(model, on_jax)
    gradient = jax.grad(lambda params: there(params)[0])
    judge = jax.jit(lambda params, v: jax.jvp(gradient, (params,), (v,))[1])
    theirs = judge(*(tree.map(on_jax.asarray, x) for x in (params, v)))
    largest = max(np.abs(x).max() for x in tree.flatten(ours).values())
    for name, x in tree.flatten(theirs).items():
        error = np.abs(on_jax.to_numpy(x) - tree.flatten(ours)[name]).max()
        assert error <= 1e-12 * largest, name


@only("numpy", "numpy-readonly", "array-api-strict", "torch")
def test_on_every_library(library: Backend) -> None:
    """Values, first, second and third derivatives agree with NumPy's."""
    model, products = MODELS["GPT"], []
    for backend in (NUMPY, library):
        params = tree.map(backend.asarray, model.init(seed=0, dtype="float64"))
        v, loss = tangent(params, 6, backend), loss_of(model, backend)

        def second(params: Any, loss: Any = loss, v: Any = v) -> Any:
            return xf.hvp(loss, params, v)

        value, first = xf.jvp(lambda params, loss=loss: loss(params)[0], (params,), (v,))
        _, third = xf.jvp(second, (params,), (v,))
        hv = second(params)
        products.append(
            (float(value), float(first), dot(v, hv, backend), dot(v, third, backend)),
        )
    assert np.allclose(*products, rtol=1e-11, atol=0)


def test_third_derivative_is_a_difference_of_second_ones() -> None:
    model = MODELS["GPT"]
    params = model.init(seed=0, dtype="float64")
    v, loss, h = tangent(params, 7), loss_of(model, NUMPY), 1e-5
    _, third = xf.jvp(lambda params: xf.hvp(loss, params, v), (params,), (v,))
    moved = [tree.map(lambda x, v, s=s: x + s * h * v, params, v) for s in (1, -1)]
    ahead, behind = (xf.hvp(loss, params, v) for params in moved)
    difference = dot(v, tree.map(lambda a, b: (a - b) / (2 * h), ahead, behind))
    assert dot(v, third) == pytest.approx(difference, rel=1e-6)


def test_float32_stays_float32() -> None:
    model = MODELS["GPT"]
    params = model.init(seed=0)
    hv = xf.hvp(loss_of(model, NUMPY), params, tangent(params, 8))
    assert {x.dtype for x in tree.flatten(hv).values()} == {np.dtype("float32")}


# ---- Gauss-Newton ----


def test_gauss_newton_is_the_hessian_of_a_linear_model() -> None:
    rng = np.random.default_rng(9)
    x, w, v = rng.normal(size=(5, 3)), rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    targets = rng.integers(0, 4, 5)

    def model(w: Any, x: Any) -> tuple[Any, Any]:
        y, cache = ops.linear(x, w)
        return y, Second(cache)

    def whole(w: Any, x: Any) -> tuple[Any, Any]:
        z, cache = model(w, x)
        loss, loss_cache = ops.cross_entropy(z, targets=targets)
        return loss, Chain(cache, loss_cache)

    product = xf.gauss_newton(model, lambda z: ops.cross_entropy(z, targets=targets), w, v, x)
    assert np.allclose(product, xf.hvp(whole, w, v, x), rtol=1e-13, atol=0)


class Second(NamedTuple):
    cache: Any

    def backward(self, dy: Any) -> Any:
        return self.cache.backward(dy)[1]


class Chain(NamedTuple):
    model: Any
    loss: Any

    def backward(self) -> Any:
        return self.model.backward(self.loss.backward())


def test_gauss_newton_of_a_model() -> None:
    """J^T H J by matrices: J from jvp along each parameter of a bias, H of the softmax."""
    model = MODELS["GPT"]
    params = model.init(seed=0, dtype="float64")
    v = tangent(params, 10)

    def loss(z: Any) -> tuple[Any, Any]:
        return ops.cross_entropy(z, targets=TARGETS)

    product = xf.gauss_newton(lambda p: model.forward(p, TOKENS), loss, params, v)
    z, dz = xf.jvp(lambda p: model.forward(p, TOKENS)[0], (params,), (v,))
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    dz, p = dz.reshape(-1, 17), p.reshape(-1, 17)
    by_hand = ((dz**2 * p).sum(-1) - (dz * p).sum(-1) ** 2).mean()  # v^T G v, which is not negative
    assert dot(v, product) == pytest.approx(by_hand, rel=1e-12)


# ---- Rules ----


def test_derivatives_of_derivatives_do_not_mix() -> None:
    """d/dx (x d/dy (x + y)) = 1 at any x, y, and d/dx (x d/dy (x y)) = 2 x."""
    one, x, y = np.ones(()), np.asarray(3.0), np.asarray(5.0)

    def inner(f: Any, x: Any) -> Any:
        return x * xf.jvp(lambda y: f(x, y), (y,), (one,))[1]

    for f, wanted in ((lambda x, y: x + y, 1), (lambda x, y: x * y, 6)):
        assert xf.jvp(lambda x, f=f: inner(f, x), (x,), (one,))[1] == wanted


ELEMENTWISE: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "exp": (lambda xp, x: xp.exp(x), np.exp),
    "log": (lambda xp, x: xp.log(x), lambda x: 1 / x),
    "sqrt": (lambda xp, x: xp.sqrt(x), lambda x: 0.5 / np.sqrt(x)),
    "log1p": (lambda xp, x: xp.log1p(x), lambda x: 1 / (1 + x)),
    "tanh": (lambda xp, x: xp.tanh(x), lambda x: 1 - np.tanh(x) ** 2),
    "sin": (lambda xp, x: xp.sin(x), np.cos),
    "cos": (lambda xp, x: xp.cos(x), lambda x: -np.sin(x)),
    "power": (lambda xp, x: x**3 + x**0 + x**-2, lambda x: 3 * x**2 - 2 * x**-3),
    "quotient": (lambda xp, x: (1 + x) / (2 - x), lambda x: 3 / (2 - x) ** 2),
    "reversed": (lambda xp, x: 1 / x - (1 - x) * 3, lambda x: 3 - 1 / x**2),
    "abs": (lambda xp, x: xp.abs(-x), lambda x: np.ones_like(x)),
    "sort": (lambda xp, x: xp.sort(x**2), lambda x: (2 * x)[np.argsort(x**2)]),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_rules(name: str) -> None:
    f, df = ELEMENTWISE[name]
    x = np.asarray([0.3, 1.7, 0.9])
    _, dy = xf.jvp(lambda x: f(x.__array_namespace__(), x), (x,), (np.ones(3),))
    assert np.allclose(dy, df(x), rtol=4 * EPS, atol=0)


def test_ties() -> None:
    """Of equal numbers max takes the first, maximum the second; abs'(0) = 0. They are recorded."""
    x, v = np.asarray([2.0, 2.0, 0.0]), np.asarray([1.0, 10.0, 100.0])

    def along(f: Callable[[Any, Any], Any]) -> tuple[Any, list[str]]:
        with kinks() as met:
            return xf.jvp(lambda x: f(x.__array_namespace__(), x), (x,), (v,))[1], met

    assert along(lambda xp, x: xp.max(x)) == (1.0, ["max"])
    assert along(lambda xp, x: xp.min(x)) == (100.0, [])
    dy, met = along(lambda xp, x: xp.maximum(x, 0.0))
    assert (dy.tolist(), met) == ([1.0, 10.0, 0.0], ["maximum"])
    dy, met = along(lambda xp, x: xp.abs(x))
    assert (dy.tolist(), met) == ([1.0, 10.0, 0.0], ["abs"])
    assert along(lambda xp, x: xp.max(x * x + xp.asarray([0.0, 1.0, 0.0])))[1] == []


def test_constants_are_arguments() -> None:
    rng = np.random.default_rng(11)
    x, dy = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))

    def backward(x: Any, dy: Any) -> Any:
        return ops.softmax(x)[1].backward(dy)

    dx, _ = xf.jvp(backward, (x, dy), (x, None))
    assert np.array_equal(dx, backward(x, dy))
    with pytest.raises(TypeError, match="must be an argument of jvp, with the tangent None"):
        xf.jvp(lambda x: backward(x, dy), (x,), (x,))
    with pytest.raises(TypeError, match=r"must call functions of `array_namespace\(x\)`"):
        xf.jvp(np.sin, (x,), (x,))
    with pytest.raises(ValueError, match="must return the gradient of params alone, got a tuple"):
        xf.hvp(lambda p: ops.mse(p, dy), x, x)


# ---- Gradient checks on dual numbers ----


class Wrong(NamedTuple):
    cache: Any
    factor: float

    def backward(self, dy: Any) -> Any:
        dx, dw, db = self.cache.backward(dy)
        return dx, dw * self.factor, db


@pytest.mark.parametrize("factor", [1 + 1e-9, 1.0])
def test_exact_gradcheck(factor: float) -> None:
    """An error of 1e-9, which differences do not see."""
    rng = np.random.default_rng(12)
    args = (rng.normal(size=(5, 3)), rng.normal(size=(3, 4)), rng.normal(size=4))

    def linear(x: Any, w: Any, b: Any) -> tuple[Any, Wrong]:
        y, cache = ops.linear(x, w, b)
        return y, Wrong(cache, factor)

    assert gradcheck(linear, *args).ok
    report = gradcheck(linear, *args, exact=True)
    wrong = {row.name for row in report.failures}
    assert wrong == (set() if factor == 1 else {"all inputs together", "w", "w, each element"})
    if wrong:
        with pytest.raises(GradientError, match="at most 1e-12"):
            report.require()


def test_exact_gradcheck_names_what_is_not_smooth() -> None:
    def relu_from_below(x: Any) -> tuple[Any, Any]:
        y, _ = ops.relu(x)
        return y, Slope(x)

    report = gradcheck(relu_from_below, np.asarray([1.0, 0.0, -1.0]), exact=True)
    assert any("not smooth: maximum" in row.remark for row in report.failures)
    assert gradcheck(ops.relu, np.asarray([1.0, 0.0, -1.0]), exact=True).ok


class Slope(NamedTuple):
    x: Any

    def backward(self, dy: Any) -> Any:
        return dy * (self.x >= 0)  # 1 at 0, where relu has 0


# ---- Wrong input ----


def test_wrong_input() -> None:
    x = np.ones(3)

    def double(x: Any) -> Any:
        return x + x

    with pytest.raises(ValueError, match="jvp: 2 arguments need as many tangents, got 1"):
        xf.jvp(double, (x, x), (x,))
    with pytest.raises(ValueError, match=r"jvp: tangents.0. must have shape \(3,\), got \(2,\)"):
        xf.jvp(double, (x,), (np.ones(2),))
    with pytest.raises(TypeError, match=r"jvp: tangents\[0\] must be float64, got float32"):
        xf.jvp(double, (x,), (np.ones(3, np.float32),))
    with pytest.raises(TypeError, match="an argument of dtype int64 is constant"):
        xf.jvp(double, (np.arange(3),), (np.arange(3),))
    with pytest.raises(TypeError, match="must return arrays, got str"):
        xf.jvp(lambda x: "no", (x,), (x,))
    with pytest.raises(ValueError, match=r"tree\.map"):
        xf.jvp(lambda p: p["a"], ({"a": x},), ({"b": x},))
    with pytest.raises(TypeError, match="an exponent must be a number, got Dual"):
        xf.jvp(lambda x: x**x, (x,), (x,))
    with pytest.raises(TypeError, match=r"^unsupported operand"):
        xf.jvp(lambda x: 2.0**x, (x,), (x,))
    with pytest.raises(NotImplementedError, match="dual: max of several axes has no rule"):
        xf.jvp(lambda x: x.__array_namespace__().max(x, axis=(0,)), (x,), (x,))
    with pytest.raises(NotImplementedError, match="dual: linspace has no rule"):
        xf.jvp(lambda x: x.__array_namespace__().linspace(x, 1.0, 3), (x,), (x,))


def test_the_arrays_are_told_apart() -> None:
    kinds: list[Any] = []
    xf.jvp(lambda x: kinds.append(x) or x, (np.ones(3),), (np.ones(3),))  # type: ignore[func-returns-value]
    (x,) = kinds
    assert isinstance(x, Dual)
    assert repr(x).startswith("Dual(array([1., 1., 1.])")
    with pytest.raises(TypeError, match="__array_ufunc__"):
        np.exp(x)


def test_nothing_is_kept_of_a_call() -> None:
    x = np.ones(3)
    before = len(_namespaces)
    for _ in range(3):
        xf.jvp(lambda x: ops.softmax(x)[0], (x,), (x,))
    assert len(_namespaces) == before


def squared(w: Any, x: Any) -> Any:
    """The loss (x w)^2 / n, and its cache."""
    y, linear = ops.linear(x, w, None)
    loss, mse = ops.mse(y, 0 * y)
    return loss, SimpleNamespace(backward=lambda: linear.backward(mse.backward()[0])[1])


def test_a_constant_of_another_library_is_named() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, w = np.random.default_rng(0).normal(size=(2, 4, 4))
    there = torch.asarray(w)
    with pytest.raises(TypeError, match=r"hvp: args\[0\] must be of torch, as params, got arrays"):
        xf.hvp(squared, there, there, x)
    with pytest.raises(TypeError, match=r"gauss_newton: args\[0\] must be of torch, as params"):
        xf.gauss_newton(lambda w, x: ops.linear(x, w, None), None, there, there, x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"jvp: args\[1\] must be of torch, as args\[0\], got ar"):
        xf.jvp(lambda w, x: squared(w, x)[0], (there, x), (there, None))
    with pytest.raises(TypeError, match="hvp: v must be an array of torch, got one of numpy"):
        xf.hvp(squared, there, w, torch.asarray(x))
    with pytest.raises(ValueError, match=r"hvp: v must have shape \(4, 4\), got \(2, 4\)"):
        xf.hvp(squared, w, w[:2], x)


def test_a_constant_of_a_closure_is_named() -> None:
    """It cannot be followed where a function of NumPy meets it."""
    xs, w = np.random.default_rng(0).normal(size=(2, 4, 4))
    with pytest.raises(TypeError, match=r"hvp: .* \(it uses xs\) must be an argument of hvp"):
        xf.hvp(lambda w: squared(w, xs), w, w)
    assert np.all(np.isfinite(xf.hvp(squared, w, w, xs)))
    with pytest.raises(TypeError, match=r"jvp: .* \(it uses xs\) must be an argument of jvp, with"):
        xf.jvp(lambda w: np.concatenate([w, xs]), (w,), (w,))
    with pytest.raises(TypeError, match=r"jvp: the function must call functions of .*'sum'"):
        xf.jvp(lambda w: (w * w).sum(), (w,), (w,))
