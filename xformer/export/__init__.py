"""Models and training steps as files for other runtimes: ONNX.

    model, params = xf.pretrained.load("all-MiniLM-L6-v2")
    xf.export.onnx(model, params, "minilm.onnx", pooling="mean")

It needs the extra `onnx`. A page with all that is exported: docs/onnx.md.
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.arrays.onnx import NotExported as NotExported
    from xformer.export.model import onnx as onnx
    from xformer.export.step import onnx_step as onnx_step

later(__name__)
