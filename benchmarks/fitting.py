"""Whether contestants fit into memory beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.contestants import PEER
from benchmarks.worker import LIGHT

SPARE = 2  # times what the first takes: about as much as one that keeps every score


def has_room(running: Mapping[str, Any], limit: int | None, device: str | None) -> bool:
    """Whether one more may be started: where memory is short the system ends whom it likes.

    One beside the peer may be; and on a device, where a process that gets no memory says so.
    """
    if limit is None or device is not None or is_alone(running):
        return True
    first = next(one for name, one in running.items() if name != LIGHT)
    return memory(running)[0] + SPARE * sum(memory({"first": first})) <= limit


def is_alone(running: Mapping[str, Any]) -> bool:
    """Whether there is nobody yet but the peer."""
    return not set(running) - {LIGHT, PEER}


def require_memory(running: Mapping[str, Any], limit: int | None) -> None:
    """MemoryError where what all processes hold, and one in its step, comes near the limit."""
    needed = sum(memory(running))
    if limit is not None and needed > limit:
        raise MemoryError(
            f"{', '.join(running)} together need {needed / 1e9:.1f} GB, and there are "
            f"{limit / 1e9:.1f}; name fewer with --contestant"
        )


def memory(running: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes that all processes hold, and the most that one of them takes beside that in a step."""
    found = [one.ask(about={}) for one in running.values()]
    sizes = [(a["bytes"], a["most_bytes"]) for a in found if a["bytes"] is not None]
    return sum(now for now, _ in sizes), max((peak - now for now, peak in sizes), default=0)
