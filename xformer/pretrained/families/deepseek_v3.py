"""DeepSeek-V3 and R1 (arXiv:2412.19437): V2 with a router whose load is balanced without a loss."""

from __future__ import annotations

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.families.deepseek_v2 import layer_links, mixture, model
from xformer.pretrained.families.mixtral import links_in_memory


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    c.ignore("num_nextn_predict_layers")  # the layers that predict later tokens are left out
    c.unread("scoring_func", "sigmoid")
    c.unread("topk_method", "noaux_tc")
    n_groups = c.integer("n_group", low=1, high=1024, default=8)
    config = mixture(
        c,
        n_experts=256,
        n_shared=1,
        d_ff=2048,
        top_k=8,
        normalise=c.flag("norm_topk_prob", default=True),
        score="sigmoid",
        correction=True,
        weight_scale=c.number("routed_scaling_factor", default=2.5),
        n_groups=n_groups,
        top_groups=c.integer("topk_group", low=1, high=1024, default=4),
        group_top=2 if n_groups > 1 else 1,
    )
    interleaved = c.flag("rope_interleave", default=True)
    return model(c, head, config, n_dense=3, max_len=4096, interleaved=interleaved)


FAMILY = llama.family(
    "DeepseekV3",
    build,
    layer_links,
    in_memory=links_in_memory,
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    unused=(r"(model\.)?layers\.61\..*",),  # of V3, which predict the token after the next one
)
