"""Check hand-written gradients by finite differences, for any op, layer or model, also your own.

    report = xformer.gradcheck(my_op, x, w)      # float64 arrays, or trees of them
    print(report)                                # a table: which gradient disagrees, where
    report.require()                             # raises GradientError unless all agree

`my_op(x, w)` must return `(y, cache)`, and `cache.backward(dy)` the gradients of the positional
arguments in order. Let L = sum(y * dy) for a random dy. The derivative of L along a random
direction v, by a central difference of fourth order, must equal sum(gradient * v). This is checked
for all inputs together, for each input, and for each element of small inputs. The length of a step
is in units of the root mean square of the input.

With `exact=True` the derivative is computed on dual numbers instead (`xformer.jvp`): it
has no step, and its only error is rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from array_api_compat import is_array_api_obj

from xformer.arrays.derivatives import jvp
from xformer.arrays.dual import kinks
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.ops.random_bits import RandomKey, random_bits

# Rounding matters less in a long step, curvature and kinks matter less in a short one. The steps
# are tried in this order until one agrees with the gradient, or two agree with each other only.
STEPS = (2e-3, 2e-4, 2e-5, 2e-6, 2e-7)
# Rounding changes a difference of L by up to this fraction of sum(|y * dy|).
ROUNDING = 64 * 2.0**-53
# The smallest unit of a step; otherwise it is the root mean square of the input.
SMALLEST = 1e-3
RTOL, EXACT_RTOL = 1e-7, 1e-12  # of finite differences, and of dual numbers


class GradientError(AssertionError):
    """A hand-written gradient disagrees with the numerical one."""


class Row(NamedTuple):
    """One comparison: the name of the input, both derivatives, their error, and a remark."""

    name: str
    analytic: float
    numeric: float
    error: float  # |analytic - numeric| / max(|analytic|, |numeric|, rounding error / rtol)
    remark: str = ""


class Report(NamedTuple):
    """The rows of a gradient check, and the relative error `rtol` up to which they agree."""

    function: str
    rows: tuple[Row, ...]
    rtol: float

    @property
    def ok(self) -> bool:
        """Whether every row is within `rtol`."""
        return not self.failures

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that disagree. A row with NaN always disagrees."""
        return tuple(r for r in self.rows if not r.error <= self.rtol)

    @property
    def worst(self) -> float:
        """The largest error of all rows."""
        return max(map(_badness, self.rows), default=0.0)

    def require(self) -> Report:
        """This report. GradientError, with the rows that disagree, if there are any."""
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
            mark = "" if r.error <= self.rtol else f"  <- {r.remark}"
            lines.append(
                f"  {r.name:{width}}  {r.analytic:16.9e}  {r.numeric:16.9e}  {r.error:8.1e}{mark}"
            )
        return "\n".join(lines)


def gradcheck(
    fn: Callable[..., tuple[Any, Any]],
    *args: Any,
    seed: int = 0,
    rtol: float | None = None,
    alone: bool = True,
    elementwise: int = 64,
    exact: bool = False,
) -> Report:
    """Compare the gradients of `fn(*args)` with numerical derivatives, and return a report.

    fn: returns `(y, cache)`; `cache.backward(dy)` returns the gradients of args in order.
    args: float64 arrays, trees of float64 arrays (NamedTuples of parameters), or None.
    seed: of the random dy and directions.
    rtol: the largest relative error that passes; None: 1e-7, or 1e-12 with `exact`.
    alone: also check each input separately. Without it one comparison covers all inputs.
    elementwise: with `alone`, arrays of at most so many elements are also checked element by
        element.
    exact: compute the derivatives on dual numbers, not by central differences. fn must then call
        only ops and functions of the array API, and the references of the ops run.

    The report also fails if a second call of backward returns other gradients, or if an input was
    overwritten. TypeError for arrays that are not float64, ValueError for gradients of another
    structure than args.
    """
    if not callable(fn):
        raise TypeError(f"gradcheck: fn must be a function, got {fn!r:.100}")
    name = getattr(fn, "__name__", type(fn).__name__)
    if rtol is None:
        rtol = EXACT_RTOL if exact else RTOL
    if not rtol > 0:
        raise ValueError(f"gradcheck: rtol must be positive, got {rtol}")
    inputs = dict(zip(_argument_names(fn, len(args)), args, strict=True))
    leaves = tree.flatten(inputs)
    _require_float64(name, leaves)
    before = {key: leaf + 0 for key, leaf in leaves.items()}

    returned = fn(*args)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"gradcheck of {name}: it must return (y, cache), got {returned!r:.60}")
    y, cache = returned
    douts = _random_like(_as_tuple(y), seed)
    grads = _gradients(name, inputs, cache, douts)
    again = _gradients(name, inputs, cache, douts)

    check = (_ExactCheck if exact else _Check)(fn, inputs, y, douts, grads, rtol)
    rows = [check.along("all inputs together", tuple(leaves), seed + 1)]
    for i, key in enumerate(leaves if alone else ()):
        rows.append(check.along(key, (key,), seed + 2 + i))
        if 1 < math.prod(leaves[key].shape) <= elementwise:
            rows.append(check.elements(key))
    rows.append(_unchanged("backward called twice", grads, again, "backward changed its cache"))
    rows.append(_unchanged("inputs left untouched", before, leaves, "an input was written to"))
    return Report(name, tuple(rows), rtol)


