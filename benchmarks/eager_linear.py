"""The peer's linear maps and parameters in plain PyTorch, with or without LoRA adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xformer.base.tree import Frozen, value
from xformer.layers import LinearParams, LoRAParams


def linear(*parts: Any) -> Linear | Adapted:
    """Return one module for several projections of the same input, all with adapters or none."""
    if isinstance(parts[0], LoRAParams):
        return Adapted(*parts)
    return Linear(*parts)


class Linear(nn.Linear):
    """Several projections of the same input, packed into one matmul."""

    def __init__(self, *parts: LinearParams) -> None:
        w = np.concatenate([p.w for p in parts], axis=1)
        super().__init__(*w.shape, bias=parts[0].b is not None)
        self.widths = [p.w.shape[1] for p in parts]
        self.weight = parameter(w.T)
        if parts[0].b is not None:
            self.bias = parameter(np.concatenate([p.b for p in parts]))

    def grads(self) -> list[LinearParams]:
        """Return dw (I, O) and db, or None without a bias, of each projection, after a backward.

        The order is that of `parts`; the arrays are NumPy's.
        """
        dw = self.weight.grad.T.split(self.widths, dim=1)
        if self.bias is None:
            return [LinearParams(*host(w), None) for w in dw]
        db = self.bias.grad.split(self.widths)
        return [LinearParams(*host(*pair)) for pair in zip(dw, db, strict=True)]


class Adapted(nn.Module):
    """Frozen projections w of an input, each with an adapter (a, b): x w + bias + scale (x a) b."""

    def __init__(self, *parts: LoRAParams) -> None:
        super().__init__()
        self.base = Linear(*(LinearParams(*map(value, p.base)) for p in parts))
        self.base.requires_grad_(False)
        self.widths, self.ranks = self.base.widths, [p.a.shape[1] for p in parts]
        self.scale = parts[0].scale
        self.a = parameter(np.concatenate([p.a for p in parts], axis=1).T)  # (sum R, I)
        self.b = nn.ParameterList(parameter(p.b.T) for p in parts)  # (O, R)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all projections: one matmul by all a, then one by each b."""
        lows = F.linear(x, self.a).split(self.ranks, dim=-1)
        parts = [F.linear(low, b) for low, b in zip(lows, self.b, strict=True)]
        out = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        return self.base(x) + self.scale.value * out

    def grads(self) -> list[LoRAParams]:
        """Return the gradients of each adapter; those of the frozen weights are None."""
        das = self.a.grad.T.split(self.ranks, dim=1)
        none = LinearParams(None, None)
        return [
            LoRAParams(none, *host(da, b.grad.T), self.scale)
            for da, b in zip(das, self.b, strict=True)
        ]


def parameter(values: np.ndarray | Frozen) -> nn.Parameter:
    """Return a parameter with a C-contiguous copy of `values`; frozen ones need no gradient."""
    copy = torch.tensor(np.ascontiguousarray(value(values)))
    return nn.Parameter(copy, requires_grad=not isinstance(values, Frozen))


def grad(p: nn.Parameter | None) -> Any:
    """Return the gradient of a parameter as a NumPy array; None if it has no gradient."""
    return None if p is None or p.grad is None else host(p.grad)[0]


def host(*tensors: Tensor) -> list[np.ndarray]:
    """Return NumPy arrays: views of tensors on the CPU, copies of others."""
    return [t.cpu().numpy() for t in tensors]
