"""Attention by cuDNN: what is asked for, what comes out, who runs.

On a GPU by cuDNN itself. Lengths are multiples of 64, of which alone there are plans.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cuda_shim
import numpy as np
import pytest
from cuda_shim import Cudnn, Fault
from cuda_shim.cudnn_graph import Graph
from devices import bits, is_stand_in, placed
from libraries import ON_DEVICE, only
from nvidia import calling_cublaslt, calling_cudnn, why_without_cudnn, without_cudnn
from stored import DTYPES, Host, in_both, normal, on, require_exact

import xformer
from xformer import RandomKey, explain, inference, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy import cudnn as by_cudnn
from xformer.backends.cupy import cudnn_plan, flash, sdpa_cudnn
from xformer.backends.cupy.cudnn_plan import Layout
from xformer.layers.attention import merge_heads, split_heads
from xformer.training import TrainConfig, Windows, loss_of, start, train

pytestmark = only(*ON_DEVICE)

BF16 = DTYPES["bfloat16"]


@pytest.fixture
def cudnn(library: Backend) -> Iterator[Any]:
    with calling_cudnn(library) as found:
        yield found


@pytest.fixture
def fake(stand_in: Backend, cudnn: Cudnn) -> Cudnn:
    """The stand-in's cuDNN, for what it alone shows."""
    return cudnn


def called(cudnn: Any) -> list[str]:
    return [call.name for call in cudnn.calls]


def inputs(
    length: tuple[int, int], heads: tuple[int, int] = (2, 1), widths: tuple[int, int] = (8, 8)
) -> list[Host]:
    (t, s), (h, g), (k, m) = length, heads, widths
    return [normal(1, 2, h, t, k), normal(2, 2, g, s, k), normal(3, 2, g, s, m)]


def stored(library: Backend, arrays: list[Host], dtype: Any = BF16) -> list[Any]:
    return [on(library, x, dtype) for x in arrays]


def read(library: Backend, array: Any) -> Host:
    return library.to_numpy(array).astype("f4")


def require(library: Backend, cudnn: Any, precision: str, arrays: Any, **options: Any) -> None:
    """The gradients go by ctx as it is stored, which is one rounding more."""
    cudnn.calls.clear()
    options |= {"kinds": "ssss--", "roundings": 2, "in_any_order": True}
    require_exact(library, precision, ops.sdpa, *arrays, **options)
    assert called(cudnn) == ["sdpa", "sdpa_backward"]


# ---- What comes out ----


