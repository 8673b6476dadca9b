"""Whether several contestants fit into memory at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.contestants import PEER
from benchmarks.worker import LIGHT

SPARE = 2  # times the first contestant's memory: about that of one that stores all scores


def has_room(running: Mapping[str, Any], limit: int | None, device: str | None) -> bool:
    """Whether another contestant may be started beside those of `running` (processes by name).

    If the host's memory is exhausted, Linux kills an arbitrary process, so this must not happen.
    On a device a process without memory raises an error, so any number may be started. A first
    contestant beside the peer may always be started. limit: bytes; None if unknown.
    """
    if limit is None or device is not None or is_alone(running):
        return True
    first = next(one for name, one in running.items() if name != LIGHT)
    return memory(running)[0] + SPARE * sum(memory({"first": first})) <= limit


def is_alone(running: Mapping[str, Any]) -> bool:
    """Whether no contestant but the peer is running."""
    return not set(running) - {LIGHT, PEER}


def require_memory(running: Mapping[str, Any], limit: int | None) -> None:
    """Raise MemoryError if all processes together, one of them in a step, exceed `limit` bytes."""
    needed = sum(memory(running))
    if limit is not None and needed > limit:
        raise MemoryError(
            f"{', '.join(running)} together need {needed / 1e9:.1f} GB, and there are "
            f"{limit / 1e9:.1f}; name fewer with --contestant"
        )


def memory(running: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes that all processes hold, and the most that one step takes beyond these."""
    answers = [one.ask(about={}) for one in running.values()]
    sizes = [(a["bytes"], a["most_bytes"]) for a in answers if a["bytes"] is not None]
    return sum(now for now, _ in sizes), max((peak - now for now, peak in sizes), default=0)
