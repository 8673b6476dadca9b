"""What a training step holds in memory, account by account, and what it really took.

found = ledger(model, batch=8, length=128)
print(found.peak, measured_peak(model, batch=8, length=128))

In bytes, of NumPy arrays; Python itself and its libraries are not counted. States are donated to
the next step, as the commands do it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from xformer import backends, optim, tree
from xformer.backends.numpy.stand_in import Tally, stand_in
from xformer.backends.numpy.threads import forget_scratch, scratch_nbytes
from xformer.checks import require_sizes
from xformer.initializers import Shapes
from xformer.measure import arguments, saved_by_part
from xformer.models import EncoderDecoder
from xformer.ops import RandomKey
from xformer.ops._loss import one
from xformer.optim import Optimiser
from xformer.shapes import FLOATING
from xformer.training.batch import Batch
from xformer.training.config import TrainConfig
from xformer.training.loop import start, train
from xformer.training.loss import loss_of

# glibc's malloc keeps some of the large arrays that were freed, up to a fifth of all, unless told
# from which size on to give memory back at once.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
STACKS = ("encoder", "decoder")
STEPS = 3  # measured ones: from the second on, all is in its place


class Ledger(NamedTuple):
    """Bytes of a training step."""

    params: int
    state: int  # of the optimiser
    saved: dict[str, int]  # by each part of the model, for its backward
    loss_work: int  # at most, while a backward goes through the loss and the head
    layer_work: int  # at most, while it goes through a layer, beside the gradients it returns
    update_work: int  # at most, in the optimiser, beside what is written over
    scratch: int  # that NumPy's kernels keep from one call to the next
    early: int = 0  # of the gradients, those that the saved set holds already

    @property
    def grads(self) -> int:
        """Of all parameters."""
        return self.params

    @property
    def backward(self) -> int:
        """The most that a loss and its backward hold; its cache is kept to the end."""
        work = max(self.loss_work, self.grads - self.early + self.layer_work)
        return self.params + self.state + sum(self.saved.values()) + work

    @property
    def update(self) -> int:
        """The most that the optimiser holds; clipping writes over the gradients."""
        return self.params + self.state + self.grads + self.update_work

    @property
    def peak(self) -> int:
        """The most that a step holds."""
        return max(self.backward, self.update) + self.scratch


def ledger(
    model: Any,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimiser: str = "adamw",
) -> Ledger:
    """The accounts of a step on a batch of sequences of one length, dropout as configured.

    Parameters, state and saved set are found without making them. What an op needs for a moment is
    measured, on as much of the model as one layer, its embedding and its head. ValueError for
    sizes below 1, another dtype, a model without a loss.
    """
    network = getattr(model, "network", model)
    batch, length = sizes_of(network, batch, length, dtype, optimiser)
    own = TrainConfig(steps=1, optimiser=optimiser).chosen_optimiser()
    tally = Tally()
    shapes = network.init_from(Shapes())
    params = tree.map(lambda leaf: stand_in(leaf.shape, dtype, tally), shapes)
    forget_scratch()
    work = [_backward_work(cut, batch, length, dtype) for cut in _one_layer_of_each(network)]
    loss_work, layer_work, early = (max(kind) for kind in zip(*work, strict=True))
    update_work = _update_work(network, dtype, own, tree.nbytes(params))
    return Ledger(
        tree.nbytes(params),
        tree.nbytes(own.init(params)),
        saved_by_part(network, batch, length, dtype),
        loss_work,
        layer_work,
        update_work,
        scratch_nbytes(),
        early,
    )


def measured_peak(
    model: Any,
    *,
    batch: int,
    length: int,
    dtype: str = "float32",
    optimiser: str = "adamw",
) -> int | None:
    """The bytes that some steps of `training.train` took at most, in a process of their own.

    What the process held before is taken off, and its malloc keeps nothing back. None where the
    system does not tell (outside Linux). Arguments as in `ledger`; RuntimeError where it fails.
    """
    network = getattr(model, "network", model)
    batch, length = sizes_of(network, batch, length, dtype, optimiser)
    network = replace(network, hf_config=None)
    task = pickle.dumps((network, batch, length, dtype, optimiser))
    command = [sys.executable, "-m", "xformer.ledger"]
    done = subprocess.run(command, input=task, env=os.environ | MALLOC, capture_output=True)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"measured_peak: the process that trains failed: {last}")
    peak: int | None = pickle.loads(done.stdout)
    return peak


def sizes_of(network: Any, batch: int, length: int, dtype: str, optimiser: str) -> tuple[int, ...]:
    """batch and length as ints. ValueError as `ledger`."""
    sizes = require_sizes("ledger", 1, batch=batch, length=length)
    if dtype not in FLOATING:
        raise ValueError(f"ledger: dtype must be {' or '.join(FLOATING)}, got {dtype!r}")
    if optimiser not in optim.OPTIMISERS:
        names = ", ".join(optim.OPTIMISERS)
        raise ValueError(f"ledger: optimiser must be one of {names}, got {optimiser!r}")
    if arguments(network, 1, 1, dtype)[1] is None:
        raise ValueError(f"ledger: the model must have a loss, got {network!r:.60}")
    return sizes


def _one_layer_of_each(network: Any) -> Iterator[Any]:
    """Models that differ from `network` in having one layer: one of each kind that it has."""
    if isinstance(network, EncoderDecoder):
        kinds = (dict.fromkeys(network.encoder), dict.fromkeys(network.decoder))
        first = network.encoder[0], network.decoder[0]
        for pair in zip_longest(*kinds):
            encoder, decoder = (own or usual for own, usual in zip(pair, first, strict=True))
            yield replace(network, encoder=(encoder,), decoder=(decoder,))
    else:
        for config in dict.fromkeys(network.blocks):
            routed = (
                {} if config.experts else {"load_balancing_weight": 0.0, "router_z_weight": 0.0}
            )
            yield replace(network, blocks=(config,), n_shared_layer_groups=None, **routed)


def _backward_work(network: Any, batch: int, length: int, dtype: str) -> tuple[int, int, int]:
    """What `Ledger` calls loss_work, layer_work and early, of a model of one layer."""
    params = network.init(0, "numpy", dtype)
    _, examples = arguments(network, batch, length, dtype)
    network.loss(params, *examples, dropout_key=RandomKey(0))[
        1
    ].backward()  # makes the scratch memory
    with _traced():
        loss, cache = network.loss(params, *examples, dropout_key=RandomKey(0))
        own = getattr(cache, "tokens", cache).model  # the losses of routers take next to nothing
        top, at_loss = _peak(getattr(own, "decode", own).head.backward, one(loss))
        grads, at_layer = _peak(_above(own, top).backward, one(loss))
        new = tree.nbytes(grads) - (early := _held_bytes(grads, cache))
        return at_loss, at_layer + tree.nbytes(top) - _held_bytes(top, cache) - new, early


def _update_work(network: Any, dtype: str, optimiser: Optimiser, n_bytes: int) -> int:
    """What `Ledger` calls update_work, of parameters of so many bytes.

    Some optimisers need it for a parameter at a time, some for all together, and some make anew
    what they return: from one and from two layers of each kind it is known for all.
    """
    sizes, work = [], []
    for times in (1, 2):
        params = _shortened(network, times).init(0, "numpy", dtype)
        state, grads = optimiser.init(params), tree.map(np.zeros_like, params)
        step = partial(optimiser.step, lr=1e-3, donate=True)
        params, state = step(params, grads, state)  # makes the scratch memory
        with _traced():
            new, most = _peak(step, params, grads, state)
        sizes.append(tree.nbytes(params))
        work.append(most)
        del params, state, grads, new
    slope = (work[1] - work[0]) / (sizes[1] - sizes[0])
    return work[0] + max(int(slope * (n_bytes - sizes[0])), 0)


def _shortened(network: Any, times: int) -> Any:
    """A model of each kind of layer that `network` has, so many times."""
    if isinstance(network, EncoderDecoder):
        kinds = [tuple(dict.fromkeys(getattr(network, name))) * times for name in STACKS]
        return replace(network, encoder=kinds[0], decoder=kinds[1])
    return replace(
        network, blocks=tuple(dict.fromkeys(network.blocks)) * times, n_shared_layer_groups=None
    )


@contextmanager
def _traced() -> Iterator[None]:
    """What is allocated inside is counted."""
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        yield
    finally:
        if not tracing:
            tracemalloc.stop()


def _peak(step: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What a step returns, and the bytes that it held at most."""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    result = step(*args)
    return result, tracemalloc.get_traced_memory()[1] - before


