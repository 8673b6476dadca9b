"""A gradient as an array that also keeps its summands: the gradient of each example of a batch.

A parameter's gradient is a sum over the examples. For a weight, the summand of one example is
x^T dy, with few rows in x and dy, and the factors are kept instead of the product ("ghost norms",
Goodfellow, arXiv:1510.01799; Li et al., arXiv:2110.05679). The layers around the ops add, transpose
and reshape gradients: a `Summands` array carries its summands along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from itertools import combinations_with_replacement
from operator import add
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device

from xformer import ops
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.ops.sum_to import sum_to


class Product(NamedTuple):
    """Summands x^T dy, one for each example: of a weight (I, O), or of several, (..., I, O).

    x: (B, ..., N, I), or integers (B, N), the rows of a table: x is then one-hot
    dy: (B, ..., N, O)
    """

    x: Array
    dy: Array


class Each:
    """Summands as an array (B, *shape). `make` computes it when it is first needed."""

    def __init__(self, make: Callable[[], Array]) -> None:
        self._make = make

    @cached_property
    def array(self) -> Array:
        """(B, *shape)."""
        return self._make()

    def map(self, fn: Callable[[Array], Array]) -> Each:
        """The summands fn(array)."""
        return Each(lambda: fn(self.array))


Term = Product | Each


class Summands:
    """A gradient and its summands.

    value: the gradient, as the backward computes it without this class
    terms: the summands are the sums of these
    """

    __slots__ = ("terms", "value")
    __hash__ = None  # type: ignore[assignment]  # like other arrays
    __array_ufunc__ = None  # NumPy's arrays leave operators to this class
    __xformer_library__ = "summands"

    def __init__(self, value: Array, terms: Sequence[Term]) -> None:
        self.value, self.terms = value, tuple(terms)

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return _Namespace(array_namespace(self.value))

    # Attributes of the array API.
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: device(self.value))
    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)

    @property
    def T(self) -> Summands:
        """The transpose of a matrix."""

        def transposed(term: Term) -> Term:
            if isinstance(term, Product):
                return Product(term.dy, term.x)
            return term.map(lambda a: a.mT)

        return Summands(self.value.T, [transposed(term) for term in self.terms])

    def __add__(self, other: Any) -> Summands:
        if not isinstance(other, Summands):
            raise TypeError("per_example: a gradient without summands is added to one with them")
        return Summands(self.value + other.value, self.terms + other.terms)

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Summands:
        keys = key if isinstance(key, tuple) else (key,)
        return self.map(lambda a: a[key], lambda a: a[(slice(None), *keys)])

    def map(self, fn: Callable[[Array], Array], each: Callable[[Array], Array]) -> Summands:
        """fn of the value, and `each` of its summands, (B, *shape). Not for products."""
        if any(isinstance(term, Product) for term in self.terms):
            raise TypeError("per_example: the gradient of a weight is neither reshaped nor sliced")
        terms = [term.map(each) for term in self.terms if isinstance(term, Each)]
        return Summands(fn(self.value), terms)

    def squared_norms(self) -> Array:
        """(B,): the squared norm of each summand."""
        if any(isinstance(term, Each) or _is_small(term) for term in self.terms):
            return _over_batch(reduce(add, (_explicit(t, self.shape) for t in self.terms)) ** 2)
        products = [term for term in self.terms if isinstance(term, Product)]
        wide = _wide(self.value)
        return _one_by_one(products, self.value) if wide is None else _by_rows(products, wide)

    def weighted(self, weights: Array) -> Array:
        """The sum of the summands, each times its weight, of `weights` (B,)."""
        return reduce(add, (_weighted(term, weights, self.shape) for term in self.terms))


class _Namespace:
    """The functions of the array API that layers call on the gradients of parameters."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def __getattr__(self, name: str) -> Any:  # creation, dtypes
        return getattr(self.xp, name)

    def reshape(self, x: Summands, shape: tuple[int, ...]) -> Summands:
        return x.map(
            lambda a: self.xp.reshape(a, shape),
            lambda a: self.xp.reshape(a, (a.shape[0], *shape)),
        )

    def permute_dims(self, x: Summands, axes: tuple[int, ...]) -> Summands:
        return x.map(
            lambda a: self.xp.permute_dims(a, axes),
            lambda a: self.xp.permute_dims(a, (0, *(axis + 1 for axis in axes))),
        )

    def sum(self, x: Summands, *, axis: tuple[int, ...]) -> Summands:
        return x.map(
            lambda a: self.xp.sum(a, axis=axis),
            lambda a: self.xp.sum(a, axis=tuple(i + 1 for i in axis)),
        )

    def concat(self, arrays: Sequence[Any]) -> Summands:
        """Of constants, whose summands are 0, and one gradient; along the first axis."""
        (x,) = (a for a in arrays if isinstance(a, Summands))

        def each(summands: Array) -> Array:
            def constant(a: Array) -> Array:
                shape = (summands.shape[0], *a.shape)
                return self.xp.zeros(shape, dtype=a.dtype, device=device(a))

            parts = [summands if a is x else constant(a) for a in arrays]
            return self.xp.concat(parts, axis=1)

        return x.map(lambda a: self.xp.concat([a if b is x else b for b in arrays]), each)


