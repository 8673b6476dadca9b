"""Cases of the models: their loss, and the gradients of all parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from xformer.backends import Backend, Generator
from xformer.base.typing import Array
from xformer.layers import (
    BlockConfig,
    EmbedConfig,
    ExpertsConfig,
    NormConfig,
    RelativeConfig,
    RopeConfig,
)
from xformer.models import (
    GPT,
    Classifier,
    Discriminator,
    EncoderDecoder,
    LanguageModel,
    LMHead,
    MaskedLMHead,
    Pooler,
    SegmentMemory,
    TokenClassifier,
    Transformer,
)
from xformer.proofs.catalogue.blocks import DELTA, LATENT, LLAMA, block_config
from xformer.proofs.catalogue.case import (
    DEAD_BATCH,
    KEY,
    Case,
    Function,
    Options,
    drawn,
    mask,
    random,
)


def cases() -> Iterator[Case]:
    """All cases of this module: every model with every option."""
    for subject in (_gpt, _segments, _transformer, _language_model, _encoder_decoder):
        yield from subject()


def _gpt() -> Iterator[Case]:
    def case(note: str, loss: Options | None = None, **config: Any) -> Case:
        sizes: Options = {"vocab_size": 13, "n_layers": 1, "d_model": 6, "n_heads": 2, "max_len": 7}
        model = GPT(**sizes | {"d_ff": 11} | config)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            tokens, targets = rng.integers((5, 4), high=13), rng.integers((5, 4), high=13)
            fn = partial(model.loss, tokens=tokens, targets=targets, **loss or {})
            return fn, (random(rng, model.init()),)

        return Case("models", f"GPT: {note}", make)

    yield case("as it is")
    yield case("two layers, untied, post-norm", n_layers=2, tied=False, norm_placement="post")
    yield case("one key head, no biases", n_kv_heads=1, bias=False)
    yield case("silu, eps", activation="silu", eps=0.1)
    yield case("positions: none", positions="none")
    yield case("positions: sinusoidal", positions="sinusoidal")
    yield case("positions: learned, for q, k, v", position_mode="qkv", n_layers=2)
    yield case("positions: learned, concatenated", position_mode="concat")
    few: Options = {"position_mode": "concat", "d_positions": 3}
    yield case("positions: sinusoidal, concatenated", positions="sinusoidal", **few)
    yield case("positions: XL", positions="xl", memory_len=3, n_layers=2)
    options: Options = {"label_smoothing": 0.1, "z_loss": 0.3, "ignore_index": 2}
    yield case("dropout and loss options", {"dropout_key": KEY, **options}, dropout=0.3)
    yield case("no norms", norm_placement="none", n_layers=2)
    yield case("ReZero", norm_placement="none", residual_scale=0.0, n_layers=2)
    again: Options = {"activation_checkpointing": True, "n_layers": 2}
    yield case("checkpointing, dropout", {"dropout_key": KEY}, dropout=0.3, **again)
    yield case("reversible", {"dropout_key": KEY}, dropout=0.3, reversible=True, n_layers=2)


def _segments() -> Iterator[Case]:
    """A segment after a memory, which gets no gradient."""

    def case(note: str, length: int, loss: Options | None = None, **config: Any) -> Case:
        sizes: Options = {"vocab_size": 13, "n_layers": 2, "d_model": 6, "n_heads": 2, "max_len": 4}
        model = GPT(**sizes | {"d_ff": 11, "positions": "xl", "memory_len": 3} | config)

        def make(rng: Generator, _: Backend) -> tuple[Function, tuple[Any, ...]]:
            tokens, targets = rng.integers((5, 4), high=13), rng.integers((5, 4), high=13)
            inputs = rng.normal((5, 3, 6)), rng.normal((5, 3, 6))
            memory: Options = {"inputs": inputs, "length": length}
            data: Options = {"tokens": tokens, "targets": targets, **memory}
            fn = partial(_segment_loss, model, **data, **loss or {})
            return fn, (random(rng, model.init()),)

        return Case("models", f"LanguageModel: segment, {note}", make)

    yield case("full memory", 3)
    yield case("memory of two tokens, post-norm", 2, norm_placement="post")
    yield case("empty memory", 0)
    again: Options = {"activation_checkpointing": True, "dropout": 0.3}
    yield case("checkpointing, dropout", 3, {"dropout_key": KEY}, **again)


def _segment_loss(
    model: LanguageModel, params: Any, *, inputs: Any, length: int, **data: Any
) -> tuple[Array, Any]:
    """The loss of a segment after the last `length` of `inputs`, without the next memory."""
    loss, cache, _ = model.segment_loss(params, memory=SegmentMemory(inputs, length), **data)
    return loss, cache


def _transformer() -> Iterator[Case]:
    def case(note: str, loss: Options | None = None, **config: Any) -> Case:
        sizes: Options = {"src_vocab_size": 17, "tgt_vocab_size": 13, "d_model": 6, "n_heads": 2}
        depth: Options = {"n_encoder_layers": 1, "n_decoder_layers": 1}
        pad_id: int = config.get("pad_id", 0)
        model = Transformer(**sizes | depth | {"max_len": 7, "d_ff": 11} | config)

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            src = _padded(rng, backend, 7, 17, pad_id)
            tgt = _padded(rng, backend, 5, 13, pad_id)
            data: Options = {"src": src, "tgt": tgt[:, :-1], "targets": tgt[:, 1:]}
            fn = partial(model.loss, **data, **loss or {})
            return fn, (random(rng, model.init()),)

        return Case("models", f"Transformer: {note}", make)

    yield case("as it is")
    yield case("pre-norm, tied", norm_placement="pre", tied=True)
    yield case("no norms", norm_placement="none")
    yield case("ReZero, shared memory", norm_placement="none", residual_scale=0, shared_memory=True)
    yield case("two layers each", n_encoder_layers=2, n_decoder_layers=2)
    yield case("two layers each, shared memory", shared_memory=True, n_decoder_layers=2)
    yield case("free widths, no biases", d_head=5, d_value=2, src_width=5, tgt_width=9, bias=False)
    yield case("one key head, silu, eps", n_kv_heads=1, activation="silu", eps=0.1)
    yield case("pad_id 4", pad_id=4)
    concat: Options = {"position_mode": "concat", "src_width": 5, "tgt_width": 3, "d_positions": 3}
    yield case("positions: concatenated", **concat)
    yield case("positions: learned", positions="learned")
    qkv: Options = {"positions": "learned", "position_mode": "qkv"}
    yield case("positions: learned, for q, k, v", **qkv)
    yield case("positions: learned, for q, k, v, shared memory", shared_memory=True, **qkv)
    yield case("positions: sinusoidal, for q, k, v", position_mode="qkv")
    options: Options = {"label_smoothing": 0.1, "z_loss": 0.3}
    yield case("dropout and loss options", {"dropout_key": KEY, **options}, dropout=0.3)
    again: Options = {
        "activation_checkpointing": True,
        "shared_memory": True,
        "n_decoder_layers": 2,
    }
    yield case("checkpointing, dropout", {"dropout_key": KEY}, dropout=0.3, **again)


PADDED: Options = {"mask": mask((5, 4), DEAD_BATCH)}
ROPE = RopeConfig(width=4)


def _blocks(n: int = 1, **options: Any) -> tuple[BlockConfig, ...]:
    return (block_config(options),) * n


def _embed_config(width: int = 6, **options: Any) -> EmbedConfig:
    return EmbedConfig(**{"vocab_size": 13, "width": width, "d_model": 6, "max_len": 7} | options)


def _language_model() -> Iterator[Case]:
    def case(
        note: str,
        blocks: tuple[BlockConfig, ...],
        method: str = "loss",
        keywords: Options | None = None,
        *,
        embed: EmbedConfig | None = None,
        labels: int = 13,
        **options: Any,
    ) -> Case:
        embed = _embed_config(positions="none", max_len=None) if embed is None else embed
        model = LanguageModel(embed, blocks, **options)

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            inputs = {"tokens": rng.integers((5, 4), high=13)}
            if method == "loss":
                one_each = isinstance(model.head, Classifier)
                inputs["targets"] = rng.integers((5,) if one_each else (5, 4), high=labels)
            function = getattr(model, method)
            fn = partial(function, **inputs, **drawn(rng, backend, keywords or {}))
            return fn, (random(rng, model.init()),)

        return Case("models", f"LanguageModel: {note}", make)

    llama = _blocks(**LLAMA)
    yield case("rotary", llama, rotary=ROPE, head=LMHead(tied=False))
    latent = _blocks(**LLAMA | {"attn": LATENT})
    yield case("latent attention", (*latent, *llama), keywords=PADDED, rotary=ROPE)
    delta = _blocks(**LLAMA | {"attn": DELTA})
    with_rope: Options = {"rotary": (None, *(ROPE,) * len(llama))}
    yield case("gated DeltaNet", (delta[0], *llama), keywords=PADDED, **with_rope)
    yield case("rotary, padding", llama, keywords=PADDED, rotary=ROPE)
    other = RopeConfig(2, 50.0, scaling="linear", factor=2.0)
    by_layer: Options = {"rotary": (ROPE, other, None, ROPE), "keywords": PADDED}
    yield case("rotary by layer", llama * 4, **by_layer)
    again: Options = {"activation_checkpointing": True}
    yield case("rotary by layer, checkpointing", llama * 4, **by_layer, **again)
    softcap = LMHead(softcap=2.0, scale=0.5)
    yield case("softcap", _blocks(norm_placement="sandwich", **LLAMA), rotary=ROPE, head=softcap)
    positions: Options = {"positions": lambda rng, _: rng.integers((4,), high=7)}
    yield case("given positions", llama, keywords=positions, rotary=ROPE)
    mixture = ExpertsConfig(n_experts=3, top_k=2, d_ff=11)
    experts = _blocks(2, **LLAMA | {"ffn": mixture})
    losses: Options = {"load_balancing_weight": 0.3, "router_z_weight": 0.1}
    yield case("experts", (*experts, *llama), keywords=PADDED, rotary=ROPE, **losses)
    again |= {"rotary": ROPE, **losses}
    yield case("experts, checkpointing", (*experts, *llama), keywords=PADDED, **again)
    yield case("alibi", _blocks(), alibi=True, head=LMHead(tied=False, bias=True))
    yield case(
        "sequence classifier", llama, keywords=PADDED, head=Classifier(3, "last", None), labels=3
    )
    yield from _encoders(case)


def _encoders(case: Any) -> Iterator[Case]:
    blocks = _blocks(norm_placement="post")
    embed: Options = {"positions": "learned", "norm": NormConfig(), "n_types": 3}
    bert: Options = {"embed": _embed_config(**embed), "causal": False}
    types: Options = {"types": lambda rng, _: rng.integers((5, 4), high=3)}
    yield case("masked LM", blocks, keywords=PADDED | types, head=MaskedLMHead(), **bert)
    untied = MaskedLMHead("relu", eps=0.1, tied=False)
    narrow = bert | {"embed": _embed_config(5, project_bias=True, **embed)}
    yield case("masked LM, groups", blocks * 2, n_shared_layer_groups=1, head=untied, **narrow)
    dropped: Options = {"dropout_key": KEY}
    head = Classifier(3, dense_dropout=0.3, dropout=0.2)
    yield case("classifier", blocks, keywords=dropped, labels=3, head=head, **bert)
    no_bias = Classifier(3, dense="relu", bias=False)
    yield case("classifier, no bias", blocks, keywords=PADDED, labels=3, head=no_bias, **bert)
    tags = TokenClassifier(3, dropout=0.3)
    ignored: Options = {"ignore_index": 2}
    yield case("token classifier", blocks, keywords=dropped | ignored, labels=3, head=tags, **bert)
    plain = TokenClassifier(3, bias=False)
    yield case("token classifier, no bias", blocks, "forward", PADDED, head=plain, **bert)
    bare: Options = {"dense_bias": False, "norm": NormConfig(bias=False)}
    named = TokenClassifier(3, dropout=0.3, dense="gelu", **bare)
    yield case("token classifier, norm", blocks, keywords=dropped, labels=3, head=named, **bert)
    modern = Classifier(3, "mean", dense="gelu", dropout=0.2, **bare)
    yield case(
        "classifier, mean, norm", blocks, keywords=PADDED | dropped, labels=3, head=modern, **bert
    )
    yield case(
        "masked LM, no biases",
        blocks,
        head=MaskedLMHead(dense_bias=False, norm_bias=False, bias=False),
        **bert,
    )
    replaced = Discriminator("relu")
    yield case("discriminator", blocks, keywords=ignored, labels=3, head=replaced, **bert)
    yield case("discriminator, logits", blocks, "forward", PADDED, head=Discriminator(), **bert)
    hidden: Options = {"head": None, "out_dropout": 0.3, "final_norm": True}
    yield case("hidden states", blocks, "forward", dropped, **hidden, **bert)
    yield case("hidden states, pooler", blocks, "forward", head=Pooler(), **bert)
    yield case("pooler", blocks, "pooled", {"pooling": "pooler"}, head=Pooler(), **bert)
    sentence: Options = {"normalize": True, "mask": mask((5, 4))}
    yield case("mean, normalised", blocks, "pooled", sentence, head=Pooler(), **bert)
    buckets: Options = {"relative_bias": RelativeConfig(2, n_buckets=8, max_distance=6)}
    yield case("relative bias", _blocks(), "forward", head=None, causal=False, **buckets)


def _encoder_decoder() -> Iterator[Case]:
    def case(note: str, inputs: Options | None = None, **options: Any) -> Case:
        model = EncoderDecoder(**{"encoder": _blocks(), "decoder": _blocks()} | options)
        vectors = model.src_embed is None

        def make(rng: Generator, backend: Backend) -> tuple[Function, tuple[Any, ...]]:
            keywords = drawn(rng, backend, inputs or {})
            if vectors:
                fn = partial(_of_vectors, model, **keywords)
                x = (rng.normal((5, 7, 6)), rng.normal((5, 4, 6)))
                return fn, (random(rng, model.init()), *x)
            src = rng.integers((5, 7), high=13)
            tgt, targets = rng.integers((5, 4), high=13), rng.integers((5, 4), high=13)
            fn = partial(model.loss, src=src, tgt=tgt, targets=targets, **keywords)
            return fn, (random(rng, model.init()),)

        return Case("models", f"EncoderDecoder: {note}", make)

    t5: Options = {
        "attn": {"bias": False, "scale": 1.0},
        "ffn": {"bias": False, "activation": "relu"},
        "norm": {"kind": "rms"},
    }
    tables: Options = {
        "encoder_relative_bias": RelativeConfig(2, n_buckets=8, max_distance=6),
        "decoder_relative_bias": RelativeConfig(
            2, n_buckets=8, max_distance=6, bidirectional=False
        ),
    }
    shared: Options = {"src_embed": _embed_config(positions="none"), "shared_embed": True}
    t5_like: Options = {"encoder": _blocks(**t5), "decoder": _blocks(**t5), **tables, **shared}
    yield case("T5", head=LMHead(scale=0.4), **t5_like)
    masks: Options = {"src_mask": mask((5, 7), DEAD_BATCH), "tgt_mask": mask((5, 4))}
    untied: Options = {"head": LMHead(tied=False), "out_dropout": 0.3}
    yield case("T5, untied, padding, dropout", {"dropout_key": KEY, **masks}, **untied, **t5_like)
    post: Options = {
        "encoder": _blocks(norm_placement="post"),
        "decoder": _blocks(norm_placement="post"),
    }
    yield case("vectors", masks, encoder_norm=True, decoder_norm=True, **post)
    separate: Options = {
        "src_embed": _embed_config(),
        "tgt_embed": _embed_config(5),
        "head": LMHead(False),
    }
    yield case("two embeddings, shared memory", shared_memory=True, **separate)


class _All(NamedTuple):
    """A cache that also returns the gradients of the input vectors."""

    cache: Any

    def backward(self, dy: Array) -> tuple[Any, ...]:
        return self.cache.backward_all(dy)


def _of_vectors(
    model: EncoderDecoder, params: Any, src: Array, tgt: Array, **options: Any
) -> tuple[Array, Any]:
    y, cache = model.forward(params, src, tgt, **options)
    return y, _All(cache)


def _padded(rng: Generator, backend: Backend, length: int, size: int, pad_id: int) -> Array:
    """(5, length) ids: three full rows, one that ends in padding, and one with a single token."""
    host = backend.to_numpy(rng.integers((5, length), low=1, high=size)).copy()
    host[host == pad_id] = size - 1
    host[1, length - 2 :] = pad_id
    host[2, 1:] = pad_id
    return backend.asarray(host)
