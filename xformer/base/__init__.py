"""What everything needs and no array library: trees, types, printing, files, lazy imports."""

from xformer.base.lazy import later

__all__ = ["tree"]

later(__name__, tree="")
