"""Training steps captured as graphs. The stand-in notes work and does it later."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from causal_models import V, causal
from cuda_shim import CublasLt, calling
from cuda_shim.graph import Graph
from devices import bits, is_stand_in
from libraries import ON_DEVICE, only
from nvidia import by_cublas, counted_graphs, memories

import xformer
from xformer import RandomKey, backends, explain, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy.captured import Captured
from xformer.cli import main
from xformer.dispatch.shapes import STORED
from xformer.training import Batch, TrainConfig, Windows, loss_of, start, train

pytestmark = only(*ON_DEVICE)

TEXT = np.frombuffer(b"to be or not to be, that is the question " * 20, np.uint8)
GPT = xformer.GPT(vocab_size=256, n_layers=1, d_model=8, n_heads=2, max_len=6, dropout=0.2)
CONFIG = TrainConfig(steps=5, batch_size=2, eval_every=2, warmup=3, lr=1e-2, clip=0.5)


@pytest.fixture
def graphs(library: Backend) -> Iterator[list[Any]]:
    with counted_graphs(library) as made:
        yield made


@pytest.fixture
def notes(stand_in: Backend, graphs: list[Graph]) -> list[Graph]:
    """The stand-in's graphs, whose calls can be read."""
    return graphs


class Cut:
    """Batches of a source, of which those after some number are shorter."""

    def __init__(self, source: Any, after: int) -> None:
        self.source, self.after = source, after

    def batch(self, i: int) -> Batch:
        batch = self.source.batch(i)
        if i < self.after:
            return batch
        arrays = tuple(ids[:, :4] for ids in batch.arrays)
        return batch._replace(arrays=arrays, n_targets=8, n_tokens=8)


def run(
    library: Backend, config: TrainConfig, compiled: bool, *, source: Any = None, **options: Any
) -> tuple[list[Any], dict[str, bytes]]:
    """Numbers of every step, and the bytes of the last state."""
    source = source or Windows(TEXT, GPT.context, config.batch_size)
    held_out = list(Windows(TEXT, GPT.context, 2).held_out(1))
    state = options.pop("state", None)
    if state is None:
        state = start(tree.map(library.asarray, GPT.init(0)), config)
    options = {"held_out": held_out, "donate": True, "deterministic": True, **options}
    loss = options.pop("loss", loss_of(GPT))
    numbers = []
    for step in train(loss, state, source, config, library, compiled=compiled, **options):
        numbers.append((step.step, step.loss, step.norm, step.lr, step.tokens, step.validation))
        state = step.state
    leaves = tree.flatten(state._replace(seconds=0.0))
    return numbers, {name: bits(library, leaf) for name, leaf in leaves.items()}


