"""`append` in place."""

from __future__ import annotations

from xformer.backends.append import append as in_place

from xformer.dispatch import kernel
from xformer.layers.past import append as reference

append = kernel(reference, "cupy")(in_place)
