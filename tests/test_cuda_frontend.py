"""The graphs of attention, and the stand-in of cuDNN, beside NVIDIA's frontend, without a GPU.

It checks a graph by itself, and by cuDNN's own rules where the library is installed too
(nvidia-cudnn-cu13 or nvidia-cudnn-cu12).
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
from cuda_shim import Cudnn
from cuda_shim import cudnn_graph as own

from xformer.backends.cupy import cudnn_plan
from xformer.backends.cupy.cudnn_plan import Kind, by_rows, by_token
from xformer.backends.cupy.cudnn_support import unsupported

real = pytest.importorskip("cudnn", reason="NVIDIA's frontend of cuDNN is missing: extra cudnn")

KIND = Kind(
    "bfloat16",
    by_token(2, 4, 128, 64),
    by_token(2, 2, 192, 64),
    by_rows(2, 2, 192, 64),
    None,
    0,
    0.125,
    False,
    False,
)
GRAPHS = {"forward": cudnn_plan.forward_graph, "backward": cudnn_plan.backward_graph}
SHORT = by_token(2, 2, 128, 64)
ODD = by_rows(2, 4, 192, 12)
LONG = by_token(2, 4, 256, 64)
WHOLE = by_rows(2, 4, 128, 65)._replace(shape=(2, 4, 128, 64))  # rows of 130 bytes
KINDS = {
    "causal": (KIND, True),
    "full": (KIND._replace(right=None), True),
    "window": (KIND._replace(left=5, right=3), True),
    "own key": (KIND._replace(left=0, right=0), True),
    "left": (KIND._replace(left=5, right=None), True),
    "float16": (KIND._replace(dtype="float16"), True),
    "deterministic": (KIND._replace(deterministic=True), True),
    "many queries": (KIND._replace(q=LONG, right=None), True),
    "queries without keys": (KIND._replace(q=LONG), False),
    "queries ahead of a window": (KIND._replace(q=LONG, left=5, right=None), False),
    "odd widths": (KIND._replace(q=ODD, k=ODD, v=ODD), False),
    "odd groups": (KIND._replace(q=by_token(2, 3, 128, 64)), False),
    "odd steps": (KIND._replace(q=WHOLE), False),
    "as many keys": (KIND._replace(k=SHORT, v=SHORT), True),
    "gradients side by side": (KIND._replace(k=SHORT, v=SHORT, joined=True), True),
    "gradients of keys and values side by side": (KIND._replace(joined=True), True),
    "as many keys, window": (KIND._replace(k=SHORT, v=SHORT, left=5, right=3), True),
}
REFUSALS = (real.cudnnGraphNotSupportedError, ValueError)


def is_library_there() -> bool:
    try:
        return bool(real.backend_version())
    except RuntimeError:
        return False


needs_library = pytest.mark.skipif(
    not is_library_there(), reason="cuDNN is missing: nvidia-cudnn-cu13 or nvidia-cudnn-cu12"
)


class Frontend:
    """The package, which is told of an H100 unless of another device."""

    def __init__(self, capability: int = 90) -> None:
        self.pygraph = functools.partial(real.pygraph, sm_version=capability)

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


@pytest.mark.parametrize("direction", GRAPHS)
@pytest.mark.parametrize("name", [name for name, (_, is_right) in KINDS.items() if is_right])
def test_graphs_are_valid(name: str, direction: str) -> None:
    graph = GRAPHS[direction](Frontend(), None, KINDS[name][0])
    graph.validate()
    made = {tensor.get_uid() for tensor in graph.get_outputs()}
    wanted = {"forward": {4, 5}, "backward": {7, 8, 9}}
    assert made == wanted[direction]


@needs_library
@pytest.mark.parametrize("direction", GRAPHS)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_refused_is_what_the_stand_in_refuses(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules of the library, to which the frontend hands a graph."""
    kind, is_right = KINDS[name]
    fake = Cudnn()
    checked = GRAPHS[direction](fake, fake.create_handle(), kind)
    monkeypatch.setattr("cudnn._pygraph._default_backend_handle", lambda: None)
    graph = GRAPHS[direction](Frontend(), None, kind)
    if is_right:
        checked.validate()
        graph.validate()
        graph._lower_to_cpp().validate()
        return
    with pytest.raises((own.cudnnGraphNotSupportedError, ValueError)):
        checked.validate()
    with pytest.raises(REFUSALS):
        graph.validate()
        graph._lower_to_cpp().validate()