class _Done(NamedTuple):
    """In the place of a head's cache, what its backward has returned."""

    grads: tuple[Any, ...]

    def backward(self, dloss: Any) -> tuple[Any, ...]:
        return self.grads


def _above(cache: Any, top: tuple[Any, ...]) -> Any:
    """The cache of a model, for a backward that goes on from that of its head."""
    if hasattr(cache, "decode"):
        return cache._replace(decode=cache.decode._replace(head=_Done(top)))
    return cache._replace(head=_Done(top))


def _held_bytes(grads: Any, cache: Any) -> int:
    """Bytes of those gradients that a cache holds."""
    held = [a for a in tree.flatten(cache).values() if isinstance(a, np.ndarray)]
    given = tree.flatten(grads).values()
    return tree.nbytes([g for g in given if any(np.may_share_memory(g, a) for a in held)])


class Same:
    """A source, for `training.train`, of one batch for ever."""

    def __init__(self, arrays: tuple[np.ndarray, ...]) -> None:
        self.only = Batch(arrays, {}, arrays[-1].size, arrays[-1].size)

    def batch(self, i: int) -> Any:
        """The batch."""
        return self.only


def _measure(network: Any, batch: int, length: int, dtype: str, optimiser: str) -> int | None:
    """For a process of its own: the most that training takes, beyond what is there before it."""
    place = backends.get("numpy")

    def trained(network: Any, batch: int, length: int, steps: int) -> None:
        config = TrainConfig(steps=steps, optimiser=optimiser)
        source = Same(arguments(network, batch, length, dtype)[1])
        # The first state has no name here, which would keep it to the end.
        for _ in train(
            loss_of(network),
            start(network.init(0, "numpy", dtype), config),
            source,
            config,
            place,
            donate=True,
        ):
            pass

    trained(next(_one_layer_of_each(network)), 1, 1, 1)  # loads what is loaded late
    before = place.memory().in_use
    trained(network, batch, length, STEPS)
    peak = place.memory().peak
    return None if before is None or peak is None else peak - before


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(_measure(*pickle.load(sys.stdin.buffer))))
