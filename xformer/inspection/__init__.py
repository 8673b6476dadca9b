"""What a model costs and does: tables of its parts, of memory and operations, a trace of a step."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.inspection.trace import trace as trace

later(__name__, "ledger", "measure", "summary")
