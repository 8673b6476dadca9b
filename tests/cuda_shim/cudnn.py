"""In the place of NVIDIA's package cudnn: attention by NumPy in the stand-in's memory.

    with calling_cudnn(Cudnn()) as cudnn:
        ops.sdpa(q, k, v)  # cudnn.calls is what was asked for

What cuDNN would refuse is its error; what it would not have noticed is a Fault: memory outside the
arrays, results that lie over each other, another stream, a workspace that is too small, or gone.
tests/test_cuda_frontend.py compares both with the package.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cuda_shim.array import Array, Fault, quietly
from cuda_shim.cublaslt_parts import Held, memory, told_to_raise
from cuda_shim.cudnn_graph import (
    Graph,
    cudnnGraphNotSupportedError,
    data_type,
    diagonal_alignment,
    heur_mode,
)
from cuda_shim.graph import note
from xformer.backends.cupy.cudnn_support import OLDEST
from xformer.backends.cupy.runtimes import AttentionStream


class Call(NamedTuple):
    """What was asked for."""

    name: str  # sdpa, sdpa_backward
    options: dict[str, Any]
    stream: int


class Handle:
    """Of a device, with the stream on which it starts what it is asked for."""

    def __init__(self, device: int) -> None:
        self.device, self.stream = device, 0


class Cudnn:
    """The module. lacks: names of graphs, or ("sdpa_backward", deterministic), without a plan.

    raises: errors of its functions and of its graphs'; "sdpa_backward.execute": of such graphs.
    """

    data_type, diagonal_alignment, heur_mode = data_type, diagonal_alignment, heur_mode
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError

    def __init__(
        self,
        lacks: Iterable[Any] = (),
        capability: int = 90,
        version: int = OLDEST,
        raises: Mapping[str, BaseException] | None = None,
    ) -> None:
        self.raises = dict(raises or {})
        told_to_raise(self, self.raises)
        self.lacks, self.version = tuple(lacks), version
        self.device, self.stream, self.capability = 0, 7, capability
        self.arrays: list[Array] = []  # of what is being asked for
        self.held: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
        self.calls: list[Call] = []
        self.built = 0  # graphs
        self.random = np.random.default_rng(0)

    def stream_of(self, arrays: Iterable[Array]) -> AttentionStream:
        self.arrays = list(arrays)
        return AttentionStream(self.device, self.stream, self.capability)

    def allocate(self, size: int) -> Held:
        held = Held(size, self.stream)
        self.held[held.ptr] = held
        return held

    # ---- The package ----

    def backend_version(self) -> int:
        return self.version

    def create_handle(self) -> Handle:
        return Handle(self.device)

    def set_stream(self, handle: Handle, stream: int) -> None:
        handle.stream = stream

    def pygraph(self, **options: Any) -> Graph:
        return Graph(self, **options)

    # ---- A graph that runs ----

    def run(self, graph: Graph, addresses: dict[int, int], workspace: Any, handle: Handle) -> None:
        if handle.device != self.device or handle.stream != self.stream:
            raise Fault(f"another stream or device than the current one: {handle.stream}")
        held = self.held.get(workspace)
        if held is None or held.size < graph.workspace or held.stream != self.stream:
            raise Fault(f"there is no workspace of {graph.workspace} bytes")
        if addresses.keys() != graph.tensors.keys():
            raise Fault(f"the graph names {sorted(graph.tensors)}, got {sorted(addresses)}")
        views = {graph.names[uid]: self._view(graph, uid, at) for uid, at in addresses.items()}
        self._require_apart({name: views[name] for name in graph.results}, views)
        arrays, compute = self.arrays, graph.arithmetic(self.random)

        def start() -> None:
            assert arrays  # whose memory it is
            given = {name: x.astype(np.float32) for name, x in views.items()}
            with quietly(True):
                for name, values in compute(given).items():
                    views[name][...] = values

        if not note(graph.node, (tuple(addresses.items()), graph.options["attn_scale"]), start):
            start()
        self.calls.append(Call(graph.node, graph.options, handle.stream))
        self.arrays = []

    def _require_apart(self, results: dict[str, np.ndarray], views: dict[str, np.ndarray]) -> None:
        for name, result in results.items():
            for other, x in views.items():
                if other != name and np.shares_memory(result, x):  # slices lie between each other
                    raise Fault(f"{name} is written over {other}")

    def _view(self, graph: Graph, uid: int, at: int) -> np.ndarray:
        """What a tensor of the graph is in memory."""
        tensor, name = graph.tensors[uid], graph.names[uid]
        if at % 16:
            raise Fault(f"{name} begins at no multiple of 16 bytes")
        bounds = [(*np.lib.array_utils.byte_bounds(x.host), x.dtype) for x in self.arrays]
        around = [(high, dtype) for low, high, dtype in bounds if low <= at < high]
        if not around:
            raise Fault(f"{name} is outside the arrays")
        high, dtype = max(around, key=lambda one: one[0])  # views may lie between each other
        if dtype.name != tensor.data_type.value:
            raise Fault(f"{name} holds {dtype.name}, not {tensor.data_type.value}")
        pairs = zip(tensor.dim, tensor.stride, strict=True)
        count = 1 + sum((n - 1) * stride for n, stride in pairs)
        if at + count * dtype.itemsize > high:
            raise Fault(f"{name} ends outside its array")
        strides = [dtype.itemsize * stride for stride in tensor.stride]
        return np.lib.stride_tricks.as_strided(memory(at, dtype, count), tensor.dim, strides)
