"""What everything needs and no array library: trees, types, printing, files, lazy imports."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.base import tree as tree

later(__name__)
