"""The array libraries that tests run on: every backend, and stricter forms of two of them."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from xformer import backends
from xformer.backends import Backend
from xformer.ops._attention import SdpaOptions, sdpa_options
from xformer.ops._loss import LossOptions, loss_options

# Name in test ids -> name of the backend.
LIBRARIES = {
    "numpy": "numpy",
    "numpy-readonly": "numpy",
    "array-api-strict": "array-api-strict",
    "torch": "torch",
    "jax": "jax",
    "cupy": "cupy",
    "numba": "numba",
    "mkl": "mkl",
}
STAND_IN = "cuda_shim"  # CuPy's kernels on the CPU
ON_DEVICE = ("cupy", STAND_IN)  # arrays whose values nobody looks at unasked
ON_DEMAND = ("numba", "mkl", STAND_IN)  # for tests that name them, and for --backend


class ReadOnly(Backend):
    """NumPy whose arrays cannot be written to: an op that writes to its inputs raises."""

    def _from_host(self, host: np.ndarray) -> np.ndarray:
        array = host.view()
        array.flags.writeable = False
        return array


def slow_but(quick: Collection[Any], every: Iterable[Any]) -> list[Any]:
    """The parameters `every` of a test; those that are not in `quick` run for a release."""
    return [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in every]


def only(*libraries: Any) -> pytest.MarkDecorator:
    """Run a test that takes `library` on these alone."""
    return pytest.mark.parametrize("library", libraries, indirect=True)


@contextmanager
def opened(library: str) -> Iterator[Backend]:
    """The backend of a name in `LIBRARIES`, or of the stand-in, itself of that name.

    Raises `backends.Unusable`.
    """
    if library == STAND_IN:
        import cuda_shim

        yield cuda_shim.backend()
        return
    # What mixes in arrays of the default device fails on another one.
    device = "device1" if library == "array-api-strict" else None
    backend = backends.get(LIBRARIES[library], device)
    backend = dataclasses.replace(backend, name=library)
    if library == "numpy-readonly":
        yield ReadOnly(**vars(backend))
    elif library == "array-api-strict":
        from array_api_strict import ArrayAPIStrictFlags

        # What lazy libraries cannot do: shapes that depend on values.
        with ArrayAPIStrictFlags(boolean_indexing=False, data_dependent_shapes=False):
            yield backend
    elif library == "cupy":
        from devices import unwritten

        with unwritten():
            yield backend
    elif library == "torch":
        import torch

        torch.set_num_threads(1)  # in small arrays, threads do nothing but wait for each other
        yield backend
    elif library in backends.ON_NUMPY:
        with backend.active():
            yield backend
    else:
        yield backend


def header(demanded: Collection[str]) -> list[str]:
    """Lines above a run's tests: with --backend cupy, versions and what is missing."""
    if "cupy" not in demanded:
        return []
    command = [sys.executable, "-m", "xformer", "info"]  # JAX in it keeps memory of the device
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return (said.stdout + said.stderr).splitlines()


def parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """(name, kind, default) of each, keyword-only ones by name.

    A kernel of attention leaves `**options` to `sdpa_options`, a kernel of a loss to
    `loss_options`.
    """
    listed = list(inspect.signature(function).parameters.values())
    if listed[-1].kind is inspect.Parameter.VAR_KEYWORD:
        is_loss = "targets" in (p.name for p in listed)
        check, fields = (loss_options, LossOptions) if is_loss else (sdpa_options, SdpaOptions)
        checked = inspect.signature(check).parameters
        listed[-1:] = [checked[name] for name in fields._fields]
    by_place = [p for p in listed if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    by_name = sorted(set(listed) - set(by_place), key=lambda p: p.name)
    return [(p.name, p.kind, p.default) for p in by_place + by_name]
