"""Files damaged at random, and what reading them may do at most: refuse them, soon and small."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from xformer.pretrained.reading import PretrainedError

SECONDS, BYTES = 1.0, 8 << 20

# The same examples at every run; their files lie in a folder that all of them share.
some = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

VALUES = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**30, 10**300, 0.5, -0.0, 1e308),
        *("", "F32", "I64", "../x", "/etc/passwd", "a\x00b", "\ud800", "x" * 2000),
        *([], {}, [0], [[]], {"a": 1}, [2**40] * 3, [0, 2**62], [1] * 100, [0, 4], [4, 0]),
    ]
)

# What replaces a part of the text itself.
TEXTS = st.sampled_from(
    [
        *(b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 20000, b'{"a":' * 20000, b"\xff"),
        *(b"", b'"', b"}", b",", b"\\u0000", b"\\ud800", b"null", b"\xef\xbb\xbf", b"1" * 401),
    ]
)


@contextmanager
def refused_at_most(seconds: float = SECONDS, nbytes: int = BYTES) -> Iterator[None]:
    """What runs inside may raise PretrainedError, in time and memory that do not matter."""
    tracemalloc.start()
    start = time.process_time()  # not the time that other work takes on the machine
    try:
        yield
    except PretrainedError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
    finally:
        took, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert took < seconds
    assert peak < nbytes


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with bytes changed, cut out or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "cut", "drop", "put"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 64))]
        else:
            data[at:at] = draw(TEXTS)
    return bytes(data)


@st.composite
def edited(draw: st.DrawFn, whole: dict[str, Any]) -> bytes:
    """The JSON of `whole` with values exchanged, taken out or put in."""
    data = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        node: Any = data
        while node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw(st.sampled_from(keys))
            if isinstance(node[key], (dict, list)) and node[key] and draw(st.booleans()):
                node = node[key]
                continue
            if draw(st.integers(0, 3)):
                node[key] = copy.deepcopy(draw(VALUES))
            else:
                del node[key]
            break
    return json.dumps(data).encode()


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """As on a full disk: the system refuses what a file would have beyond that."""
    resource = pytest.importorskip("resource", reason="the system has no limits of this kind")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