CONFIGS = {
    "adamw": {},
    "accumulate": {"accumulate": 2, "clip": None},
    "average": {"ema": 0.9, "schedule": "linear"},
    "sgd": {"optimiser": "sgd", "lr": 0.1},
    "lion": {"optimiser": "lion"},
    **{stored: {"precision": stored} for stored in STORED if stored != "float16"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits(library: Backend, graphs: list[Any], name: str) -> None:
    """As of steps that are not compiled: with dropout, clipping, a schedule, validation between."""
    if "precision" in CONFIGS[name]:
        pytest.importorskip("ml_dtypes", reason="there is no bfloat16: ml_dtypes is missing")
    config = TrainConfig(**{**vars(CONFIG), **CONFIGS[name]})
    wanted = run(library, config, False)
    assert not graphs
    assert run(library, config, True) == wanted
    (graph,) = graphs
    assert graph.launches == config.steps - 1  # the first step is made as it is


def test_targets_that_are_ignored(library: Backend, graphs: list[Any]) -> None:
    """Each batch has another share of a step's targets, in arrays of one shape."""

    class Ignoring(Cut):
        def batch(self, i: int) -> Batch:
            batch = self.source.batch(i)
            tokens, targets = batch.arrays[0], batch.arrays[1].astype(np.int64)
            targets[0, : i % 5] = -1
            return batch._replace(arrays=(tokens, targets), n_targets=targets.size - i % 5)

    config = TrainConfig(**{**vars(CONFIG), "accumulate": 2})
    options: Any = {"loss": loss_of(GPT, ignore_index=-1), "held_out": []}
    source = Ignoring(Windows(TEXT, GPT.context, 2), 0)
    wanted = run(library, config, False, source=source, **options)
    assert run(library, config, True, source=source, **options) == wanted
    assert graphs[0].launches == config.steps - 1


def test_a_graph_is_the_steps_launches(
    library: Backend, notes: list[Graph], launched: list[Any]
) -> None:
    """Kernels and products of a step, in their order; nothing is done when they are noted."""
    config = TrainConfig(**{**vars(CONFIG), "eval_every": 99, "steps": 2})
    source, loss = Windows(TEXT, GPT.context, 2), loss_of(GPT)
    with calling(CublasLt()) as lt:
        state = start(tree.map(library.asarray, GPT.init(0)), config)
        launched.clear()
        next(iter(train(loss, state, source, config, library, donate=True)))
        wanted = [(name, grid) for name, grid, _ in launched], len(lt.products)
    state = start(tree.map(library.asarray, GPT.init(0)), config)
    steps = train(loss, state, source, config, library, donate=True, compiled=True)
    first = next(steps)
    (graph,) = notes
    assert not graph.calls  # the first step is made, not noted
    arrays = [leaf.data.ptr for leaf in tree.flatten(first.params).values()]
    last = next(steps)
    assert [leaf.data.ptr for leaf in tree.flatten(last.params).values()] == arrays
    own = {name for name, _ in wanted[0]}
    noted = [(call.name, call.arguments[0]) for call in graph.calls if call.name in own]
    products = [call for call in graph.calls if call.name == "matmul"]
    assert (noted, len(products)) == wanted


@pytest.mark.parametrize("name", ["llama", "sinusoidal", "alibi", "relative bias"])
def test_tables_of_the_host(library: Backend, graphs: list[Any], name: str) -> None:
    """They are brought in the first step, and there from then on."""
    model, params = causal(name)
    source = Windows(TEXT % V, 6, 2)

    def numbers(compiled: bool) -> list[Any]:
        own = tree.map(lambda p: library.asarray(p.astype(np.float32)), params)
        config = TrainConfig(**{**vars(CONFIG), "eval_every": 99})
        options = {"donate": True, "deterministic": True, "compiled": compiled}
        steps = train(loss_of(model), start(own, config), source, config, library, **options)
        return [(step.loss, step.norm) for step in steps]

    wanted = numbers(False)
    assert numbers(True) == wanted
    assert [graph.launches for graph in graphs] == [CONFIG.steps - 1]


def test_a_state_with_an_array_twice(library: Backend, graphs: list[Any]) -> None:
    """A graph would write over it for one of both."""
    call: Any = Captured(lambda state, x: (state, ({"y": state["a"] + x["x"]},)), library)
    a = library.asarray(np.ones(3, np.float32))
    with pytest.warns(RuntimeWarning, match="an array is in the state twice"):
        for x in (1.0, 2.0):
            _, (results,) = call({"a": a, "b": a}, {"x": np.float32(x)})
            assert library.to_numpy(results["y"]).tolist() == [1 + x] * 3
    assert not graphs


def test_batches_of_another_shape(library: Backend, graphs: list[Any]) -> None:
    """Are made call by call, which is said once; the graph goes on where shapes are its own."""

    class Some(Cut):
        def batch(self, i: int) -> Batch:
            return super().batch(i) if i in (2, 3) else self.source.batch(i)

    source = Some(Windows(TEXT, GPT.context, 2), 0)
    for name in ("adamw", "sgd"):
        config = TrainConfig(**{**vars(CONFIG), **CONFIGS[name]})
        wanted = run(library, config, False, source=source)
        with pytest.warns(RuntimeWarning) as said:
            assert run(library, config, True, source=source) == wanted
        assert [str(each.message) for each in said] == [
            f"backend {library.name}: no graph: another shape of its arrays than at first; such a "
            "step is made call by call"
        ]
        assert graphs[-1].launches == 2


def test_what_cannot_be_captured(library: Backend) -> None:
    """CuPy refuses cuBLAS: the message has the place; the run goes on, and is the same."""
    with by_cublas(library):
        wanted = run(library, CONFIG, False)
        with pytest.warns(RuntimeWarning) as said:
            assert run(library, CONFIG, True) == wanted
    (message,) = (str(each.message) for each in said)
    place = "xformer.backends.cupy.products.Products.affine: "
    assert message.startswith(f"backend {library.name}: no graph: {place}")
    assert message.endswith("; steps are made call by call")
    assert "cuBLAS" in message


@pytest.mark.parametrize("what", ["looks", "brings"])
def test_a_loss_that_cannot_be_captured(
    library: Backend, graphs: list[Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at a number of the device, or brings one there, which would stay the same."""
    loss = loss_of(GPT)
    of = type(loss).of

    def waits(self: Any, params: Any, inputs: Any, key: Any) -> Any:
        if what == "looks":
            float(inputs[0][0][0, 0])
        else:
            library.asarray(np.ones(2))  # of a number CuPy makes an array on the device
        return of(self, params, inputs, key)

    wanted = run(library, CONFIG, False)
    monkeypatch.setattr(type(loss), "of", waits)
    said = f"a value is {'looked' if what == 'looks' else 'brought'}"
    with pytest.warns(RuntimeWarning, match=said if is_stand_in(library) else "no graph: "):
        assert run(library, CONFIG, True) == wanted


@pytest.mark.parametrize("what", ["a loss of its own", "strict"])
def test_steps_that_are_made_as_ever(library: Backend, what: str) -> None:
    if what == "strict":
        library, options = backends.get("array-api-strict"), {}
        why = "backend array-api-strict compiles nothing"
    else:
        loss = loss_of(GPT)
        options, why = {"loss": lambda *args: loss(*args)}, "the loss must be a loss_of"
    wanted = run(library, CONFIG, False, **options)
    with pytest.warns(RuntimeWarning, match=f"train: steps are not compiled: {why}"):
        assert run(library, CONFIG, True, **options) == wanted


def test_float16_is_made_as_ever(library: Backend) -> None:
    config = TrainConfig(**{**vars(CONFIG), "precision": "float16", "steps": 1})
    with pytest.warns(RuntimeWarning, match="the loss scale of float16 depends"):
        run(library, config, True)


def test_states_must_be_donated(library: Backend) -> None:
    with pytest.raises(ValueError, match="compiled steps write over their states"):
        run(library, CONFIG, True, donate=False)


def test_a_run_goes_on(library: Backend, graphs: list[Any], tmp_path: Any) -> None:
    """From a file that a compiled step's state was written to, compiled or not."""
    from xformer.training import read_state, write_state

    wanted = run(library, CONFIG, True)
    source, held_out = (
        Windows(TEXT, GPT.context, 2),
        list(Windows(TEXT, GPT.context, 2).held_out(1)),
    )
    state = start(tree.map(library.asarray, GPT.init(0)), CONFIG)
    options: Any = {"held_out": held_out, "donate": True, "deterministic": True, "compiled": True}
    steps = train(loss_of(GPT), state, source, CONFIG, library, **options)
    third = next(itertools.islice(steps, 2, None))
    write_state(tmp_path / "state", third.state, library)
    for compiled in (True, False):
        like = start(tree.map(library.asarray, GPT.init(1)), CONFIG)
        state = read_state(tmp_path / "state").restored(like, library)
        numbers, last = run(library, CONFIG, compiled, state=state)
        assert (numbers, last) == (wanted[0][3:], wanted[1])


def test_ids_are_checked_before_each_step(library: Backend, graphs: list[Any]) -> None:
    class Wrong(Cut):
        def batch(self, i: int) -> Batch:
            batch = self.source.batch(i)
            return batch if i < 2 else batch._replace(arrays=(batch.arrays[0] + 256, *batch.arrays))

    with pytest.raises(ValueError, match="ids of array 1 of the batch"):
        run(library, CONFIG, True, source=Wrong(Windows(TEXT, GPT.context, 2), 0))
    assert graphs[0].launches == 1


def test_divergence_names_the_gradient(library: Backend, graphs: list[Any]) -> None:
    config = TrainConfig(**{**vars(CONFIG), "lr": 1e30, "warmup": 0})
    with (
        np.errstate(all="ignore"),
        pytest.raises(xformer.training.Diverged, match=r"not finite: the gradient of "),
    ):
        run(library, config, True, held_out=[])
    assert graphs[0].launches >= 1


def test_its_memory_goes_with_it(library: Backend, graphs: list[Any]) -> None:
    gc.collect()
    before = memories(library, graphs)()
    state = start(tree.map(library.asarray, GPT.init(0)), CONFIG)
    source = Windows(TEXT, GPT.context, 2)
    steps = train(loss_of(GPT), state, source, CONFIG, library, donate=True, compiled=True)
    kept = [next(steps) for _ in range(2)][-1]
    held = memories(library, graphs)
    assert held() > before
    steps.close()
    del steps
    graphs.clear()
    gc.collect()
    assert held() == before
    assert np.isfinite(library.to_numpy(next(iter(tree.flatten(kept.params).values())))).all()


def test_the_command_asks_for_it(library: Backend, tmp_path: Any) -> None:
    """And a run may go on with it, or without; where there is no such thing, that is said."""
    (text := tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    sizes = "--layers 1 --d-model 8 --heads 1 --max-len 8 --batch 2 --steps 2 --data"
    folder, other = str(tmp_path / "run"), str(tmp_path / "other")
    assert main(["train", *sizes.split(), str(text), "--out", folder]) == 0
    with pytest.warns(RuntimeWarning, match="train: steps are not compiled: backend array-api-s"):
        more = "--out", other, "--compile", "--backend", "array-api-strict"
        assert main(["train", *sizes.split(), str(text), *more]) == 0
    assert main(["train", "--resume", folder, "--compile"]) == 0  # which has no steps left


# ---- Several calls in one ----

ROUNDS = ((1, 2.0), (1, 3.0), (4, 2.0), (3, 0.5), (1, 1.0))  # calls, and a number they get
N_CALLS = sum(n for n, _ in ROUNDS)
OTHER = np.array([1.0, 2.0])


def growing(rate: Any, state: Any, other: Any) -> Any:
    x, y = state
    return (x * rate + other, y + 1), x + y


def swapping(rate: Any, state: Any, other: Any) -> Any:
    """The next value of each array of the state is the other array."""
    x, y = state
    return (y, x), x * rate + other


def first_state() -> tuple[np.ndarray, np.ndarray]:
    return np.array([1.0, 2.0]), np.array([3.0, 4.0])


def one_by_one(fn: Any) -> list[Any]:
    """The results on NumPy after each of `ROUNDS`."""
    state, found = first_state(), []
    for n, rate in ROUNDS:
        for _ in range(n):
            state, result = fn(rate, state, OTHER)
        found.append([x.tolist() for x in (*state, result)])
    return found


def in_rounds(library: Backend, fn: Any, *, lends: bool = True) -> list[Any]:
    """The same, each round by one call of `repeated`, which reads nothing."""
    compiled: Any = library.compiled(fn, (1,), lends=lends)
    state, found = tuple(map(library.asarray, first_state())), []
    other = library.asarray(OTHER)
    for n, rate in ROUNDS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(library), "to_numpy", None)
            state, result = compiled.repeated(n, rate, state, other)
        found.append([library.to_numpy(x).tolist() for x in (*state, result)])
    return found


@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("fn", [growing, swapping])
def test_calls_in_one(library: Backend, graphs: list[Any], fn: Any, lends: bool) -> None:
    """A number of a round is an input; the first call of all is no launch."""
    assert in_rounds(library, fn, lends=lends) == one_by_one(fn)
    assert [graph.launches for graph in graphs] == [N_CALLS - 1]


def test_further_calls_only_launch(
    library: Backend, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each result of the state is in the array of its argument; else they are calls."""
    calls: list[Any] = []
    called = Captured.__call__
    monkeypatch.setattr(Captured, "__call__", lambda *args: calls.append(1) or called(*args))
    for fn, lends, n in (
        (growing, True, len(ROUNDS)),
        (growing, False, N_CALLS),
        (swapping, True, N_CALLS),
    ):
        calls.clear()
        in_rounds(library, fn, lends=lends)
        assert len(calls) == n


def test_calls_in_one_that_are_not_captured(library: Backend, graphs: list[Any]) -> None:
    def bringing(rate: Any, state: Any, other: Any) -> Any:
        results = growing(rate, state, other)
        return results[0], results[1] + library.asarray(OTHER)

    wanted = [[x, y, (np.array(r) + OTHER).tolist()] for x, y, r in one_by_one(growing)]
    with pytest.warns(RuntimeWarning, match="no graph: .*; steps are made call by call") as said:
        assert in_rounds(library, bringing) == wanted
    assert len(said) == 1
    assert [graph.launches for graph in graphs] == [0]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 6])
def test_a_launch_that_fails_in_a_round(
    library: Backend, notes: list[Graph], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """The calls that are left are made call by call, from the state of the last launch."""
    launch = Graph.launch

    def fails(self: Graph) -> None:
        if self.launches == n:
            raise RuntimeError("the device is busy")
        launch(self)

    monkeypatch.setattr(Graph, "launch", fails)
    with pytest.warns(RuntimeWarning, match="the device is busy; steps are made call by") as said:
        assert in_rounds(library, growing) == one_by_one(growing)
    assert len(said) == 1
    assert [graph.launches for graph in notes] == [n]


@pytest.mark.parametrize("build", [list, tuple])
def test_calls_in_one_on_other_trees(library: Backend, graphs: list[Any], build: Any) -> None:
    """Trees of another build, and arrays of other shapes, are computed call by call."""
    compiled: Any = library.compiled(growing, (1,), lends=True)
    state, other = tuple(map(library.asarray, first_state())), library.asarray(OTHER)
    state, _ = compiled.repeated(3, 2.0, state, other)
    short = build(library.asarray(x[:1]) for x in first_state())
    with pytest.warns(RuntimeWarning, match="call by call"):
        (x, y), result = compiled.repeated(3, 2.0, short, library.asarray(OTHER[:1]))
    assert [library.to_numpy(a).tolist() for a in (x, y, result)] == [[15.0], [6.0], [12.0]]
    (x, y), _ = compiled.repeated(3, 2.0, state, other)
    assert library.to_numpy(x).tolist() == [64 + 63, 2 * 64 + 2 * 63]
    assert library.to_numpy(y).tolist() == [9, 10]
    assert [graph.launches for graph in graphs] == [5]


def test_deterministic_calls_are_not_the_graph(library: Backend, graphs: list[Any]) -> None:
    """The graph has the kernels of its first call."""
    compiled: Any = library.compiled(lambda x: (x * 2, None), ())
    x = library.asarray(np.ones(3, np.float32))
    for _ in range(3):
        compiled(x)
    launches = [graph.launches for graph in graphs]
    with library.deterministic(), pytest.warns(RuntimeWarning, match=r"deterministic\(\)"):
        assert library.to_numpy(compiled(x)[0]).tolist() == [2, 2, 2]
    assert [graph.launches for graph in graphs] == launches and sum(launches)
    compiled(x)
    assert sum(graph.launches for graph in graphs) == sum(launches) + 1


# ---- Numbers on the device ----


def test_kernels_read_the_step_of_a_key(library: Backend) -> None:
    """Those that draw: the same words as of a number of the host."""
    x = library.asarray(np.random.default_rng(0).normal(size=(1, 2, 20, 8)).astype("f4"))
    at = RandomKey(3, library.asarray(np.array(2**32 - 2)), 5)
    key = RandomKey(3, 2**32 - 2, 5)
    for op, args, name in (
        (ops.dropout, (x,), "key"),
        (ops.sdpa, (x, x, x), "dropout_key"),
    ):
        rate = {"rate": 0.4} if name == "key" else {"dropout_rate": 0.4}
        assert "the reference" not in explain(op, *args, **rate, **{name: at}).splitlines()[0]
        (y, cache), (wanted, own) = (op(*args, **rate, **{name: k}) for k in (at, key))
        assert bits(library, y) == bits(library, wanted)
        grads = [c.backward(x) for c in (cache, own)]
        grads = [g if isinstance(g, tuple) else (g,) for g in grads]
        for got, exact in zip(*grads, strict=True):
            assert got is exact is None or bits(library, got) == bits(library, exact)
    got, wanted = (ops.random_bits(x, key=k, size=9) for k in (at, key))
    assert bits(library, got) == bits(library, wanted)


def test_a_step_that_kernels_do_not_read(library: Backend) -> None:
    x = library.asarray(np.ones((1, 2, 20, 8), np.float32))
    for step in (np.ones(1, np.int64), np.array(1, np.int32)):
        said = explain(ops.dropout, x, rate=0.5, key=RandomKey(3, library.asarray(step)))
        assert "key.step must be an int, or int64 of shape ()" in said
    half = library.xp.astype(x, np.float16)
    key = RandomKey(3, library.asarray(np.array(1)))
    said = explain(ops.sdpa, half, half, half, dropout_rate=0.5, dropout_key=key)
    assert (
        "the step of dropout_key is an array" in said and "cupy.sdpa.sdpa" in said.splitlines()[0]
    )
