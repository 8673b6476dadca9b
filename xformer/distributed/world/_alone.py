"""A process alone: a group of one."""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Sequence

import numpy as np

from xformer.base.typing import Array
from xformer.distributed.world.base import World


class Alone(World):
    """A process without others. Sums are the process's own numbers."""

    rank, size = 0, 1
    local_rank, local_size = 0, 1

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self._sent: deque[Array] = deque()

    def send(self, x: Array, to: int) -> None:
        """Keep x for `receive`."""
        _require_self(to)
        self._sent.append(x)

    def receive(self, source: int) -> Array:
        """The oldest array that was sent. ValueError if there is none."""
        _require_self(source)
        if not self._sent:
            raise ValueError("receive: a process alone gets what it sent, and it sent nothing")
        return self._sent.popleft()

    def split(self, color: int) -> Alone:
        """A group of one."""
        return Alone()

    def end(self, message: str) -> None:
        """Print the message on stderr."""
        print(message, file=sys.stderr)

    def _exchange(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(parts)


def _require_self(rank: int) -> None:
    if rank != 0:
        raise ValueError(f"a process alone has number 0, got {rank}")