class _Check:
    """Differences of L along lines through the inputs, and the gradients to compare with."""

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
        self.leaves, self.y = tree.flatten(inputs), _as_tuple(y)
        self.units = {name: _unit(leaf) for name, leaf in self.leaves.items()}
        terms = [y * dy for y, dy in zip(self.y, douts, strict=True) if y is not None]
        self.rounding = ROUNDING * sum(_total(array_namespace(t).abs(t)) for t in terms)

    def along(self, name: str, keys: tuple[str, ...], seed: int) -> Row:
        """A row with both derivatives along a random direction in the inputs `keys`."""
        parts = _random_like(tuple(self.leaves[k] for k in keys), seed)
        direction = {k: v * self.units[k] for k, v in zip(keys, parts, strict=True)}
        return self._row(name, direction)

    def elements(self, key: str) -> Row:
        """The row with the largest error among the single elements of input `key`."""
        leaf, unit = self.leaves[key], self.units[key]
        xp = array_namespace(leaf)
        n = math.prod(leaf.shape)
        positions = xp.reshape(xp.cumulative_sum(xp.ones_like(xp.reshape(leaf, (n,)))), leaf.shape)
        rows = []
        for i in range(n):
            one = xp.astype(positions == i + 1, leaf.dtype)
            row = self._row(f"{key}, each element", {key: unit * one})
            remark = f"{row.remark} at {_unravel(i, leaf.shape)}"
            rows.append(Row(row.name, row.analytic / unit, row.numeric / unit, row.error, remark))
        return max(rows, key=_badness)

    def _row(self, name: str, direction: dict[str, Array]) -> Row:
        analytic = sum(_total(self.grads[k] * v) for k, v in direction.items())
        best = Row(name, analytic, math.nan, math.nan)
        last = math.nan
        for h in STEPS if math.isfinite(analytic) else ():
            numeric = self._difference(direction, h)
            row = Row(name, analytic, numeric, self._error(analytic, numeric, h))
            if row.error <= self.rtol:
                return row
            if self._error(last, numeric, h) <= self.rtol:
                kink = self._is_kink(direction, max(abs(analytic), abs(numeric)))
                return row._replace(remark="not smooth" if kink else "disagrees")
            best, last = min(row, best, key=_badness), numeric
        finite = math.isfinite(best.error)
        return best._replace(remark="not smooth, or wrong" if finite else "not finite")

    def _difference(self, direction: dict[str, Array], h: float) -> float:
        """(8 (L(h) - L(-h)) - (L(2h) - L(-2h))) / 12h, whose error is of order h^4."""
        near = self._change(direction, h) - self._change(direction, -h)
        far = self._change(direction, 2 * h) - self._change(direction, -2 * h)
        return (8 * near - far) / (12 * h)

    def _is_kink(self, direction: dict[str, Array], slope: float) -> bool:
        """Whether the slopes on the two sides differ, so that no difference gives the gradient."""
        h = STEPS[-2]
        bend = abs(self._change(direction, h) + self._change(direction, -h)) / h
        return bend > 1e-2 * slope + self.rounding / h

    def _change(self, direction: dict[str, Array], step: float) -> float:
        """L(step) - L(0)."""
        moved = {
            k: x + step * direction[k] if k in direction else x for k, x in self.leaves.items()
        }
        y, _ = self.fn(*tree.unflatten(self.inputs, moved).values())
        terms = zip(_as_tuple(y), self.y, self.douts, strict=True)
        return sum(_total((new - old) * dy) for new, old, dy in terms if old is not None)

    def _error(self, a: float, b: float, h: float) -> float:
        return abs(a - b) / (max(abs(a), abs(b), self.rounding / (h * self.rtol)) or 1.0)


