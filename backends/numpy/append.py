"""`append` in place."""

from __future__ import annotations

from xformer.backends.append import append as in_place
from xformer.backends.append import columns_are_fixed

from xformer.dispatch import kernel
from xformer.layers.past import append as reference

append = kernel(reference, "numpy", unsupported=columns_are_fixed)(in_place)
