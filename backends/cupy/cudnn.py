"""Attention by cuDNN, through NVIDIA's frontend (extra `cudnn`), where both are installed.

    plans = plans_of(q, kind)
    run(plans.forward, {Q: q, K: k, V: v, CTX: ctx, LSE: lse})

`cudnn_plan` has what is kept of each kind of attention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from xformer.backends.cupy.cudnn_plan import Kind, Plan, Plans, planned

from xformer.typing import Array

# 9.16: before it backward brings lengths from the host where keys are no multiple of 128.
OLDEST = 91600
KEPT = 128  # kinds


class Place(NamedTuple):
    """Where work goes."""

    device: int
    stream: int  # its address
    capability: int  # of the device, 90 for 9.0


class Runtime(NamedTuple):
    """What is asked of the library of the arrays. CuPy's is in `driver`; tests bring their own."""

    library: Callable[[], Any]  # NVIDIA's package cudnn, or why it cannot be used, in words
    place: Callable[[Iterable[Array]], Place]  # ValueError for arrays of another device
    memory: Callable[[int], Any]  # so many bytes of the device, from `ptr` on


RUNTIMES: dict[type, Runtime] = {}


class State(threading.local):
    """Of one thread: a handle has one stream at a time."""

    def __init__(self) -> None:
        self.handles: dict[Any, Any] = {}  # of a device
        self.plans: dict[Any, Plans | str] = {}  # or why there are none


_state = State()


def runtime(array_type: type) -> Runtime:
    """That of CuPy's arrays, or of the stand-in's."""
    found = RUNTIMES.get(array_type)
    if found is None:
        from xformer.backends.cupy import driver

        found = RUNTIMES[driver.ARRAY]
    return found


def plans_of(q: Array, kind: Kind) -> Plans | str:
    """Kept, or made; all are forgotten where they would be too many. Or why there are none."""
    own = runtime(type(q))
    place = own.place([q])
    key = type(q), place.device, kind
    found = _state.plans.get(key)
    if found is None:
        if len(_state.plans) == KEPT:
            _state.plans.clear()
        handle = _handle(own, q, place)
        found = _state.plans[key] = planned(own.library(), handle, kind)
    return found


def run(plan: Plan, arrays: dict[int, Array]) -> None:
    """Start a plan on the current stream; arrays: all that its graph names."""
    like = next(iter(arrays.values()))
    own = runtime(type(like))
    handle = _handle(own, like, own.place(arrays.values()))
    # Back in the pool when this returns, it serves only what comes later on the same stream.
    held = own.memory(plan.workspace) if plan.workspace else None
    addresses = {uid: x.data.ptr for uid, x in arrays.items()}
    plan.graph.execute(addresses, None if held is None else held.ptr, handle=handle)


def _handle(own: Runtime, like: Array, place: Place) -> Any:
    """The device's, on the current stream."""
    cudnn, key = own.library(), (type(like), place.device)
    if key not in _state.handles:
        _state.handles[key] = cudnn.create_handle()
    cudnn.set_stream(_state.handles[key], place.stream)
    return _state.handles[key]
