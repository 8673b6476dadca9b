"""Write a recorded graph as an ONNX file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors

import xformer
from xformer.arrays.onnx import Array, Graph, Node, NotExported, Size
from xformer.base.files import file_layout, replacing, write_arrays

# Opset 17, because tools of ONNX Runtime cannot infer the shape of opset 18's ReduceMax. Operations
# on bits, for a dropout mask, need opset 18. ONNX Runtime reads both since 1.14.
OPSET, OPSET_OF_BITS, IR_VERSION = 17, 18, 8
EXTERNAL = 1 << 30  # bytes of weights from which they are in a file of their own; ONNX has 2^31
ALIGNED = 4096  # bytes; the offset of each weight in that file is a multiple of it
# What tells the files beside a graph from files that no export has written.
HEADER = b"weights of an ONNX file, written by xformer\n"  # the file of weights begins with it
KEY = "xformer-onnx"  # in the metadata of the file of first values


class Exported(NamedTuple):
    """What was written. A type is a dtype and a shape, such as "int64 (batch, length)"."""

    files: tuple[Path, ...]
    inputs: dict[str, str]  # name -> type
    outputs: dict[str, str]
    n_nodes: int


def require_onnx() -> None:
    """ImportError that names the extra, unless the package onnx can be imported."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the package onnx is not installed: pip install 'xformer-array[onnx]'"
        ) from error


def require_path(path: str | os.PathLike[str]) -> Path:
    """The path. ValueError unless its name ends with .onnx, OSError if its folder is missing."""
    file = Path(path)
    if file.suffix != ".onnx":
        raise ValueError(f"onnx: the file's name must end with .onnx, got {str(path)!r}")
    if file.is_dir():
        raise IsADirectoryError(f"onnx: {file} is a folder")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"onnx: there is no folder {file.parent}")
    return file