@kernel(sum_to, "summands")
def _sum_to(x: Summands, *, shape: tuple[int, ...]) -> Summands:
    def each(a: Array) -> Array:
        xp, n = array_namespace(a), a.shape[0]
        whole = (n, *(1,) * (a.ndim - 1 - len(shape)), *shape)
        return xp.reshape(sum_to(a, shape=whole), (n, *shape))

    return x.map(lambda a: sum_to(a, shape=shape), each)


def rows(x: Array, n: int) -> Array:
    """(..., D) -> (n, N / n, D): the rows of each of n examples, which come one after another."""
    n_rows = math.prod(x.shape[:-1])
    if n_rows % n:
        raise ValueError(
            f"per_example: the first axis of arrays must be the {n} examples, "
            f"got shape {tuple(x.shape)}"
        )
    return array_namespace(x).reshape(x, (n, n_rows // n, x.shape[-1]))


def _is_ids(x: Array) -> bool:
    return bool(array_namespace(x).isdtype(x.dtype, "integral"))


def _is_small(term: Term) -> bool:
    """Whether the summands of a product have fewer elements than the products of its rows need."""
    if not isinstance(term, Product) or _is_ids(term.x) or _is_ids(term.dy):
        return False
    n_rows, n_in, n_out = term.dy.shape[-2], term.x.shape[-1], term.dy.shape[-1]
    return n_in * n_out < n_rows * (n_in + n_out)


def _explicit(term: Term, shape: tuple[int, ...]) -> Array:
    """The summands (B, *shape)."""
    if isinstance(term, Each):
        return term.array
    x, dy = (_onehot(a, n, term) for a, n in zip(term, shape[-2:], strict=True))
    return x.mT @ dy


def _onehot(a: Array, size: int, term: Product) -> Array:
    if not _is_ids(a):
        return a
    xp = array_namespace(a)
    other = term.x if a is term.dy else term.dy
    every = xp.arange(size, dtype=a.dtype, device=device(a))
    return xp.astype(a[..., None] == every, other.dtype)


def _wide(value: Array) -> Any:
    """float64, or None: JAX has it only if the program has enabled it."""
    xp = array_namespace(value)
    dtypes = xp.__array_namespace_info__().dtypes(device=device(value), kind="real floating")
    return dtypes.get("float64")


def _one_by_one(products: list[Product], value: Array) -> Array:
    """The squared norms (B,), from the summand of one example at a time."""
    xp = array_namespace(value)
    weight = xp.ones((1,), dtype=value.dtype, device=device(value))
    norms = []
    for i in range(products[0].dy.shape[0]):
        ones = [Product(x[i : i + 1, ...], dy[i : i + 1, ...]) for x, dy in products]
        norms.append(xp.sum(Summands(value, ones).weighted(weight) ** 2))
    return xp.stack(norms)


def _by_rows(products: list[Product], wide: Any) -> Array:
    """The squared norms (B,) of sums of products, from the inner products of their rows.

    These cancel where the summand is far shorter than its rows. So they are computed in the dtype
    `wide`, float64, and the result is never too small: a bound of its rounding error is added, of
    about 1e-12 times (sum of |row of x| |row of dy|)^2.
    """
    xp = array_namespace(products[0].dy)
    dtype = products[0].dy.dtype
    products = [Product(*(a if _is_ids(a) else xp.astype(a, wide) for a in p)) for p in products]
    pairs = combinations_with_replacement(products, 2)
    total = reduce(add, ((1 if a is b else 2) * _inner(a, b, wide) for a, b in pairs))
    each = (_over_batch(_lengths(p.x, wide) * _lengths(p.dy, wide)) for p in products)
    largest = reduce(add, each) ** 2
    n_added = sum(math.prod(p.dy.shape[1:-1]) + _width(p.x) + _width(p.dy) for p in products)
    return xp.astype(total + n_added * xp.finfo(wide).eps * largest, dtype)


def _width(a: Array) -> int:
    return 1 if _is_ids(a) else int(a.shape[-1])


def _lengths(a: Array, dtype: Any) -> Array:
    """(B, ..., N): the norms of rows (B, ..., N, D). Those of ids (B, N) are 1."""
    xp = array_namespace(a)
    return xp.ones_like(a, dtype=dtype) if _is_ids(a) else xp.sqrt(xp.sum(a * a, axis=-1))


def _inner(a: Product, b: Product, dtype: Any) -> Array:
    """(B,): the inner products of the summands: <x^T dy, z^T dw> = <x z^T, dy dw^T>."""
    xp = array_namespace(a.dy)
    grams = [xp.astype(_gram(x, z), dtype) for x, z in ((a.x, b.x), (a.dy, b.dy))]
    return _over_batch(grams[0] * grams[1])


def _gram(x: Array, z: Array) -> Array:
    """(B, ..., N, M): the inner products of the rows of x (B, ..., N, I) and z (B, ..., M, I)."""
    xp = array_namespace(x)
    if not _is_ids(x) and not _is_ids(z):
        return x @ z.mT
    if _is_ids(x) and _is_ids(z):
        return x[:, :, None] == z[:, None, :]
    if _is_ids(x):
        return _gram(z, x).mT
    shape = (*x.shape[:2], z.shape[1])
    return xp.take_along_axis(x, xp.broadcast_to(z[:, None, :], shape), axis=2)


def _over_batch(a: Array) -> Array:
    """The sums over all axes but the first."""
    return array_namespace(a).sum(a, axis=tuple(range(1, a.ndim)))


def _weighted(term: Term, weights: Array, shape: tuple[int, ...]) -> Array:
    if isinstance(term, Each):
        xp = array_namespace(term.array)
        return xp.sum(_times(term.array, weights), axis=0)
    x, dy = term
    xp = array_namespace(weights)
    if _is_ids(x):
        zeros = xp.zeros(shape, dtype=dy.dtype, device=device(dy))
        dys = xp.reshape(_times(dy, weights), (math.prod(dy.shape[:2]), dy.shape[2]))
        return ops.index_add(zeros, dys, ids=xp.reshape(x, (math.prod(x.shape),)))[0]
    x, dy = (_joined(a) for a in (x, _times(dy, weights)))
    return x.mT @ dy


def _times(a: Array, weights: Array) -> Array:
    xp = array_namespace(weights)
    return a * xp.reshape(weights, (-1, *(1,) * (a.ndim - 1)))


def _joined(a: Array) -> Array:
    """(B, ..., N, D) -> (..., B * N, D): the rows of all examples."""
    xp = array_namespace(a)
    n, *lead, n_rows, width = a.shape
    axes = (*range(1, a.ndim - 2), 0, a.ndim - 2, a.ndim - 1)
    return xp.reshape(xp.permute_dims(a, axes), (*lead, n * n_rows, width))


def value_of(x: Any) -> Any:
    """The array of a gradient, with summands or without."""
    return x.value if isinstance(x, Summands) else x


def each_of(x: Any) -> Array:
    """(B, *shape): the summands of a gradient; of one without summands, its entries."""
    if not isinstance(x, Summands):
        return x
    return reduce(add, (_explicit(term, x.shape) for term in x.terms))
