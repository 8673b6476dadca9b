"""Check hand-written gradients against numbers: any op, layer or model, your own included.

    report = xformer.gradcheck(my_op, x, w)      # float64 arrays, or trees of them
    print(report)                                # a table: which gradient disagrees, where
    report.require()                             # raises GradientError unless all agree

`my_op(x, w)` returns `(y, cache)`, and `cache.backward(dy)` the gradients of the positional
arguments in order. With L = sum(y * dy) for a random dy, the derivative of L along a random
direction v, by a central difference of fourth order, must equal sum(gradient * v): for all inputs
together, for each alone, and element by element for small ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from xformer import tree
from xformer.ops.random_bits import Key, random_bits
from xformer.typing import Array

# A long step drowns rounding, a short one stays clear of curvature and kinks nearby: a gradient
# that is right agrees at one of them, a wrong one at none.
STEPS = (1e-3, 1e-4, 1e-5)
# Derivatives below this share of sum(|y * dy|) are compared absolutely: rounding hides them.
FLOOR = 1e-3


class GradientError(AssertionError):
    """A hand-written gradient disagrees with the numerical one."""


class Row(NamedTuple):
    """One comparison: what was varied, both derivatives, their distance, and a remark."""

    name: str
    analytic: float
    numeric: float
    error: float  # |analytic - numeric| / max(|analytic|, |numeric|, FLOOR * sum(|y * dy|))
    remark: str = ""


class Report(NamedTuple):
    """The rows of a gradient check, and the relative error up to which they agree."""

    function: str
    rows: tuple[Row, ...]
    rtol: float

    @property
    def ok(self) -> bool:
        """Whether every row is within `rtol`."""
        return not self.failures

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that disagree; NaN disagrees with everything."""
        return tuple(r for r in self.rows if not r.error <= self.rtol)

    @property
    def worst(self) -> float:
        """The largest error of all rows."""
        return max((math.inf if math.isnan(r.error) else r.error for r in self.rows), default=0.0)

    def require(self) -> Report:
        """This report, or GradientError with the rows that disagree."""
        if not self.ok:
            raise GradientError(str(self._replace(rows=self.failures)))
        return self

    def __str__(self) -> str:
        width = max([len(r.name) for r in self.rows] + [4])
        lines = [
            f"{self.function}: {'gradients agree' if self.ok else 'GRADIENTS DISAGREE'} "
            f"(relative error at most {self.rtol:.0e})",
            f"  {'what':{width}}  {'by hand':>16}  {'numerical':>16}  {'error':>8}",
        ]
        for r in self.rows:
            mark = "" if r.error <= self.rtol else "  <- " + (r.remark or "disagrees")
            lines.append(
                f"  {r.name:{width}}  {r.analytic:16.9e}  {r.numeric:16.9e}  {r.error:8.1e}{mark}"
            )
        return "\n".join(lines)


def gradcheck(
    fn: Callable[..., tuple[Any, Any]],
    *args: Any,
    seed: int = 0,
    rtol: float = 1e-7,
    elementwise: int = 64,
) -> Report:
    """Compare the gradients of `fn(*args)` with central differences; see the module's text.

    args: float64 arrays, trees of them (NamedTuples of parameters), or None for an absent one.
    elementwise: arrays of at most so many elements are also checked element by element.
    Also fails where backward changes when called again, or where an input was written to.
    Raises TypeError for arrays that are not float64, ValueError for gradients of wrong structure.
    """
    name = getattr(fn, "__name__", type(fn).__name__)
    args = tuple(args)
    inputs = dict(zip(_argument_names(fn, len(args)), args, strict=True))
    leaves = tree.flatten(inputs)
    _require_float64(name, leaves)
    before = {key: leaf + 0 for key, leaf in leaves.items()}

    y, cache = fn(*args)
    douts = _random_like(_as_tuple(y), seed)
    grads = _gradients(name, inputs, cache, douts)
    again = _gradients(name, inputs, cache, douts)

    check = _Check(fn, inputs, y, douts, grads, rtol)
    rows = [check.along("all inputs together", tuple(leaves), seed + 1)]
    for i, key in enumerate(leaves):
        rows.append(check.along(key, (key,), seed + 2 + i))
        if 1 < math.prod(leaves[key].shape) <= elementwise:
            rows.append(check.elements(key))
    rows.append(_unchanged("backward called twice", grads, again, "backward changed its cache"))
    rows.append(_unchanged("inputs left untouched", before, leaves, "an input was written to"))
    return Report(name, tuple(rows), rtol)


