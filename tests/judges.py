"""Judges of gradients written by hand, by case: other libraries, autograd, float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from xformer import backends, tree
from xformer.backends import Backend
from xformer.proofs.catalogue import Case, cases

Values = dict[str, np.ndarray]

# How close is close enough, as a share of an array's largest element.
FLOAT64 = 1e-12  # the same sums in another order
AUTOGRAD = 1e-10  # another formula, which may cancel more than the one by hand
ROUNDINGS = 16  # in float32: sums of some hundred terms
FLOAT32 = ROUNDINGS * 2.0**-23


def by_hand(case: Case, backend: Backend, dtype: str = "float64") -> Values:
    """Outputs and gradients as `case` gives them on a backend, by name, on the host.

    Fails where an input or dy was written to: both can be made anew.
    """
    fn, args = case.build(backend, dtype)
    y, cache = fn(*args)
    dys = douts(backend, y, dtype)
    values = named(backend, y, gradients(args, cache.backward(*dys)))
    _, new_args = case.build(backend, dtype)
    new = tree.flatten((new_args, douts(backend, y, dtype)))
    for name, a in tree.flatten((args, dys)).items():
        assert np.array_equal(backend.to_numpy(a), backend.to_numpy(new[name])), f"{name} changed"
    return values


def one_of_each(*groups: str) -> list[Any]:
    """The cases of `groups`, or all. Those of layers and models are slow, but for one of each."""
    found, seen = [], set()
    for case in (case for case in cases() if not groups or case.group in groups):
        marks = [pytest.mark.slow] if case.group != "ops" and case.subject in seen else []
        seen.add(case.subject)
        found.append(pytest.param(case, marks=marks, id=case.name))
    return found


def compiled(case: Case, backend: Backend) -> tuple[Values, Values]:
    """As `by_hand` and, by JAX's reverse mode through the same forward code, as it should be.

    Under one `jax.jit`: op by op, JAX compiles each of them, which takes ten times as long.
    """
    import jax

    both, args, dys = _on_jax(case, backend, "float64")
    lowered = jax.jit(both).lower(args, dys)
    # What is compiled quickly, as the tests ask for, has NaN in some of JAX's own gradients where
    # a query may attend to nothing.
    for options in ({}, {"xla_backend_optimization_level": 1}):
        y, grads, judged = lowered.compile(options)(args, dys)
        by_jax = named(backend, y, judged)
        if all(np.isfinite(a).all() for a in by_jax.values()):
            break
    return named(backend, y, grads), by_jax


def dtypes(case: Case, backend: Backend, dtype: str) -> set[str]:
    """Those of outputs and gradients by hand, as JAX infers them without computing anything."""
    import jax

    both, args, dys = _on_jax(case, backend, dtype)
    y, grads, _ = jax.eval_shape(both, args, dys)
    return {str(leaf.dtype) for leaf in jax.tree.leaves((y, grads))}


def _on_jax(case: Case, backend: Backend, dtype: str) -> tuple[Any, Any, Any]:
    import jax

    fn, args = case.build(backend, dtype)

    def forward(args: Any) -> Any:
        return outputs(fn(*args)[0])

    def both(args: Any, dys: Any) -> Any:
        y, cache = fn(*args)
        _, pull_back = jax.vjp(forward, args)
        return y, gradients(args, cache.backward(*dys)), pull_back(dys)[0]

    return both, args, douts(backend, jax.eval_shape(forward, args), dtype)


@functools.cache
def on_numpy(case: Case, dtype: str = "float64") -> Values:
    """The same on NumPy in float64, from inputs and dy rounded to `dtype`."""
    return _in_float64(case, dtype, _wide)


@functools.cache
def moved_by_rounding(case: Case) -> dict[str, float]:
    """How far rounding the inputs moves each of `on_numpy(case, "float32")`: its condition.

    The most of three tries. In each, every number of the inputs and of dy moves by a random part of
    float32's epsilon. A function that divides by a difference of almost equal numbers moves far.
    """
    exact = on_numpy(case, "float32")
    moved = dict.fromkeys(exact, 0.0)
    for seed in range(3):
        rng = np.random.default_rng(seed)

        def rounded(arrays: Any, rng: np.random.Generator = rng) -> Any:
            return tree.map(lambda a: _rounded_at_random(a, rng), _wide(arrays))

        for name, value in _in_float64(case, "float32", rounded).items():
            moved[name] = max(moved[name], _largest(value - exact[name]))
    return moved


def _in_float64(case: Case, dtype: str, change: Callable[[Any], Any]) -> Values:
    """Outputs and gradients on NumPy of inputs and dy that were rounded to `dtype`, then changed.

    `change` returns float64.
    """
    numpy = backends.get("numpy")
    fn, args = case.build(numpy, dtype)
    options = {name: _wide(value) for name, value in fn.keywords.items()}  # tables among them
    y, cache = partial(fn.func, *fn.args, **options)(*change(args))
    return named(numpy, y, gradients(args, cache.backward(*change(douts(numpy, y, dtype)))))


def _rounded_at_random(a: Any, rng: np.random.Generator) -> Any:
    if getattr(a, "dtype", None) != np.float64:
        return a
    return a * (1 + np.finfo(np.float32).eps * rng.uniform(-1, 1, a.shape))


def by_torch_autograd(case: Case, backend: Backend) -> Values:
    """Gradients by torch's autograd through the same forward code."""
    import torch

    fn, args = case.build(backend)
    leaves = tree.flatten({"args": args})
    for leaf in leaves.values():
        leaf.requires_grad_()
    y, _ = fn(*args)
    pairs = list(zip(outputs(y), douts(backend, y), strict=True))
    used = [(out, dy) for out, dy in pairs if out.requires_grad]  # none where all is dropped
    grads: Any = [None] * len(leaves)
    if used:
        outs, dys = zip(*used, strict=True)
        grads = torch.autograd.grad(outs, list(leaves.values()), dys, allow_unused=True)
    filled = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
    return named(backend, y, tree.unflatten({"args": args}, filled)["args"])


