"""CuPy: NVIDIA GPUs through CUDA.

The kernels' Python modules do not import CuPy, so that tests can launch the kernels without a GPU
(see `module`). `device` and `driver` import CuPy: when the backend is opened, and at the first
launch.
"""

from __future__ import annotations

from xformer.backends.cupy import (
    activation,
    adamw,
    add_norm,
    append,
    constant,
    cross_entropy,
    dropout,
    embedding,
    feed_forward_lt,
    flash,
    global_norm,
    glu,
    in_range,
    index_add,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_lt,
    linear_many_lt,
    random_bits,
    rms_norm,
    rope,
    sdpa,
    sdpa_cudnn,
    softmax,
    sum_to,
)
from xformer.backends.cupy.index_add import deterministic
from xformer.backends.cupy.products import tf32
from xformer.dispatch.backend import Backend

__all__ = [
    "activation",
    "adamw",
    "add_norm",
    "append",
    "backend",
    "constant",
    "cross_entropy",
    "deterministic",
    "dropout",
    "embedding",
    "feed_forward_lt",
    "flash",
    "global_norm",
    "glu",
    "in_range",
    "index_add",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_lt",
    "linear_many_lt",
    "random_bits",
    "rms_norm",
    "rope",
    "sdpa",
    "sdpa_cudnn",
    "softmax",
    "sum_to",
    "tf32",
]


def backend(device: str | None = None) -> Backend:
    """Return the CuPy backend.

    device: "cuda" or "cuda:N"; None: the current device
    """
    from xformer.backends.cupy.device import opened

    return opened(device)
