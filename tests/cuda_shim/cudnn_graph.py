"""Graphs of cuDNN's frontend, checked as it does, and their arithmetic, for `cuda_shim.cudnn`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuda_shim.array import Fault
from cuda_shim.cublaslt_parts import told_to_raise

Values = dict[str, np.ndarray]


class data_type(Enum):
    NOT_SET = ""
    FLOAT = "float32"
    HALF = "float16"
    BFLOAT16 = "bfloat16"


class diagonal_alignment(Enum):
    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class heur_mode(Enum):
    A = 0
    FALLBACK = 2


class cudnnGraphNotSupportedError(Exception):
    pass


class Tensor:
    """Of a graph. What an op makes is virtual until it is an output."""

    def __init__(self, data_type: data_type) -> None:
        self.dim: list[int] = []
        self.stride: list[int] = []
        self.data_type, self.uid, self.is_output = data_type, -1, False

    def set_output(self, is_output: bool) -> Tensor:
        self.is_output = is_output
        return self

    def set_uid(self, uid: int) -> Tensor:
        self.uid = uid
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: data_type) -> Tensor:
        self.data_type = data_type
        return self


class Graph:
    """`cudnn.pygraph`: one node, whose plan runs once all that builds it was called in order."""

    STEPS = ("validate", "build_operation_graph", "create_execution_plans", "select", "build_plans")

    def __init__(
        self,
        cudnn: Any,
        io_data_type: data_type = data_type.NOT_SET,
        intermediate_data_type: data_type = data_type.NOT_SET,
        compute_data_type: data_type = data_type.NOT_SET,
        handle: Any = None,
    ) -> None:
        if {intermediate_data_type, compute_data_type} != {data_type.FLOAT} or handle is None:
            raise Fault("sums are not in float32, or the graph has no handle")
        self.cudnn, self.io, self.handle = cudnn, io_data_type, handle
        self.device = cudnn.device
        self.ports: dict[str, Tensor] = {}
        self.results: tuple[str, ...] = ()
        self.node, self.options, self.done = "", {}, 0
        self.workspace = 0
        told_to_raise(self, cudnn.raises)

    def tensor(
        self,
        dim: list[int],
        stride: list[int],
        data_type: data_type = data_type.NOT_SET,
        uid: int = -1,
    ) -> Tensor:
        return Tensor(data_type).set_dim(dim).set_stride(stride).set_uid(uid)

    # ---- Nodes ----

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_scale: float | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        name: str = "",
        generate_stats: bool | None = None,
    ) -> list[Tensor]:
        if not generate_stats:
            raise Fault("backward needs the statistics")
        band = diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound
        return self._node("sdpa", dict(q=q, k=k, v=v), ("o", "stats"), attn_scale, band)

    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        attn_scale: float | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        name: str = "",
    ) -> list[Tensor]:
        band = diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound
        given = dict(q=q, k=k, v=v, o=o, dO=dO, stats=stats)
        made = self._node("sdpa_backward", given, ("dQ", "dK", "dV"), attn_scale, band)
        self.options["deterministic"] = use_deterministic_algorithm
        return made

    def _node(
        self, node: str, given: dict[str, Tensor], made: tuple[str, ...], scale: Any, band: Any
    ) -> list[Tensor]:
        alignment, left, right = band
        self.node, self.results = node, made
        of_node = (name.partition(".")[::2] for name in self.cudnn.raises)
        own = {step: f"{node}.{step}" for of, step in of_node if of == node and step}
        told_to_raise(self, {step: self.cudnn.raises[name] for step, name in own.items()})
        self.options = {"attn_scale": scale, "alignment": alignment, "left": left, "right": right}
        results = {name: Tensor(self.io) for name in made}
        self.ports = given | results
        return list(results.values())

    # ---- From a graph to a plan ----

    def _next(self, step: str) -> None:
        if self.STEPS[self.done] != step:
            raise Fault(f"{step} before {self.STEPS[self.done]}")
        self.done += 1

    def validate(self) -> None:
        self._next("validate")
        for name, tensor in self.ports.items():
            if len(tensor.dim) != 4 or len(tensor.stride) != 4:
                raise ValueError(f"The dim for {name} is invalid")
            if tensor.stride[3] != 1:
                raise cudnnGraphNotSupportedError(f"The stride for the last dimension of {name}")
        (_, h, t, width), (_, g, s, m) = self.ports["q"].dim, self.ports["v"].dim
        left, right = self.options["left"], self.options["right"]
        of_band = self.options["alignment"] is diagonal_alignment.BOTTOM_RIGHT
        if of_band and (t == s or (left, right) == (None, None)):
            raise Fault("aligned to the bottom right where the diagonal is the same")
        for refused, why in (
            (h % g or h % self.ports["k"].dim[1], "number of heads"),
            (width % 8 or m % 8, "hidden_dim should be multiple of 8"),
            (not self._has_widths(width, m), "hidden_dim should be less than or equal to"),
            (of_band and right is not None and t > s, "Bottom right causal mask does not support"),
            (left is not None and t > s, "Sliding window attention is only supported with"),
            (any(n <= 0 for x in self.ports.values() for n in x.stride), "a stride of 0 or less"),
            (self._misaligned(), "is no multiple of the tensor's 16-byte alignment"),
        ):
            if refused:
                raise cudnnGraphNotSupportedError(why)
        if (left is not None and left <= 0) or (right is not None and right < 0):
            raise ValueError("a bound is too low")
        self._require_shapes()

    def _has_widths(self, width: int, m: int) -> bool:
        """As the frontend checks them: of forward they are left to the library's plans."""
        major = self.cudnn.capability // 10
        if self.node == "sdpa":
            return True
        if major == 10 and (width == 192 or (width, m) == (256, 256)):
            return m == 128 if width == 192 else self.cudnn.backend_version() >= 92300
        return max(width, m) <= (256 if major == 9 else 128)

    def _misaligned(self) -> bool:
        own = [x for name, x in self.ports.items() if name != "stats"]
        return any(n > 1 and x.stride[i] % 8 for x in own for i, n in enumerate(x.dim[:3]))

    def _require_shapes(self) -> None:
        """Of all ports, which the frontend takes as they are given."""
        ports = self.ports
        q, k, v = (ports[name].dim for name in "qkv")
        ctx = [*q[:3], v[3]]
        wanted = {"q": q, "k": [q[0], k[1], k[2], q[3]], "v": [q[0], k[1], k[2], v[3]]}
        wanted |= {"o": ctx, "stats": [*q[:3], 1], "dO": ctx, "dQ": q, "dK": k, "dV": v}
        uids = [tensor.uid for tensor in ports.values()]
        if -1 in uids or len(set(uids)) < len(uids):
            raise Fault(f"tensors are not told apart: {uids}")
        for name, tensor in ports.items():
            kind = data_type.FLOAT if name == "stats" else self.io
            if tensor.dim != wanted[name] or tensor.data_type is not kind:
                raise Fault(f"{name} is {tensor.dim} of {tensor.data_type}")
            if tensor.is_output != (name in self.results):
                raise Fault(f"{name} is no output, or an input that is one")

    def build_operation_graph(self) -> None:
        self._next("build_operation_graph")

    def create_execution_plans(self, heuristics: list[heur_mode]) -> None:
        self._next("create_execution_plans")
        asked = self.node, self.options.get("deterministic")
        if self.node in self.cudnn.lacks or asked in self.cudnn.lacks:
            raise cudnnGraphNotSupportedError("No valid engine configs")
        # One of the frontend's own, one that cannot be built, and one that can.
        own = [SimpleNamespace(cpp_index=i) for i in range(len(heuristics))]
        self._plans = [SimpleNamespace(cpp_index=None), *own]

    @property
    def plans(self) -> list[SimpleNamespace]:
        if not hasattr(self, "_plans"):
            raise Fault("plans are asked for before they are created")
        return self._plans

    def select_plan(self, index: int) -> Graph:
        self.done = self.STEPS.index("select")
        self._next("select")
        self._selected = self.plans[index].cpp_index
        return self

    def build_plans(self) -> None:
        self._next("build_plans")
        if self._selected is None:
            raise Fault("a plan of the frontend's own is compiled")
        if self._selected == 0:
            raise cudnnGraphNotSupportedError("this engine is not for this graph")
        self.cudnn.built += 1
        self.workspace = 1000 + 8 * self.ports["q"].dim[2]
        self.tensors = {tensor.uid: tensor for tensor in self.ports.values()}
        self.names = {tensor.uid: name for name, tensor in self.ports.items()}

    def get_workspace_size(self) -> int:
        return self.workspace

    def execute(self, tensor_dict: dict[int, int], workspace: Any, handle: Any) -> None:
        if self.done < len(self.STEPS) or handle.device != self.device:
            raise Fault("the graph was not built, or for another device")
        self.cudnn.run(self, tensor_dict, workspace, handle)

    # ---- Arithmetic ----

    def arithmetic(self, random: np.random.Generator) -> Callable[[Values], Values]:
        """From the values of all ports to those of the results."""
        scale, left, right = (self.options[name] for name in ("attn_scale", "left", "right"))
        (t, s), shift = (self.ports[name].dim[2] for name in "qk"), 0
        if self.options["alignment"] is diagonal_alignment.BOTTOM_RIGHT:
            shift = s - t
        row, column = np.arange(t)[:, None], np.arange(s)[None, :]
        seen = np.ones((t, s), bool) if right is None else column <= row + shift + right
        if left is not None:
            seen &= column + left - shift > row
        groups = self.ports["q"].dim[1] // self.ports["k"].dim[1]

        def scores(x: Values) -> np.ndarray:
            product = x["q"] @ np.repeat(x["k"], groups, 1).swapaxes(2, 3)
            return np.where(seen, np.float32(scale) * product, np.float32(-np.inf))

        def forward(x: Values) -> Values:
            found = scores(x)
            top = found.max(axis=-1, keepdims=True)
            exps = np.exp(found - top)
            total = exps.sum(axis=-1, keepdims=True)
            ctx = exps / total @ np.repeat(x["v"], groups, 1)
            return {"o": ctx, "stats": top + np.log(total)}

        def backward(x: Values) -> Values:
            k, v = (np.repeat(x[name], groups, 1) for name in "kv")
            probs = np.exp(scores(x) - x["stats"])
            inner = (x["dO"] * x["o"]).sum(axis=-1, keepdims=True)
            dscores = probs * (x["dO"] @ v.swapaxes(2, 3) - inner) * np.float32(scale)
            dq = dscores @ k
            if not self.options["deterministic"]:  # added up in whatever order
                dq = dq * (1 + np.float32(2e-4) * random.random(dq.shape, np.float32))
            dk, dv = dscores.swapaxes(2, 3) @ x["q"], probs.swapaxes(2, 3) @ x["dO"]
            return {"dQ": dq, "dK": of_groups(dk, groups), "dV": of_groups(dv, groups)}

        return forward if self.node == "sdpa" else backward


def of_groups(x: np.ndarray, groups: int) -> np.ndarray:
    """Sums over the query heads that share keys."""
    b, h, s, width = x.shape
    return x.reshape(b, h // groups, groups, s, width).sum(axis=2)
