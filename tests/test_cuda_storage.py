"""Numbers of two bytes: how they are rounded, and what is refused, by name.

The kernels are in test_cuda_precision.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_shim
import numpy as np
import pytest
from cuda_shim import Fault
from devices import is_stand_in, placed
from libraries import ON_DEVICE, only
from stored import DTYPES, Host, in_both, ml_dtypes, normal, on

from xformer import GPT, RandomKey, backends, explain, layers, ops, reference_only, tree
from xformer.backends import Backend
from xformer.backends.cupy import packed
from xformer.backends.cupy.module import EVERY, Source, launch
from xformer.layers import NormConfig

pytestmark = only(*ON_DEVICE)

STORAGE = Source(str(Path(cuda_shim.__file__).with_name("storage.py")), dtypes=EVERY)


# ---- The numbers themselves ----


def hard_numbers() -> Host:
    """Around every number of both precisions: itself, the ties beside it, and their neighbours."""
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        halves = every.view(np.float16).astype(np.float32)
        brains = every.view(ml_dtypes.bfloat16).astype(np.float32)
        ties = (every.astype(np.uint32) << 16 | 0x8000).view(np.float32)
        between = halves[:-1] + (halves[1:] - halves[:-1]) / np.float32(2)
        near = [f(x) for x in (halves, between, ties) for f in (next_up, next_down)]
    return np.concatenate([halves, brains, ties, between, *near])


def next_up(x: Host) -> Host:
    return np.nextafter(x, np.float32(np.inf))


def next_down(x: Host) -> Host:
    return np.nextafter(x, np.float32(-np.inf))


@in_both
def test_rounding_to_the_nearest_even(library: Backend, precision: str) -> None:
    """Of every number beside which it could go wrong, subnormal and infinite ones too."""
    x = hard_numbers()
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(DTYPES[precision])
    y = placed(library, np.zeros(x.shape, DTYPES[precision]))
    back = library.asarray(np.zeros_like(x))
    options: Any = {"grid": (-(-x.size // 256),), "block": (256,)}
    launch(STORAGE, "narrow", y, args=(library.asarray(x), y, x.size), **options)
    launch(STORAGE, "widen", y, args=(y, back, x.size), **options)
    real = ~np.isnan(x)
    narrow, wide = library.to_numpy(y), library.to_numpy(back)
    assert np.array_equal(narrow[real].view(np.uint16), wanted[real].view(np.uint16))
    assert np.isnan(narrow[~real].astype(np.float32)).all()
    assert np.array_equal(wide[real], wanted[real].astype(np.float32))


# ---- Parameters ----


def bits(x: Host) -> Host:
    """The bits of numbers of two bytes; of whatever is no number the same."""
    return np.where(np.isnan(x.astype(np.float32)), 0x7FFF, x.view(np.uint16))


@in_both
def test_weights_to_the_bit(library: Backend, launched: list[Any], precision: str) -> None:
    """By rows and columns, with gaps, from odd addresses, longer than a block's share: one launch
    for 50 leaves that are read in packs, one for the others."""
    hard = hard_numbers()[:: 7 if is_stand_in(library) else 1]
    hard = hard[: hard.size // 24 * 24]
    packs, odd = library.asarray(hard.reshape(-1, 12)), library.asarray(hard[:-1])
    params = {
        "by rows": packs,
        "by columns": tree.Frozen(library.asarray(hard.reshape(8, -1)).T),
        "gaps": packs[::2, ::3],
        "odd": odd,
        "odd address": odd[1:9],
        "many": [library.asarray(hard[8 * i : 8 * i + 8]) for i in range(50)],
        "none": odd[:0],
        "one": library.asarray(np.float32(1.0)),
    }
    assert packs.size > packed.SHARE
    launched.clear()
    found = tree.flatten(tree.thaw(library.cast_params(params, precision)))
    assert [name for name, _, _ in launched] == ["rounded"] * 3
    for name, leaf in tree.flatten(tree.thaw(params)).items():
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = library.to_numpy(leaf).astype(DTYPES[precision])
        assert np.array_equal(bits(library.to_numpy(found[name])), bits(wanted)), name
    assert found["by columns"].T.flags.c_contiguous


@in_both
def test_a_tied_weight_is_rounded_once(
    library: Backend, launched: list[Any], precision: str
) -> None:
    """The table of GPT-2 is its head too: one leaf, one copy."""
    model = GPT(vocab_size=11, n_layers=1, d_model=8, n_heads=2, max_len=6)
    params = model.init_from(library.generator(0))
    launched.clear()
    weights = library.cast_params(params, precision)
    leaves = [x for _, _, args in launched for x in args[0] if x is not None]
    assert len(leaves) == len(tree.flatten(params))
    assert sum(leaf.shape == (11, 8) for leaf in tree.flatten(weights).values()) == 1


def test_weights_of_float64_are_refused(library: Backend) -> None:
    params = [library.asarray(np.ones(8, np.float32)), library.asarray(np.ones(8))]
    with pytest.raises(ValueError, match="precision bfloat16 is for float32 parameters"):
        library.cast_params(params, "bfloat16")


# ---- What is refused, by name ----


@in_both
def test_ops_without_a_kernel(library: Backend, precision: str) -> None:
    x, table = (on(library, normal(1, *shape), DTYPES[precision]) for shape in ((3, 4), (5, 4)))
    said = f"must be float32 or float64, got {precision}"
    with pytest.raises(TypeError, match=f"softmax: x {said}"):
        ops.softmax(x)
    with pytest.raises(TypeError, match=f"log_softmax: x {said}"):
        ops.log_softmax(x)
    with pytest.raises(TypeError, match=f"l2_normalize: x {said}"):
        ops.l2_normalize(x)
    with pytest.raises(TypeError, match=f"index_add: x {said}"):
        ops.index_add(table, x, ids=library.asarray([1, 0, 1]))
    with pytest.raises(TypeError, match=f"pool: x {said}"):
        layers.pool(x[None, :, :], pooling="first")
    with pytest.raises(TypeError, match=f"layer_norm: w must be {precision} like x, got float32"):
        ops.layer_norm(x, library.asarray(np.ones(4, np.float32)))
    widened = layers.NormParams(library.asarray(np.ones(4, np.float32)), None)
    with pytest.raises(TypeError, match=f"layer_norm: w must be {precision} like x, got float32"):
        layers.add_norm(x, x, widened, config=NormConfig())


@in_both
def test_arguments_that_no_kernel_takes(library: Backend, precision: str) -> None:
    """Not even references that could be asked for."""
    x = on(library, normal(1, 3, 4), DTYPES[precision])
    q = on(library, normal(1, 1, 2, 3, 4), DTYPES[precision])
    wide = on(library, normal(1, 1, 2, 3, 260), DTYPES[precision])
    bias = on(library, normal(1, 3, 3), DTYPES[precision])
    said = f"no kernel runs in {precision}: "
    with pytest.raises(TypeError, match=f"rms_norm: {said}there is no w"):
        ops.rms_norm(x, offset=1.0)
    w = x[0, :]
    with pytest.raises(TypeError, match=f'add_norm: {said}kind "rms" has no bias'):
        layers.add_norm(x, x, layers.NormParams(w, w), config=NormConfig("rms"))
    with pytest.raises(TypeError, match=f"sdpa: {said}heads are 260 wide"):
        ops.sdpa(wide, wide, wide)
    with pytest.raises(TypeError, match=f"sdpa: {said}a bias is not added"):
        ops.sdpa(q, q, q, bias)
    with (
        reference_only(),
        pytest.raises(TypeError, match=rf"glu: {said}reference_only\(\) is active"),
    ):
        ops.glu(gate=x, up=x)
    start = f"rms_norm on {library.name}: "
    assert explain(ops.rms_norm, x, offset=1.0).startswith(f"{start}nothing, these")
    assert explain(ops.rms_norm, x).startswith(f"{start}xformer.backends.cupy.rms")


@in_both
def test_sources_without_a_form_for_it(library: Backend, precision: str) -> None:
    x = on(library, normal(1, 3, 4), DTYPES[precision])
    with pytest.raises(
        TypeError, match=rf"random_bits\.cu is for float32, float64, got {precision}"
    ):
        ops.random_bits(x, key=RandomKey(1), size=4)


@in_both
def test_generic_code_adds(library: Backend, precision: str) -> None:
    """An addition is rounded once."""
    with np.errstate(all="ignore"):
        x = hard_numbers().astype(DTYPES[precision])
        a = placed(library, x)
        b = library.xp.concat([a[7:], a[:7]])
        wanted = (x.astype(np.float64) + np.roll(x, -7).astype(np.float64)).astype(x.dtype)
        got = library.to_numpy(a + b)
        if is_stand_in(library):
            assert np.array_equal(got, wanted, equal_nan=True)
            return
        # CuPy's kernels are compiled with -ftz=true: numbers below 2**-126 may be taken for 0.
        small = np.abs(got.astype(np.float64) - wanted.astype(np.float64)) <= 2.0**-125
    assert (small | (got == wanted) | (np.isnan(got) & np.isnan(wanted))).all()


@in_both
def test_generic_code_does_nothing_else(stand_in: Backend, precision: str) -> None:
    """As it is on the stand-in, so that tests of models see it."""
    library, a = stand_in, on(stand_in, normal(1, 20), DTYPES[precision])
    for mistake in (
        lambda: a * 2.0,
        lambda: a + library.asarray(np.ones(a.shape, np.float32)),
        lambda: library.xp.sum(a),
        lambda: library.xp.exp(a),
    ):
        with pytest.raises(Fault, match="only kernels compute with what is stored in two bytes"):
            mistake()


@pytest.mark.parametrize("name", ["numpy", "array-api-strict"])
def test_other_libraries_refuse_it(library: Backend, name: str) -> None:
    place = backends.get(name)
    with pytest.raises(
        ValueError, match=rf"backend {name} stores numbers in float32 and float64, not"
    ):
        place.cast_params({"w": place.asarray([1.0], "float32")}, "bfloat16")
    with pytest.raises(ValueError, match="float16, not float8"):
        library.cast_params({"w": library.asarray([1.0], "float32")}, "float8")
    with pytest.raises(ValueError, match="bfloat16 is for float32 parameters, got float64"):
        library.cast_params({"w": library.asarray([1.0], "float64")}, "bfloat16")
    with pytest.raises(TypeError, match="glu: gate must be float32 or float64, got float16"):
        ops.glu(*[np.ones(3, np.float16)] * 2)
