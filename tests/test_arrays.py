"""Array types that compute otherwise than their library's own are refused by name, everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import only
from test_bad_input import CALLS, raises, run

import xformer
from xformer import backends, dispatch, ops, optim, tree
from xformer.backends import Backend
from xformer.generation import beam_search, generate, speculative
from xformer.training import Pairs, Windows

X = np.random.default_rng(3).normal(size=(2, 3)).astype(np.float32)
IDS = np.array([[1, 3, 2]])
GOT = ", whose operators differ from numpy.ndarray's"


class Metres(np.ndarray):
    """Numbers with a unit, as astropy's Quantity and unyt's arrays are."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        raise AssertionError("no ufunc may be asked for")


class Named(np.ndarray):
    """Numbers with a name: all else is ndarray's."""

    name = "x"


def masked(x: Any) -> Any:
    """All of it is hidden: whatever is computed of it is wrong."""
    return np.ma.masked_array(x, np.ones(np.shape(x), np.bool_))


OTHERS: dict[str, Callable[[np.ndarray], Any]] = {
    "MaskedArray": masked,
    "matrix": lambda x: x.view(np.matrix),
    "Metres": lambda x: x.view(Metres),
}


@pytest.mark.parametrize("kind", ["MaskedArray", "Metres"])
@pytest.mark.parametrize("name", CALLS)
def test_every_argument_of_every_op(name: str, kind: str) -> None:
    arrays, options = CALLS[name].on(backends.get())
    for argument, array in arrays.items():
        with raises(TypeError, f"{name}: {argument} must be an array, got {kind}{GOT}"):
            run(name, arrays | {argument: OTHERS[kind](array)}, options)
    for argument, array in options.items():
        if isinstance(array, np.ndarray):
            with pytest.raises(TypeError, match=f" {argument} must be an? .*array, got {kind}"):
                run(name, arrays, options | {argument: OTHERS[kind](array)})


@pytest.mark.parametrize("kind", OTHERS)
def test_every_entry_of_trees(kind: str) -> None:
    other, good = {"w": OTHERS[kind](X)}, {"w": X}
    for name, (init, step) in optim.OPTIMISERS.items():
        calls: list[Callable[[], Any]] = [
            lambda init=init: init(other),
            lambda init=init, step=step: step(other, good, init(good), lr=0.1),
            lambda init=init, step=step: step(good, other, init(good), lr=0.1),
            lambda init=init, step=step: step(other, other, init(good), lr=0.1),
        ]
        for call in calls:
            with pytest.raises(TypeError, match=f"^{name.removesuffix('w')}w?: .*got {kind}"):
                call()
    for call in (
        lambda: optim.clip_by_global_norm({"a": X, **other}, max_norm=1.0),
        lambda: optim.ema(other, other, decay=0.9),
        lambda: optim.reduced({"a": X, **other}, lambda flat: flat),
        lambda: optim.LossScale().unscale(other, good),
        lambda: optim.sgd(good, good, optim.sgd_init(good), lr=OTHERS[kind](np.ones(()))),
        lambda: backends.backend_of(other["w"]),
        lambda: backends.get().asarray(other["w"]),
        lambda: Windows(OTHERS[kind](np.arange(99)), 8, 2),
        lambda: Pairs([OTHERS[kind](IDS[0])], [[1]], bos_id=0, eos_id=1, batch_size=1),
    ):
        with pytest.raises(TypeError, match=f"got {kind}"):
            call()


@only("numpy", "numba")
def test_every_parameter_of_a_model(library: Backend) -> None:
    """Whole models have kernels too, which would read the data and not the mask."""
    model = xformer.GPT(vocab_size=11, n_layers=2, d_model=8, n_heads=2, max_len=8)
    params = model.init(seed=0)
    leaves = tree.flatten(params)
    for name, leaf in leaves.items():
        bad = tree.unflatten(params, leaves | {name: masked(leaf)})
        with pytest.raises(TypeError, match="got MaskedArray"):
            model.loss(bad, IDS, IDS)
        with pytest.raises(TypeError, match="got MaskedArray"):
            generate(model, bad, IDS, max_new_tokens=2)
    for tokens, targets in itertools.product((IDS, masked(IDS)), repeat=2):
        if tokens is not IDS or targets is not IDS:
            with pytest.raises(TypeError, match="got MaskedArray"):
                model.loss(params, tokens, targets)
    for prompts in (masked(IDS), [masked(IDS[0])]):
        with raises(TypeError, f"prefill: prompt 0 must be a list of ids, got MaskedArray{GOT}"):
            generate(model, params, prompts, max_new_tokens=2)
        with raises(TypeError, f"prefill: prompt 0 must be a list of ids, got MaskedArray{GOT}"):
            beam_search(model, params, prompts, max_new_tokens=2, n_beams=2)
    with pytest.raises(TypeError, match="got MaskedArray"):
        speculative(model, params, model, params, masked(IDS[0]), k=2, max_new_tokens=2)


def test_subclasses_that_compute_as_their_base(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=X.shape)
    mapped[:] = X
    for array in (mapped, X.view(Named), X.view(np.recarray)):
        assert dispatch.library_of(type(array)) == "numpy"
        assert np.array_equal(ops.gelu(array)[0], ops.gelu(X)[0])
        params, _ = optim.adamw({"w": array}, {"w": array}, optim.adamw_init({"w": X}), lr=0.1)
        wanted, _ = optim.adamw({"w": X}, {"w": X}, optim.adamw_init({"w": X}), lr=0.1)
        assert np.array_equal(params["w"], wanted["w"])


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "i4,f4", "V4"])
def test_dtypes_that_are_no_numbers(dtype: str) -> None:
    x = np.zeros((2, 3), dtype)
    with pytest.raises(TypeError, match=r"^gelu: x must be float32 or float64, got"):
        ops.gelu(x)
    with pytest.raises(TypeError, match=r"^linear: w must be float32 like x, got"):
        ops.linear(X, np.zeros((3, 4), dtype))
    with pytest.raises(TypeError, match=r"^embedding: ids must be an integer array, got dtype"):
        ops.embedding(X, ids=x)
    with pytest.raises(TypeError, match=r"^sdpa: mask must be boolean"):
        ops.sdpa(X[None, None], X[None, None], X[None, None], mask=x[:, :2])


def test_torch_tensors_with_a_mask_or_rows_of_many_lengths() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.masked import masked_tensor

    with pytest.warns(UserWarning, match="prototype"):
        hidden = masked_tensor(torch.ones(2, 3), torch.ones(2, 3) > 0)
    rows = [torch.ones(2), torch.ones(3)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for bad in (hidden, ragged):
        got = f"{type(bad).__name__}, whose operators differ from torch.Tensor's"
        with raises(TypeError, f"gelu: x must be an array, got {got}"):
            ops.gelu(bad)
    parameter = torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)
    assert torch.equal(ops.gelu(parameter)[0], ops.gelu(torch.ones(2, 3))[0])