class _Check:
    """L along lines through the inputs, and the gradients it is compared with."""

    def __init__(
        self,
        fn: Any,
        inputs: dict[str, Any],
        y: Any,
        douts: tuple[Array, ...],
        grads: dict[str, Array],
        rtol: float,
    ) -> None:
        self.fn, self.inputs, self.douts, self.grads, self.rtol = fn, inputs, douts, grads, rtol
        self.leaves = tree.flatten(inputs)
        terms = [y * dy for y, dy in zip(_as_tuple(y), douts, strict=True)]
        self.floor = FLOOR * sum(_total(array_namespace(t).abs(t)) for t in terms)

    def along(self, name: str, keys: tuple[str, ...], seed: int) -> Row:
        """Both derivatives along a random direction of unit length in the inputs `keys`."""
        parts = dict(
            zip(keys, _random_like(tuple(self.leaves[k] for k in keys), seed), strict=True)
        )
        length = math.sqrt(sum(_total(v**2) for v in parts.values())) or 1.0
        direction = {k: v / length for k, v in parts.items()}
        return self._row(name, direction)

    def elements(self, key: str) -> Row:
        """The worst of the derivatives by each single element of input `key`."""
        leaf = self.leaves[key]
        xp = array_namespace(leaf)
        n = math.prod(leaf.shape)
        positions = xp.reshape(xp.cumulative_sum(xp.ones_like(xp.reshape(leaf, (n,)))), leaf.shape)
        rows = []
        for i in range(n):
            index = _unravel(i, leaf.shape)
            unit = xp.astype(positions == i + 1, leaf.dtype)
            row = self._row(f"{key}, each element", {key: unit})
            remark = row.remark or f"at {index}"
            rows.append(row._replace(remark=remark))
        return max(rows, key=lambda r: math.inf if math.isnan(r.error) else r.error)

    def _row(self, name: str, direction: dict[str, Array]) -> Row:
        analytic = sum(_total(self.grads[k] * v) for k, v in direction.items())
        tried = []
        for h in STEPS:
            numeric = self._difference(direction, h)
            tried.append((self._error(analytic, numeric), numeric))
            if tried[-1][0] <= self.rtol:
                return Row(name, analytic, numeric, tried[-1][0])
        error, numeric = min(tried, key=lambda t: math.inf if math.isnan(t[0]) else t[0])
        steady = self._error(tried[0][1], tried[-1][1]) < 1e-3 or not math.isfinite(error)
        return Row(name, analytic, numeric, error, "" if steady else "not smooth here, or wrong")

    def _difference(self, direction: dict[str, Array], h: float) -> float:
        """(8 (L(h) - L(-h)) - (L(2h) - L(-2h))) / 12h: right to h^4."""
        near = self._loss(direction, h) - self._loss(direction, -h)
        far = self._loss(direction, 2 * h) - self._loss(direction, -2 * h)
        return (8 * near - far) / (12 * h)

    def _loss(self, direction: dict[str, Array], step: float) -> float:
        moved = {
            k: x + step * direction[k] if k in direction else x for k, x in self.leaves.items()
        }
        y, _ = self.fn(*tree.unflatten(self.inputs, moved).values())
        return sum(_total(a * dy) for a, dy in zip(_as_tuple(y), self.douts, strict=True))

    def _error(self, a: float, b: float) -> float:
        return abs(a - b) / (max(abs(a), abs(b), self.floor) or 1.0)


def _gradients(
    name: str, inputs: dict[str, Any], cache: Any, douts: tuple[Array, ...]
) -> dict[str, Array]:
    """Gradients by the dotted names of the inputs' leaves; ValueError where they do not match."""
    grads = cache.backward(*douts)
    if len(inputs) == 1 and not _is_plain_tuple(grads):
        grads = (grads,)
    extra = [g for g in grads[len(inputs) :] if g is not None]
    if len(grads) < len(inputs) or extra:
        raise ValueError(f"{name}: backward must return {len(inputs)} gradients, got {len(grads)}")
    by_name = tree.flatten(dict(zip(inputs, grads, strict=False)))
    for key, leaf in tree.flatten(inputs).items():
        shape = tuple(by_name[key].shape) if key in by_name else None
        if shape != tuple(leaf.shape):
            got = "none" if shape is None else f"shape {shape}"
            raise ValueError(
                f"{name}: the gradient of {key} must have shape {tuple(leaf.shape)}, got {got}"
            )
    return by_name


def _unchanged(name: str, a: dict[str, Array], b: dict[str, Array], remark: str) -> Row:
    different = [k for k in a if not bool(array_namespace(a[k]).all(a[k] == b[k]))]
    remark = f"{remark}: {', '.join(different)}"
    return Row(name, 0.0, 0.0, math.inf, remark) if different else Row(name, 0.0, 0.0, 0.0)


def _random_like(arrays: tuple[Array, ...], seed: int) -> tuple[Array, ...]:
    """Numbers uniform in (-1, 1), by the library's own counter-based bits."""
    out = []
    for site, like in enumerate(arrays):
        xp = array_namespace(like)
        bits = random_bits(like, key=Key(seed, 0, site), size=math.prod(like.shape))
        out.append(xp.reshape((xp.astype(bits, like.dtype) + 0.5) / 2**31 - 1, like.shape))
    return tuple(out)


def _argument_names(fn: Callable[..., Any], n: int) -> list[str]:
    names = [
        p.name for p in inspect.signature(fn).parameters.values() if p.kind <= p.VAR_POSITIONAL
    ]
    return names[:n] if len(names) >= n else [f"argument {i}" for i in range(n)]


def _require_float64(name: str, leaves: dict[str, Any]) -> None:
    for key, leaf in leaves.items():
        dtype = str(getattr(leaf, "dtype", type(leaf).__name__))
        if not dtype.endswith("float64"):
            raise TypeError(f"gradcheck of {name}: {key} must be a float64 array, got {dtype}")


def _is_plain_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and not hasattr(x, "_fields")


def _as_tuple(y: Any) -> tuple[Array, ...]:
    return y if isinstance(y, tuple) else (y,)


def _total(x: Array) -> float:
    return float(array_namespace(x).sum(x))


def _unravel(i: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        i, r = divmod(i, size)
        index.append(r)
    return tuple(reversed(index))
