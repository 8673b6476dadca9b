"""The backward of a model, read and edited: `watch`, `edit`, `per_example`, `stepped`.

A cache is a tree of data, and its nodes own the backward. So a copy of the tree with other nodes is
another backward. `addresses` names the nodes after the parameters.
"""

from xformer.backward.editing import Watched, edit, watch
from xformer.backward.examples import PerExample, per_example
from xformer.backward.rules import per_example_rule
from xformer.backward.updating import stepped

__all__ = ["PerExample", "Watched", "edit", "per_example", "per_example_rule", "stepped", "watch"]
