"""NVIDIA's libraries that the stand-in's kernels call where a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xformer.backends.cupy import cublaslt, cudnn
from xformer.backends.cupy.runtimes import Runtime


class OnRequest:
    """`with calling(library)`: kernels of `module` call it, and keep nothing from before."""

    def __init__(self, module: Any, name: str) -> None:
        self.why_not = f"on the stand-in {name} is called where a test asks for it"
        self._module, self._now = module, list[Any]()
        self.runtime = Runtime(
            lambda: self._now[-1] if self._now else self.why_not,
            lambda arrays: self._now[-1].stream_of(arrays),
            lambda size: self._now[-1].allocate(size),
        )

    @contextmanager
    def __call__(self, library: Any) -> Iterator[Any]:
        module = self._module
        before, module._state = module._state, module.State()
        self._now.append(library)
        try:
            yield library
        finally:
            self._now.pop()
            module._state = before


calling = OnRequest(cublaslt, "cuBLASLt")
calling_cudnn = OnRequest(cudnn, "cuDNN")
