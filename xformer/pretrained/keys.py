"""Keys of a config.json that no family reads.

A family reads every key that transformers reads for its models (`test_pretrained_keys`). The other
keys cannot change what transformers computes, except for the keys of `READ`.
"""

from __future__ import annotations

import warnings
from typing import Any

from xformer.pretrained.config import Config
from xformer.pretrained.reading import listed

# Keys that code shared by all families of transformers reads: weights in another format or place,
# layers that differ, masks, parts of a larger model.
READ = (
    *("quantization_config", "compression_config", "transformers_weights", "fusion_config"),
    *("per_layer_config", "layer_types", "kv_sharing_modes", "number_of_conv_states"),
    *("sliding_window", "attention_chunk_size", "is_causal"),
    *("text_config", "text_encoder", "decoder", "generator", "sub_configs"),
    *("attribute_map", "default_theta", "default_rope_type"),
)
NOTHING: dict[str, tuple[Any, ...]] = {"is_causal": (True,)}  # values that change nothing


def unread_keys(c: Config) -> list[str]:
    """The keys that transformers does not read. They become accepted in `c`.

    `finish` refuses the other keys that the family did not read.
    """
    unasked = c.unasked()
    c.accept(name for name in unasked if name not in READ or _says_nothing(c, name))
    return [name for name in unasked if name not in READ]


def warn_of(unread: list[str], where: str, reader: str = "transformers") -> None:
    """Warn of the keys that are ignored because `reader` does not read them."""
    if unread:
        names = listed(unread)
        message = f"{where}: keys that {reader} does not read are left out: {names}"
        warnings.warn(message, stacklevel=3)


def _says_nothing(c: Config, name: str) -> bool:
    value = c.data[name]
    if name == "layer_types":
        return isinstance(value, list) and all(kind == "full_attention" for kind in value)
    return value in (*NOTHING.get(name, ()), {}, [])
