"""`xformer.compile` of functions that read more than arrays: the results of the function itself.

Each function is called several times, and something that it reads changes between the calls.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
import operator
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
import pytest
from libraries import only

import xformer as xf
from xformer import GPT, ops, tree
from xformer.backends import Backend
from xformer.base.keys import Unkeyed, exact

LIBRARIES = ("numpy", "jax")
X = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)
IDS = np.array([0, 2])
SCALE, TABLE = 1.0, {"scale": 1.0, "also": [1, 2]}


@pytest.fixture(autouse=True)
def _numba(request: pytest.FixtureRequest) -> None:
    if "library" not in request.fixturenames or "numpy" in request.node.callspec.id:
        pytest.importorskip("numba", reason="numba is not installed")


def require_equal(got: Any, want: Any) -> None:
    got, want = tree.flatten({"": got}), tree.flatten({"": want})
    assert list(got) == list(want)
    for name, x in want.items():
        if isinstance(x, str):
            assert got[name] == x
            continue
        assert getattr(got[name], "dtype", None) == getattr(x, "dtype", None)
        np.testing.assert_allclose(np.asarray(got[name]), np.asarray(x), rtol=1e-6, err_msg=name)


def require_same(fn: Callable[..., Any], calls: Iterator[tuple[Any, ...]], says: str) -> Any:
    """Each call of the compiled function gives what fn gives, with at most one warning, `says`."""
    compiled = xf.compile(fn)
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        for arguments in calls:
            require_equal(compiled(*arguments), fn(*arguments))
    messages = {str(each.message) for each in met}
    if says:
        assert len(messages) == 1 and says in messages.pop()
    else:
        assert not messages
    return compiled


def scaled(x: Any) -> Any:
    return x * SCALE * TABLE["scale"] + len(TABLE["also"])  # type: ignore[arg-type]


class Scaled:
    offset = 0.0

    def __init__(self, w: Any) -> None:
        self.w, self.scale, self.n_calls = w, 1.0, 0

    def step(self, x: Any) -> Any:
        return helper(x) * self.scale + self.offset

    def with_array(self, x: Any) -> Any:
        return x + self.w


def helper(x: Any) -> Any:
    return x * SCALE


@only(*LIBRARIES)
def test_numbers_of_closures_globals_and_attributes(
    library: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, held, factor = library.asarray(X), Scaled(None), 1.0

    def of_closure(x: Any) -> Any:
        return x * factor

    def calls() -> Iterator[tuple[Any, ...]]:
        nonlocal factor
        held.scale = factor = 1.0
        yield (x,)
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        yield (x,)
        monkeypatch.setitem(TABLE, "scale", -0.0)
        monkeypatch.setitem(TABLE, "also", [1, 2, 3])
        yield (x,)
        held.scale = 5.0
        yield (x,)
        monkeypatch.setattr(Scaled, "offset", 7.0)
        factor = 4.0
        yield (x,)
        monkeypatch.undo()

    for fn in (scaled, held.step, of_closure, lambda x, times=held: times.step(x)):
        require_same(fn, calls(), "")


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Halved:
    whole = 4.0

    @property
    def scale(self) -> float:
        return self.whole / 2


class Pair(NamedTuple):
    w: Any
    b: Any

    def run(self, x: Any) -> Any:
        return x * self.w + self.b


@only(*LIBRARIES)
def test_properties_slots_and_fields(library: Backend) -> None:
    x, slots, halved = library.asarray(X), Slots(), Halved()

    def calls() -> Iterator[tuple[Any, ...]]:
        slots.scale, halved.whole = 2.0, 4.0
        yield (x,)
        slots.scale, halved.whole = 3.0, 5.0
        yield (x,)

    for fn in (
        lambda x: x * slots.scale,
        lambda x: x * halved.scale,
        lambda x: Pair(x, x).run(x),
    ):
        require_same(fn, calls(), "")


class Shared:
    scale = 2.0

    def run(self, x: Any) -> Any:
        return x * self.scale


@only(*LIBRARIES)
def test_the_class_of_an_argument(library: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    x, shared = library.asarray(X), Shared()

    def calls() -> Iterator[tuple[Any, ...]]:
        for scale in (2.0, 3.0):
            monkeypatch.setattr(Shared, "scale", scale)
            yield x, shared

    for fn in (lambda x, shared: x * shared.scale, lambda x, shared: shared.run(x)):
        require_same(fn, calls(), "")


def test_what_is_not_read_compiles_nothing_again() -> None:
    held = Scaled(None)
    compiled = xf.compile(held.step)
    for n in range(3):
        held.n_calls = n
        compiled(X)
    assert compiled.explain().count("instructions") == 1


class Read:
    """Whose number is read without naming it."""

    scale: Any = 2.0

    def __call__(self, x: Any) -> Any:
        return x * self.scale

    def __getitem__(self, i: int) -> Any:
        return self.scale

    def __float__(self) -> float:
        return float(self.scale)

    def __get__(self, of: Any, kind: Any) -> Any:
        return self.scale


READ, PLACE, GET = Read(), types.SimpleNamespace(a=2.0), operator.attrgetter("scale")
CHAINED = collections.ChainMap({"a": 2.0})


class Below(Read):
    held = READ

    @classmethod
    def times(cls, x: Any) -> Any:
        return x * cls.scale


def own(x: Any) -> Any:
    return x * own.scale  # type: ignore[attr-defined]


INDIRECT: dict[str, Callable[..., Any]] = {
    "called": lambda x: READ(x),
    "in a list": lambda x, of=(READ,): of[0](x),
    "item": lambda x: x * READ[0],
    "operator": lambda x: x * float(READ),
    "descriptor": lambda x: x * Below().held,
    "getattr": lambda x: x * getattr(READ, "sca" + "le"),
    "vars": lambda x: x * vars(READ)["scale"],
    "attrgetter": lambda x: x * GET(READ),
    "namespace": lambda x: x * PLACE.a,
    "mapping": lambda x: x * CHAINED["a"],
    "class": Below.times,
    "class by name": lambda x: Below.times(x),
    "function": own,
    "globals": lambda x: x * globals()["PLACE"].a,
    "eval": lambda x: x * eval("PLACE.a + 1"),
}


@pytest.mark.parametrize("name", INDIRECT)
def test_what_is_read_without_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls() -> Iterator[tuple[Any, ...]]:
        for value in (2.0, 3.0):
            for holder in (READ, Read, own):
                monkeypatch.setattr(holder, "scale", value, raising=False)
            monkeypatch.setattr(PLACE, "a", value)
            monkeypatch.setitem(CHAINED, "a", value)
            yield (X,)

    require_same(INDIRECT[name], calls(), "it reads what" if name in ("globals", "eval") else "")


def caught(x: Any) -> Any:
    try:
        return x * float(x[0, 0])
    except Exception:
        return x


def rounded(x: Any, n: float = 1.6) -> Any:
    with contextlib.suppress(TypeError):
        return x * round(n)
    return x


IN_SILENCE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a caught error": (caught, ()),
    "a suppressed error": (rounded, (2.6,)),
    "repr": (lambda x: (x, repr(x)), ()),
    "the text of a list": (lambda x, n: (x, f"{[n]}"), (2.0,)),
    "an index True": (lambda x: x[True], ()),
    "a tuple as an index": (lambda x: x[:, (2, 0)], ()),
    "a range as an index": (lambda x: x[range(2)], ()),
    "type": (lambda x, n: x * (2 if type(n).__name__ == "int" else 3), (2,)),
    "a large product": (lambda x, n: x + n * n, (2**40,)),
    "a large shift": (lambda x, n: x + (n << 3), (2**61,)),
    "a sum beyond int64": (lambda x, n: x + (n + 1), (2**63 - 1,)),
    "an int beside a float": (lambda x, n, f: x * (2 if n == f else 3), (2**53 + 1, 2.0**53)),
    "a power of booleans": (lambda x: (x > 0) ** 2, ()),
    "a complex root": (lambda x, n: x * abs(n**0.5), (-4.0,)),
    "a number of differences": (lambda x, n: x.__array_namespace__().diff(x, n=n), (2,)),
    "repetitions": (lambda x, ids: x.__array_namespace__().repeat(x, ids, axis=0), (IDS,)),
}


@pytest.mark.parametrize("name", IN_SILENCE)
def test_nothing_is_recorded_in_silence(name: str) -> None:
    """The function itself, with one warning, where a recording would give something else."""
    fn, more = IN_SILENCE[name]
    says = "it reads what `type` returns" if name == "type" else "not recorded"
    require_same(fn, iter([(X, *more), (X + 1, *more)]), says)


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda x, n: x * (1 / n), ZeroDivisionError),
        (lambda x, n: x + 7 % n, ZeroDivisionError),
        (lambda x, n: x * 10.0 ** (400 - 390 * n), OverflowError),
    ],
)
def test_errors_of_numbers_come_out(fn: Callable[..., Any], error: type[Exception]) -> None:
    """Also in a later call than the first."""
    compiled = xf.compile(fn)
    require_equal(compiled(X, 1), fn(X, 1))
    with pytest.raises(error):
        compiled(X, 0)
    require_equal(compiled(X, 1), fn(X, 1))


def test_a_learning_rate_is_checked_in_each_call() -> None:
    def step(params: Any, lr: float) -> Any:
        return xf.optim.sgd(params, params, xf.optim.sgd_init(params), lr=lr)[0]

    compiled = xf.compile(step)
    require_equal(compiled(X, 0.1), step(X, 0.1))
    for lr in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="sgd: lr must"):
            compiled(X, lr)
    require_equal(compiled(X, 0.2), step(X, 0.2))


@only(*LIBRARIES)
@pytest.mark.parametrize("with_op", [False, True])
def test_arrays_of_a_closure(library: Backend, with_op: bool) -> None:
    x, held = library.asarray(X), Scaled(library.asarray(X))
    w = held.w

    def closed(x: Any) -> Any:
        return ops.gelu(x + w)[0] if with_op else w * 2 + x

    def calls() -> Iterator[tuple[Any, ...]]:
        nonlocal w
        for i in range(3):
            w = held.w = library.asarray(X + i)
            yield (x,)

    says = "an array that is no argument is read" if library.name == "numpy" else ""
    require_same(closed, calls(), says)
    require_same(held.with_array, calls(), says)


@only(*LIBRARIES)
def test_arrays_of_the_host_that_change_in_place(library: Backend) -> None:
    w, x = X.copy(), library.asarray(X)

    def calls() -> Iterator[tuple[Any, ...]]:
        for i in range(3):
            w[...] = i
            yield (x,)

    says = "an array that is no argument is read" if library.name == "numpy" else ""
    require_same(lambda x: x * w, calls(), says)
    says = says and "its result holds an array of NumPy"
    require_same(lambda x: (x, w.sum() if library.name == "jax" else w), calls(), says)


@only(*LIBRARIES)
def test_numbers_that_change_in_every_call(library: Backend) -> None:
    x, n = library.asarray(X), 0

    def calls() -> Iterator[tuple[Any, ...]]:
        nonlocal n
        for n in range(20):  # noqa: B007
            yield (x,)

    says = "what it reads besides its arguments has changed 16 times"
    compiled = require_same(lambda x: x + n, calls(), says)
    assert says in compiled.explain()


@only(*LIBRARIES)
def test_random_keys_are_inputs(library: Backend) -> None:
    """The step is one; seed and site are compiled in."""
    x = library.asarray(np.ones((40, 50), np.float32))
    keys = [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 2, 0), (2**64 - 1, 2**32 - 1, 5)]

    def fn(x: Any, key: xf.RandomKey, more: dict[str, Any]) -> Any:
        return [ops.dropout(x, rate=0.5, key=k)[0] for k in (key, key.at(3), more["key"])]

    def calls() -> Iterator[tuple[Any, ...]]:
        for key in keys:
            yield x, xf.RandomKey(*key), {"key": xf.RandomKey(7, key[1])}

    compiled = require_same(fn, calls(), "")
    if library.name == "numpy":
        assert compiled.explain().count("instructions") == 3


def test_a_training_step_with_dropout() -> None:
    model = GPT(19, n_layers=1, d_model=8, n_heads=2, max_len=6, dropout=0.5)
    params = tree.map(lambda p: p.astype(np.float32), model.init())
    ids = np.arange(12).reshape(2, 6)

    def step(params: Any, ids: Any, key: Any) -> Any:
        loss, cache = model.loss(params, ids, ids, dropout_key=key)
        return loss, cache.backward()

    compiled = xf.compile(step)
    for i in range(3):
        key = xf.RandomKey(1, i)
        (got, grads), (want, wanted) = compiled(params, ids, key), step(params, ids, key)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        for name, x in tree.flatten(grads).items():
            np.testing.assert_allclose(x, tree.flatten(wanted)[name], atol=1e-6, err_msg=name)


def assigned(x: Any) -> Any:
    y = x * 2
    y[0] = 1
    return y


def changed(x: Any) -> Any:
    y = x * 2
    z = y
    z += 1
    return y


def typed(x: Any, number: Any = 1.0) -> Any:
    is_known = isinstance(x, np.ndarray) and isinstance(number, float)
    return x * 2 if is_known and not isinstance(x, tuple) else x * 3


UNRECORDED: dict[str, tuple[Callable[..., Any], str]] = {
    "a method of NumPy": (lambda x: x.sum(), "sum, which is not of the array API"),
    "another method": (lambda x: x.astype("float64").copy(), "astype, which is not"),
    "a method if there is one": (lambda x: x.std() if hasattr(x, "std") else x, "std, which is"),
    "a function of NumPy": (lambda x: np.exp(x), ""),
    "NumPy's concatenate": (lambda x: np.concatenate([x, x]), "value of an array"),
    "an item": (assigned, "item assignment"),
    "in place": (changed, "changed in place"),
    "a text": (lambda x: (x, f"{x}"), "value of an array"),
    "a result that is no argument": (lambda x: (x, np.ones(2)), "that no argument is"),
    "an unknown function": (lambda x: array_api_compat.array_namespace(x).cross(x, x), "cross"),
    "no axis to iterate over": (lambda x: list(iter(x[0])), ""),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_any_error_while_recording_calls_the_function(name: str) -> None:
    fn, says = UNRECORDED[name]
    compiled, iterates = xf.compile(fn), name == "no axis to iterate over"
    for i in range(2):
        x = X + i
        if i or iterates:
            require_equal(compiled(x), fn(x))
            continue
        with pytest.warns(RuntimeWarning, match=f"not recorded: .*{says}.*called as it is"):
            require_equal(compiled(x), fn(x))


def test_an_error_of_the_function_is_its_own() -> None:
    """Without a warning, and a later call may succeed."""
    compiled = xf.compile(lambda x: ops.linear(x, x)[0] if x.shape[0] == 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiled(np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="linear"):
        compiled(X)
    x = np.ones((2, 2), np.float32)
    require_equal(compiled(x), x @ x)


def test_the_types_of_arrays_and_numbers() -> None:
    compiled = xf.compile(typed)
    require_equal(compiled(X, 1.0), X * 2)
    require_equal(compiled(X, 1), X * 3)
    for scalar in (np.float64(2), np.float32(2), np.asarray(2.0)):
        with pytest.warns(RuntimeWarning, match=r"the type of an array \(\) is read"):
            require_equal(xf.compile(typed)(X, scalar), typed(X, scalar))


# ---- Contexts ----

CONTEXTS: dict[str, Callable[[], Any]] = {
    "inference": xf.inference,
    "unfused": xf.unfused,
    "reference_only": xf.reference_only,
    "one reference": lambda: xf.reference_only(ops.gelu),
}


@only(*LIBRARIES)
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(library: Backend, name: str) -> None:
    """A call within a context, first or later, does what the function does there."""
    x, seen = library.asarray(X), list[str]()
    see = seen.append  # the list itself would be read, and differ in each call

    def fn(x: Any) -> Any:
        y, cache = ops.gelu(x)
        see(f"{cache.__class__.__name__} {xf.explain(ops.gelu, x)}")
        return y

    compiled = xf.compile(fn)
    with CONTEXTS[name]():
        inside = compiled(x)
    compiled(x)
    with CONTEXTS[name]():
        require_equal(compiled(x), inside)
    compiled(x)
    assert len(seen) == 2
    if name == "inference" or (library.name == "numpy" and name != "unfused"):
        assert seen[0] != seen[1]


def test_the_kernels_of_numpy_arrays() -> None:
    seen = list[str]()
    see = seen.append

    def fn(x: Any) -> Any:
        see(xf.dispatch.chosen_kernels())
        return x * 2

    compiled = xf.compile(fn)
    for _ in range(2):
        compiled(X)
        with xf.kernels("numba"):
            compiled(X)
    assert seen == ["numpy", "numba"]


# ---- Configurations ----


@dataclass
class Config:
    scale: Any = 1.0
    sizes: list[Any] = field(default_factory=list)


class Mode(enum.IntEnum):
    A = 1
    B = 2


class Opaque:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def configured(x: Any, config: Any) -> Any:
    if isinstance(config, dict):
        return {name: x * 2 for name in config}
    if isinstance(config, Config | Opaque):
        return x * (3.0 if str(config.scale) == "-0.0" else 2.0), repr(config.scale)
    return x * (2 if config is Mode.A else 3), repr(config)


@only(*LIBRARIES)
def test_configurations_by_type_and_value(library: Backend) -> None:
    x, changing = library.asarray(X), Config(1)
    values = [0.0, -0.0, 1, True, 1.0, np.float32(1), "1", (1,), [1], {1}, None, float("nan")]
    configs = [*map(Config, values), *map(Opaque, (0.0, -0.0)), Mode.A, Mode.B, True, 3j]

    def calls() -> Iterator[tuple[Any, ...]]:
        for config in configs:
            yield x, config

    results = xf.compile(lambda x, config: configured(x, config)[0])
    for x, config in calls():
        require_equal(results(x, config), configured(x, config)[0])
    if library.name == "numpy":
        require_same(configured, calls(), "")
        compiled = xf.compile(configured)
        for number in (1, 1.0, 2):
            changing.scale = number
            assert compiled(x, changing)[1] == repr(number)
    compiled = xf.compile(configured)
    for node in ({1: x}, {"1": x}, {True: x}, {1.0: x}):
        assert [repr(key) for key in compiled(x, node)] == [repr(key) for key in node]


def test_keys() -> None:
    values: list[Any] = [0, 0.0, -0.0, False, 1, 1.0, True, 1j, "1", b"1", None, ..., (1,), [1]]
    values += [(1.0,), {1: 2}, {"1": 2}, {1}, frozenset([1]), Config(1), Config(True), Mode.A, int]
    values += [np.float64(1), np.float32(1), np.True_, np.dtype("float32"), len, np.add, ops.gelu]
    keys = [exact(x) for x in values]
    assert len(set(keys)) == len(keys)
    assert [exact(x) for x in values] == keys
    assert exact(float("nan")) == exact(float("nan")) and exact(Config(1)) == exact(Config(1))
    cycle: list[Any] = []
    cycle.append(cycle)
    hash(exact(cycle))
    for x in (iter([1]), X, Config(X), np.random.default_rng(0), range(10**6).__iter__()):
        with pytest.raises(Unkeyed):
            exact(x)
    with pytest.raises(Unkeyed, match="more than 10,000 objects"):
        exact([[] for _ in range(10_001)])


def test_what_has_no_key_calls_the_function() -> None:
    rng, numbers = np.random.default_rng(0), itertools.count()
    for fn in (lambda x, rng: x * rng.random(), lambda x, rng: x + next(numbers)):
        compiled = xf.compile(fn)
        with pytest.warns(RuntimeWarning, match="whose state may change"):
            first = compiled(X, rng)
        assert (compiled(X, rng) != first).all()


def test_arrays_of_two_libraries() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = torch.ones(3)

    def calls() -> Iterator[tuple[Any, ...]]:
        for _ in range(2):
            t.add_(1)
            yield X, t

    require_same(lambda x, t: x * float(t.sum()), calls(), "an array in an object that is no tree")


def test_threads() -> None:
    """Each with more kinds than are kept."""
    compiled, errors = xf.compile(lambda x, name: x * 2), list[BaseException]()

    def work(thread: int) -> None:
        try:
            for n in range(60):
                x = np.full(1 + n % 20, thread, np.float32)
                np.testing.assert_array_equal(compiled(x, None), 2 * x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# ---- Within other transformations ----


@only(*LIBRARIES, "torch")
def test_within_other_transformations(library: Backend) -> None:
    x, w = library.asarray(X), library.asarray(X[0])

    def fn(x: Any, w: Any) -> Any:
        return array_api_compat.array_namespace(x).exp(x * 0.1) * w

    inner = xf.compile(fn)
    outer = [lambda x, w, fn=each: fn(x, w) + fn(w, x)[0] for each in (inner, fn)]
    require_equal(xf.compile(outer[0])(x, w), outer[1](x, w))
    got, want = (xf.jvp(lambda x, fn=each: fn(x, w), (x,), (x,)) for each in (inner, fn))
    require_equal(got, want)
    got, want = (xf.jvp(lambda x, fn=each: fn(w, x), (x,), (x,)) for each in (inner, fn))
    require_equal(got, want)
    got, want = (xf.rounded(each, "bfloat16")(x, w) for each in (inner, fn))
    require_equal(got, want)


def test_hessian_products_and_gradients_of_each_example() -> None:
    model = GPT(19, n_layers=1, d_model=8, n_heads=2, max_len=6)
    params, ids = model.init(), np.arange(12).reshape(2, 6)
    inner = xf.compile(lambda p: model.loss(p, ids, ids)[0])
    wanted = model.loss(params, ids, ids)[0]
    jvp = [xf.jvp(f, (params,), (params,)) for f in (inner, lambda p: model.loss(p, ids, ids)[0])]
    require_equal(*jvp)
    hvp = [xf.hvp(f, params, params, ids, ids) for f in (xf.compile(model.loss), model.loss)]
    require_equal(*hvp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        np.testing.assert_allclose(inner(params), wanted, rtol=1e-12)


# ---- Numbers ----


def test_numpy_scalars_and_great_numbers() -> None:
    """A scalar of NumPy is an array without axes; a Python number takes the array's dtype."""
    x = X.astype(np.float32)
    numbers = [np.float64(2), np.float32(2), np.int64(2), np.int32(2), 2, 2.0]
    for dtype in ("float32", "float64", "float16", "int32", "int64"):
        compiled = xf.compile(lambda x, n: x * n + n)
        for number in numbers:
            x = X.astype(dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                require_equal(compiled(x, number), x * number + number)
    ids = X.astype(np.int32)
    with pytest.warns(RuntimeWarning, match="may be out of bounds for int32"):
        compiled = xf.compile(lambda x, n: x + n)
        require_equal(compiled(ids, 3), ids + 3)
    with pytest.raises(OverflowError):
        compiled(ids, 2**40)
    big = xf.compile(lambda x, n: x * n)
    for number in (2**63, 2**70, -(2**64)):
        with pytest.warns(RuntimeWarning, match="more bits than int64"):
            require_equal(xf.compile(lambda x, n: x * n)(X, number), X * number)
    require_equal(big(X, 2**62), X * 2**62)
