"""Collectives as ops: what they compute, and that each backward is the transpose of the forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from libraries import slow_but
from numpy.typing import NDArray

from xformer import backends, distributed, gradcheck, ops
from xformer.distributed.world import World, threads

Arrays = list[NDArray[Any]]
N_RANKS = 3
SHAPE, AXIS = (2, 6, 5), 1  # the axis is cut; 5 is not divisible

# From which state to which: (op, states of x and y). See xformer/distributed/collectives.py.
OPS: dict[str, tuple[Any, str, str]] = {
    "enter": (distributed.enter, "whole", "copies"),
    "leave": (distributed.leave, "addends", "whole"),
    "gather": (partial(distributed.gather, axis=AXIS), "parts", "copies"),
    "scatter": (partial(distributed.scatter, axis=AXIS), "addends", "parts"),
    "part": (partial(distributed.part, axis=AXIS), "whole", "parts"),
    "join": (partial(distributed.join, axis=AXIS), "parts", "whole"),
    "part, uneven": (partial(distributed.part, axis=2), "whole", "parts of 2"),
    "join, uneven": (partial(distributed.join, axis=2), "parts of 2", "whole"),
    "exchange": (partial(distributed.exchange, cut=AXIS, join=0), "parts of 0", "parts"),
}
UNEVEN = [(0, 1), (1, 3), (3, 5)]  # of 5 among 3


def numbers(seed: int, state: str) -> Arrays:
    """What each rank has of random numbers in a state."""
    rng = np.random.default_rng(seed)
    if state == "whole":
        return [rng.standard_normal(SHAPE)] * N_RANKS
    if state == "parts":
        return np.split(rng.standard_normal(SHAPE), N_RANKS, axis=AXIS)
    if state == "parts of 2":
        x = rng.standard_normal(SHAPE)
        return [x[..., first:last] for first, last in UNEVEN]
    if state == "parts of 0":  # of 3 * 2 rows
        return [rng.standard_normal(SHAPE) for _ in range(N_RANKS)]
    return [rng.standard_normal(SHAPE) for _ in range(N_RANKS)]  # addends or copies


def gradient(seed: int, state: str, y: Arrays) -> Arrays:
    """A random gradient of y: the same on all ranks where they have the same y."""
    rng = np.random.default_rng(seed)
    if state == "whole":
        return [rng.standard_normal(y[0].shape)] * N_RANKS
    return [rng.standard_normal(a.shape) for a in y]


def inner(x: Arrays, dx: Arrays, state: str) -> float:
    """<dx, x>: an array that all ranks have counts once."""
    products = [float(np.sum(a * da)) for a, da in zip(x, dx, strict=True)]
    return products[0] if state == "whole" else sum(products)


def both(op: Any, x: Arrays, dy: Arrays | None = None) -> tuple[Arrays, Arrays]:
    """y, and dx if dy is given, of each rank."""

    def work(world: World) -> tuple[Any, Any]:
        y, cache = op(x[world.rank], world=world)
        return y, None if dy is None else cache.backward(dy[world.rank])

    ys, dxs = zip(*threads.run(N_RANKS, work), strict=True)
    return list(ys), list(dxs)


@pytest.mark.parametrize("name", OPS)
def test_backward_is_the_transpose_of_forward(name: str) -> None:
    """<dy, op(x)> = <backward(dy), x> for all x and dy, since the ops are linear."""
    op, before, after = OPS[name]
    x = numbers(1, before)
    y, _ = both(op, x)
    dy = gradient(2, after, y)
    _, dx = both(op, x, dy)
    assert [a.shape for a in dx] == [a.shape for a in x]
    assert inner(x, dx, before) == pytest.approx(inner(y, dy, after), rel=1e-12)


@pytest.mark.parametrize("name", OPS)
def test_states_are_as_they_say(name: str) -> None:
    """`whole` arrays and the gradients of `whole` and `addends` are the same bits on all ranks."""
    op, before, after = OPS[name]
    x = numbers(1, before)
    y, dx = both(op, x, gradient(2, after, both(op, x)[0]))
    for arrays, state, states in ((y, after, ("whole", "copies")), (dx, before, ("whole",))):
        if state in states:
            assert all(np.array_equal(a, arrays[0]) for a in arrays)


def test_forward() -> None:
    """Against NumPy on the whole arrays."""
    addends, parts = numbers(1, "addends"), numbers(1, "parts")
    total, joined = sum(addends), np.concatenate(parts, axis=AXIS)
    for y in both(OPS["leave"][0], addends)[0]:
        np.testing.assert_allclose(y, total, rtol=1e-14)
    for name in ("gather", "join"):
        for y in both(OPS[name][0], parts)[0]:
            np.testing.assert_array_equal(y, joined)
    y = np.concatenate(both(OPS["scatter"][0], addends)[0], axis=AXIS)
    np.testing.assert_allclose(y, total, rtol=1e-14)
    rows = numbers(1, "parts of 0")
    y = np.concatenate(both(OPS["exchange"][0], rows)[0], axis=AXIS)
    np.testing.assert_array_equal(y, np.concatenate(rows, axis=0))
    whole = numbers(1, "whole")
    y = np.concatenate(both(OPS["part, uneven"][0], whole)[0], axis=2)
    np.testing.assert_array_equal(y, whole[0])


PAIRS = [("enter", "leave"), ("gather", "scatter"), ("part", "join")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_each_is_the_backward_of_the_other(first: str, second: str) -> None:
    for one, other in ((first, second), (second, first)):
        op, before, after = OPS[one]
        x = numbers(1, before)
        dy = gradient(2, after, both(op, x)[0])
        dx = both(op, x, dy)[1]
        for got, wanted in zip(dx, both(OPS[other][0], dy)[0], strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_exchange_attention_heads_for_places() -> None:
    """Ulysses (arXiv:2309.14509): attention of own heads and all places, between two exchanges."""
    rng = np.random.default_rng(0)
    q, k, v, dctx = (rng.standard_normal((2, 6, 9, 4)) for _ in range(4))  # (B, H, T, K)
    ctx, cache = ops.sdpa(q, k, v, causal=True)
    wanted = cache.backward(dctx)

    def own(world: World, x: NDArray[Any]) -> NDArray[Any]:
        return np.split(x, world.size, axis=2)[world.rank]

    def work(world: World) -> tuple[Any, ...]:
        pairs = [distributed.exchange(own(world, x), world=world, cut=1, join=2) for x in (q, k, v)]
        heads, attention = ops.sdpa(*(x for x, _ in pairs), causal=True)
        y, back = distributed.exchange(heads, world=world, cut=2, join=1)
        dheads = attention.backward(back.backward(own(world, dctx)))
        return y, *(c.backward(d) for (_, c), d in zip(pairs, dheads, strict=False))

    found = [np.concatenate(parts, axis=2) for parts in zip(*threads.run(3, work), strict=True)]
    for got, exact in zip(found, (ctx, *wanted), strict=False):
        np.testing.assert_allclose(got, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("op", "shape", "message"),
    [
        (partial(distributed.scatter, axis=0), (4, 3), "scatter: 3 processes must divide axis 0"),
        (partial(distributed.exchange, cut=0, join=1), (4, 3), "exchange: 3 processes must divide"),
        (partial(distributed.gather, axis=2), (4, 3), "gather: axis must be one of the 2 axes"),
        (partial(distributed.part, axis=2), (4, 3), "part: axis must be one of the 2 axes"),
        (partial(distributed.join, axis=-3), (4, 3), "join: axis must be one of the 2 axes"),
    ],
)
def test_bad_input(op: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        both(op, [np.ones(shape)] * 3)


def test_parts_of_wrong_sizes_are_refused() -> None:
    parts = [np.ones((n, 2)) for n in (3, 1, 1)]
    with pytest.raises(ValueError, match=r"join: part . of 3 of 5 must have . at axis 0"):
        both(partial(distributed.join, axis=0), parts)
    with pytest.raises(ValueError, match="gather: 3 processes must divide axis 0"):
        both(partial(distributed.gather, axis=0), [np.ones((n, 2)) for n in (1, 2, 2)])


# --- the vocabulary ---


V, D = 11, 4  # 11 rows among 2 to 4 processes
LOSSES: list[dict[str, Any]] = [
    {},
    {"ignore_index": 3},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 0.3},
    {"reduction": "sum", "ignore_index": -100},
    {"reduction": "none", "label_smoothing": 0.2, "z_loss": 0.1, "ignore_index": 3},
]


def rows(world: World, x: NDArray[Any], axis: int = 0) -> NDArray[Any]:
    """The part of a rank."""
    first, last = V * world.rank // world.size, V * (world.rank + 1) // world.size
    return x.take(np.arange(first, last), axis=axis)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_embedding(n: int) -> None:
    """Rows are the same bits, since only one addend is not 0. Sums of dy may be in other orders."""
    rng = np.random.default_rng(0)
    table, ids, dy = (
        rng.standard_normal((V, D)),
        rng.integers(0, V, (3, 7)),
        rng.standard_normal((3, 7, D)),
    )
    y, cache = ops.embedding(table, ids=ids)

    def work(world: World) -> tuple[Any, Any]:
        y, cache = distributed.embedding(rows(world, table), ids=ids, vocab_size=V, world=world)
        return y, cache.backward(dy)

    ys, dtables = zip(*threads.run(n, work), strict=True)
    assert all(np.array_equal(got, y) for got in ys)
    np.testing.assert_allclose(np.concatenate(dtables), cache.backward(dy), rtol=1e-14)


@pytest.mark.parametrize("options", LOSSES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_cross_entropy(n: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    logits, targets = 20 * rng.standard_normal((3, 7, V)), rng.integers(0, V, (3, 7))
    targets[0, :2] = options.get("ignore_index", 0)
    loss, cache = ops.cross_entropy(logits, targets=targets, **options)
    dloss = rng.standard_normal(loss.shape)

    def work(world: World) -> tuple[Any, Any]:
        own: Any = {"vocab_size": V, "world": world}
        own_logits = rows(world, logits, axis=2)
        loss, cache = distributed.cross_entropy(own_logits, targets=targets, **own, **options)
        return loss, cache.backward(np.asarray(dloss))

    losses, dlogits = zip(*threads.run(n, work), strict=True)
    assert all(np.array_equal(got, losses[0]) for got in losses)
    np.testing.assert_allclose(losses[0], loss, rtol=1e-13)
    found = np.concatenate(dlogits, axis=2)
    np.testing.assert_allclose(found, cache.backward(np.asarray(dloss)), rtol=1e-12, atol=1e-15)


def test_cross_entropy_equals_torch() -> None:
    """An independent judge: torch's cross-entropy of the whole, and its autograd."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((5, V)), rng.integers(0, V, 5)
    leaf = torch.tensor(logits, requires_grad=True)
    options = {"ignore_index": 3, "label_smoothing": 0.1}
    loss = torch.nn.functional.cross_entropy(leaf, torch.tensor(targets), **options)
    loss.backward()

    def work(world: World) -> tuple[Any, Any]:
        own: Any = {"vocab_size": V, "world": world}
        own_logits = torch.tensor(rows(world, logits, axis=1))
        loss, cache = distributed.cross_entropy(
            own_logits, targets=torch.tensor(targets), **own, **options
        )
        return loss, cache.backward()

    losses, dlogits = zip(*threads.run(3, work), strict=True)
    torch.testing.assert_close(losses[2], loss.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.cat(dlogits, 1), leaf.grad, rtol=1e-12, atol=1e-16)


