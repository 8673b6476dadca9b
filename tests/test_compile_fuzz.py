"""Random functions, compiled on NumPy: their own results, or one RuntimeWarning and their own.

A function is a list of steps. It is called several times; before each call something that it reads
changes: an argument, a context, or an attribute of an object in its closure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xformer as xf
from xformer import ops, tree

pytest.importorskip("numba", reason="numba is not installed")

MEGABYTES = 30  # that the process may grow by when programs are made and forgotten
SHAPE = (2, 3)


class Held:
    """What a function reads besides its arguments."""

    def __init__(self) -> None:
        self.scale: Any = 2.0
        self.array = np.full(SHAPE, 0.5, np.float32)
        self.options = {"offset": 1, "unread": [1]}

    def scaled(self, x: Any) -> Any:
        return x * self.scale


@dataclass
class Config:
    factor: Any = 1.0


class Arguments:
    """The arguments of a call, which `changed` changes."""

    def __init__(self, dtype: str) -> None:
        rng = np.random.default_rng(0)
        self.x, self.y = ((rng.normal(size=SHAPE) * 3).astype(dtype) for _ in "xy")
        self.number: Any = 2
        self.key = xf.RandomKey(3, 1)
        self.config: Any = Config(1.0)
        self.context: Callable[[], Any] = nullcontext

    def __call__(self) -> tuple[Any, ...]:
        y = self.y if self.y is self.x else self.y.copy()
        return self.x, {"y": y, 1: self.x + 1}, self.number, self.key, self.config


def assigned(xp: Any, x: Any) -> Any:
    y = x * 1
    y[0] = 7
    return y


def in_place(xp: Any, x: Any) -> Any:
    y = x * 1
    z = y
    z += 1
    return y


def of_cache(xp: Any, x: Any) -> Any:
    y, cache = ops.softmax(x)
    return y * (1 if isinstance(cache, xf.dispatch.NoCache) else 2)


# A step: (array API, values so far, number, key, configuration, what it holds) -> a value.
RECORDED: dict[str, Callable[..., Any]] = {
    "add": lambda xp, v, *_: v[-1] + v[-2],
    "multiply": lambda xp, v, *_: v[-1] * v[0],
    "reverse": lambda xp, v, *_: 3 - v[-1],
    "exp": lambda xp, v, *_: xp.exp(v[-1] * 0.01),
    "sum": lambda xp, v, *_: v[0] + xp.sum(v[-1], axis=0),
    "transpose": lambda xp, v, *_: xp.reshape(xp.matrix_transpose(v[-1]), SHAPE),
    "where": lambda xp, v, *_: xp.where(v[-1] > 0, v[-1], v[0]),
    "row": lambda xp, v, *_: v[-1] + v[-1][0],
    "number": lambda xp, v, n, *_: v[-1] * n,
    "quotient": lambda xp, v, n, *_: v[-1] / (1 + n * n),
    "power": lambda xp, v, n, *_: v[-1] + 0.5**n,
    "type of the number": lambda xp, v, n, *_: v[-1] * (2 if isinstance(n, float) else 3),
    "dropout": lambda xp, v, n, key, *_: ops.dropout(v[-1], rate=0.5, key=key)[0],
    "dropout elsewhere": lambda xp, v, n, k, *_: ops.dropout(v[-1], rate=0.3, key=k.at(2))[0],
    "gelu": lambda xp, v, *_: ops.gelu(v[-1])[0],
    "softmax": lambda xp, v, *_: of_cache(xp, v[-1]),
    "factor": lambda xp, v, n, k, config, *_: v[-1] * config.factor,
    "sign of the factor": lambda xp, v, n, k, c, *_: v[-1] * len(repr(c.factor)),
    "scale": lambda xp, v, n, k, c, held: held.scaled(v[-1]),
    "option": lambda xp, v, n, k, c, held: v[-1] + held.options["offset"],
    "isinstance": lambda xp, v, *_: v[-1] * (2 if isinstance(v[-1], np.ndarray) else 3),
    "inner": lambda xp, v, *_: INNER(v[-1]),
}
# Steps that no program has, and that may raise.
OTHERS: dict[str, Callable[..., Any]] = {
    "array": lambda xp, v, n, k, c, held: v[-1] + held.array,
    "array first": lambda xp, v, n, k, c, held: held.array * v[-1],
    "array in an op": lambda xp, v, n, k, c, held: ops.gelu(xp.asarray(held.array))[0] + v[-1],
    "branch": lambda xp, v, *_: v[-1] if float(xp.sum(v[0])) > 0 else -v[-1],
    "method": lambda xp, v, *_: v[0] * v[-1].sum(),
    "NumPy": lambda xp, v, *_: np.tanh(v[-1]),
    "item": lambda xp, v, *_: assigned(xp, v[-1]),
    "in place": lambda xp, v, *_: in_place(xp, v[-1]),
    "ids": lambda xp, v, *_: v[-1][np.array([1, 0])],
    "error": lambda xp, v, n, *_: v[-1] if n != 5 else v[-1][:, 9],
}
INNER = xf.compile(lambda x: x * 3)
RESULTS: dict[str, Callable[..., Any]] = {
    "array": lambda v, *_: v[-1],
    "tuple": lambda v, n, *_: (v[-1], v[0], None, "text"),
    "dict": lambda v, n, *_: {"a": v[-1], "shape": v[-1].shape, "n": n},
    "number": lambda v, n, *_: [v[-1], n, n + 1],
    "config": lambda v, n, config, held: (v[-1], config.factor, held.scale),
    "array of the closure": lambda v, n, config, held: (v[-1], held.array),
    "key": lambda v, *_: (v[-1], xf.RandomKey(1, 2)),
}


def set_scale(arguments: Arguments, held: Held, value: Any) -> None:
    held.scale = value


def set_array(arguments: Arguments, held: Held, value: Any) -> None:
    held.array = np.full(SHAPE, value, np.float32)


def write_array(arguments: Arguments, held: Held, value: Any) -> None:
    held.array[0] = value


def set_option(arguments: Arguments, held: Held, value: Any) -> None:
    held.options["offset"] = value


def set_unread(arguments: Arguments, held: Held, value: Any) -> None:
    held.options["unread"].append(value)  # type: ignore[attr-defined]


def set_number(arguments: Arguments, held: Held, value: Any) -> None:
    arguments.number = value


def set_step(arguments: Arguments, held: Held, value: Any) -> None:
    arguments.key = arguments.key._replace(step=abs(int(value)) % 2**32)


def set_seed(arguments: Arguments, held: Held, value: Any) -> None:
    arguments.key = xf.RandomKey(abs(int(value)) % 2**64, arguments.key.step)


def set_factor(arguments: Arguments, held: Held, value: Any) -> None:
    arguments.config = Config(value)


def write_factor(arguments: Arguments, held: Held, value: Any) -> None:
    arguments.config.factor = value


def set_x(arguments: Arguments, held: Held, value: Any) -> None:
    arguments.x = arguments.x + arguments.x.dtype.type(1)


def alias(arguments: Arguments, held: Held, value: Any) -> None:
    arguments.y = arguments.x


def set_context(arguments: Arguments, held: Held, value: Any) -> None:
    contexts = (xf.inference, xf.unfused, xf.reference_only, nullcontext)
    arguments.context = contexts[int(abs(value)) % 4]


CHANGES = (set_scale, set_array, write_array, set_option, set_unread, set_number, set_step)
CHANGES += (set_seed, set_factor, write_factor, set_x, alias, set_context)
VALUES = (0, 0.0, -0.0, 1, 1.0, True, 2, 3.5, -4, 5, 6, 7, np.float32(2), np.float64(2.5))


def outcome(fn: Callable[..., Any], arguments: Arguments) -> Any:
    """What a call returns, or the error that it raises."""
    try:
        with arguments.context(), np.errstate(all="ignore"):
            return fn(*arguments())
    except Exception as error:
        return error


def require_equal(got: Any, want: Any, tolerance: float) -> None:
    if isinstance(want, Exception):
        assert type(got) is type(want), (got, want)
        return
    if isinstance(got, Exception):
        raise got
    got, want = tree.flatten({"": got}), tree.flatten({"": want})
    assert got.keys() == want.keys()
    for name, x in want.items():
        if not hasattr(x, "dtype"):
            assert type(got[name]) is type(x) and repr(got[name]) == repr(x), name
            continue
        assert got[name].dtype == x.dtype, name
        np.testing.assert_allclose(got[name], x, rtol=tolerance, atol=tolerance, err_msg=name)


def resident() -> float:
    return (xf.backends.get("numpy").memory().in_use or 0) / 2**20


@given(
    dtype=st.sampled_from(["float32", "float64"]),
    steps=st.lists(st.sampled_from(list(RECORDED)), min_size=1, max_size=4),
    other=st.sampled_from([*len(OTHERS) * [""], *OTHERS]),
    result=st.sampled_from(list(RESULTS)),
    changes=st.lists(
        st.tuples(st.sampled_from(CHANGES), st.sampled_from(VALUES)), min_size=1, max_size=3
    ),
    donates=st.booleans(),
)
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_random_functions(
    dtype: str, steps: list[str], other: str, result: str, changes: list[Any], donates: bool
) -> None:
    arguments, held = Arguments(dtype), Held()
    chosen = [RECORDED[name] for name in steps] + ([OTHERS[other]] if other else [])
    returned, donates = RESULTS[result], donates and alias not in dict(changes)

    def fn(x: Any, more: Any, number: Any, key: Any, config: Any) -> Any:
        xp, values = array_api_compat.array_namespace(x), [more["y"], x]
        for step in chosen:
            values.append(step(xp, values, number, key, config, held))
        return returned(values, number, config, held)

    compiled = xf.compile(fn, donate=1 if donates else ())
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        for change, value in [(set_x, 0), *changes]:
            change(arguments, held, value)
            require_equal(outcome(compiled, arguments), outcome(fn, arguments), 1e-5)
    messages = {str(each.message) for each in met if each.category is RuntimeWarning}
    assert len(messages) <= 2, messages


def test_memory_is_bounded() -> None:
    """Programs of forgotten functions are freed."""

    def add_programs(n: int) -> None:
        for i in range(n):
            x = np.ones((1, 1 + i % 50), np.float32)
            xf.compile(lambda x: ops.gelu(x * 2 + 1)[0])(x)

    add_programs(20)
    before = resident()
    add_programs(200)
    assert resident() - before < MEGABYTES
