"""Models by their sizes."""

from __future__ import annotations

from typing import Any

from xformer import GPT, pretrained


def sized(args: Any) -> Any:
    """A GPT-2, or a Llama, of the sizes of the command line."""
    if args.model == "gpt":
        return GPT(args.vocabulary, args.layers, args.width, args.heads, max_len=args.length)
    return pretrained.model(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": args.vocabulary,
            "num_hidden_layers": args.layers,
            "hidden_size": args.width,
            "num_attention_heads": args.heads,
            "num_key_value_heads": args.kv_heads or args.heads,
            "intermediate_size": -(-args.width * 8 // 3 // 32) * 32,
            "max_position_embeddings": args.length,
        }
    )