@in_both
@pytest.mark.parametrize("length", [(64, 64), (64, 192), (128, 64)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
def test_heads_and_lengths(
    library: Backend,
    cudnn: Any,
    precision: str,
    length: tuple[int, int],
    heads: tuple[int, int],
) -> None:
    require(library, cudnn, precision, inputs(length, heads))
    if length[0] <= length[1]:
        require(library, cudnn, precision, inputs(length, heads), causal=True)


@in_both
@pytest.mark.parametrize(
    "options",
    [
        {"window": (9, 3)},
        {"window": (0, 5)},
        {"window": (5, None)},
        {"window": (None, 2)},
        {"window": (20, 7), "causal": True},
        {"window": (126, 62)},
        {"window": (127, 63)},
        {"scale": 0.3, "causal": True},
    ],
    ids=str,
)
def test_options(library: Backend, cudnn: Any, precision: str, options: Any) -> None:
    require(library, cudnn, precision, inputs((64, 128), widths=(16, 8)), **options)


def test_scores_that_are_large(library: Backend, cudnn: Any) -> None:
    """Where one key has nearly all, dq and dk are what rounding leaves of them."""
    q, k, v = stored(library, [30 * x if i == 0 else x for i, x in enumerate(inputs((64, 64)))])
    ctx, cache = ops.sdpa(q, k, v, causal=True)
    wanted, of_flash = flash.sdpa(q, k, v, causal=True)
    pairs = zip((ctx, *cache.backward(ctx)), (wanted, *of_flash.backward(ctx)), strict=True)
    for i, (got, other) in enumerate(pairs):
        if got is None:
            assert other is None
            continue
        values = read(library, got), read(library, other)
        size = np.max(np.abs(values[1])) if i in (0, 3) else 30 * np.max(np.abs(read(library, k)))
        assert np.allclose(*values, rtol=2.0**-7, atol=2.0**-7 * size), i


# ---- What is asked for ----


def test_bounds(library: Backend, fake: Cudnn) -> None:
    """cuDNN's left bound counts the query's own key; bounds that bound nothing are left out."""
    arrays = stored(library, inputs((64, 128)))
    for options, wanted in (
        ({}, (None, None)),
        ({"causal": True}, (None, 0)),
        ({"window": (0, 5)}, (1, 5)),
        ({"window": (9, 3), "causal": True}, (10, 0)),
        ({"window": (126, 62)}, (127, 62)),
        ({"window": (127, 63)}, (None, None)),
        ({"window": (10**20, 10**20), "causal": True}, (None, 0)),
    ):
        ops.sdpa(*arrays, **options)
        asked = fake.calls[-1].options
        assert (asked["left"], asked["right"]) == wanted, options
    assert fake.calls[-1].options["attn_scale"] == pytest.approx(8**-0.5)


@pytest.mark.parametrize(
    ("length", "options", "wanted"),
    [
        ((64, 64), {"causal": True}, "TOP_LEFT"),
        ((64, 64), {"window": (9, 3)}, "TOP_LEFT"),
        ((64, 64), {"window": (9, None)}, "TOP_LEFT"),
        ((64, 64), {}, "TOP_LEFT"),
        ((64, 128), {}, "TOP_LEFT"),
        ((128, 64), {}, "TOP_LEFT"),
        ((64, 128), {"causal": True}, "BOTTOM_RIGHT"),
        ((64, 128), {"window": (9, None)}, "BOTTOM_RIGHT"),
        ((64, 128), {"window": (127, 63), "causal": False}, "TOP_LEFT"),
    ],
    ids=str,
)
@in_both
def test_alignment(
    library: Backend,
    fake: Cudnn,
    precision: str,
    length: tuple[int, int],
    options: Any,
    wanted: str,
) -> None:
    """To the bottom right only where it is another diagonal; forward and backward alike."""
    require(library, fake, precision, inputs(length, (4, 2)), **options)
    assert [call.options["alignment"].name for call in fake.calls] == 2 * [wanted]


def test_another_alignment_shows(
    library: Backend, fake: Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lengths differ the numbers are others; where they do not the stand-in refuses it."""
    alignments = fake.diagonal_alignment
    for length, one, error in (
        ((64, 128), alignments.TOP_LEFT, AssertionError),
        ((64, 64), alignments.BOTTOM_RIGHT, Fault),
    ):
        swapped = SimpleNamespace(TOP_LEFT=one, BOTTOM_RIGHT=one)
        monkeypatch.setattr(fake, "diagonal_alignment", swapped)
        with pytest.raises(error):
            require(library, fake, "bfloat16", inputs(length), causal=True)


def test_arrays_are_read_where_they_lie(library: Backend, cudnn: Any) -> None:
    """Packed queries, keys and values; the gradient that comes back from merged heads."""
    packed = placed(library, normal(1, 2, 64, 3 * 16).astype(BF16))
    q, k, v = (split_heads(packed[:, :, 16 * i : 16 * (i + 1)], 2) for i in range(3))
    assert sdpa_cudnn.readable(q) is q
    assert sdpa_cudnn.layout(q) == Layout((2, 2, 64, 8), (64 * 48, 8, 48, 1))
    ctx, cache = ops.sdpa(q, k, v, causal=True)
    merged = merge_heads(ctx)
    assert merged.data.ptr == ctx.data.ptr
    dctx = split_heads(merged, 2)
    assert sdpa_cudnn._tokens_first(dctx).data.ptr == dctx.data.ptr
    for dx in cache.backward(dctx)[:3]:
        assert merge_heads(dx).data.ptr == dx.data.ptr


def odd(x: Host) -> Host:
    """Rows that begin at two bytes behind a multiple of 16."""
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 8), x.dtype)
    wide[..., 1:-7] = x
    return wide[..., 1:-7]


def shifted(x: Host) -> Host:
    """Contiguous, from two bytes behind a multiple of 16 on."""
    held = np.zeros(x.size + 1, x.dtype)
    held[1:] = x.reshape(-1)
    return held[1:].reshape(x.shape)


LAYOUTS: dict[str, Callable[[Host], Host]] = {
    "odd": odd,
    "shifted": shifted,
    "gaps": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "steps of 24 bytes": lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 4)])[..., :8],
    "backwards": lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
    "transposed": lambda x: x.swapaxes(2, 3).copy().swapaxes(2, 3),
    "one head for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "by token": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
}


@pytest.mark.parametrize("how", LAYOUTS)
def test_layouts(library: Backend, cudnn: Any, how: str) -> None:
    """Others are copied, of the gradient that comes back too."""
    hosts = [LAYOUTS[how](x.astype(BF16)) for x in inputs((64, 64), (2, 2))]
    found = []
    for lay in (np.ascontiguousarray, LAYOUTS[how]):
        ctx, cache = ops.sdpa(*(placed(library, lay(x)) for x in hosts), causal=True)
        found.append([ctx, *cache.backward(placed(library, lay(hosts[0])))[:3]])
    assert len(cudnn.calls) == 4
    for wanted, got in zip(*found, strict=True):
        # dq's own sums are made in whatever order
        size = np.max(np.abs(read(library, wanted)))
        share = 2.0**-7 * (0 if is_stand_in(library) else size) + 1e-8
        assert np.allclose(*(read(library, x) for x in (wanted, got)), rtol=2.0**-7, atol=share)


def test_one_of_everything(library: Backend, cudnn: Any) -> None:
    """Axes of one element, whose strides say nothing."""
    whole = [normal(i, 2, 1, 64, 8).astype(BF16) for i in range(3)]
    ctx, cache = ops.sdpa(*(placed(library, x)[1:, ...] for x in whole))
    alone = (np.broadcast_to(x[1, 0], (1, 1, 64, 8)) for x in whole)
    again, _ = ops.sdpa(*(placed(library, x) for x in alone))
    assert len(cudnn.calls) == 2
    assert bits(library, ctx) == bits(library, again)
    cache.backward(ctx)


# ---- Plans, streams, threads ----


def step(library: Backend, length: int = 64, **options: Any) -> None:
    ctx, cache = ops.sdpa(*stored(library, inputs((length, length))), **options)
    cache.backward(ctx)


def test_plans_are_kept(library: Backend, fake: Cudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kind, both directions; where there would be too many, all go."""
    for built in (2, 2):
        step(library)
        assert fake.built == built
    step(library, causal=True)
    step(library, 128)
    assert fake.built == 6
    monkeypatch.setattr(by_cudnn, "KEPT", 6)
    step(library, scale=0.5)
    assert fake.built == 8 and len(by_cudnn._state.plans) == 2


def test_inference_needs_no_backward(library: Backend, cudnn: Any) -> None:
    arrays = stored(library, inputs((64, 64)))
    with inference():
        ops.sdpa(*arrays)
    assert called(cudnn) == ["sdpa"]
    if is_stand_in(library):
        assert cudnn.built == 1


def test_streams_and_devices(library: Backend, fake: Cudnn) -> None:
    """Each call is on the stream of then; plans and handles are a device's."""
    for fake.device, fake.stream in ((0, 7), (0, 8), (1, 8), (0, 7)):
        step(library)
    assert [call.stream for call in fake.calls] == [7, 7, 8, 8, 8, 8, 7, 7]
    assert fake.built == 4 and len(by_cudnn._state.handles) == 2


def test_another_thread_makes_plans_of_its_own(library: Backend, cudnn: Any) -> None:
    ctx, cache = ops.sdpa(*stored(library, inputs((64, 64))))
    worker = threading.Thread(target=lambda: found.append(cache.backward(ctx)))
    found: list[Any] = []
    worker.start()
    worker.join()
    assert len(found) == 1 and called(cudnn) == ["sdpa", "sdpa_backward"]
    if is_stand_in(library):
        assert cudnn.built == 3


def test_the_cache_is_data(library: Backend, cudnn: Any) -> None:
    _, cache = ops.sdpa(*stored(library, inputs((64, 64))), window=(3, 0))
    assert pickle.loads(pickle.dumps(cache.kind)) == cache.kind
    assert len(tree.flatten(cache[1:])) == 5


# ---- Deterministic mode ----


def test_the_same_bits(library: Backend, cudnn: Any) -> None:
    """Backward is asked for them, outside of the context too where forward was within."""
    arrays = stored(library, inputs((64, 64)))

    def found() -> tuple[bytes, ...]:
        with library.deterministic():
            ctx, cache = ops.sdpa(*arrays, causal=True)
        return tuple(bits(library, x) for x in (ctx, *cache.backward(ctx)[:3]))

    assert found() == found()
    if not is_stand_in(library):
        return
    assert cudnn.calls[-1].options["deterministic"]
    ctx, cache = ops.sdpa(*arrays, causal=True)
    again = [bits(library, cache.backward(ctx)[0]) for _ in range(2)]
    assert not cudnn.calls[-1].options["deterministic"] and again[0] != again[1]


def test_without_a_deterministic_plan(stand_in: Backend) -> None:
    arrays = stored(stand_in, inputs((64, 64)))
    with cuda_shim.calling_cudnn(Cudnn(lacks=[("sdpa_backward", True)])) as cudnn:
        assert runs(explain(ops.sdpa, *arrays), "sdpa_cudnn")
        with stand_in.deterministic():
            said = explain(ops.sdpa, *arrays)
            assert runs(said, "flash")
            assert "sdpa_cudnn.sdpa: cuDNN refuses: No valid engine configs" in said
            ops.sdpa(*arrays)
    assert not cudnn.calls


# ---- Who runs, and why ----


def runs(said: str, name: str) -> bool:
    who = said.partition("\n")[0].split(" ")
    return who[:2] == ["sdpa", "on"] and who[3] == f"xformer.backends.cupy.{name}.sdpa"


def test_who_runs_and_why(library: Backend) -> None:
    q, k, v = stored(library, inputs((64, 64)))
    with without_cudnn(library):
        said = explain(ops.sdpa, q, k, v)
        assert runs(said, "flash") and f"sdpa_cudnn.sdpa: {why_without_cudnn(library)}" in said
    long, odd_one = (on(library, normal(1, 2, 2, t, 8), BF16) for t in (128, 65))
    mask = library.asarray(np.ones((64, 64), bool))
    with calling_cudnn(library):
        said = explain(ops.sdpa, q, k, v, causal=True)
        assert runs(said, "sdpa_cudnn") and "flash.sdpa: not asked" in said
        assert runs(explain(ops.sdpa, long, k, v), "sdpa_cudnn")
        for why, found in (
            ("there are 65 queries and 64 keys, no multiples of 64", (odd_one, k, v)),
            ("there may be queries that see no key", (long, k, v, {"causal": True})),
            ("there may be queries that see no key", (long, k, v, {"window": (9, None)})),
            ("a mask is not in its graphs", (q, k, v, {"mask": mask})),
            ("sinks is not in its graphs", (q, k, v, None, q[0, :, 0, 0])),
            ("a cap of the scores is not in", (q, k, v, {"softcap": 3.0})),
            ("dropout by the library's", (q, k, v, dropout(0.1))),
        ):
            options = found[-1] if isinstance(found[-1], dict) else {}
            said = explain(ops.sdpa, *found[: len(found) - bool(options)], **options)
            assert runs(said, "flash") and f"sdpa_cudnn.sdpa: {why}" in said, said
        wide = [library.xp.astype(x, library.xp.float32) for x in (q, k, v)]
        assert "numbers of two bytes, not float32" in explain(ops.sdpa, *wide)
        bias = on(library, normal(1, 64, 64), BF16)
        assert "sdpa_cudnn.sdpa: a bias is not in its graphs" in explain(ops.sdpa, q, k, v, bias)
        assert runs(explain(ops.sdpa, q, k, v, **dropout(0.0)), "sdpa_cudnn")


def test_what_cudnn_lacks(stand_in: Backend) -> None:
    q, k, v = stored(stand_in, inputs((64, 64)))
    for fake, why in (
        (Cudnn(capability=75), "cuDNN has no attention on compute capability 7.5, but from 8.0 on"),
        (Cudnn(lacks=["sdpa"]), "cuDNN refuses: No valid engine configs"),
        (Cudnn(lacks=["sdpa_backward"]), "cuDNN refuses: No valid engine configs"),
    ):
        with cuda_shim.calling_cudnn(fake):
            said = explain(ops.sdpa, q, k, v)
            assert runs(said, "flash") and f"sdpa_cudnn.sdpa: {why}" in said


@pytest.mark.parametrize(
    ("capability", "version", "widths", "forward", "backward"),
    [
        (80, 91600, (128, 128), "", ""),
        (86, 91600, (136, 128), "", "136 wide, more than the 128 of cuDNN's backward on compute"),
        (89, 91600, (256, 256), "", "256 wide, more than the 128 of cuDNN's backward on compute"),
        (90, 91600, (256, 256), "", ""),
        (90, 91600, (264, 8), "264 wide, more than the 256 of cuDNN's forward on compute", ""),
        (100, 91600, (192, 128), "", ""),
        (100, 91600, (192, 192), "", "192 wide, more than the 128 of cuDNN's backward on compute"),
        (100, 91600, (256, 256), "", "256 wide, more than the 128 of cuDNN's backward on compute"),
        (103, 92300, (256, 256), "", ""),
        (120, 92300, (256, 256), "", "256 wide, more than the 128 of cuDNN's backward on compute"),
        (120, 91600, (64, 64), "", ""),
        (90, 91600, (12, 8), "heads are 12 and 8 wide, no multiples of 8", ""),
    ],
)
def test_widths_by_capability(
    stand_in: Backend,
    capability: int,
    version: int,
    widths: tuple[int, int],
    forward: str,
    backward: str,
) -> None:
    """Within inference() only forward counts."""
    arrays = stored(stand_in, inputs((64, 64), (1, 1), widths))
    with cuda_shim.calling_cudnn(Cudnn(capability=capability, version=version)) as cudnn:
        said = explain(ops.sdpa, *arrays)
        if forward or backward:
            assert not runs(said, "sdpa_cudnn") and (forward or backward) in said, said
        else:
            assert runs(said, "sdpa_cudnn"), said
            assert cudnn.built == 2
        with inference():
            assert runs(explain(ops.sdpa, *arrays), "sdpa_cudnn") == (not forward)


def test_deterministic_by_capability(stand_in: Backend) -> None:
    arrays = stored(stand_in, inputs((64, 64)))
    for capability, version, why in (
        (100, 91600, "cuDNN before 9.18 has no deterministic backward on compute capability 10.0"),
        (100, 91800, ""),
        (90, 91600, ""),
        (120, 91600, ""),
    ):
        fake = Cudnn(capability=capability, version=version)
        with cuda_shim.calling_cudnn(fake), stand_in.deterministic():
            said = explain(ops.sdpa, *arrays)
            assert runs(said, "flash" if why else "sdpa_cudnn") and why in said


def dropout(rate: float) -> dict[str, Any]:
    return {"dropout_rate": rate, "dropout_key": RandomKey(1, 2, 3)}


def test_bad_arguments_are_the_references(library: Backend, cudnn: Any) -> None:
    q, k, v = stored(library, inputs((64, 64), (3, 2)))
    with pytest.raises(ValueError, match="sdpa: "):
        ops.sdpa(q, k, v)
    q, k, v = stored(library, inputs((64, 64)))
    with pytest.raises(ValueError, match="sdpa: window"):
        ops.sdpa(q, k, v, window=(-1, 0))
    ctx, cache = ops.sdpa(q, k, v)
    with pytest.raises(ValueError, match="sdpa: dctx must have shape"):
        cache.backward(ctx[:, :, :32, :])


# ---- Models ----


MODEL = xformer.GPT(vocab_size=256, n_layers=2, d_model=16, n_heads=2, max_len=64)
TEXT = np.frombuffer(b"to be or not to be, that is the question " * 20, np.uint8)


def losses(library: Backend, **options: Any) -> list[float]:
    config = TrainConfig(steps=3, batch_size=1, eval_every=3, lr=1e-2, precision="bfloat16")
    source = Windows(TEXT, MODEL.context, config.batch_size)
    params = tree.map(library.asarray, MODEL.init(0))
    run = train(loss_of(MODEL), start(params, config), source, config, library, **options)
    return [step.loss for step in run]


def test_training(library: Backend) -> None:
    """Whole steps, every attention of them by cuDNN: the losses of the library's own kernels."""
    with without_cudnn(library):
        wanted = losses(library)
    with calling_cudnn(library) as cudnn:
        got = losses(library)
    assert called(cudnn) == 3 * (2 * ["sdpa"] + 2 * ["sdpa_backward"])
    assert got == pytest.approx(wanted, rel=2e-3)


def test_captured_steps(library: Backend) -> None:
    """The same bits as call by call; plans are made before anything is captured."""
    options: Any = {"donate": True, "deterministic": True}
    with calling_cublaslt(library):
        with calling_cudnn(library):
            wanted = losses(library, **options)
        with calling_cudnn(library) as cudnn:
            assert losses(library, compiled=True, **options) == wanted
    # Of the first step, and of what was captured: two layers, both directions.
    assert len(cudnn.calls) == 8
    if is_stand_in(library):
        assert cudnn.built == 2


# ---- What the stand-in finds: planted mistakes ----


def replaced(**fields: Any) -> Callable[[Any], Any]:
    return lambda kind: kind._replace(**{name: fn(kind) for name, fn in fields.items()})


@pytest.mark.parametrize(
    "change",
    [
        replaced(left=lambda kind: kind.left + 1),
        replaced(right=lambda kind: None),
        replaced(scale=lambda kind: 2 * kind.scale),
        replaced(k=lambda kind: cudnn_plan.by_rows(*kind.k.shape)),
        replaced(v=lambda kind: kind.k),
        replaced(q=lambda kind: kind.q._replace(strides=tuple(2 * s for s in kind.q.strides))),
        replaced(dtype=lambda kind: "float16"),
    ],
    ids=["left", "right", "scale", "k", "v", "q", "dtype"],
)
def test_mistakes_in_a_kind_show(
    library: Backend, fake: Cudnn, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    right = sdpa_cudnn._kind
    monkeypatch.setattr(sdpa_cudnn, "_kind", lambda *args: change(right(*args)))
    q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in inputs((64, 64), (2, 2), (8, 16)))
    with pytest.raises((Fault, AssertionError)):
        require(library, fake, "bfloat16", (q, k, v), window=(5, 2))


def test_memory_that_is_wrong_shows(library: Backend, fake: Cudnn) -> None:
    """Uids, workspaces, streams, arrays of another size, results that overlap."""
    q, k, v = stored(library, inputs((64, 64), (2, 2)))
    _, cache = ops.sdpa(q, k, v)
    kind: Any = cache.kind
    plan = by_cudnn.plan_of(q, kind)
    assert not isinstance(plan, str)
    numbers = (cudnn_plan.Q, cudnn_plan.K, cudnn_plan.V, cudnn_plan.CTX, cudnn_plan.LSE)
    right = dict(zip(numbers, (q, k, v, cache.by_token, cache.lse), strict=True))
    assert by_cudnn.ran(kind, right)
    for wrong, said in (
        ({cudnn_plan.K: k[:, :1, ...]}, "k ends outside its array"),
        ({cudnn_plan.CTX: q}, "o is written over q"),
        ({cudnn_plan.LSE: cache.by_token}, "stats holds bfloat16, not float32"),
        ({cudnn_plan.DQ: q}, "the graph names"),
    ):
        with pytest.raises(Fault, match=said):
            by_cudnn.ran(kind, right | wrong)
    (key,) = (key for key, found in by_cudnn._state.plans.items() if found is plan)
    for size in (plan.workspace - 1, 0):
        by_cudnn._state.plans[key] = plan._replace(workspace=size)
        with pytest.raises(Fault, match="there is no workspace"):
            by_cudnn.ran(kind, right)


@pytest.mark.parametrize("name", ["validate", "build_operation_graph", "create_execution_plans"])
def test_steps_that_are_left_out_show(
    library: Backend, fake: Cudnn, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Graph, name, lambda *_: None)
    with pytest.raises(Fault):
        ops.sdpa(*stored(library, inputs((64, 64))))
