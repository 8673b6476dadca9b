"""Attention by cuDNN, through NVIDIA's frontend (extra `cudnn`), if both are installed.

    ran(kind, {Q: q, K: k, V: v, CTX: ctx, LSE: lse})  # False: another kernel must compute it

`cudnn_plan` describes the plan that is kept for each kind of attention.
"""

from __future__ import annotations

import threading
from typing import Any

from xformer.backends.cupy.cudnn_plan import Kind, Plan, Q, planned
from xformer.backends.cupy.module import driver_of
from xformer.backends.cupy.runtimes import AttentionStream, Lent, Runtime, failed, hold
from xformer.base.typing import Array

KEPT = 256  # plans


class State(threading.local):
    """The state of one thread, since a handle has one stream at a time."""

    def __init__(self) -> None:
        self.handles: dict[Any, Lent] = {}  # device -> handle
        self.plans: dict[Any, Plan | str] = {}  # kind -> plan, or why there is none
        self.said: set[Any] = set()  # causes of failures that were reported


_state = State()
INSTEAD = "such attention is left to another kernel from now on"


def runtime_of(like: Array) -> Runtime:
    """Return what the library of an array provides for cuDNN."""
    runtime: Runtime = driver_of(type(like)).CUDNN
    return runtime


def plan_of(q: Array, kind: Kind) -> Plan | str:
    """Return the plan of a kind, or a sentence that says why there is none.

    The plan is made if it is not kept. If there are already `KEPT` plans, all are removed first.
    """
    runtime = runtime_of(q)
    return _plan(runtime, runtime.stream_of([q]), type(q), kind)


def ran(kind: Kind, arrays: dict[int, Array]) -> bool:
    """Start the graph of a kind on the current stream; return whether it was started.

    arrays: all arrays of the graph, by their numbers (`Q`, `K`, ...)
    Returns False if there is no plan, or cuDNN fails; it is then not called again for this kind.
    """
    like = arrays[Q]
    runtime = runtime_of(like)
    stream = runtime.stream_of(list(arrays.values()))
    plan = _plan(runtime, stream, type(like), kind)
    if isinstance(plan, str):
        return False
    # When this returns, the workspace is free for later work of this stream, but of no other.
    workspace = runtime.allocate(plan.workspace) if plan.workspace else None
    addresses = {uid: x.data.ptr for uid, x in arrays.items()}
    try:
        lent = _handle(runtime, type(like), stream)
        hold(plan, lent)  # a graph's launches need the plan's code
        address = None if workspace is None else workspace.ptr
        plan.graph.execute(addresses, address, handle=lent.handle)
    except MemoryError:
        raise
    except Exception as error:  # of any type, see `_plan`
        key = type(like), stream.device, kind
        _state.plans[key] = failed(_state.said, "attention by cuDNN", error, INSTEAD)
        return False
    return True


def _plan(runtime: Runtime, stream: AttentionStream, array_type: type, kind: Kind) -> Plan | str:
    key = array_type, stream.device, kind
    plan = _state.plans.get(key)
    if plan is None:
        if len(_state.plans) >= KEPT:
            _state.plans.clear()
        try:
            handle = _handle(runtime, array_type, stream).handle
            plan = planned(runtime.library(), handle, kind)
        except MemoryError:  # other kernels of attention need memory too
            raise
        except Exception as error:
            # The frontend raises its own errors, pybind raises TypeError for arguments of other
            # versions, the driver RuntimeError. Other kernels do not depend on them.
            plan = failed(_state.said, "a plan of cuDNN", error, INSTEAD)
        _state.plans[key] = plan
    return plan


def _handle(runtime: Runtime, array_type: type, stream: AttentionStream) -> Lent:
    """Return the device's handle, set to `stream`."""
    cudnn, key = runtime.library(), (array_type, stream.device)
    if key not in _state.handles:
        _state.handles[key] = Lent(cudnn, stream.device, cudnn.create_handle)
    cudnn.set_stream(_state.handles[key].handle, stream.address)
    return _state.handles[key]
