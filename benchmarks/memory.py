"""Peak memory of two training steps: `python -m benchmarks.memory SHAPE CONTESTANT`.

A process of its own, since a process has one peak; the harness starts it.
"""

from __future__ import annotations

import sys

from benchmarks import contestants
from benchmarks.shapes import BY_NAME


def main(shape_name: str, contestant_name: str) -> None:
    """Print the bytes, or None."""
    contestant = contestants.make(contestant_name, BY_NAME[shape_name])
    for _ in range(2):
        contestant.step()
    contestant.backend.synchronize()
    print(contestant.backend.memory().peak)


if __name__ == "__main__":
    main(*sys.argv[1:])
