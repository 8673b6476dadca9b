"""`feed_forward` in bfloat16 by cuBLASLt: the matmuls also compute GELU and its derivative.

Forward, the first matmul writes the hidden layer after GELU. Backward, a matmul writes the gradient
of the hidden layer before GELU. NVIDIA does not say how precise cuBLASLt's tanh is. The tanh
instruction has 11 bits, which would be visible in float16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer import ops
from xformer.backends.cupy.cublaslt import multiply_gelu, multiply_slope, why_not
from xformer.backends.cupy.linear_lt import PRODUCTS
from xformer.backends.cupy.module import contiguous, empty
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch import is_inference, kernel
from xformer.dispatch.checks import require_gradient
from xformer.dispatch.shapes import dtype_name
from xformer.layers.feed_forward import FeedForwardParams
from xformer.layers.feed_forward import feed_forward as reference
from xformer.layers.linear import LinearParams


def unsupported(
    x: Array,
    params: FeedForwardParams,
    *,
    activation: str = "relu",
    dropout_rate: float = 0.0,
    dropout_key: ops.RandomKey | None = None,
) -> str | None:
    """Return why the kernel cannot run, or None if it can."""
    if activation != "gelu_tanh" or params.gate is not None:
        return "only gelu_tanh, and no gate"
    if params.down is None:
        return "no second linear layer"
    if dropout_rate:
        return "dropout of the hidden layer"
    if dtype_name(x) != "bfloat16":
        return f"its GELU has too few digits for {dtype_name(x)}"
    for linear in (params.up, params.down):
        leaves = linear if isinstance(linear, LinearParams) else (linear,)
        if not all(leaf is None or isinstance(leaf, type(x)) for leaf in leaves):
            return "adapters or frozen parameters"
    return why_not(x, params.up.w) or why_not(x, params.down.w)


@kernel(reference, "cupy", unsupported=unsupported)
def feed_forward(
    x: Array,
    params: FeedForwardParams,
    *,
    activation: str = "relu",
    dropout_rate: float = 0.0,
    dropout_key: ops.RandomKey | None = None,
) -> tuple[Array, CupyFeedForwardCache]:
    """Return (y = hidden w_down + b_down, cache); hidden = gelu(before), before = x w_up + b_up."""
    down: Any = params.down
    (w, b), (w_down, b_down) = params.up, down
    check = ops.linear.reference.check  # type: ignore[attr-defined]
    check((x, w, b), {}, ops.linear)
    rows, w = PRODUCTS.rows(x), PRODUCTS.matrix(w)
    hidden = empty(x, (rows.shape[0], w.shape[1]))
    before = None if is_inference() else empty(x, hidden.shape)
    multiply_gelu(rows, w, hidden, None if b is None else contiguous(b), before)
    check((hidden, w_down, b_down), {}, ops.linear)
    w_down = PRODUCTS.matrix(w_down)
    y = PRODUCTS.affine(hidden, w_down, b_down)
    y = array_namespace(x).reshape(y, (*x.shape[:-1], y.shape[1]))
    has_b = b is not None, b_down is not None
    return y, CupyFeedForwardCache(rows, w, before, hidden, w_down, has_b, x.shape)


@short
class CupyFeedForwardCache(NamedTuple):
    """Saved by `feed_forward` for backward: the inputs of both matmuls, both weights, and `before`.

    `before` gives the derivative of GELU.
    """

    x: Array  # (N, D)
    w: Array  # (D, F)
    before: Any  # (N, F), x w + b; None in inference
    hidden: Array  # (N, F), gelu(before)
    w_down: Array  # (F, D)
    has_b: tuple[bool, bool]
    x_shape: tuple[int, ...]

    def backward(self, dy: Array) -> tuple[Array, FeedForwardParams]:
        """Return dx and the gradients of the parameters.

        dbefore = (dy w_down^T) gelu'(before) is one matmul.
        """
        shape = (*self.x_shape[:-1], self.w_down.shape[1])
        require_gradient("linear", "dy", dy, self.hidden, shape)
        rows = PRODUCTS.rows(dy)
        dbefore = empty(dy, self.before.shape)
        multiply_slope(rows, self.w_down.T, dbefore, self.before)
        down = PRODUCTS.parameters(self.hidden, rows, self.w_down, self.has_b[1])
        up = PRODUCTS.parameters(self.x, dbefore, self.w, self.has_b[0])
        dx = array_namespace(dy).reshape(PRODUCTS.back(dbefore, self.w), self.x_shape)
        return dx, FeedForwardParams(LinearParams(*up), LinearParams(*down))
