"""Types of annotations: arrays, trees of arrays, and what an op saves for backward."""

from typing import Any, Protocol, TypeAlias, TypeVar

Array: TypeAlias = Any
"""An array of any library that `array_api_compat.array_namespace` understands."""

Tree = TypeVar("Tree")
"""A tree of arrays, such as the parameters of a model: what goes in comes out."""


class Cache(Protocol):
    """Saved by an op, a layer or a model for its backward."""

    def backward(self, *dy: Array) -> Any:
        """The gradients of the arguments, in their order, from those of the results."""
