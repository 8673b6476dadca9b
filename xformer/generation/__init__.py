"""Generate text with a trained or pretrained model.

    ids = generate(model, params, prompts, max_new_tokens=50, stop=(tokenizer.eos_id,))
    for piece in stream_text(model, params, tokenizer, "Once upon a time", max_new_tokens=50):
        print(piece, end="", flush=True)

Decoding is greedy by default; `samplers` has the filters of sampling. `prefill` reads a prompt
once, for several continuations. `beam_search` and `speculative` are other decoding methods.
"""

from xformer.generation import samplers
from xformer.generation.beam import Beam, beam_search
from xformer.generation.generate import generate, sample, stream
from xformer.generation.prefix import PrefilledPrompt, prefill
from xformer.generation.speculative import speculative
from xformer.generation.text import decoded, stream_text, until
from xformer.generation.vocabulary import Bytes, Characters

__all__ = [
    "Beam",
    "Bytes",
    "Characters",
    "PrefilledPrompt",
    "beam_search",
    "decoded",
    "generate",
    "prefill",
    "sample",
    "samplers",
    "speculative",
    "stream",
    "stream_text",
    "until",
]
