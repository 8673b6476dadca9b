"""Hugging Face's transformers as a judge: models of random weights, run in float64 throughout.

transformers computes norms, softmax and rotary angles in float32 whatever the model's type. For a
comparison to 1e-9 its names of float32 stand for float64 while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

FLOAT64, FLOAT32 = 1e-9, 1e-4


@contextmanager
def double_precision() -> Iterator[None]:
    """torch's names of float32 mean float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def build(kind: type, config: Any, *, seed: int = 0) -> Any:
    """A model with eager attention whose every parameter is random, norms and biases too."""
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    with double_precision():
        model = kind(config).double().eval()
    for name, parameter in model.named_parameters():
        gain = 0.3 if parameter.ndim == 1 else 1 / parameter.shape[-1] ** 0.5
        offset = 1.0 if parameter.ndim == 1 and "bias" not in name else 0.0
        with torch.no_grad():
            parameter.copy_(offset + gain * torch.randn(parameter.shape, dtype=torch.float64))
    return model
