"""`tree`: map, flatten, unflatten, nbytes over nested containers."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import array_api_strict as strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xformer import tree
from xformer.backends import Backend


class Pair(NamedTuple):
    w: Any
    b: Any


class Single(NamedTuple):
    x: Any


NESTED = Pair([Single(1), (2, None)], {"c": Pair(3, None), "d": ()})


def test_map_keeps_structure_types_and_absent_leaves() -> None:
    doubled = tree.map(lambda x: 2 * x, NESTED)
    assert doubled == Pair([Single(2), (4, None)], {"c": Pair(6, None), "d": ()})
    assert type(doubled.w[0]) is Single
    assert type(doubled.w[1]) is tuple
    assert tree.map(lambda x: 2 * x, 3) == 6
    assert tree.map(lambda x: 2 * x, None) is None


def test_map_over_several_trees() -> None:
    assert tree.map(lambda x, y, z: (x, y, z), Pair(1, [2]), Pair(3, [4]), Pair(5, [6])) == Pair(
        (1, 3, 5), [(2, 4, 6)]
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Pair(1, 2), Single(1), "the root has parts w, b in the first tree, got x"),
        (Pair(1, Single(2)), Pair(1, 3), "b has parts x in the first tree, got int"),
        (Pair(1, 3), Pair(1, Single(2)), "b is an array in the first tree only"),
        (Pair(1, 3), Pair(1, None), "b is an array in the first tree only"),
        (Pair(1, None), Pair(1, 2), "b is absent in the first tree only"),
        (Pair(1, Single(2)), Pair(1, None), "b has parts x in the first tree, got NoneType"),
        ([Single(1)], [Single(1), Single(1)], "the root has parts 0 in the first tree, got 0, 1"),
        ({"a": {"c": [1]}}, {"a": {"c": 1}}, "a.c has parts 0 in the first tree, got int"),
        ({1: 1, 2: 2}, {1: 1}, "the root has parts 1, 2 in the first tree, got 1"),
        (1, (1,), "the root is an array in the first tree only"),
    ],
)
def test_map_names_the_place_where_structures_differ(first: Any, second: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^tree\.map: {message}$"):
        tree.map(lambda x, y: x, first, second)


def test_flatten_names_leaves_in_order() -> None:
    assert list(tree.flatten(NESTED).items()) == [("w.0.x", 1), ("w.1.0", 2), ("b.c.w", 3)]
    assert tree.flatten(5) == {"": 5}
    assert tree.flatten(None) == {}
    assert tree.flatten(()) == {}


def test_names_are_of_trees_that_are_built_alike() -> None:
    """Which are remembered: whatever may differ must make another name."""

    class Named(dict[str, Any]):
        _fields = ("x",)

    trees: list[tuple[Any, list[str]]] = [
        (Pair(1, None), ["w"]),
        (Pair(None, 2), ["b"]),
        (Pair(tree.Constant(1), 2), ["b"]),
        (Pair(1, tree.Constant(2)), ["w"]),
        (Pair((), 1), ["b"]),
        (Pair((1,), None), ["w.0"]),
        ((1, 2), ["0", "1"]),
        ([(1,), 2], ["0.0", "1"]),
        ([1, (2,)], ["0", "1.0"]),
        ([[1, 2]], ["0.0", "0.1"]),
        ([[1], 2], ["0.0", "1"]),
        ({"a": 1, "c": 2}, ["a", "c"]),
        ({"c": 1, "a": 2}, ["c", "a"]),
        (Named(a=1), ["a"]),
        (Named(c=1), ["c"]),
    ]
    for _ in range(2):
        for one, names in trees:
            assert list(tree.flatten(one)) == names
            assert list(tree.flatten({"in": one})) == [f"in.{name}" for name in names]


def test_leaves_side_by_side() -> None:
    other = tree.map(lambda leaf: 10 * leaf, NESTED)
    assert tree.beside(NESTED, other) == [(1, 10), (2, 20), (3, 30)]
    assert tree.beside(NESTED) == [(1,), (2,), (3,)]
    assert tree.beside(5, 6, 7) == [(5, 6, 7)]
    assert tree.beside(Pair(tree.Constant(1.0), 2), Pair(None, 3)) == [(2, 3)]  # neither a leaf
    assert tree.beside((), ()) == tree.beside(None, None) == []
    unlike: list[tuple[Any, Any]] = [
        (Pair(1, None), Pair(1, 2)),
        (Pair(1, 2), Pair(1, None)),
        (Pair(1, 2), (1, 2)),
        ((1, 2), (1, 2, 3)),
        ([1], [1, 2]),
        ((1,), [1]),
        ((1, (2,)), (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # in another order
        ({"a": 1}, {"b": 1}),
        ({"a.b": 1}, {"a.b": 1}),  # of which `flatten` sees whether two have one name
        ({1: 1}, {True: 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        (1, 1.0),
    ]
    for one, another in unlike:
        for trees in ((one, another), (another, one), (one, one, another)):
            assert tree.beside(*trees) is None, trees


def test_few_names_are_remembered() -> None:
    def flatten(first: int) -> None:
        for i in range(first, first + 600):
            assert tree.flatten({f"n{i}": 1, "x": [i]}) == {f"n{i}": 1, "x.0": i}

    threads = [threading.Thread(target=flatten, args=(n,)) for n in range(0, 2400, 600)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tree._known) <= tree.REMEMBERED + len(threads)


def test_flatten_goes_deep() -> None:
    deep: Any = 1
    for _ in range(800):
        deep = [deep]
    assert list(tree.flatten(deep)) == [".".join("0" * 800)]


def test_flatten_refuses_two_leaves_of_one_name() -> None:
    with pytest.raises(ValueError, match=r"^flatten: two leaves are called a\.b$"):
        tree.flatten({"a": {"b": 1}, "a.b": 2})


def test_unflatten() -> None:
    leaves = {name: str(leaf) for name, leaf in tree.flatten(NESTED).items()}
    rebuilt = tree.unflatten(NESTED, leaves)
    assert rebuilt == Pair([Single("1"), ("2", None)], {"c": Pair("3", None), "d": ()})
    backwards = dict(reversed(leaves.items()))  # names count, not their order
    assert tree.unflatten(NESTED, backwards) == rebuilt
    with pytest.raises(ValueError, match=r"^unflatten: missing w; unexpected nothing$"):
        tree.unflatten(Pair(1, 2), {"b": 0})
    with pytest.raises(ValueError, match=r"^unflatten: missing b, w; unexpected c, d$"):
        tree.unflatten(Pair(1, 2), {"d": 0, "c": 0})


def nests() -> st.SearchStrategy[Any]:
    names = st.text("abc", min_size=1, max_size=3)
    return st.recursive(
        st.integers() | st.none(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(names, inner, max_size=3)
            | st.builds(Pair, inner, inner)
            | st.builds(Single, inner)
        ),
        max_leaves=12,
    )


def leaf_count(nest: Any) -> int:
    if isinstance(nest, dict):
        return sum(map(leaf_count, nest.values()))
    return sum(map(leaf_count, nest)) if isinstance(nest, tuple | list) else nest is not None


@settings(max_examples=150, deadline=None)
@given(nests())
def test_round_trip(nest: Any) -> None:
    leaves = tree.flatten(nest)
    assert len(leaves) == leaf_count(nest)
    rebuilt = tree.unflatten(nest, leaves)
    assert repr(rebuilt) == repr(nest)  # the types too
    assert tree.beside(nest, rebuilt) == [(leaf, leaf) for leaf in leaves.values()]
    assert tree.map(type, tree.map(lambda x: x, nest)) == tree.map(type, nest)
    assert tree.flatten(tree.map(lambda x: x + 1, nest)) == {k: x + 1 for k, x in leaves.items()}
    assert tree.map(lambda x, y: x - y, nest, rebuilt) == tree.map(lambda x: 0, nest)


def test_nbytes_counts_each_array_once(library: Backend) -> None:
    a = library.asarray(np.ones((3, 5)), "float64")  # 120 bytes
    b = library.asarray(np.ones(7), "float32")  # 28
    assert tree.nbytes(a) == 120
    assert tree.nbytes(Pair(a, [b, None, {"c": a}])) == 148
    assert tree.nbytes(Pair(a, a + 0)) == 240
    assert tree.nbytes([None, (), 3.0, "text"]) == 0
    for dtype, size in (("bool", 1), ("uint8", 1), ("int16", 2), ("int32", 4), ("int64", 8)):
        assert tree.nbytes(library.asarray(np.ones(11), dtype)) == 11 * size, dtype
    assert tree.nbytes(library.asarray(np.ones((0, 3)), "float32")) == 0
    assert tree.nbytes(library.asarray(np.ones(()), "float32")) == 4


def test_nbytes_of_other_dtypes() -> None:
    assert tree.nbytes(np.ones(3, np.float16)) == 6
    assert tree.nbytes(np.ones(3, np.complex64)) == 24
    assert tree.nbytes(strict.ones(3, dtype=strict.complex128)) == 48
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert tree.nbytes(np.ones(3, ml_dtypes.bfloat16)) == 6


def test_map_on_arrays_of_every_library(library: Backend) -> None:
    a = library.asarray(np.arange(6.0).reshape(2, 3), "float64")
    rows = tree.map(lambda x, y: x + 2 * y, Pair(a, [a]), Pair(a, [a]))
    assert np.array_equal(library.to_numpy(rows.b[0]), 3 * np.arange(6.0).reshape(2, 3))
    assert list(tree.flatten(Pair(a, [a]))) == ["w", "b.0"]


def test_map_nodes() -> None:
    """Nodes of a type in any place, with their names; not those within."""
    seen: dict[str, Any] = {}

    def doubled(name: str, node: Single) -> Any:
        seen[name] = node
        return Pair(node, node)

    got = tree.map_nodes(doubled, Pair([Single(Single(1)), (2, Single(3))], None), Single)
    one, three = Single(Single(1)), Single(3)
    assert got == Pair([Pair(one, one), (2, Pair(three, three))], None)
    assert seen == {"w.0": one, "w.1.1": three}
    assert tree.map_nodes(doubled, one, Single) == Pair(one, one)
    assert tree.map_nodes(doubled, {"a": 1}, (Single, Pair)) == {"a": 1}
