"""Every registered kernel against the reference: none can be registered untested.

Kernels of numba are compared in test_numba.py and test_program_*.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import cuda_shim  # registers CuPy's kernels for its own arrays too
import numpy as np
import pytest
from array_api_compat import array_namespace, is_array_api_obj
from devices import SLACK
from judges import Values, douts, gradients, named
from libraries import ON_DEVICE, STAND_IN

from xformer import RandomKey, backends, dispatch, reference_only, tree
from xformer.backends import Backend
from xformer.backends.cupy import feed_forward_lt, flash, linear_lt, linear_many_lt, sdpa_cudnn
from xformer.backends.cupy.cublaslt import runtime_of
from xformer.dispatch import Kernel, Overridable
from xformer.dispatch.checks import in_range
from xformer.layers import blocks
from xformer.layers.advance import advance
from xformer.layers.constant import constant
from xformer.layers.kv_cache import append
from xformer.layers.rope_tables import cos_sin
from xformer.ops import embedding, index_add, random_bits, rope
from xformer.ops.barrier import barrier
from xformer.ops.greedy import greedy
from xformer.ops.sum_to import sum_to
from xformer.optim.adam import adam_update
from xformer.optim.clip import clip_leaves
from xformer.optim.ema import ema_leaves
from xformer.proofs.catalogue import cases

assert cuda_shim.NAME == STAND_IN
OPS = [op for op in dispatch.ops() if op.__module__.startswith("xformer.")]  # not those of tests
for name in backends.NAMES:
    if backends.unavailable_reason(name) is None:
        for op in OPS:
            op.import_kernels(name)
# For what is stored in two bytes alone: test_cuda_flash.py, test_cuda_cudnn.py,
# test_cuda_feed_forward.py
STORED_ALONE = (flash.sdpa, sdpa_cudnn.sdpa, feed_forward_lt.feed_forward)
BY_CUBLASLT = (linear_lt.linear, linear_many_lt.linear_many, linear_lt.linear_cross_entropy)
KERNELS = [
    (library, op, kernel)
    for op in OPS
    for library, kernels in op.kernels.items()
    for kernel in kernels
    # Whose kernels want larger arrays, or have none: test_numba.py, test_program.py and others.
    if library not in ("numba", "numba.kernels")
]
UPDATES = (adam_update, clip_leaves, ema_leaves)  # test_optim_kernels.py
# append: test_kv_cache.py, constant: test_cuda_graphs.py, held: test_checkpointing.py, advance:
# test_numpy_advance.py, sum_to, whose kernel is for what is stored in two bytes alone:
# test_cuda_precision.py, cos_sin: test_rotary.py
WITHOUT_GRADIENT = (random_bits, in_range, greedy, append, constant, barrier, advance, sum_to)
WITHOUT_GRADIENT += (*UPDATES, cos_sin)
# Of many ops, whose rounding adds up either way: test_program.py
IN_FLOAT64 = (blocks,)
IN_ANY_ORDER = (embedding, index_add)  # sums at repeated ids
# On trial too: NumPy has no kernels of these, and alone it would leave nothing to compare.
REFERENCES = [("numpy", op, Kernel(op.reference, "numpy", None)) for op in WITHOUT_GRADIENT[:3]]


def every(kernels: list[tuple[str, Overridable, Kernel]]) -> pytest.MarkDecorator:
    ids = [f"{library}-{op.__name__}" for library, op, _ in kernels]
    return pytest.mark.parametrize(
        ("library", "op", "kernel"), kernels, indirect=["library"], ids=ids
    )


@pytest.fixture(autouse=True)
def with_cublaslt() -> Iterator[None]:
    """The stand-in's; CuPy has that of NVIDIA, where it is installed."""
    with cuda_shim.calling(cuda_shim.CublasLt()):
        yield


# ---- Arrays of the same values, laid out otherwise in memory ----


def contiguous(x: Any) -> Any:
    return x


def sliced(x: Any) -> Any:
    """Every second element of an array twice as wide."""
    xp = array_namespace(x)
    wide = xp.reshape(xp.stack([x, x], axis=-1), (*x.shape[:-1], 2 * x.shape[-1]))
    return wide[..., ::2]


def transposed(x: Any) -> Any:
    """The transpose of a contiguous array."""
    xp = array_namespace(x)
    back = tuple(reversed(range(x.ndim)))
    flat = xp.reshape(xp.permute_dims(x, back), (math.prod(x.shape),))
    return xp.permute_dims(xp.reshape(flat, tuple(reversed(x.shape))), back)


def expanded(x: Any) -> Any:
    """Its first row, repeated without a copy: other values, for kernel and reference alike."""
    return array_namespace(x).broadcast_to(x[:1, ...], x.shape)


LAYOUTS = (contiguous, sliced, transposed, expanded)


# ---- Ops with a gradient, by their cases in the catalogue ----