def test_large_logits_do_not_overflow() -> None:
    logits = np.asarray([[1e4, -1e4, 0.0, 9.99e3]])

    def work(world: World) -> Any:
        own = np.split(logits, 2, axis=1)[world.rank]
        return distributed.cross_entropy(own, targets=np.asarray([3]), vocab_size=4, world=world)[0]

    assert [float(loss) for loss in threads.run(2, work)] == [10 + np.log1p(np.exp(-10.0))] * 2


class _Again:
    """A cache that runs all threads again for its gradients, of one array on each rank."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def backward(self, dy: NDArray[Any]) -> Any:
        return self.run(dy)


@pytest.mark.parametrize("options", slow_but([LOSSES[0], LOSSES[-1]], LOSSES), ids=str)
def test_directional_derivatives_of_a_language_models_ends(options: dict[str, Any]) -> None:
    """Embedding, entered linear layer and loss of a tied table, by finite differences."""
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, V, (2, 5)), rng.integers(0, V, (2, 5))

    def fn(table: NDArray[Any]) -> tuple[Any, Any]:
        def run(dloss: NDArray[Any] | None) -> Any:
            def work(world: World) -> Any:
                own: Any = {"vocab_size": V, "world": world}
                part = rows(world, table)
                x, looked_up = distributed.embedding(part, ids=ids, **own)
                x, into = distributed.enter(x, world=world)
                logits, linear = ops.linear(x, part.T)
                loss, top = distributed.cross_entropy(logits, targets=targets, **own, **options)
                if dloss is None:
                    return loss
                dx, dw, _ = linear.backward(top.backward(np.asarray(dloss)))
                return looked_up.backward(into.backward(dx)) + dw.T

            found = threads.run(3, work)
            return found[0] if dloss is None else np.concatenate(found)

        return run(None), _Again(run)

    gradcheck(fn, rng.standard_normal((V, D))).require()


def test_a_table_of_another_part_is_refused() -> None:
    def work(world: World) -> Any:
        table = np.ones((4, D))
        return distributed.embedding(table, ids=np.asarray([0]), vocab_size=V, world=world)

    with pytest.raises(ValueError, match=r"embedding: table must have shape \((3|4), 4\)"):
        threads.run(3, work)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing"),
        ({"reduction": "median"}, ValueError, "reduction"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index"),
    ],
)
def test_bad_options_of_the_loss(options: Any, error: type[Exception], message: str) -> None:
    def work(world: World) -> Any:
        own: Any = {"vocab_size": 2, "world": world}
        return distributed.cross_entropy(np.ones((1, 1)), targets=np.asarray([0]), **own, **options)

    with pytest.raises(error, match=message):
        threads.run(2, work)


@pytest.mark.parametrize("target", [-1, 11])
def test_targets_out_of_range(target: int) -> None:
    def work(world: World) -> Any:
        own: Any = {"vocab_size": V, "world": world}
        logits = rows(world, np.ones((1, V)), axis=1)
        return distributed.cross_entropy(logits, targets=np.asarray([target]), **own)

    with pytest.raises(ValueError, match=f"cross_entropy: targets.*{target}"):
        threads.run(2, work)


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries(library: str) -> None:
    pytest.importorskip(library)
    backend = backends.get(library)
    x = np.arange(6.0).reshape(2, 3)
    with backend.active():

        def work(world: World) -> Any:
            y, cache = distributed.leave(backend.asarray(x), world=world)
            assert type(y) is type(backend.asarray(x))
            return backend.to_numpy(cache.backward(y))

        for got in threads.run(2, work):
            np.testing.assert_array_equal(got, 2 * x)
