"""`blocks` on NumPy, a share of the batch for each thread: what the reference says of the whole."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from block_configs import block_config, changed
from hanging import SECONDS
from test_kernels import LAYOUTS, laid_out

import xformer as xf
from xformer import dispatch, inference, layers, reference_only, tree
from xformer.backends.numpy import blocks as kernel
from xformer.backends.numpy.threads import n_threads, single_blas_thread
from xformer.layers import ExpertsConfig, KeyValue, RopeTables
from xformer.models import LanguageModel
from xformer.proofs.catalogue import Case, cases

CASES = [case for case in cases() if case.subject == "blocks"]
CONFIG = block_config(16, 2, 24, activation="gelu")
RNG = np.random.default_rng(0)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel, "ROWS", 5)
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        if n_threads() != 3:
            pytest.skip("NumPy's BLAS cannot be given 3 threads")
        yield


def arguments(n: int = 9, length: int = 10, *, n_blocks: int = 3, **changes: Any) -> Arguments:
    """Of `blocks`, for `n` sequences and three layers, with a mask, a memory and positions."""
    rng = xf.backends.get("numpy").generator(1, "float64")
    config = changed(CONFIG, **changes)
    params = layers.StackParams.init(rng, (config,) * n_blocks, cross=True).blocks
    x = rng.normal((n, length, 16))
    side = layers.SideInputs(
        rng.normal((n, 7, 16)),
        rng.normal((2, 1, length)),
        rng.normal((length, 8)),
        rng.normal((7, 8)),
    )
    mask = rng.uniform((n, 1, 1, length)) < 0.8
    options = {"configs": (config,) * 3, "context": layers.Context(mask, causal=True)}
    return (x, params, side), options


def within(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """`options` with another context."""
    return options | {"context": options["context"]._replace(**changes)}


def beside(args: Any, **changes: Any) -> tuple[Any, ...]:
    """`args` with other side inputs."""
    x, params, side = args
    return x, params, side._replace(**changes)


def gradients(run: Any, args: Any, options: Any) -> dict[str, Any]:
    y, cache = run(*args, **options)
    assert isinstance(cache, kernel.SharesCache) == (run is layers.blocks)
    grads = cache.backward(np.cos(np.arange(y.size)).reshape(y.shape))
    return tree.flatten((y, grads))


def require_same(args: Any, options: Any) -> None:
    assert kernel.unsupported(*args, **options) is None
    got = gradients(layers.blocks, args, options)
    wanted = gradients(layers.blocks.reference, args, options)
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_catalogue(
    case: Case, layout: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five sequences, one for each thread, laid out in memory as kernels must take them.

    One sequence without a batch axis is left to the reference.
    """
    monkeypatch.setattr(kernel, "n_threads", lambda: 5)
    monkeypatch.setattr(kernel, "ROWS", 1)
    fn, args = case.build(xf.backends.get("numpy"), "float64")
    args = tree.map(lambda x: laid_out(layout, x), args)
    if any(config.reversible for config in fn.keywords["configs"]):
        assert kernel.unsupported(*args, **fn.keywords) == "reversible blocks"
    elif args[0].ndim == 2:
        assert "not batches" in str(kernel.unsupported(*args, **fn.keywords))
    elif fn.keywords["context"].dropout_key is None:
        require_same(args, fn.keywords)
    else:
        assert "dropout" in str(kernel.unsupported(*args, **fn.keywords))


@pytest.mark.parametrize("n", [3, 9, 17, 26])
def test_shares_of_any_size(n: int) -> None:
    """Of 17 the last has five, of 26 eight, the others six and nine."""
    require_same(*arguments(n))


