"""Attention by cuDNN, through NVIDIA's frontend (extra `cudnn`), where both are installed.

    run(plan_of(q, kind), {Q: q, K: k, V: v, CTX: ctx, LSE: lse})

`cudnn_plan` has what is kept of each kind of attention.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from xformer.backends.cupy.cudnn_plan import Kind, Plan, planned
from xformer.backends.cupy.runtimes import Runtime, runtime_of

from xformer.typing import Array

# 9.16: before it backward brings lengths from the host where keys are no multiple of 128.
OLDEST = 91600
KEPT = 256  # plans


class Place(NamedTuple):
    """Where work goes."""

    device: int
    stream: int  # its address
    capability: int  # of the device, 90 for 9.0


RUNTIMES: dict[type, Runtime] = {}


class State(threading.local):
    """Of one thread: a handle has one stream at a time."""

    def __init__(self) -> None:
        self.handles: dict[Any, Any] = {}  # of a device
        self.plans: dict[Any, Plan | str] = {}  # or why there is none


_state = State()


def plan_of(q: Array, kind: Kind) -> Plan | str:
    """Kept, or made; all are forgotten where they would be too many. Or why there is none."""
    own = runtime_of(RUNTIMES, type(q))
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
    own = runtime_of(RUNTIMES, type(like))
    handle = _handle(own, like, own.place(list(arrays.values())))
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
