"""Generate text with a trained or pretrained model.

    ids = generate(model, params, prompts, max_new_tokens=50, stop=(tokenizer.eos_id,))
    for piece in stream_text(model, params, tokenizer, "Once upon a time", max_new_tokens=50):
        print(piece, end="", flush=True)

Decoding is greedy by default; `samplers` has the filters of sampling. `prefill` reads a prompt
once, for several continuations. `beam_search` and `speculative` are other decoding methods.
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.generation import samplers as samplers
    from xformer.generation.beam import Beam as Beam
    from xformer.generation.beam import beam_search as beam_search
    from xformer.generation.characters import Bytes as Bytes
    from xformer.generation.characters import Characters as Characters
    from xformer.generation.generate import generate as generate
    from xformer.generation.generate import sample as sample
    from xformer.generation.generate import stream as stream
    from xformer.generation.prefix import PrefilledPrompt as PrefilledPrompt
    from xformer.generation.prefix import prefill as prefill
    from xformer.generation.speculative import speculative as speculative
    from xformer.generation.text import decoded as decoded
    from xformer.generation.text import stream_text as stream_text
    from xformer.generation.text import until as until

later(__name__)