def write(
    path: Path,
    graph: Graph,
    outputs: Mapping[str, Array],
    weights: Mapping[str, np.ndarray],
    about: Mapping[str, str],
    *,
    first: Mapping[str, np.ndarray] | None = None,
) -> Exported:
    """Write the graph, after `onnx.checker` has checked it. Each file is complete, or absent.

    weights: inputs of the graph that become initializers, by name. If they have 1 GiB or more, they
        are written to a file beside it, with the name's end .onnx.data.
    about: metadata
    first: first values of inputs, which are written to a file beside it, with the name's end
        .first.safetensors in place of .onnx

    FileExistsError if the file beside it exists and was not written by an export. Weights of an
    earlier export that the new graph does not need are deleted.
    """
    import onnx

    nodes = _needed(graph, outputs)
    proto = _proto(graph, nodes, outputs, about)
    _check(proto)
    used = {name for node in nodes for name in node.inputs}
    inputs = [x for x in proto.graph.input if x.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    weights = {name: w for name, w in weights.items() if name in used}
    is_external = sum(w.nbytes for w in weights.values()) >= EXTERNAL
    files = [path]  # last, when all that it needs is there
    data = path.with_name(path.name + ".data")
    if is_external:
        files.insert(0, data)
    elif first is not None:
        files.insert(0, path.with_suffix(".first.safetensors"))
    for side in files[:-1]:
        if side.exists() and not _is_own(side):
            raise FileExistsError(
                f"onnx: {side} exists, and no export has written it; give the graph another name"
            )
    with replacing(*files) as parts:
        if is_external:
            with parts[0].open("wb") as file:
                proto.graph.initializer.extend(_external(file, weights, files[0].name))
        else:
            proto.graph.initializer.extend(
                onnx.numpy_helper.from_array(file_layout(w), name) for name, w in weights.items()
            )
            if first is not None:
                write_arrays(first, parts[0], files[0], {KEY: "first values"})
        parts[-1].write_bytes(proto.SerializeToString())
    if not is_external and data.is_file() and _is_own(data):
        data.unlink()
    types = {x.name: _type(x) for x in (*inputs, *proto.graph.output)}
    return Exported(
        tuple(files),
        {x.name: types[x.name] for x in inputs},
        {name: types[name] for name in outputs},
        len(proto.graph.node),
    )


def _is_own(file: Path) -> bool:
    """Whether an export has written this file beside a graph."""
    if file.suffix == ".data":
        with file.open("rb") as opened:
            return opened.read(len(HEADER)) == HEADER
    try:
        with safetensors.safe_open(file, "np") as opened:
            return KEY in (opened.metadata() or {})
    except (safetensors.SafetensorError, OSError):
        return False


def _needed(graph: Graph, outputs: Mapping[str, Array]) -> list[Node]:
    """The nodes that the outputs depend on, in order."""
    wanted = {graph.name_of(x) for x in outputs.values()}
    nodes = []
    for node in reversed(graph.nodes):
        if wanted.intersection(node.outputs):
            nodes.append(node)
            wanted.update(node.inputs)
    return nodes[::-1]


def _proto(
    graph: Graph, nodes: list[Node], outputs: Mapping[str, Array], about: Mapping[str, str]
) -> Any:
    import onnx
    from onnx import helper

    opset = OPSET_OF_BITS if any(node.op.startswith("Bitwise") for node in nodes) else OPSET
    nodes = [_with_axes(graph, node, opset) for node in nodes]
    used = {name for node in nodes for name in node.inputs}
    used.update(graph.name_of(x) for x in outputs.values())
    constants = [
        onnx.numpy_helper.from_array(file_layout(c), name)
        for name, c in graph.constants.items()
        if name in used
    ]
    made = [
        helper.make_node(
            node.op,
            node.inputs,
            node.outputs,
            f"{node.scope}/{node.op}_{i}".lstrip("/"),
            **{
                name: helper.np_dtype_to_tensor_dtype(np.dtype(value)) if name == "to" else value
                for name, value in node.attributes
            },
        )
        for i, node in enumerate(nodes)
    ]
    made += [helper.make_node("Identity", [graph.name_of(x)], [n]) for n, x in outputs.items()]
    ins = [_info(graph, name, x) for name, x in graph.inputs.items()]
    outs = [_info(graph, name, x) for name, x in outputs.items()]
    proto = helper.make_model(
        helper.make_graph(made, "xformer", ins, outs, constants),
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", opset)],
        producer_name="xformer",
        producer_version=xformer.__version__,
    )
    helper.set_model_props(proto, dict(about))
    return proto


def _with_axes(graph: Graph, node: Node, opset: int) -> Node:
    """The node, with its axes as an input if it is a reduction that has them so in this opset."""
    if "axes" not in dict(node.attributes) or (opset == OPSET and node.op != "ReduceSum"):
        return node
    attributes = dict(node.attributes)
    axes = graph.name_of(Array.constant(np.asarray(attributes.pop("axes"), np.int64)))
    return node._replace(inputs=(*node.inputs, axes), attributes=tuple(attributes.items()))


def _info(graph: Graph, name: str, x: Array) -> Any:
    """The type of an input or output. Only sizes of inputs have names."""
    from onnx import helper

    names = {size.key: known for known, size in graph.sizes.items()}
    shape = [names.get(n.key) if isinstance(n, Size) else n for n in x.shape]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), shape)


def _type(x: Any) -> str:
    """The dtype and shape of an input or output."""
    from onnx import helper

    tensor = x.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    sizes = [
        d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in tensor.shape.dim
    ]
    return f"{dtype} ({', '.join(map(str, sizes))})"


def _check(proto: Any) -> None:
    import onnx

    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        why = str(error).partition("\n")[0]
        raise NotExported(f"onnx: the recorded graph is not valid: {why}") from error


def _external(file: BinaryIO, weights: Mapping[str, np.ndarray], location: str) -> Iterator[Any]:
    """Write the weights to a file, and yield their descriptions."""
    import onnx

    file.write(HEADER)
    for name, w in ((name, file_layout(w)) for name, w in weights.items()):
        file.write(bytes(-file.tell() % ALIGNED))
        dtype = onnx.helper.np_dtype_to_tensor_dtype(w.dtype)
        tensor = onnx.TensorProto(name=name, data_type=dtype, dims=w.shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        nbytes = math.prod(w.shape) * w.dtype.itemsize
        about = {"location": location, "offset": file.tell(), "length": nbytes}
        for key, value in about.items():
            tensor.external_data.add(key=key, value=str(value))
        file.write(w.data)
        yield tensor
