"""The named shapes of the benchmarks: models with their batches."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save_file

from xformer import GPT, Transformer, backends, pretrained
from xformer.base import tree
from xformer.base.typing import Array
from xformer.finetune import lora
from xformer.initializers import Shapes
from xformer.layers import AttentionParams, LoRAParams
from xformer.models import Classifier, EncoderDecoder, LanguageModel

STAND_IN = "stand-in"  # the device of CuPy's stand-in on the CPU: tests/cuda_shim
SHAPE, WEIGHTS = "shape.pickle", "weights.safetensors"
EAGER, TRANSFORMERS = "eager", "transformers"  # the source of the peer's model


class Inputs(NamedTuple):
    """One batch: the arguments of a model's `loss` after the parameters, and its masks."""

    arrays: tuple[Array, ...]
    masks: dict[str, Array]


@dataclass(frozen=True)
class Shape:
    """A model with the batch for its training step or its inference."""

    name: str
    model: LanguageModel | EncoderDecoder
    batch: int  # B
    length: int  # T; of an encoder-decoder, the source's
    rounds: int  # by default; enough for a stable minimum
    repeats: int  # consecutive runs in a round, together about 0.1 s
    tolerance: float = 1e-5  # relative error of loss, gradients or output
    training: bool = True  # False: inference, the mean of the hidden states
    scores_fit: bool = True  # whether attention that stores all T x T scores fits into 16 GB
    device: str | None = None  # of torch, "cuda"; None: the default; STAND_IN: of a dry run
    tf32: bool = False  # whether matmuls may round their operands to TF32
    precision: str | None = None  # of weights and activations on a device; None: float32
    judged: int | None = None  # rows of the batch that the judge computes at once; None: all
    peer: str = EAGER  # the model that torch runs: EAGER, of this folder, or TRANSFORMERS
    dropout: bool = False  # whether each loss draws dropout masks, at the rates of the model
    lora_rank: int | None = None  # of adapters at all linear maps; all else is frozen
    target_length: int | None = None  # of an EncoderDecoder; None: `length`
    lengths: tuple[int, ...] = ()  # of the batches of one cycle, which is timed as a whole

    def weights(self) -> Any:
        """Return initial weights in float32, plus noise.

        Without noise, biases of zero and norm weights of one would hide gradients that ignore them.
        T5 does not scale its scores, so the weights of its queries are scaled, as T5 initialises
        them.
        """
        rng = np.random.default_rng(1)
        attn = self.model.blocks[0].attn
        unscaled = attn.head_width**-0.5 if attn.scale == 1 else 1.0

        def move(p: np.ndarray) -> np.ndarray:
            return (p + rng.normal(0.0, 0.02, p.shape)).astype(np.float32)

        def queries(_: str, node: AttentionParams) -> AttentionParams:
            return node._replace(q=tree.map(lambda p: p * np.float32(unscaled), node.q))

        return tree.map_nodes(queries, tree.map(move, self.model.init(0)), AttentionParams)

    def parameters(self, weights: Any) -> Any:
        """Return the parameters: `weights`, or for LoRA frozen `weights` with adapters.

        Adapters get noise too: initially b is 0, and then the gradient of a is 0.
        """
        if self.lora_rank is None:
            return weights
        rng = np.random.default_rng(3)

        def move(_: str, node: LoRAParams) -> LoRAParams:
            noise = rng.normal(0.0, 0.02, node.b.shape).astype(node.b.dtype)
            return node._replace(b=node.b + noise)

        adapted = lora.attach(weights, self.lora_rank, 2 * self.lora_rank, ("*",))
        return tree.map_nodes(move, adapted, LoRAParams)

    @property
    def n_tokens(self) -> int:
        """Tokens of a batch, or of all batches of a cycle; of an encoder-decoder, the source's."""
        return self.batch * sum(self.lengths or (self.length,))

    def batches(self, backend: backends.Backend) -> list[Inputs]:
        """Return the batches of a cycle: one batch, or one for each of `lengths`."""
        if isinstance(self.model.head, Classifier) and self.training:
            return [self._classified(backend)]
        return [Inputs(self.data(backend, n), {}) for n in self.lengths or (self.length,)]

    def _classified(self, backend: backends.Backend) -> Inputs:
        """Return padded sequences with their labels, and the mask, True for a token."""
        rng, model = np.random.default_rng(2), self.model
        ids = self._padded(rng, model.embed.vocab_size, self.length)
        labels = rng.integers(0, model.head.n_labels, self.batch)
        arrays = backend.asarray(ids), backend.asarray(labels)
        return Inputs(arrays, {"mask": backend.asarray(ids != 0)})

    def data(self, backend: backends.Backend, length: int | None = None) -> tuple[Array, ...]:
        """Return the arguments of `loss` after the parameters: random ids of `length`, targets."""
        rng, model = np.random.default_rng(2), self.model
        length = length or self.length
        if isinstance(model, LanguageModel):
            size = model.embed.vocab_size
            ids = rng.integers(0, size, (self.batch, length + self.training))
            host = (ids[:, :-1], ids[:, 1:]) if self.training else (ids,)
        elif model.pad_id is None:
            size = model.target_embed.vocab_size
            src = rng.integers(1, model.src_embed.vocab_size, (self.batch, length))
            tgt = rng.integers(1, size, (self.batch, (self.target_length or length) + 1))
            host = src, tgt[:, :-1], tgt[:, 1:]
        else:
            src = self._padded(rng, model.src_embed.vocab_size, self.length)
            tgt = self._padded(rng, model.tgt_embed.vocab_size, self.length + 1)
            host = src, tgt[:, :-1], tgt[:, 1:]
        return tuple(backend.asarray(np.ascontiguousarray(ids)) for ids in host)

    def _padded(self, rng: np.random.Generator, vocab_size: int, length: int) -> np.ndarray:
        """Return ids (batch, length); each row has length / 2 to `length` tokens, then zeros."""
        ids = rng.integers(1, vocab_size, (self.batch, length))
        lengths = rng.integers(length // 2, length + 1, (self.batch, 1))
        return np.where(np.arange(length) < lengths, ids, 0)

    def describe(self) -> str:
        """Return one line with the sizes of the model and the batch."""
        model = self.model
        block = model.blocks[0]
        if isinstance(model, LanguageModel):
            what = "decoder" if model.causal else "encoder"
            layers, vocab = f"{len(model.blocks)}", f"{model.embed.vocab_size}"
        else:
            what, layers = "encoder-decoder", f"{len(model.encoder)}+{len(model.decoder)}"
            vocab = f"{model.src_embed.vocab_size}/{model.target_embed.vocab_size}"
        heads = f"{block.attn.n_heads}"
        if block.attn.kv_heads != block.attn.n_heads:
            heads += f"/{block.attn.kv_heads}"
        return (
            f"{what}, {layers} layers, width {block.d_model}, {heads} heads, vocabulary {vocab}, "
            f"batch {self.batch} of {self._lengths()} tokens{self._extras()}"
        )

    def _lengths(self) -> str:
        if self.lengths:
            return f"{', '.join(map(str, self.lengths))}"
        return f"{self.length}" + (f" to {self.target_length}" if self.target_length else "")

    def _extras(self) -> str:
        extras = [f", LoRA of rank {self.lora_rank}"] if self.lora_rank else []
        extras += [", dropout"] if self.dropout else []
        return "".join(extras)


def store(shape: Shape, folder: Path) -> None:
    """Write shape and weights for the processes of a run."""
    (folder / SHAPE).write_bytes(pickle.dumps(shape))
    save_file(tree.flatten(shape.weights()), folder / WEIGHTS)


def load(folder: Path) -> tuple[Shape, Any]:
    """Read the files of `store`. Returns the shape, and the weights as NumPy arrays."""
    shape: Shape = pickle.loads((folder / SHAPE).read_bytes())
    like = shape.model.init_from(Shapes())
    return shape, tree.unflatten(like, load_file(folder / WEIGHTS))


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
# About 350M parameters, as GPT-2 medium has.
LLAMA_350M = LLAMA | {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
MINILM = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
# One ReLU input that rounds to the other side of 0 gives an error of 3e-4; some of 25 million do.
RELU = 3e-3
SHAPES = (
    Shape("tiny", GPT(256, 4, 128, 4, max_len=64), batch=12, length=64, rounds=20, repeats=10),
    Shape("char-gpt", GPT(65, 6, 384, 6, max_len=256), batch=12, length=256, rounds=15, repeats=1),
    Shape("gpt2", GPT(50257, 12, 768, 12, max_len=1024), batch=1, length=1024, rounds=5, repeats=1),
    Shape("llama", pretrained.model(LLAMA), batch=4, length=512, rounds=7, repeats=1),
    Shape(
        "encdec",
        Transformer(8000, 8000, 256, 4, n_encoder_layers=3, n_decoder_layers=3, max_len=32),
        batch=128,
        length=32,
        rounds=15,
        repeats=1,
        tolerance=RELU,
    ),
    Shape(
        "long",
        GPT(65, 4, 256, 4, max_len=8192),
        batch=1,
        length=8192,
        rounds=5,
        repeats=1,
        scores_fit=False,
    ),
    *(
        Shape(
            f"minilm-{batch}",
            pretrained.model(MINILM, names=()),  # without a pooler
            batch=batch,
            length=128,
            rounds=20,
            repeats=repeats,
            training=False,
        )
        for batch, repeats in ((32, 1), (1, 10))
    ),
)
BY_NAME = {shape.name: shape for shape in SHAPES}
