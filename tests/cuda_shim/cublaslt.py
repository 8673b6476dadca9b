"""In the place of nvmath.bindings.cublasLt: products by NumPy in the stand-in's memory.

    with calling(CublasLt()) as lt:  # on_request.py
        ops.linear(x, w, b)  # lt.products is what was asked for

What the library would refuse, or would not have noticed, is a Fault: descriptors that do not fit
each other or the algorithm, memory outside the arrays, addresses that are less aligned than the
heuristics were told, another stream's workspace. tests/test_cuda_bindings.py compares the names.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuda_shim.array import Array, Fault, quietly
from cuda_shim.cublaslt_parts import (
    COMPUTE_32F,
    COMPUTE_32F_FAST_TF32,
    NAMES,
    NOT_SUPPORTED,
    RESULT,
    SPLIT,
    WIDTHS,
    Epilogue,
    Held,
    Layout,
    MatmulDescAttribute,
    MatmulPreferenceAttribute,
    MatrixLayoutAttribute,
    Product,
    ReductionScheme,
    cuBLASLtError,
    gelu,
    memory,
    product,
    read,
    rounded,
    slope,
    told_to_raise,
)
from cuda_shim.graph import note
from xformer.backends.cupy.runtimes import MatmulStream


class CublasLt:
    """The module. lacks: epilogues for which there is no algorithm; raises: errors of functions."""

    workspace = 1 << 20  # bytes that an algorithm needs which splits sums
    Epilogue, ReductionScheme = Epilogue, ReductionScheme
    MatmulDescAttribute = MatmulDescAttribute
    MatmulPreferenceAttribute = MatmulPreferenceAttribute
    MatrixLayoutAttribute = MatrixLayoutAttribute
    cuBLASLtError = cuBLASLtError
    matmul_heuristic_result_dtype = RESULT

    def __init__(
        self, lacks: Sequence[int] = (), raises: Mapping[str, BaseException] | None = None
    ) -> None:
        self.lacks = lacks
        told_to_raise(self, raises or {})
        self.device, self.stream, self.tf32 = 0, 7, False
        self.arrays: Sequence[Array] = ()  # of the product that is being asked for
        self.held: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
        self.lent = 0  # workspaces so far
        self.products: list[Product] = []
        self.alive: dict[int, Any] = {}
        self.algorithms: dict[int, Any] = {}
        self._ids = itertools.count(1)
        self._random = np.random.default_rng(0)

    # ---- The runtime ----

    def stream_of(self, arrays: Sequence[Array]) -> MatmulStream:
        self.arrays = arrays
        return MatmulStream(self.device, self.stream, self.tf32)

    def allocate(self, size: int) -> Any:
        held = Held(size, (self.device, self.stream))
        self.held[held.ptr] = held
        self.lent += 1
        return held

    # ---- Handles and descriptors ----

    def _made(self, what: Any) -> int:
        self.alive[number := next(self._ids)] = what
        return number

    def create(self) -> int:
        return self._made(("handle", self.device))

    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        if scale_type != 0 or compute_type not in (COMPUTE_32F, COMPUTE_32F_FAST_TF32):
            raise Fault(f"sums are not in float32: {compute_type}, {scale_type}")
        return self._made({"compute": compute_type, MatmulDescAttribute.BIAS_DATA_TYPE: -1})

    def matmul_desc_destroy(self, matmul_desc: int) -> None:
        del self.alive[matmul_desc]

    def matmul_desc_set_attribute(
        self, matmul_desc: int, attr: int, buf: int, size_in_bytes: int
    ) -> None:
        kind = self.get_matmul_desc_attribute_dtype(attr)
        self.alive[matmul_desc][attr] = read(kind, buf, size_in_bytes)

    def get_matmul_desc_attribute_dtype(self, attr: int) -> Any:
        long = dict.fromkeys((8, 10, 11, 12), np.int64)
        return ({7: np.uint32} | long).get(MatmulDescAttribute(attr), np.int32)

    def matrix_layout_create(self, type: int, rows: int, cols: int, ld: int) -> int:
        if type not in NAMES or min(rows, cols) < 1 or ld < rows:
            raise Fault(f"no layout: type {type}, {rows} rows, {cols} columns, {ld} between them")
        return self._made(Layout(type, rows, cols, ld))

    def matrix_layout_set_attribute(
        self, mat_layout: int, attr: int, buf: int, size_in_bytes: int
    ) -> None:
        number = read(self.get_matrix_layout_attribute_dtype(attr), buf, size_in_bytes)
        name = {5: "count", 6: "apart"}[attr]
        self.alive[mat_layout] = self.alive[mat_layout]._replace(**{name: number})

    def get_matrix_layout_attribute_dtype(self, attr: int) -> Any:
        return np.int32 if MatrixLayoutAttribute(attr) == 5 else np.int64

    def matrix_layout_destroy(self, mat_layout: int) -> None:
        del self.alive[mat_layout]

    def matmul_preference_create(self) -> int:
        return self._made({})

    def matmul_preference_destroy(self, pref: int) -> None:
        del self.alive[pref]

    def matmul_preference_set_attribute(
        self, pref: int, attr: int, buf: int, size_in_bytes: int
    ) -> None:
        kind = self.get_matmul_preference_attribute_dtype(attr)
        self.alive[pref][attr] = read(kind, buf, size_in_bytes)

    def get_matmul_preference_attribute_dtype(self, attr: int) -> Any:
        return np.uint64 if MatmulPreferenceAttribute(attr) == 1 else np.uint32

    # ---- Algorithms ----

    def matmul_algo_get_heuristic(
        self,
        light_handle: int,
        operation_desc: int,
        adesc: int,
        bdesc: int,
        cdesc: int,
        ddesc: int,
        preference: int,
        requested_algo_count: int,
        heuristic_results_array: int,
        return_algo_count: int,
    ) -> None:
        if self.alive[light_handle] != ("handle", self.device):
            raise Fault("the handle is another device's")
        operation = self.alive[operation_desc]
        epilogue = operation.get(MatmulDescAttribute.EPILOGUE, Epilogue.DEFAULT)
        if epilogue in self.lacks:
            raise cuBLASLtError(NOT_SUPPORTED)
        wanted = self._wanted(operation, adesc, bdesc, cdesc, ddesc)
        number = next(self._ids)
        told = [min(at & -at, 256) for at in self._pointed(operation)]
        self.algorithms[number] = wanted, dict(self.alive[preference]), told
        result = memory(heuristic_results_array, self.matmul_heuristic_result_dtype, 1)
        size = self.workspace if wanted[3][0].cols >= SPLIT or wanted[3][0].rows >= SPLIT else 0
        result["algo"]["data_"][0, 0], result["workspace_size"], result["state"] = number, size, 0
        memory(return_algo_count, np.dtype(np.int32), 1)[0] = requested_algo_count

    def _wanted(self, operation: Any, *descriptors: int) -> Any:
        """All that an algorithm depends on; Fault where it does not fit together."""
        a, b, c, d = (self.alive[number] for number in descriptors)
        trans = tuple(operation.get(name, 0) for name in (3, 4))
        (m, k), (k2, n) = (
            (x.cols, x.rows) if t else (x.rows, x.cols) for x, t in zip((a, b), trans, strict=True)
        )
        if (m, n, k, c) != (d.rows, d.cols, k2, d):
            raise Fault(f"the matrices do not fit: {a}, {b}, {c}, {d}, transposed {trans}")
        epilogue = Epilogue(operation.get(MatmulDescAttribute.EPILOGUE, 1))
        kind = operation[MatmulDescAttribute.BIAS_DATA_TYPE]
        if a.type != b.type or d.type not in (a.type, 0):
            raise Fault(f"cuBLASLt has no such types: {a}, {b}, {d}")
        if epilogue.has_vector and kind != d.type:
            raise Fault(f"cuBLASLt has no such types: {d}, vector {kind}")
        step = operation.get(MatmulDescAttribute.EPILOGUE_AUX_LD, 0)
        if epilogue.has_aux and (step < d.rows or step % 8):
            raise Fault(f"the array beside has rows of {step}, no multiple of 8 from {d.rows} on")
        for has, at in zip(
            (epilogue.has_vector, epilogue.has_aux), self._pointed(operation), strict=True
        ):
            if has and not at:
                raise Fault(f"{epilogue.name} has nowhere to point")
        if operation["compute"] != COMPUTE_32F and a.type != 0:
            raise Fault("only float32 is rounded to TF32")
        if len({x.count for x in (a, b, d)}) > 1:
            raise Fault(f"as many matrices of each: {a}, {b}, {d}")
        if d.count > 1 and (d.apart < d.cols * d.ld or epilogue not in (1, 4)):
            raise Fault(f"several products write to one place, or have sums: {d}")
        vector_apart = operation.get(MatmulDescAttribute.BIAS_BATCH_STRIDE, 0)
        return operation["compute"], trans, epilogue, (a, b, d), step, vector_apart

    def _pointed(self, operation: Any) -> tuple[int, int]:
        names = MatmulDescAttribute.BIAS_POINTER, MatmulDescAttribute.EPILOGUE_AUX_POINTER
        vector, aux = (operation.get(name, 0) for name in names)
        return vector, aux

    # ---- The product ----

    def matmul(
        self,
        light_handle: int,
        compute_desc: int,
        alpha: int,
        a: int,
        adesc: int,
        b: int,
        bdesc: int,
        beta: int,
        c: int,
        cdesc: int,
        d: int,
        ddesc: int,
        algo: int,
        workspace: int,
        workspace_size_in_bytes: int,
        stream: int,
    ) -> None:
        number = int(memory(algo, np.dtype("<u8"), 8)[0])
        wanted, preferred, told = self.algorithms[number]
        operation = self.alive[compute_desc]
        if wanted != self._wanted(operation, adesc, bdesc, cdesc, ddesc):
            raise Fault("the algorithm was advised for another product")
        if stream != self.stream or self.alive[light_handle] != ("handle", self.device):
            raise Fault(f"another stream or device than the current one: {stream}")
        needed = int(memory(algo, self.matmul_heuristic_result_dtype, 1)["workspace_size"][0])
        self._require_workspace(workspace, workspace_size_in_bytes, needed, preferred[1])
        if c != d:
            raise Fault("what is added to is not what is written to")
        _, trans, epilogue, three, _, vector_apart = wanted
        add = float(memory(beta, np.dtype("f4"), 1)[0])
        pointed = self._pointed(operation)
        steps = [of.apart * WIDTHS[of.type] for of in three]
        runs = []
        for i in range(three[2].count):
            at = [x + i * step for x, step in zip((a, b, d), steps, strict=True)]
            own = pointed[0] + i * vector_apart * WIDTHS[three[2].type], pointed[1]
            runs.append(self._one(wanted, preferred, told, at, own, alpha, add))

        def run() -> None:
            for one in runs:
                one()

        if not note("matmul", (epilogue, trans, a, b, d, pointed, add), run):
            run()
        mask = preferred[MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK]
        self.products.append(Product(epilogue, trans, three, wanted[0], add, mask, stream))
        self.arrays = ()

    def _one(
        self,
        wanted: Any,
        preferred: Any,
        told: Sequence[int],
        at: Sequence[int],
        pointed: tuple[int, int],
        alpha: int,
        add: float,
    ) -> Callable[[], None]:
        """The work of one product, of which there may be several."""
        a, b, d = at
        for name, address in zip((5, 6, 7, 8), (a, b, d, d), strict=True):
            if address % preferred.get(name, 256):
                raise Fault(f"an address is not aligned as the heuristics were told: {name}")
        compute, trans, epilogue, (of_a, of_b, of_d), step, _ = wanted
        views = self._view(a, of_a), self._view(b, of_b)
        out = self._view(d, of_d)
        if any(np.may_share_memory(self._owner(x).host, self._owner(d).host) for x in (a, b)):
            raise Fault("a factor is written to")
        scale = float(memory(alpha, np.dtype("f4"), 1)[0])
        mask = preferred[MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK]
        vector = self._vector(epilogue, pointed[0], of_d)
        aux = self._view(pointed[1], of_d._replace(ld=step)) if epilogue.has_aux else None
        for beside, address, aligned in zip((vector, aux), pointed, told, strict=True):
            if beside is not None and address % aligned:
                raise Fault("what the epilogue has beside is not aligned as was told")
        if aux is not None and (aux.ctypes.data % 16 or np.may_share_memory(aux, out)):
            raise Fault("the array beside is not aligned to 16 bytes, or is what is written to")
        arrays = self.arrays  # whose memory it is

        def run() -> None:
            assert arrays
            factors = [rounded(x.astype(np.float32), compute) for x in views]
            factors = [x.T if turn else x for x, turn in zip(factors, trans, strict=True)]
            with quietly(True):
                y = np.float32(scale) * product(*factors, out.dtype, mask, self._random.normal())
                y = y + np.float32(add) * out.astype(np.float32) if add else y
                out[...] = self._epilogue(epilogue, vector, aux, factors, y)

        return run

    def _vector(self, epilogue: Epilogue, at: int, d: Layout) -> Any:
        """What the epilogue reads or writes; None without one."""
        size = d.cols if epilogue == Epilogue.BGRADB else d.rows
        return self._view(at, Layout(d.type, size, 1, size)) if epilogue.has_vector else None

    def _epilogue(
        self, epilogue: Epilogue, vector: Any, aux: Any, factors: Any, y: Any
    ) -> np.ndarray:
        a, b = factors
        if epilogue & Epilogue.BIAS:
            y = y + vector.astype(np.float32)
        elif epilogue.has_vector:
            vector[:, 0] = a.sum(axis=1) if epilogue == Epilogue.BGRADA else b.sum(axis=0)
        if epilogue == Epilogue.DGELU:
            return y * slope(aux.astype(np.float32))  # type: ignore[no-any-return]
        if epilogue.has_aux:
            aux[...] = y
        return gelu(y) if epilogue & Epilogue.GELU else y

    # ---- Memory ----

    def _require_workspace(self, at: int, size: int, needed: int, most: int) -> None:
        if not needed <= size <= most:
            raise Fault(f"the workspace has {size} bytes, {needed} to {most} are needed")
        if size == 0:
            return
        held = self.held.get(at)
        if held is None or held.size < size:
            raise Fault(f"there is no workspace of {size} bytes")
        if held.stream != (self.device, self.stream):
            raise Fault(f"the workspace is that of another stream: {held.stream}")

    def _owner(self, at: int) -> Array:
        for array in self.arrays:
            low, high = np.lib.array_utils.byte_bounds(array.host)
            if low <= at < high:
                return array
        raise Fault(f"an address outside the arrays: {at}")

    def _view(self, at: int, of: Layout) -> np.ndarray:
        """What a layout finds there."""
        owner = self._owner(at)
        dtype, high = owner.host.dtype, np.lib.array_utils.byte_bounds(owner.host)[1]
        if dtype.name != NAMES[of.type]:
            raise Fault(f"numbers are {dtype.name}, not {NAMES[of.type]}")
        count = (of.cols - 1) * of.ld + of.rows
        if at + count * dtype.itemsize > high:
            raise Fault(f"{of} ends outside its array")
        flat = memory(at, dtype, count)
        strides = (dtype.itemsize, of.ld * dtype.itemsize)
        return np.lib.stride_tricks.as_strided(flat, (of.rows, of.cols), strides)
