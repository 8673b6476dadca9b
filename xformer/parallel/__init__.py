"""Models cut among processes."""

from typing import TYPE_CHECKING

from xformer.later import later

if TYPE_CHECKING:
    from xformer.parallel.collectives import enter, exchange, gather, join, leave, part, scatter
    from xformer.parallel.vocabulary import cross_entropy, embedding

__all__ = [
    "cross_entropy",
    "embedding",
    "enter",
    "exchange",
    "gather",
    "join",
    "leave",
    "part",
    "scatter",
]

later(
    __name__,
    collectives="enter exchange gather join leave part scatter",
    vocabulary="cross_entropy embedding",
)