def require_close(got: Values, wanted: Values, rtol: float) -> None:
    """max|got - wanted| <= rtol * max|wanted| for each array."""
    _require_within(got, wanted, {name: rtol * _largest(a) for name, a in wanted.items()})


def require_rounded(got: Values, case: Case) -> None:
    """max|got - wanted| <= ROUNDINGS * moved_by_rounding(case) for each array, got in float32.

    A limit as a share of the largest element would depend on the order of the sums, which BLAS
    chooses for each processor, where the case is ill-conditioned.
    """
    limits = {name: ROUNDINGS * move for name, move in moved_by_rounding(case).items()}
    _require_within(got, on_numpy(case, "float32"), limits)


def _require_within(got: Values, wanted: Values, limits: dict[str, float]) -> None:
    """max|got - wanted| <= limit for each array.

    To which comes some rounding of the largest number of all, since a gradient may be 0 but for
    rounding: that of the keys' bias, for instance, to which a softmax is blind.
    """
    assert got.keys() == wanted.keys()
    scale = max((_largest(a) for a in wanted.values()), default=0.0)
    for name, b in wanted.items():
        a = got[name]
        assert a.shape == b.shape, name
        allowed = limits[name] + 8 * np.finfo(a.dtype).eps * scale
        off = _largest(a - b)
        assert off <= allowed, f"{name}: off by {off:.1e}, {off / (allowed or 1):.3g} x the limit"


def outputs(y: Any) -> tuple[Any, ...]:
    """The arrays that a function returns beside its cache."""
    return tuple(y) if issubclass(type(y), tuple) else (y,)


def douts(backend: Backend, y: Any, dtype: str = "float64") -> tuple[Any, ...]:
    """A random gradient for each output."""
    rng = backend.generator(1, dtype)
    return tuple(rng.normal(out.shape) for out in outputs(y))


def gradients(args: tuple[Any, ...], returned: Any) -> tuple[Any, ...]:
    """What `cache.backward` returned, as a tuple in the order of args."""
    several = issubclass(type(returned), tuple) and not hasattr(returned, "_fields")
    return returned[: len(args)] if several else (returned,)


def named(backend: Backend, y: Any, grads: tuple[Any, ...]) -> Values:
    """Outputs and gradients by name, on the host."""
    leaves = tree.flatten({"y": outputs(y), "grad": grads})
    return {name: backend.to_numpy(leaf) for name, leaf in leaves.items()}


def _wide(arrays: Any) -> Any:
    """Floating-point arrays as float64; what else there is, as it is."""

    def widen(a: Any) -> Any:
        return a.astype(np.float64) if getattr(a, "dtype", None) == np.float32 else a

    return tree.map(widen, arrays)


def _largest(a: np.ndarray) -> float:
    largest = float(np.max(np.abs(a), initial=0.0))
    return largest if math.isfinite(largest) else math.nan  # NaN is never within a limit
