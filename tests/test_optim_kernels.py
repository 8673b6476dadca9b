"""Kernels of updates over all leaves: the reference's numbers, and what is donated and what is not.

`test_kernels.py` leaves these ops to this file, which goes over the registry as that does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from libraries import only
from test_kernels import KERNELS, LAYOUTS, UPDATES, contiguous, every, laid_out
from test_ledger import MODELS

from xformer import dispatch, optim, reference_only, tree
from xformer.backends import Backend
from xformer.backends.numpy.leaves import SMALL
from xformer.backends.numpy.rows import BLOCK
from xformer.dispatch import Kernel, Overridable
from xformer.inspection.measure import arguments
from xformer.optim.adam import adam_update
from xformer.optim.clip import clip_leaves
from xformer.optim.ema import ema_leaves

# Nothing, a number, vectors, leaves that share a piece, one of several pieces.
SHAPES: tuple[tuple[int, ...], ...] = (
    (5, 3), (), (0, 3), (1,), (SMALL, 1), (3, 31), (SMALL + 1,), (2, BLOCK // 2 + 7), (7, 2, 3),
)  # fmt: skip
ADAM: dict[str, Any] = {"rate": 0.02, "root": 0.3, "betas": (0.8, 0.95), "eps": 1e-3}
# Of each op: how many trees it takes, which of them it gives anew, and its options.
CASES: dict[Overridable, tuple[int, tuple[int, ...], list[dict[str, Any]]]] = {
    adam_update: (4, (0, 2, 3), [ADAM | {"keep": keep} for keep in (1.0, 0.9)]),
    clip_leaves: (1, (0,), [{"max_norm": norm} for norm in (0.5, 1e6, math.inf)]),
    ema_leaves: (2, (0,), [{"share": share} for share in (0.0, 0.3)]),
}


def drawn(n_trees: int, dtype: str = "float32") -> list[list[np.ndarray]]:
    """Trees of leaves, the last of them of no negative numbers, as second moments."""
    rng = np.random.default_rng(0)
    trees = [[rng.normal(size=shape) for shape in SHAPES] for _ in range(n_trees)]
    trees[-1] = [np.abs(x) for x in trees[-1]]
    return [[np.asarray(x, dtype) for x in leaves] for leaves in trees]


def flat(result: Any) -> list[Any]:
    """The arrays of a result, in order."""
    if isinstance(result, list | tuple):
        return [leaf for part in result for leaf in flat(part)]
    return [result]


def test_no_op_is_left_out() -> None:
    assert set(CASES) == set(UPDATES)


@every([k for k in KERNELS if k[1] in UPDATES])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_as_exact_as_the_reference(
    library: Backend, op: Overridable, kernel: Kernel, layout: Callable[[Any], Any], donate: bool
) -> None:
    """err(kernel) <= 2 err(reference) + rounding; the second tree is contiguous, as gradients."""
    n_trees, _, options = CASES[op]
    for dtype, option in itertools.product(("float32", "float64"), options):
        given = [[library.asarray(x) for x in leaves] for leaves in drawn(n_trees, dtype)]
        layouts = (layout, contiguous, layout, layout)
        trees = [
            [laid_out(how, x) for x in leaves] for how, leaves in zip(layouts, given, strict=False)
        ]
        host = [[np.array(library.to_numpy(x)) for x in leaves] for leaves in trees]
        exact = flat(op.reference(*wide(host), **option))
        plain = flat(op.reference(*host, **option))
        assert kernel.unsupported is None or kernel.unsupported(*trees, **option) is None
        got = flat(kernel.run(*trees, **option, donate=donate))
        for a, p, wanted in zip(got, plain, exact, strict=True):
            a = library.to_numpy(a)
            assert a.shape == np.shape(p) and a.dtype == dtype
            off, off_plain = (np.max(np.abs(x - wanted), initial=0) for x in (a, p))
            rounding = 2 * np.finfo(dtype).eps * np.max(np.abs(wanted), initial=0)
            assert off <= 2 * off_plain + rounding, f"{a.shape} {dtype}: {off:.1e}"
        if not donate:
            now = [library.to_numpy(x) for leaves in trees for x in leaves]
            assert all(np.array_equal(a, b) for a, b in zip(now, flat(host), strict=True))


def wide(trees: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    return [[x.astype(np.longdouble) for x in leaves] for leaves in trees]


# ---- NumPy: what is written over ----


@pytest.mark.parametrize("op", CASES, ids=lambda op: op.__name__)
@pytest.mark.parametrize("order", ["C", "F"])
def test_donated_leaves_are_written_over(op: Overridable, order: Any) -> None:
    n_trees, replaced, (option, *_) = CASES[op]
    trees = [[np.array(x, order=order) for x in leaves] for leaves in drawn(n_trees)]
    before = [[x.copy() for x in leaves] for leaves in trees]
    wanted = flat(op(*trees, **option))
    got = flat(op(*trees, **option, donate=True))
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))
    donated = [leaf for i in replaced for leaf in trees[i]]
    assert all(a is b for a, b in zip(got, donated, strict=False))
    for i in set(range(n_trees)) - set(replaced):
        assert all(np.array_equal(a, b) for a, b in zip(trees[i], before[i], strict=True))


def stepped(params: Any, grads: Any, **options: Any) -> Any:
    """Two steps of AdamW."""
    state = optim.adamw_init(params)
    for _ in range(2):
        params, state = optim.adamw(params, grads, state, lr=0.1, **options)
    return params, state


def weights() -> dict[str, np.ndarray]:
    return {str(shape): x for shape, x in zip(SHAPES, drawn(1)[0], strict=True)}


def require_same(a: Any, b: Any) -> None:
    for name, leaf in tree.flatten(a).items():
        assert np.array_equal(leaf, tree.flatten(b)[name]), name


def test_what_is_read_only_is_not_written_to() -> None:
    """Weights that are mapped from a file."""
    params, grads = weights(), weights()
    wanted = stepped(params, grads)
    before = tree.map(np.copy, params)
    for leaf in params.values():
        leaf.flags.writeable = False
    require_same(stepped(params, grads, donate=True), wanted)
    require_same(params, before)


def test_an_array_that_is_there_twice_is_not_written_over() -> None:
    params, grads = weights(), weights()
    params["again"], grads["again"] = params["(5, 3)"], 2 - grads["(5, 3)"]
    wanted = stepped(params, grads)
    before = tree.map(np.copy, params)
    optim.adamw(params, grads, optim.adamw_init(params), lr=0.1, donate=True)
    require_same(params, before)
    require_same(stepped(params, grads, donate=True), wanted)
    both = {"a": np.full(3, 4.0), "b": np.ones(3)}
    both["c"] = both["a"]
    wanted, norm = optim.clip_by_global_norm(both, max_norm=1.0)
    clipped, same = optim.clip_by_global_norm(both, max_norm=1.0, donate=True)
    require_same(clipped, wanted)
    assert norm == same
    require_same(optim.ema(both, both, decay=0.5, donate=True), both)


VIEWS = {"all": slice(40), "part": slice(8, 24), "edge": slice(32, 48), "apart": slice(40, 64)}


@only("numpy", "numba", "cuda_shim")
@pytest.mark.parametrize("how", [*VIEWS, "mapped"])
def test_leaves_that_share_memory_are_not_written_over(library: Backend, how: str) -> None:
    """A tied weight as a view, whose memory a step would write twice."""
    memory = library.asarray(drawn(1)[0][-1].ravel().repeat(2)[:64])
    params = [memory[:40], memory[VIEWS.get(how, slice(32, 48))]]
    if how == "mapped":  # arrays of no common base, as of a file
        if library.name == "cuda_shim":
            pytest.skip("a file is memory of the host, not of CUDA")
        mapped = bytearray(library.to_numpy(memory).tobytes())
        params = [np.frombuffer(mapped, np.float32, n, at) for n, at in ((40, 0), (16, 128))]
    before = [library.to_numpy(x).copy() for x in params]
    grads = [library.asarray(np.full_like(x, i)) for i, x in enumerate(before, 1)]
    zeros = [[library.asarray(np.zeros_like(x)) for x in before] for _ in range(4)]
    given = [library.asarray(x.copy()) for x in before]
    wanted, _, _ = adam_update(given, grads, *zeros[:2], **ADAM, keep=0.9)
    got, _, _ = adam_update(params, grads, *zeros[2:], **ADAM, keep=0.9, donate=True)
    for new, right, old, was in zip(got, wanted, params, before, strict=True):
        assert np.array_equal(library.to_numpy(new), library.to_numpy(right))
        assert (how == "apart") != np.array_equal(library.to_numpy(old), was)


def test_clipped_and_averaged_leaves_that_share_memory() -> None:
    memory = np.arange(1, 65, dtype=np.float32)
    for view in VIEWS.values():
        leaves = {"a": memory[:40], "b": memory[view]}
        wanted, _ = optim.clip_by_global_norm(tree.map(np.copy, leaves), max_norm=1.0)
        memory = memory.copy()
        leaves = {"a": memory[:40], "b": memory[view]}
        require_same(optim.clip_by_global_norm(leaves, max_norm=1.0, donate=True)[0], wanted)
        memory = np.arange(1, 65, dtype=np.float32)
        average, params = {"a": memory[:40]}, {"a": memory[4:44]}
        wanted = optim.ema(average, tree.map(np.copy, params), decay=0.5)
        require_same(optim.ema(average, params, decay=0.5, donate=True), wanted)


def test_gradients_may_be_the_parameters() -> None:
    params = weights()
    wanted = stepped(params, tree.map(np.copy, params))
    state = optim.adamw_init(params)
    for _ in range(2):
        params, state = optim.adamw(params, weights(), state, lr=0.1, donate=True)
    require_same((params, state), wanted)
    first = weights()
    wanted = optim.adamw(first, weights(), optim.adamw_init(first), lr=0.1)
    require_same(optim.adamw(first, first, optim.adamw_init(first), lr=0.1, donate=True), wanted)


def test_absent_leaves_stay_absent() -> None:
    params = {"w": np.ones((2, 3), np.float32), "frozen": None, "c": [np.ones(1, np.float32)]}
    new, state = stepped(params, tree.map(np.ones_like, params), donate=True)
    assert new["frozen"] is None and state.m["frozen"] is None
    assert new["w"] is params["w"] and new["c"][0] is params["c"][0]
    assert (new["w"] < 1).all()


def test_leaves_of_several_kinds_run_the_reference() -> None:
    for other in (np.ones(3), np.ones(3, np.float16)):
        leaves = [np.ones(2, np.float32), other]
        said = dispatch.explain(clip_leaves, leaves, max_norm=1.0)
        assert said.startswith("clip_leaves on numpy: the reference")
        assert "must all be NumPy's, and all float32 or all float64" in said
        params = dict(enumerate(leaves))
        new, _ = optim.adamw(params, params, optim.adamw_init(params), lr=0.1, donate=True)
        assert [x.dtype for x in new.values()] == [x.dtype for x in leaves]
        assert (params[0] == 1).all()


def test_nothing_is_copied_where_nothing_is_clipped() -> None:
    grads = weights()
    clipped, norm = optim.clip_by_global_norm(grads, max_norm=1e9)
    assert clipped is grads
    with reference_only():
        assert float(norm) == pytest.approx(float(optim.clip_by_global_norm(grads, max_norm=1)[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_written_over(bad: float) -> None:
    """The loop says which gradient it was."""
    grads = weights()
    grads["(5, 3)"][1, 1] = bad
    before = tree.map(np.copy, grads)
    with np.errstate(invalid="ignore"):
        _, norm = optim.clip_by_global_norm(grads, max_norm=1.0, donate=True)
    assert not np.isfinite(norm)
    for name, leaf in before.items():
        assert np.array_equal(grads[name], leaf, equal_nan=True)


def test_threads_change_no_bit() -> None:
    params = {"w": drawn(1)[0][-2], **weights(), "x": np.ones((5, BLOCK), np.float32) / 3}
    found = []
    for n in (1, 2):
        with threadpoolctl.threadpool_limits(n):
            own = tree.map(np.copy, params)
            for _ in range(20):
                grads, norm = optim.clip_by_global_norm(own, max_norm=0.5)
            found.append((stepped(own, grads, donate=True), norm))
    require_same(found[0], found[1])


# ---- Every optimiser, every library ----


@pytest.mark.parametrize("name", optim.OPTIMISERS)
def test_donating_changes_no_number(library: Backend, name: str) -> None:
    def run(donate: bool) -> Any:
        rng = library.generator(0, "float64")
        params = {"w": rng.normal((4, 3)), "v": [rng.normal((2, 5)), None]}
        rules = (optim.Rule("w", name), optim.Rule("*", "adamw"))
        for init, step in (optim.OPTIMISERS[name], optim.grouped(*rules)):
            state = init(params)
            for _ in range(3):
                grads = tree.map(lambda p: p**3 - 1, params)
                params, state = step(params, grads, state, lr=0.01, donate=donate)
        return tree.map(library.to_numpy, params)

    require_same(run(True), run(False))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_arrays_of_their_own(name: str) -> None:
    """Else clipping in place would scale what two of them share twice."""
    network = MODELS[name]
    params = network.init()
    _, examples = arguments(network, 2, 8, "float32")
    grads = network.loss(params, *examples)[1].backward()
    leaves = [*tree.flatten(grads).items(), *tree.flatten(params).items()]
    for (a, x), (b, y) in itertools.combinations(leaves, 2):
        assert not np.shares_memory(x, y), f"{a}, {b}"
