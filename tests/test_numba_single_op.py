"""Ops that run at once on numba are programs: recorded when they pay, right for every call."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer import GPT, RandomKey, finetune, layers, ops, optim, tree
from xformer.base.typing import Array

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import single_op
from xformer.models import LanguageModel

pytestmark = pytest.mark.usefixtures("numba_kernels")
GRADIENTS = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def nothing_recorded() -> None:
    single_op._programs.clear()


def model(**options: Any) -> GPT:
    """Of more elements than `LEAST`."""
    return GPT(vocab_size=31, n_layers=2, d_model=64, n_heads=4, max_len=16, **options)


def tokens(seed: int = 0) -> tuple[Array, Array]:
    ids = np.random.default_rng(seed).integers(0, 31, (6, 17))
    return ids[:, :-1], ids[:, 1:]


def step(gpt: LanguageModel, params: Any, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    loss, cache = gpt.loss(params, *tokens(seed), **options)
    return loss, cache.backward()


def require_same(one: Any, other: Any) -> None:
    one, other = (tree.flatten({"": x}) for x in (one, other))
    assert one.keys() == other.keys()
    for name, x in one.items():
        np.testing.assert_allclose(x, other[name], err_msg=name, **GRADIENTS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_placement": "post"},
        {"positions": "sinusoidal"},
        {"activation_checkpointing": True},
        {"reversible": True},
        {"activation": "relu"},
    ],
    ids=str,
)
def test_the_layers_of_a_loss_are_a_program(options: dict[str, Any]) -> None:
    gpt = model(**options)
    params = gpt.init(0)
    with xf.kernels("numpy"):
        wanted = [step(gpt, params, seed) for seed in range(3)]
    for seed in range(3):
        before = len(single_op._programs)
        require_same(step(gpt, params, seed), wanted[seed])
        own = [kind for kind in list(single_op._programs)[before:] if kind[0] is layers.blocks]
        assert bool(own) == (seed == 0)


def test_dropout_masks_are_numpys_at_each_step() -> None:
    gpt = model(dropout=0.3)
    params = gpt.init(0)
    kept: list[int] = []
    for n in range(5):
        key = RandomKey(7, step=n)
        with xf.kernels("numpy"):
            wanted = step(gpt, params, dropout_key=key)
        require_same(step(gpt, params, dropout_key=key), wanted)
        kept.append(len(single_op._programs))
    assert kept[2:] == [kept[2]] * 3  # nothing is recorded for another step


def test_frozen_parameters_and_adapters() -> None:
    gpt = model()
    plain = gpt.init(0)
    frozen = tree.freeze(plain, "*attn*")
    adapted = [finetune.lora.attach(plain, rank=2, alpha=alpha, seed=0) for alpha in (1, 64)]
    adapted = [tree.map(lambda x: x + np.float32(0.01), params) for params in adapted]
    for params in (frozen, *adapted):
        with xf.kernels("numpy"):
            wanted = step(gpt, params)
        for _ in range(3):
            require_same(step(gpt, params), wanted)


def test_a_cache_holds_parameters_once() -> None:
    gpt = model()
    params = gpt.init(0)
    held = []
    for name in ("numpy", "numba"):
        with xf.kernels(name):
            for _ in range(2):
                _, cache = gpt.forward(params, tokens()[0])
        held.append(tree.nbytes((params, cache)) - tree.nbytes(params))
    assert held[1] <= 1.2 * held[0]


def test_adam_writes_over_what_is_donated() -> None:
    params = {"w": np.ones((200, 100), np.float32)}
    state = optim.adam_init(params)
    place = params["w"].ctypes.data
    new, _ = optim.adamw(params, {"w": params["w"] * 2}, state, lr=0.1, donate=True)
    assert new["w"].ctypes.data == place and not np.allclose(new["w"], 1)


def test_adam_of_leaves_that_share_memory() -> None:
    """None is written over."""
    leaf = np.ones((200, 100), np.float32)
    params = {"one": leaf, "other": leaf[:]}
    grads = {"one": leaf, "other": leaf}
    new, _ = optim.adamw(params, grads, optim.adam_init(params), lr=0.1, donate=True)
    np.testing.assert_array_equal(leaf, 1)
    assert not np.shares_memory(new["one"], leaf)


def test_threads_run_and_record_at_once() -> None:
    gpt = model()
    params = gpt.init(0)
    with xf.kernels("numpy"):
        wanted = step(gpt, params)
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            with xf.kernels("numba"):
                for _ in range(4):
                    require_same(step(gpt, params), wanted)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_as_many_programs_are_kept_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_op, "KEPT", 3)
    for n in range(300, 310):
        x = np.ones((n, 100), np.float32)
        y, cache = ops.gelu(x)
        assert cache.backward(y).shape == x.shape
        assert len(single_op._programs) <= 3


def test_arguments_may_lie_anyhow() -> None:
    """Copied where a program cannot read them, and never written to."""
    x = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float32)
    wanted, _ = ops.gelu.reference(x)
    for own in (np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2], x[::-1].copy()[::-1]):
        own.flags.writeable = False
        y, cache = ops.gelu(own)
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
        assert cache.backward(own).shape == x.shape


def test_gradients_are_new_arrays() -> None:
    gpt = model()
    params = gpt.init(0)
    _, cache = gpt.loss(params, *tokens())
    first = cache.backward()
    wanted = tree.map(np.copy, first)
    tree.map(lambda x: x.fill(0), first)
    require_same(cache.backward(), wanted)


def test_a_loss_times_a_number() -> None:
    """A scalar of NumPy's is an array; a number of Python's is not, as on NumPy."""
    gpt = model()
    params = gpt.init(0)
    _, cache = gpt.loss(params, *tokens())
    half = tree.map(lambda g: g / 2, cache.backward(np.ones((), np.float32)))
    for dloss in (np.float32(0.5), np.asarray(0.5, np.float32)):
        require_same(cache.backward(dloss), half)
    for wrong in (1.0, True, 2, np.asarray(1.0)):
        with pytest.raises(TypeError, match=r"d(y|loss) must"):
            cache.backward(wrong)


def test_errors_are_numpys() -> None:
    gpt = model(dropout=0.1)
    params = gpt.init(0)
    x, targets = tokens()
    for call in (
        lambda: gpt.loss(params, x, targets + 31),
        lambda: gpt.loss(params, x, targets, dropout_key=RandomKey(1, step=2**32)),
    ):
        with xf.kernels("numpy"), pytest.raises(ValueError) as wanted:
            call()
        with pytest.raises(ValueError) as found:
            call()
        assert str(found.value) == str(wanted.value)
    y = np.ones((8, 64, 64), np.float32)
    for step, error in ((2**32, ValueError), (-1, ValueError), (1.7, TypeError)):
        with pytest.raises(error, match="step"):
            ops.dropout(y, rate=0.5, key=RandomKey(1, step=step))


def test_what_is_not_float32_is_numpys() -> None:
    x = np.ones((300, 200))
    assert type(ops.gelu(x)[1]) is not single_op.Saved
    with pytest.raises(TypeError, match="float32"):
        ops.gelu(x.astype(np.float32))[1].backward(x)
