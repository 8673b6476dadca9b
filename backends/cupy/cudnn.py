"""Attention by cuDNN, through NVIDIA's frontend (extra `cudnn`), where both are installed.

    ran(kind, {Q: q, K: k, V: v, CTX: ctx, LSE: lse})  # False: it is another kernel's

`cudnn_plan` has what is kept of each kind of attention.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from xformer.backends.cupy.cudnn_plan import Kind, Plan, Q, planned
from xformer.backends.cupy.runtimes import Lent, Runtime, failed, hold, runtime_of
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
        self.handles: dict[Any, Lent] = {}  # of a device
        self.plans: dict[Any, Plan | str] = {}  # or why there is none
        self.said: set[Any] = set()  # causes of failures


_state = State()
INSTEAD = "such attention is left to another kernel from now on"


def plan_of(q: Array, kind: Kind) -> Plan | str:
    """Kept, or made; all are forgotten where they would be too many. Or why there is none."""
    own = runtime_of(RUNTIMES, type(q))
    return _plan(own, own.place([q]), type(q), kind)


def ran(kind: Kind, arrays: dict[int, Array]) -> bool:
    """Whether the kind's graph was started on the current stream; arrays: all that it names.

    False where there is no plan, or cuDNN fails: it is not asked again for this kind.
    """
    like = arrays[Q]
    own = runtime_of(RUNTIMES, type(like))
    place = own.place(list(arrays.values()))
    plan = _plan(own, place, type(like), kind)
    if isinstance(plan, str):
        return False
    # Back in the pool when this returns, it serves only what comes later on the same stream.
    held = own.memory(plan.workspace) if plan.workspace else None
    addresses = {uid: x.data.ptr for uid, x in arrays.items()}
    try:
        lent = _handle(own, type(like), place)
        hold(plan, lent)  # a graph's launches need the plan's code
        plan.graph.execute(addresses, None if held is None else held.ptr, handle=lent.handle)
    except MemoryError:
        raise
    except Exception as error:  # as in `_plan`
        key = type(like), place.device, kind
        _state.plans[key] = failed(_state.said, "attention by cuDNN", error, INSTEAD)
        return False
    return True


def _plan(own: Runtime, place: Place, array_type: type, kind: Kind) -> Plan | str:
    key = array_type, place.device, kind
    found = _state.plans.get(key)
    if found is None:
        if len(_state.plans) >= KEPT:
            _state.plans.clear()
        try:
            found = planned(own.library(), _handle(own, array_type, place).handle, kind)
        except MemoryError:  # as of products: other attention needs memory too
            raise
        except Exception as error:
            # Whatever it is: the frontend has errors of its own, pybind's TypeError for other
            # versions' arguments, RuntimeError of the driver. Other kernels need none of it.
            found = failed(_state.said, "a plan of cuDNN", error, INSTEAD)
        _state.plans[key] = found
    return found


def _handle(own: Runtime, array_type: type, place: Place) -> Lent:
    """The device's, on the current stream."""
    cudnn, key = own.library(), (array_type, place.device)
    if key not in _state.handles:
        _state.handles[key] = Lent(cudnn, place.device, cudnn.create_handle)
    cudnn.set_stream(_state.handles[key].handle, place.stream)
    return _state.handles[key]