@needs_library
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
def test_widths_of_backward_are_those_of_the_library(
    capability: int, widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of `cudnn_support`, and the stand-in, beside what the frontend checks."""
    k, m = widths
    kind = KIND._replace(q=by_token(1, 2, 128, k), k=by_token(1, 2, 128, k))
    kind = kind._replace(v=by_token(1, 2, 128, m), backward=True)
    fake = Cudnn(capability=capability, version=real.backend_version())
    why = unsupported(
        capability, real.backend_version(), widths, backward=True, deterministic=False
    )
    monkeypatch.setattr("cudnn._pygraph._default_backend_handle", lambda: None)
    for cudnn, handle, errors in (
        (fake, fake.create_handle(), own.cudnnGraphNotSupportedError),
        (Frontend(capability), None, real.cudnnGraphNotSupportedError),
    ):
        graph = cudnn_plan.backward_graph(cudnn, handle, kind)
        if why is None:
            checked(graph)
            continue
        with pytest.raises(errors, match="hidden_dim"):
            checked(graph)


def checked(graph: Any) -> None:
    """By the library too, where the graph is the package's."""
    graph.validate()
    if isinstance(graph, real.pygraph):
        graph._lower_to_cpp().validate()


# ---- Names ----


@pytest.mark.parametrize(
    "name",
    [
        *("validate", "build_operation_graph", "create_execution_plans", "select_plan"),
        *("build_plans", "get_workspace_size", "execute", "tensor", "__init__"),
    ],
)
def test_methods_take_what_theirs_do(name: str) -> None:
    theirs = inspect.signature(getattr(real.pygraph, name)).parameters
    names = set(inspect.signature(getattr(own.Graph, name)).parameters) - {"cudnn"}
    assert names <= theirs.keys()


@pytest.mark.parametrize("name", ["create_handle", "set_stream", "backend_version"])
def test_functions_take_what_theirs_do(name: str) -> None:
    _, *names = inspect.signature(getattr(Cudnn, name)).parameters
    if name != "backend_version":  # compiled
        assert names == list(inspect.signature(getattr(real, name)).parameters)
    assert callable(getattr(real, name))


@pytest.mark.parametrize("name", ["sdpa", "sdpa_backward"])
def test_nodes_take_what_theirs_do(name: str) -> None:
    said = getattr(real._pybind_module.backend_graph, name).__doc__.splitlines()[0]
    parameters = inspect.signature(getattr(own.Graph, name)).parameters
    assert set(parameters) <= {"self", *re.findall(r"(\w+): ", said)}
    defaults = {p.name: p.default for p in parameters.values() if p.default in (None, False)}
    for argument, default in defaults.items():
        assert f"= {default}" in said.split(f"{argument}: ")[1].split(",")[0]


@pytest.mark.parametrize("name", ["data_type", "diagonal_alignment", "heur_mode"])
def test_names_are_theirs(name: str) -> None:
    theirs = getattr(real, name)
    assert all(hasattr(theirs, member.name) for member in getattr(own, name))


def test_tensors_have_their_methods() -> None:
    names = [name for name in vars(own.Tensor) if name.startswith("set_")]
    assert len(names) == 5
    for name in names:
        wanted = list(inspect.signature(getattr(own.Tensor, name)).parameters)
        assert len(inspect.signature(getattr(real.Tensor, name)).parameters) == len(wanted)


def test_plans_say_whose_they_are() -> None:
    from cudnn.engines.base import PlanConfig

    assert PlanConfig(0, None).cpp_index is None
    assert isinstance(real.pygraph.plans, property)
    assert PlanConfig(0, None, cpp_index=3).cpp_index == 3
