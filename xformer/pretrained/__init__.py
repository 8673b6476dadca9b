"""Pretrained models: folders in Hugging Face's format, read and written.

model, params = xformer.pretrained.load("SmolLM2-135M")
logits, cache = model.forward(params, tokens)
xformer.pretrained.save(model, params, "copy")
"""

from xformer.pretrained.loading import inspect, load, model, save, tensors_of
from xformer.pretrained.reading import PretrainedError

__all__ = ["PretrainedError", "inspect", "load", "model", "save", "tensors_of"]