@every(
    [
        k
        for k in KERNELS
        if k[1] not in WITHOUT_GRADIENT + IN_FLOAT64 and k[2].run not in STORED_ALONE
    ]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_as_exact_as_the_reference(
    library: Backend, op: Overridable[..., Any], kernel: Kernel, layout: Callable[[Any], Any]
) -> None:
    """err(kernel) <= 2 err(reference) + rounding, both against float64."""
    if kernel.run in BY_CUBLASLT:
        why = runtime_of(library.asarray([1.0])).library()
        if isinstance(why, str):
            pytest.skip(why)
    ran = 0
    for case in (case for case in cases() if case.subject == op.__name__):
        fn, args = case.build(library, "float32")
        if fn.func is not op and op is not rope:  # some of its arguments are options
            continue
        args = tree.map(lambda x: laid_out(layout, x), args)
        if kernel.unsupported is None or not kernel.unsupported(*args, **fn.keywords):
            require_exact(library, kernel, op, args, fn.keywords, layout)
            ran += 1
    assert ran, f"no case of {op.__name__} in the catalogue is for this kernel"


def laid_out(layout: Callable[[Any], Any], x: Any) -> Any:
    return layout(x) if x.ndim and math.prod(x.shape) else x


def like(x: Any, option: Any) -> Any:
    """An option that is an array of real numbers in the dtype of x."""
    xp = array_namespace(x)
    if not is_array_api_obj(option) or not xp.isdtype(option.dtype, "real floating"):
        return option
    return xp.astype(option, x.dtype)


def require_exact(
    library: Backend,
    kernel: Kernel,
    op: Overridable[..., Any],
    args: Any,
    options: dict[str, Any],
    layout: Callable[[Any], Any],
) -> None:
    def values(run: Callable[..., Any], args: Any, dys: Any) -> Values:
        own = {name: like(args[0], value) for name, value in options.items()}  # rope's tables
        y, cache = run(*args, **own)
        return named(library, y, gradients(args, cache.backward(*dys)))

    def double(x: Any) -> Any:
        xp = array_namespace(x)
        return xp.astype(x, xp.float64)

    with reference_only():
        y, _ = op.reference(*args, **options)
        dys = tuple(laid_out(layout, dy) for dy in douts(library, y, "float32"))
        exact = values(op.reference, tree.map(double, args), tree.map(double, dys))
        plain = values(op.reference, args, dys)
    got = values(kernel.run, args, dys)
    if library.name == "cupy" and op not in IN_ANY_ORDER:
        again = values(kernel.run, args, dys)
        assert all(a.tobytes() == again[name].tobytes() for name, a in got.items()), "other bits"
    assert got.keys() == exact.keys()
    for name, wanted in exact.items():
        assert got[name].shape == wanted.shape and got[name].dtype == plain[name].dtype, name
        off, off_plain = (np.max(np.abs(a[name] - wanted), initial=0) for a in (got, plain))
        # A GPU adds products that it has not rounded, so that of equal ones a rounding is left.
        size = np.max(np.abs(wanted), initial=1 if library.name == "cupy" else 0)
        allowed = 2 * off_plain + 2 * np.finfo(np.float32).eps * size
        allowed = SLACK.get(library.name, 1) * allowed
        assert off <= allowed, f"{name}: {off:.1e}, reference {off_plain:.1e}"


# ---- Ops without one ----


def bits(library: Backend) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Arguments, options, and the answer: here, what the reference says on NumPy."""
    like = library.generator(0).full((1,), 0.0)
    for key in (
        RandomKey(0),
        RandomKey(2**64 - 1, 2**32 - 1, 2**32 - 1),
        RandomKey(2**40 + 3, 5, 7),
    ):
        for size in (0, 1, 7, 1000):
            options = {"key": key, "size": size}
            yield (like,), options, random_bits.reference(np.zeros(1), **options)


def ranges(library: Backend) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    unseen = library.name in ON_DEVICE  # what is out of range there: test_cuda_kernels.py
    for ids, inside in (([], True), ([0, 6], True), ([[3, 7]], False), ([-1, 2], False)):
        yield (library.asarray(ids, "int64"),), {"size": 7}, inside or unseen
    if library.name == "torch":
        import torch

        yield (torch.empty((3,), dtype=torch.int64, device="meta"),), {"size": 7}, True


def largest(library: Backend) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Of equal ones the first; -1 where the largest is no finite number."""
    inf, nan = np.inf, np.nan
    rows = ([0, 2, 1, 2], 1), ([-inf, -5, -inf, -7], 1), ([3, 1, inf, 0], -1), ([-inf] * 4, -1)
    rows += (([1, nan, 0, 2], -1), ([nan, 1, 2, 3], -1))
    for row, best in rows:
        yield (library.asarray([row], "float32"),), {}, [best]
    for dtype in ("float32", "float64"):
        yield (library.asarray([row for row, _ in rows], dtype),), {}, [best for _, best in rows]


@every([k for k in KERNELS if k[1] in WITHOUT_GRADIENT[:3]] + REFERENCES)
def test_same_answers_as_the_reference(
    library: Backend, op: Overridable[..., Any], kernel: Kernel
) -> None:
    ran = 0
    for args, options, wanted in {random_bits: bits, in_range: ranges, greedy: largest}[op](
        library
    ):
        if kernel.unsupported is None or not kernel.unsupported(*args, **options):
            got = kernel.run(*args, **options)
            assert np.array_equal(got if isinstance(got, bool) else library.to_numpy(got), wanted)
            ran += 1
    assert ran, f"no arguments of {op.__name__} here are for this kernel"
