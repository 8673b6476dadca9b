"""Hugging Face's transformers as a judge: models of random weights, run in float64 throughout.

transformers computes norms, softmax and rotary angles in float32 whatever the model's type. For a
comparison to 1e-9 its names of float32 stand for float64 while it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from xformer import pretrained, tree
from xformer.initializers import Shapes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
core_model_loading = pytest.importorskip("transformers.core_model_loading")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FLOAT64, FLOAT32 = 1e-9, 1e-4
ROUNDINGS = 16  # of the largest gradient, in one that is 0 but for them

Values = dict[str, np.ndarray]


@contextmanager
def double_precision(*, integers: bool = True) -> Iterator[None]:
    """torch's names of float32 mean float64, and its default; integers: where they become floats
    by `tensor.float()` too."""
    single = torch.Tensor.float

    def double(x: Any) -> Any:
        return x.double() if integers or x.is_floating_point() else single(x)

    with pytest.MonkeyPatch.context() as patch, default_double():
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", double)
        yield


@contextmanager
def default_double() -> Iterator[None]:
    """What has no type becomes float64: dynamic frequencies, which are made from integers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(kind: type, config: Any, *, seed: int = 0) -> Any:
    """A model with eager attention whose every parameter is random, norms and biases too."""
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    with double_precision():
        model = kind(config).double().eval()
    for name, parameter in model.named_parameters():
        gain = 0.3 if parameter.ndim == 1 else 1 / parameter.shape[-1] ** 0.5
        offset = 1.0 if parameter.ndim == 1 and "bias" not in name else 0.0
        with torch.no_grad():
            parameter.copy_(offset + gain * torch.randn(parameter.shape, dtype=torch.float64))
    for buffer in corrections(model).values():
        buffer.copy_(0.3 * torch.randn(buffer.shape, dtype=torch.float64))
    return model


def proof(
    hf: Any,
    folder: Path,
    inputs: Values,
    ours: Callable[[Any, Any], tuple[np.ndarray, Any]],
    *,
    output: str = "logits",
    keep: np.ndarray | None = None,
    integers: bool = True,
) -> None:
    """Loaded from what transformers saved: its output, its gradients; and saved so that it loads.

    inputs: of transformers' model   ours(model, params): (y, cache)   output: which of its
    outputs is y   keep: (B, T), where y is compared, since what comes out for padding is nobody's.
    integers: see `double_precision`.
    """
    hf.double().save_pretrained(folder / "theirs")
    with double_precision(integers=integers):
        want = judged(hf, inputs, output, keep)
    model, params = pretrained.load(folder / "theirs", dtype="float64")
    require_same(model, *ours(model, params), want, FLOAT64, keep)
    pretrained.save(model, params, folder / "ours")
    with double_precision(integers=integers):
        again = reloaded(hf, folder / "ours")
        got = judged(again, inputs, output, keep)
    require_close("reloaded", got.y, want.y, FLOAT64)
    _, reread = pretrained.load(folder / "ours", dtype="float64")
    require_equal(reread, params)
    want = judged(hf.float(), inputs, output, keep)
    model, params = pretrained.load(folder / "theirs")
    require_same(model, *ours(model, params), want, FLOAT32, keep)


class Judged(NamedTuple):
    """What transformers gives."""

    y: np.ndarray
    dy: np.ndarray  # random
    grads: Values  # of all parameters


def judged(hf: Any, inputs: Values, output: str, keep: np.ndarray | None = None) -> Judged:
    """An output of transformers' model, and gradients of its parameters; dy is 0 outside keep."""
    hf.zero_grad()
    y = getattr(hf(**{name: torch.tensor(value) for name, value in inputs.items()}), output)
    dy = np.random.default_rng(0).normal(size=tuple(y.shape))
    if keep is not None and y.shape[:2] == keep.shape:
        dy[~keep] = 0
    dy = dy.astype(str(y.dtype).removeprefix("torch."))
    y.backward(torch.tensor(dy))
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in parameters_of(hf).items()
    }
    # A router's correction is a buffer: it chooses experts and weighs nothing.
    grads |= {name: torch.zeros_like(b) for name, b in corrections(hf).items()}
    saved = {name: grad.detach().numpy().copy() for name, grad in as_saved(hf, grads).items()}
    return Judged(y.detach().numpy(), dy, saved)


