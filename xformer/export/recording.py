"""Record a function of arrays as an ONNX graph, for sizes that are known only in a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from xformer.arrays.onnx import Array, Graph, NotExported
from xformer.base.choices import require_one_of
from xformer.dispatch.checks import require_sizes


class Input(NamedTuple):
    """An input of a graph. shape: ints, and names of sizes."""

    shape: tuple[int | str, ...]
    dtype: Any


def recorded(
    fn: Callable[[dict[str, Array]], dict[str, Array]],
    inputs: Mapping[str, Input],
    largest: Mapping[str, int],
    sizes: Mapping[str, int] | None,
) -> tuple[Graph, dict[str, Array]]:
    """The graph of `fn(inputs) -> outputs`, and its outputs by name.

    largest: name of each size in the inputs' shapes -> its largest value; of "batch", which has no
        largest one, the value while recording
    sizes: the sizes that are fixed; the others are dynamic

    NotExported if fn cannot be recorded, or if its graph depends on the value of a dynamic size:
    it is recorded for the largest sizes and for sizes smaller by one, and both must be equal.
    """
    from xformer.export import kernels  # noqa: F401 - registers them

    fixed = {name: _fixed(name, n, largest) for name, n in (sizes or {}).items()}
    dynamic = {name: n for name, n in largest.items() if name not in fixed}
    for name, n in dynamic.items():
        if n < 3:
            raise NotExported(f"onnx: {name} is at most {n}: fix it with sizes={{{name!r}: {n}}}")

    most = max((n for name, n in dynamic.items() if name != "batch"), default=0)

    def record(less: int) -> tuple[Graph, dict[str, Array]]:
        graph = Graph({name: n - less for name, n in dynamic.items()}, most)
        with graph.recording():
            arrays = {
                name: graph.input(name, [_plain(n, fixed) for n in x.shape], x.dtype)
                for name, x in inputs.items()
            }
            outputs = fn(arrays)
        for x in outputs.values():
            graph.name_of(x)
        return graph, outputs

    graph, outputs = record(0)
    if dynamic:
        _require_same(graph, record(1)[0], dynamic)
    return graph, outputs


def _plain(n: int | str, fixed: Mapping[str, int]) -> int | str:
    return fixed.get(n, n) if isinstance(n, str) else n


def _fixed(name: str, n: Any, largest: Mapping[str, int]) -> int:
    require_one_of("onnx: sizes", name, largest)
    (n,) = require_sizes("onnx", 1, **{f"sizes[{name!r}]": n})
    if n > largest[name] and name != "batch":
        raise ValueError(f"onnx: sizes[{name!r}] must be at most {largest[name]}, got {n}")
    return n


def _require_same(graph: Graph, other: Graph, dynamic: Mapping[str, int]) -> None:
    """Raise NotExported, with the name of the first op that differs, unless the graphs are equal.

    graph, other: recordings with different values of the dynamic sizes. If one graph is the
        beginning of the other one, no op is named.
    dynamic: its keys are the names of the dynamic sizes, for the message
    """
    message = "onnx: the graph depends on a dynamic size; fix one of {} with sizes".format(
        ", ".join(dynamic)
    )
    for a, b in zip(graph.nodes, other.nodes, strict=False):
        for x, y in zip(a.inputs, b.inputs, strict=False):
            if x in graph.constants and not _equal(graph.constants[x], other.constants.get(y)):
                raise NotExported(message, a.scope)
        if a != b:
            raise NotExported(message, a.scope)
    if len(graph.nodes) != len(other.nodes):
        raise NotExported(message)


def _equal(x: np.ndarray, y: np.ndarray | None) -> bool:
    return y is not None and x.shape == y.shape and x.tobytes() == y.tobytes()