def test_layers_that_share_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are added as they come, and not kept until the last layer has its own."""
    made: list[Any] = []

    class Total(kernel._Total):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(kernel, "_Total", Total)
    require_same(*arguments(n_blocks=1))
    assert len(made) == 1 and not made[0]._early


def turned(n: int, length: int = 10) -> RopeTables:
    """Tables for neighbouring columns, of n sequences."""
    angles = RNG.normal(size=(n, length, 4))
    return RopeTables(np.cos(angles), np.sin(angles), interleaved=True)


def ready(args: Any, options: dict[str, Any], memory: Any) -> Arguments:
    """`arguments` with keys and values of a memory that are made."""
    x, params, side = args
    params = tuple(p._replace(cross=p.cross._replace(kv=None)) for p in params)
    return (x, params, side._replace(memory=memory, memory_pos=None)), options


def key_value(n: int = 9) -> KeyValue:
    return KeyValue(RNG.normal(size=(n, 2, 7, 8)), RNG.normal(size=(n, 2, 7, 8)))


def test_what_each_sequence_has_of_its_own() -> None:
    args, options = arguments()
    options = within(options, memory_mask=RNG.uniform(size=(9, 1, 1, 7)) < 0.8)
    require_same(args, within(options, rotary=turned(9)))
    for shape in ((9, 2, 10, 10), (9, 1, 1, 1), (1, 2, 10, 10), (10, 10)):
        require_same(beside(args, bias=RNG.normal(size=shape)), options)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_memory_for_each_layer(kind: Any) -> None:
    args, options = ready(*arguments(), kind(key_value() for _ in range(3)))
    require_same(args, options)
    dmemory = layers.blocks(*args, **options)[1].backward(args[0])[2].memory
    assert [type(own) for own in dmemory] == [KeyValue] * 3
    params = layers.StackParams(args[1], None, None)
    y, _ = layers.stack(args[0], params, args[2], **options)
    assert np.array_equal(y, layers.blocks(*args, **options)[0])


def test_checkpointing_keeps_the_inputs_of_the_layers() -> None:
    args, options = arguments()
    require_same(args, options | {"activation_checkpointing": True})
    kept = [
        tree.nbytes(layers.blocks(*args, **options, activation_checkpointing=again)[1].caches)
        for again in (False, True)
    ]
    assert kept[1] < kept[0] / 3


def test_frozen_parameters_have_no_gradient() -> None:
    (x, params, side), options = arguments()
    params = tree.freeze(params, "1.*", "2.ffn.*")
    require_same((x, params, side), options)


def test_sums_are_the_same_whichever_share_is_first() -> None:
    """The bits of gradients, that is; not those of one share alone."""
    args, options = arguments()
    runs = [gradients(layers.blocks, args, options) for _ in range(5)]
    for name, array in runs[0].items():
        assert all(np.array_equal(run[name], array) for run in runs), name
    total, parts = kernel._Total(), [1e16, 1.0, -1e16]
    for share in (2, 0, 1):
        total.add(share, (np.array([parts[share]]),))
    assert total.value[0][0] == (parts[0] + parts[1]) + parts[2]


def test_one_thread_at_a_time_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    total, locked = kernel._Total(), []
    monkeypatch.setattr(kernel, "add", lambda a, b: locked.append(total._lock.locked()))
    for turn in (0, 2, 1):
        total.add(turn, None)
    assert locked == [True, True]


@contextmanager
def a_busy_pool() -> Iterator[None]:
    """Another thread of the program has it."""
    inside, left = threading.Event(), threading.Event()

    def other() -> None:
        with single_blas_thread():
            inside.set()
            left.wait(SECONDS)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(SECONDS)
    try:
        yield
    finally:
        left.set()
        thread.join(SECONDS)


def test_what_else_the_program_does_changes_no_bit() -> None:
    """Products are large enough to be cut, where they are not within a share."""
    args, options = arguments(9, 60)
    wide = changed(CONFIG, d_ff=1024)
    rng = xf.backends.get("numpy").generator(1, "float64")
    options["configs"] = (wide,) * 3
    params = layers.StackParams.init(rng, options["configs"], cross=True).blocks
    args = (args[0], params, args[2])
    free = gradients(layers.blocks, args, options)
    with a_busy_pool():
        busy = gradients(layers.blocks, args, options)
    for name, array in free.items():
        assert np.array_equal(busy[name], array), name


def test_the_shares_run_on_threads_of_their_own() -> None:
    """Each of them at once with the others, forward and backward."""
    meet = threading.Barrier(3, timeout=SECONDS)
    met: list[str] = []

    class Cache:
        def backward(self, dy: Any) -> Any:
            meet.wait()
            met.append("backward")
            return dy, None, layers.SideInputs()

    def block_terms(x: Any, *args: Any, **options: Any) -> Any:
        meet.wait()
        met.append("forward")
        return (x, None), Cache()

    args, options = arguments()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["xformer.layers.blocks"], "block_terms", block_terms)
        y, cache = layers.blocks(*args, **options)
        cache.backward(y)
    assert met == ["forward"] * 9 + ["backward"] * 9


def test_inference_keeps_nothing() -> None:
    args, options = arguments()
    wanted, _ = layers.blocks.reference(*args, **options)
    with inference():
        y, cache = layers.blocks(*args, **options)
    np.testing.assert_allclose(y, wanted, rtol=1e-10)
    with pytest.raises(RuntimeError, match="saves nothing"):
        cache.backward(y)


def wrong() -> dict[str, Callable[[Any, dict[str, Any]], Arguments]]:
    """Arguments that the reference refuses; three sequences are a share, whom some would fit."""
    mask, memory = np.ones((3, 1, 1, 10), bool), RNG.normal(size=(3, 7, 16))

    def option(**more: Any) -> Callable[[Any, dict[str, Any]], Arguments]:
        return lambda args, options: (args, within(options, **more))

    def x_of(x: Any) -> Callable[[Any, dict[str, Any]], Arguments]:
        return lambda args, options: ((x, *args[1:]), options)

    def side(**more: Any) -> Callable[[Any, dict[str, Any]], Arguments]:
        return lambda args, options: (beside(args, **more), options)

    return {
        "mask of a share": option(mask=mask),
        "mask of four": option(mask=np.ones((4, 1, 1, 10), bool)),
        "mask that is a list": option(mask=mask.tolist()),
        "mask of queries": option(mask=np.ones((9, 1, 4, 10), bool)),
        "mask of five axes": option(mask=np.ones((1, 9, 1, 1, 10), bool)),
        "memory_mask of a share": option(memory_mask=mask[..., :7]),
        "bias of a share": side(bias=RNG.normal(size=(3, 1, 10, 10))),
        "bias that is a list": side(bias=[1.0]),
        "rotary of a share": option(rotary=turned(3)),
        "rotary of one": option(rotary=turned(1)),
        "rotary whose sin is one for all": option(rotary=turned(9)._replace(sin=turned(1).sin[0])),
        "x of no axes": x_of(np.array(1.0)),
        "x that is a list": x_of(list(RNG.normal(size=(9, 10, 16)))),
        "memory of a share": side(memory=memory),
        "memory that is a number": side(memory=np.array(1.0)),
        "memory that is a list": side(memory=[1.0]),
        "memory that is frozen": side(memory=tree.Frozen(memory)),
        "keys of a share": lambda args, options: ready(args, options, key_value(3)),
        "two memories": lambda args, options: ready(args, options, [key_value()] * 2),
    }


@pytest.mark.parametrize(
    ("case", "n"), [(case, n) for case in wrong() for n in (9, 3) if n == 9 or "share" not in case]
)
def test_errors_speak_of_the_whole_batch(case: str, n: int) -> None:
    args, options = wrong()[case](*arguments(n))
    with pytest.raises((TypeError, ValueError)) as whole:
        layers.blocks.reference(*args, **options)
    with pytest.raises((TypeError, ValueError)) as shares:
        layers.blocks(*args, **options)
    assert (shares.type, str(shares.value)) == (whole.type, str(whole.value))
    assert shares.value.__context__ is None


def test_errors_of_the_backward() -> None:
    args, options = arguments()
    y, cache = layers.blocks(*args, **options)
    with pytest.raises(
        ValueError, match=r"blocks: dy must have shape \(9, 10, 16\), got \(9, 10, 15\)"
    ):
        cache.backward(np.zeros((9, 10, 15)))
    cache.backward(y, (None,) * 3)
    with pytest.raises(ValueError, match=r"^blocks: drouter_logits must be None"):
        cache.backward(y, (None, y, None))
    params = layers.StackParams(args[1], None, None)
    _, whole = layers.stack(args[0], params, args[2], **options)
    with pytest.raises(AttributeError, match=r"within reference_only\(\)"):
        _ = whole.blocks


@pytest.mark.parametrize(
    ("n", "changes", "why"),
    [
        (10, {}, "10 sequences cannot be divided evenly among 3 threads"),
        (3, {"length": 4}, "1 sequences of 4 tokens are too few for a thread"),
        (9, {"dropout": 0.1}, "dropout"),
        (9, {"experts": ExpertsConfig(n_experts=2, top_k=1, d_ff=8)}, "experts"),
    ],
)
def test_when_the_batch_is_left_whole(n: int, changes: dict[str, Any], why: str) -> None:
    args, options = arguments(n, **changes)
    options = within(options, dropout_key=xf.RandomKey(1))
    assert why in dispatch.explain(layers.blocks, *args, **options)
    y, _ = layers.blocks(*args, **options)
    wanted, _ = layers.blocks.reference(*args, **options)
    assert np.array_equal(y, wanted)


def test_it_says_why_else() -> None:
    args, options = arguments()
    assert (
        kernel.unsupported(args[0][0], *args[1:], **options)
        == "x and memory are not batches of one size"
    )
    short = beside(args, memory=args[2].memory[:8])
    assert kernel.unsupported(*short, **options) == "x and memory are not batches of one size"
    kv_cache = (layers.KVCache(),) * 3
    after = within(options, kv_cache=kv_cache)
    assert kernel.unsupported(*args, **after) == "there is a KV cache"
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        assert kernel.unsupported(*args, **options) == "one thread"
    kept, _ = arguments(9, 5)
    assert kernel.unsupported(*kept, **options) is None  # 15 tokens
    with inference():  # there is nothing to add
        assert kernel.unsupported(*arguments(9, 2)[0], **options) is None


@pytest.mark.parametrize("how", ["pre", "post"])
def test_a_model_learns_the_same(how: str) -> None:
    block = changed(CONFIG, norm_placement=how)
    model = LanguageModel(layers.EmbedConfig(31, 16, 16, 32), (block,) * 2)
    params = model.init(0, dtype="float64")
    ids = np.random.default_rng(0).integers(0, 31, (6, 11))

    def found() -> tuple[float, dict[str, Any]]:
        loss, cache = model.loss(params, ids[:, :-1], ids[:, 1:])
        kept = cache.model.hidden.stack.layers
        assert isinstance(kept, kernel.SharesCache) != dispatch.is_reference_only()
        return float(loss), tree.flatten(cache.backward())

    loss, grads = found()
    with reference_only():
        again, others = found()
    assert abs(loss - again) < 1e-12
    for name, grad in grads.items():
        np.testing.assert_allclose(others[name], grad, rtol=1e-9, atol=1e-12, err_msg=name)