class _ExactCheck(_Check):
    """Derivatives of L on dual numbers."""

    def _row(self, name: str, direction: dict[str, Array]) -> Row:
        terms = [self.grads[k] * v for k, v in direction.items()]
        analytic = sum(map(_total, terms))
        # Rounding changes a sum by up to this much.
        rounding = ROUNDING * sum(_total(array_namespace(term).abs(term)) for term in terms)
        tangents = {k: direction.get(k, 0 * x) for k, x in self.leaves.items()}
        with kinks() as met:
            _, dy = jvp(
                lambda *args: self.fn(*args)[0],
                tuple(self.inputs.values()),
                tuple(tree.unflatten(self.inputs, tangents).values()),
            )
        parts = zip(_as_tuple(dy), self.douts, strict=True)
        numeric = sum(_total(d * dout) for d, dout in parts if d is not None)
        size = max(abs(analytic), abs(numeric), rounding / self.rtol) or 1.0
        finite = math.isfinite(analytic) and math.isfinite(numeric)
        remark = "disagrees" if finite else "not finite"
        if met:
            remark += f"; not smooth: {', '.join(sorted(set(met)))}"
        return Row(name, analytic, numeric, abs(analytic - numeric) / size, remark)


def _gradients(
    name: str, inputs: dict[str, Any], cache: Any, douts: tuple[Array, ...]
) -> dict[str, Array]:
    """Gradients by the dotted names of the inputs' leaves. ValueError if they do not match."""
    grads = cache.backward(*douts)
    if len(inputs) == 1 and not _is_plain_tuple(grads):
        grads = (grads,)
    extra = tree.flatten(tuple(grads[len(inputs) :]))  # a None or a side without arrays is none
    if len(grads) < len(inputs) or extra:
        raise ValueError(f"{name}: backward must return {len(inputs)} gradients, got {len(grads)}")
    grads = dict(zip(inputs, grads, strict=False))
    by_name = tree.flatten(grads)
    leaves = tree.flatten(inputs)
    for key in by_name:
        if key not in leaves:
            of = key.partition(".")[0]
            wanted, got = (type(trees[of]).__name__ for trees in (inputs, grads))
            raise ValueError(
                f"{name}: backward returned a gradient of {key}, which was not given; the gradient "
                f"of {of} must be of its type, {wanted}, got {got}"
            )
    for key, leaf in leaves.items():
        wanted, got = _form(leaf), _form(by_name.get(key))
        if got != wanted:
            raise ValueError(f"{name}: the gradient of {key} must be {wanted}, got {got}")
    return by_name


def _unchanged(name: str, a: dict[str, Array], b: dict[str, Array], remark: str) -> Row:
    different = [k for k in a if not _equal(a[k], b[k])]
    remark = f"{remark}: {', '.join(different)}"
    return Row(name, 0.0, 0.0, math.inf, remark) if different else Row(name, 0.0, 0.0, 0.0)


def _equal(a: Array, b: Array) -> bool:
    return bool(array_namespace(a).all((a == b) | ((a != a) & (b != b))))  # NaN equals NaN here


def _unit(x: Array) -> float:
    """The unit of steps of x: its root mean square, or 1 if all elements are 0."""
    square = _total(x**2) / max(math.prod(x.shape), 1)
    return max(math.sqrt(square), SMALLEST) if square > 0 else 1.0


def _badness(row: Row) -> float:
    return math.inf if math.isnan(row.error) else row.error


def _random_like(arrays: tuple[Array, ...], seed: int) -> tuple[Array, ...]:
    """Uniform numbers in (-1, 1) from `random_bits`; None for None."""
    out: list[Array] = []
    for site, like in enumerate(arrays):
        if like is None:
            out.append(None)
            continue
        xp = array_namespace(like)
        n = math.prod(like.shape)
        # Powers of two only, because JAX compiles again for every size.
        bits = random_bits(like, key=RandomKey(seed, 0, site), size=1 << n.bit_length())
        numbers = (xp.astype(bits, like.dtype) + 0.5) / 2**31 - 1
        out.append(xp.reshape(numbers[:n], like.shape))
    return tuple(out)


def _argument_names(fn: Callable[..., Any], n: int) -> list[str]:
    names = [
        p.name for p in inspect.signature(fn).parameters.values() if p.kind <= p.VAR_POSITIONAL
    ]
    return names[:n] if len(names) >= n else [f"argument {i}" for i in range(n)]


def _require_float64(name: str, leaves: dict[str, Any]) -> None:
    for key, leaf in leaves.items():
        if not _form(leaf).startswith("float64"):
            raise TypeError(
                f"gradcheck of {name}: {key} must be a float64 array, got {_form(leaf)}"
            )


def _form(leaf: Any) -> str:
    """The dtype and shape of an array as text."""
    if not is_array_api_obj(leaf):
        return "none" if leaf is None else type(leaf).__name__
    return f"{str(leaf.dtype).rpartition('.')[2]} of shape {tuple(leaf.shape)}"


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
