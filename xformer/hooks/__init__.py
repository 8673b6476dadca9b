"""The backward of a model, read and edited: `watch`, `edit`, `per_example`, `stepped`.

A cache is a tree of data, and its nodes own the backward. So a copy of the tree with other nodes is
another backward. `node_names` names the nodes after the parameters.
"""

from xformer.hooks.editing import Watched, edit, watch
from xformer.hooks.fused_update import stepped
from xformer.hooks.per_example import PerExample, per_example
from xformer.hooks.per_example_rules import per_example_rule

__all__ = ["PerExample", "Watched", "edit", "per_example", "per_example_rule", "stepped", "watch"]
