"""The peer for further model families: Hugging Face transformers, eager.

It uses the configuration's model class, its default attention, and the cross-entropy of its logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from xformer.base import tree
from xformer.initializers import Shapes
from xformer.models import EncoderDecoder
from xformer.pretrained.loading import links_of

transformers.logging.set_verbosity_error()


class Hugging(nn.Module):
    """The model of transformers for `model.hf_config`, with the weights `params` of xformer."""

    def __init__(self, model: Any, params: Any) -> None:
        super().__init__()
        config = dict(model.hf_config)
        model_class = getattr(transformers, config["architectures"][0])
        hf_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        self.hf_model: Any = model_class(hf_config).eval()  # no dropout
        self.links = links_of(model, in_memory=True)
        self.like = model.init_from(Shapes())
        self.is_seq2seq = isinstance(model, EncoderDecoder)
        leaves, tensors = tree.flatten(params), {}
        for link in self.links:
            tensors |= link.write([leaves[name] for name in link.ours])
        with torch.no_grad():
            for name, p in self.hf_model.named_parameters():
                p.copy_(torch.tensor(tensors[name].copy()))

    def forward(self, *ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean loss; ids: as the arguments of xformer's `loss` after the parameters."""
        *inputs, targets = ids
        options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        if self.is_seq2seq:
            options["decoder_input_ids"] = inputs[1]
        if hasattr(self.hf_model.config, "use_cache"):
            options["use_cache"] = False
        logits = self.hf_model(inputs[0], **options).logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def grads(self) -> Any:
        """Return the gradients in xformer's parameter types."""
        hf_grads = {name: p.grad.numpy() for name, p in self.hf_model.named_parameters()}
        grads: dict[str, Any] = {}
        for link in self.links:
            grads |= link.read([hf_grads[name] for name in link.theirs])
        return tree.unflatten(self.like, grads)
