"""The limits of cuDNN's attention in bfloat16 and float16, by compute capability.

From NVIDIA's support matrix of scaled dot product attention
(https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html) and from what
version 1.32 of its frontend checks (cudnn_frontend/node/sdpa_support_surface.h and
scaled_dot_product_flash_attention.h), of cuDNN 9.16 and newer:

| capability | widest heads, forward | widest heads, backward | deterministic backward |
|---|---|---|---|
| 8.x | 256 | 128 | yes |
| 9.x | 256 | 256 | yes |
| 10.x | 256 | 128; 192 with values of 128; from 9.23 on 256 | from 9.18 on |
| 11.x, 12.x | 256 | 128 | yes |

Every capability has bfloat16 and float16, widths that are multiples of 8, causal masks and windows.
Bottom-right alignment needs T <= S. Within these limits cuDNN itself says whether there is a plan.
"""

from __future__ import annotations

from typing import NamedTuple

# 9.16: before it, backward copies lengths from the host if keys are no multiple of 128.
OLDEST = 91600
PACK = 8  # head widths are multiples of it
OLDEST_CAPABILITY = 80


class Widths(NamedTuple):
    """The widest heads of each direction."""

    forward: int
    backward: int


# By the major number of the capability. All others, newer ones too, have the strictest limits.
WIDEST = {9: Widths(256, 256)}
OTHERS = Widths(256, 128)
# Further widths (keys, values) of backward, and the version of cuDNN that added them.
MORE = {10: {(192, 128): 91600, (256, 256): 92300}}
DETERMINISTIC = {10: 91800}  # the version that added it; the others always had it


def unsupported(
    capability: int, version: int, widths: tuple[int, int], *, backward: bool, deterministic: bool
) -> str | None:
    """Return why cuDNN does not support attention on a device, or None if it may.

    capability: compute capability of the device, 90 for 9.0
    version: of cuDNN, 91800 for 9.18
    widths: of the heads of keys, and of values
    backward: the direction to check: backward if true, else forward
    deterministic: whether backward must be deterministic
    """
    here = f"on compute capability {capability / 10}"
    if capability < OLDEST_CAPABILITY:
        return f"cuDNN has no attention {here}, but from {OLDEST_CAPABILITY / 10} on"
    if any(width % PACK for width in widths):
        return f"heads are {widths[0]} and {widths[1]} wide, no multiples of {PACK}"
    first, (name, widest) = capability // 10, ("forward", OTHERS.forward)
    if backward and version < MORE.get(first, {}).get(widths, version + 1):
        name, widest = "backward", WIDEST.get(first, OTHERS).backward
    if max(widths) > widest:
        return f"heads are {max(widths)} wide, more than the {widest} of cuDNN's {name} {here}"
    if backward and deterministic and version < DETERMINISTIC.get(first, 0):
        return f"cuDNN before {_named(DETERMINISTIC[first])} has no deterministic backward {here}"
    return None


def _named(version: int) -> str:
    """Return a version as text: "9.18" for 91800."""
    return f"{version // 10000}.{version // 100 % 100}"