def parameters_of(hf: Any) -> dict[str, Any]:
    """The parameters of transformers' model; a tied one has the name of the one it repeats."""
    named = dict(hf.named_parameters())
    tied = hf._tied_weights_keys or {}
    return {name if (of := tied.get(name, name)) in named else of: p for name, p in named.items()}


def corrections(hf: Any) -> dict[str, Any]:
    """The buffers that are parameters here, and in files."""
    return {n: b for n, b in hf.named_buffers() if n.endswith("e_score_correction_bias")}


def as_saved(hf: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of parameters by the names and in the layouts of files, as `save_pretrained` does."""
    saved: dict[str, Any] = core_model_loading.revert_weight_conversion(hf, tensors)
    return saved


def reloaded(hf: Any, folder: Path) -> Any:
    """What transformers loads from a folder that should hold hf: all of its tensors, no others."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    options |= {"dtype": torch.float64}
    again, info = type(hf).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    state, want = again.state_dict(), hf.state_dict()
    assert state.keys() == want.keys()
    assert all(torch.equal(state[name], value) for name, value in want.items())
    return again.eval()


def require_same(
    model: Any,
    y: np.ndarray,
    cache: Any,
    want: Judged,
    tolerance: float,
    keep: np.ndarray | None = None,
) -> None:
    """Our output, and our gradients under the names of transformers, are those of transformers."""
    assert y.dtype == want.dy.dtype and y.shape == want.y.shape
    kept = keep if keep is not None and y.shape[:2] == keep.shape else ...
    require_close("output", y[kept], want.y[kept], tolerance)
    grads = pretrained.tensors_of(model, cache.backward(want.dy))
    assert grads.keys() == want.grads.keys()
    # Softmax does not see a key's bias, which adds the same to all scores of a query: its gradient
    # is 0 in real numbers, and comes out as what rounding leaves of larger ones.
    largest = max(np.max(np.abs(g)) for g in want.grads.values())
    floor = ROUNDINGS * np.finfo(y.dtype).eps * largest
    for name, grad in grads.items():
        require_close(name, grad, want.grads[name], tolerance, floor)


def require_close(
    name: str, got: np.ndarray, want: np.ndarray, tolerance: float, floor: float = 0.0
) -> None:
    """Equal up to a share of the largest element, or up to floor."""
    assert got.shape == want.shape, name
    error = np.max(np.abs(got - want))
    assert error <= tolerance * np.max(np.abs(want)) + floor, f"{name}: {error:.1e}"


def require_equal(got: Any, want: Any) -> None:
    """Trees of arrays equal bit for bit."""
    got, want = tree.flatten(got), tree.flatten(want)
    assert got.keys() == want.keys()
    assert [n for n, a in want.items() if a.tobytes() != np.asarray(got[n]).tobytes()] == []


def rewritten(
    folder: Path,
    rename: Callable[[str], str | None] | None = None,
    more: Values | None = None,
    **config: Any,
) -> Path:
    """The folder with other names of tensors (None: left out), more tensors, other keys."""
    tensors = load_file(folder / "model.safetensors")
    named = {rename(name) if rename else name: tensor for name, tensor in tensors.items()}
    named.pop(None, None)
    save_file({**named, **(more or {})}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def on_meta(hf: type, config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of transformers' model, each tied one once."""
    with torch.device("meta"):
        model = hf(config)
    return {name: tuple(p.shape) for name, p in as_saved(model, parameters_of(model)).items()}


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of ours by the same names, without the memory."""
    leaves = tree.map(lambda s: np.broadcast_to(np.float32(0), s.shape), model.init_from(Shapes()))
    return {name: a.shape for name, a in pretrained.tensors_of(model, leaves).items()}
