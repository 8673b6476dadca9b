"""The peer of families that this folder has not written: Hugging Face's transformers, eager.

Its own model class of the configuration, with the attention that it takes by default, and the
cross-entropy of its logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from xformer import tree
from xformer.initializers import Shapes
from xformer.models import EncoderDecoder
from xformer.pretrained.loading import links_of

transformers.logging.set_verbosity_error()


class Hugging(nn.Module):
    """transformers' model of `model.hf_config`, with these weights."""

    def __init__(self, model: Any, params: Any) -> None:
        super().__init__()
        config = dict(model.hf_config)
        kind = getattr(transformers, config["architectures"][0])
        own = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        self.own: Any = kind(own).eval()  # no dropout
        self.links = links_of(model, in_memory=True)
        self.like = model.init_from(Shapes())
        self.is_seq2seq = isinstance(model, EncoderDecoder)
        leaves, written = tree.flatten(params), {}
        for link in self.links:
            written |= link.write([leaves[name] for name in link.ours])
        with torch.no_grad():
            for name, p in self.own.named_parameters():
                p.copy_(torch.tensor(written[name].copy()))

    def forward(self, *ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean loss; ids: what comes after the parameters in `loss` of xformer's model."""
        *inputs, targets = ids
        options: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        if self.is_seq2seq:
            options["decoder_input_ids"] = inputs[1]
        if hasattr(self.own.config, "use_cache"):
            options["use_cache"] = False
        logits = self.own(inputs[0], **options).logits
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def grads(self) -> Any:
        """Gradients of the parameters, as xformer has them."""
        theirs = {name: p.grad.numpy() for name, p in self.own.named_parameters()}
        found: dict[str, Any] = {}
        for link in self.links:
            found |= link.read([theirs[name] for name in link.theirs])
        return tree.unflatten(self.like, found)
