"""What the null device is given to do: training steps and texts, and what was seen of them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from null_device import device, table
from null_device.device import cupy
from xformer import backends, optim, tree
from xformer.generation import compiled_decoding, prefill, stream
from xformer.initializers import Shapes
from xformer.training import Batch, TrainConfig, loss_of, start, train

PLACE = backends.get("cupy")
LOOKS = ("wait", "D2H")  # at values on the device
SHORT = 4  # greedy tokens of a captured call, where a context has no room for some calls of MOST


def parameters(model: Any) -> Any:
    """Those of a model, in float32, with the shapes of `init` and without values."""
    return tree.map(lambda p: cupy.empty(p.shape, np.float32), model.init_from(Shapes()))


def ids(size: int, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and targets, on the host."""
    drawn = np.random.default_rng(0).integers(0, size, (batch, length + 1))
    return drawn[:, :-1].copy(), drawn[:, 1:].copy()


class Steps:
    """Training steps of a model as a loop of one's own makes them, on arrays of the host."""

    def __init__(
        self, model: Any, arrays: tuple[Any, ...], precision: str | None = None, **options: Any
    ) -> None:
        self.model, self.precision, self.options = model, precision, options
        self.arrays = [PLACE.asarray(a) for a in arrays]
        self.params = parameters(model)
        self.state = optim.adamw_init(self.params)

    def __call__(self) -> None:
        weights = PLACE.cast_params(self.params, self.precision)
        _, cache = self.model.loss(weights, *self.arrays, **self.options)
        grads = cache.backward()
        self.params, self.state = optim.adamw(self.params, grads, self.state, lr=3e-4, donate=True)


class Looped:
    """Steps of `training.train`."""

    def __init__(
        self, model: Any, arrays: tuple[np.ndarray, ...], *, compiled: bool = False, **config: Any
    ) -> None:
        batch = Batch(arrays, {}, arrays[-1].size, arrays[0].size)

        class Source:
            def batch(self, i: int) -> Batch:
                return batch

        options = {"optimiser": config.pop("by", None), "deterministic": config.pop("fixed", False)}
        loss = loss_of(model, **config.pop("loss", {}))
        values = {"eval_every": 10**6, "diverged": None, **config}
        config_ = TrainConfig(10**6, len(arrays[0]), **values)
        first = start(parameters(model), config_, options["optimiser"])
        self._steps = train(
            loss, first, Source(), config_, PLACE, compiled=compiled, donate=True, **options
        )

    def __call__(self) -> None:
        next(self._steps)


class Texts:
    """Tokens of texts, one more of each at a call; a compiled call may decode several ahead."""

    def __init__(
        self,
        model: Any,
        prompts: list[list[int]],
        precision: str | None = None,
        *,
        start_id: int | None = None,
        n: int = 16,
        **options: Any,
    ) -> None:
        params = PLACE.cast_params(parameters(model), precision)
        if start_id is not None:
            prompts = prefill(model, params, prompts, start_id=start_id)
        self._tokens = stream(model, params, prompts, max_new_tokens=n, **options)

    def __call__(self) -> None:
        next(self._tokens)


def second_call(model: Any, prompts: list[list[int]], most: int, *args: Any) -> device.Seen:
    """The second captured call of a greedy text, which decodes `most` tokens as the first did."""
    with patch.object(compiled_decoding, "MOST", most):
        texts = Texts(model, prompts, *args, n=1 + 2 * most, compiled=True)
        return steady(texts, before=1 + most)


def steady(work: Callable[[], Any], before: int = 2, **options: Any) -> device.Seen:
    """What is called once `work` was done before: kernels are compiled, graphs captured.

    `grown` of the result: the peak of the work before, which a graph's memory has to hold. Python's
    collector of cycles is off meanwhile: when it runs depends on its version.
    """
    gc.collect()
    gc.disable()
    try:
        with device.counting() as first:
            for _ in range(before):
                work()
                gc.collect()
        with device.counting(**options) as seen:
            work()
    finally:
        gc.enable()
    seen.grown = first.peak
    return seen


@contextmanager
def warned() -> Iterator[list[str]]:
    """What RuntimeWarnings say that no graph is captured; other warnings are errors."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    for one in caught:
        if not issubclass(one.category, RuntimeWarning):
            raise AssertionError(f"{one.category.__name__}: {one.message}")
        said.append(str(one.message))


def numbers(seen: device.Seen) -> dict[str, int]:
    """What a budget has: calls that there were, and bytes.

    How often CuPy's pool asks CUDA for memory is left out: it goes by when cycles were collected.
    """
    found: dict[str, int] = {}
    for kind in ("launch", "graph", "H2D", "D2H", "D2D", "memset", "wait", "load"):
        if calls := seen.calls(kind):
            found[kind] = calls
        if kind in ("H2D", "D2H", "D2D", "memset") and seen.bytes(kind):
            found[f"{kind} bytes"] = seen.bytes(kind)
        elif kind == "graph" and calls:
            found["nodes"], found["graph bytes"] = seen.bytes(kind) // calls, seen.grown
    return found | dict(sorted(seen.library.items())) | {"peak bytes": seen.peak}


def of_loop(seen: device.Seen) -> dict[str, int]:
    """The numbers of a step, a token, or a call of several tokens that is looked at once."""
    assert seen.calls("D2H") == seen.calls("wait") == 1, "it is not looked at once"
    return numbers(seen)


def of_graph(
    seen: device.Seen, said: list[str], refused: str | None = None, launches: int = 1
) -> dict[str, int]:
    """The numbers of a captured step, or of a call of several tokens.

    AssertionError if the graph was not launched as often, or if values were read more than once.
    refused: part of the sentence that says why there is no graph.
    """
    table.require_refusal(said, refused)
    assert seen.calls("graph") == (launches if refused is None else 0), f"no graph: {said}"
    return of_loop(seen)
