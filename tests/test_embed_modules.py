"""Poolings, Dense modules, prompts and short vectors, beside sentence-transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, SPECIAL, TEXTS, tokenizers, write, write_model

from xformer import finetune, layers, pretrained, tree
from xformer.cli import main
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import Dense, Settings, colbert, embed, prompts, settings

TOLERANCE = 1e-12  # of float64, in sums of another order
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
OWN = ("first", "max", "mean", "sum", "mean_sqrt_len", "weighted_mean", "last")
PROMPTS = {"query": "the very good ", "passage": "it was ", "none": ""}


def chain(*names: str) -> list[dict[str, Any]]:
    """modules.json."""
    return [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{name}" if i else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(names)
    ]


def write_dense(folder: Path, shape: tuple[int, int], activation: str, **config: Any) -> None:
    """A Dense module with random numbers that float32 holds."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(shape[0])
    weights = {"linear.weight": rng.normal(0, 0.3, shape[::-1]).astype(np.float32)}
    if config.get("bias", True):
        weights["linear.bias"] = rng.normal(0, 0.3, shape[1]).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    own = {"in_features": shape[0], "out_features": shape[1], "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(own | config))


def write_special_tokenizer(folder: Path) -> None:
    """The tokenizer of `sentences`, whose special tokens are also called so in its files."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(SPECIAL)
    inner.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad", "unk", "cls", "sep"), SPECIAL, strict=True))
    config = {f"{name}_token": token for name, token in names.items()}
    write(folder, tokenizer_config=config | {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_sentences(folder: Path, pooling: dict[str, Any], *modules: str) -> Path:
    """A model with its files of sentence-transformers."""
    folder.mkdir(exist_ok=True)
    write_model(folder, BERT)
    write_special_tokenizer(folder)
    write(
        folder,
        modules=chain("Transformer", "Pooling", *modules),
        config_sentence_transformers={"prompts": PROMPTS, "default_prompt_name": "passage"},
        sentence_bert_config={"max_seq_length": 20},
        **{"1_Pooling__config": {"embedding_dimension": 12} | pooling},
    )
    return folder


def judged(folder: Path, texts: list[str], **options: Any) -> np.ndarray:
    """The vectors of sentence-transformers, in float64."""
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    import torch

    options = {"device": "cpu", "model_kwargs": {"dtype": torch.float64}} | options
    encode = {k: options.pop(k) for k in ("prompt", "prompt_name") if k in options}
    is_normal = options.pop("normalize", False)
    model = judge.SentenceTransformer(str(folder), **options).double()
    vectors: np.ndarray = model.encode(texts, normalize_embeddings=is_normal, **encode)
    return vectors


def ours(folder: Path, prompt_name: str | None = None, **options: Any) -> np.ndarray:
    own = settings(folder, prompt_name=prompt_name)._asdict()
    model, params = pretrained.load(folder, dtype="float64")
    return embed(model, params, tokenizer(folder), TEXTS, **own | options)


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), ("max", "cls", "weightedmean")])
def test_poolings(tmp_path: Path, modes: tuple[str, ...], include_prompt: bool) -> None:
    mode = modes[0] if len(modes) == 1 else list(modes)
    pooling = {"pooling_mode": mode, "include_prompt": include_prompt}
    folder = write_sentences(tmp_path, pooling)
    for name in (None, *PROMPTS):
        got = ours(folder, name)
        assert got.shape == (5, 12 * len(modes)) and got.dtype == np.float64
        want = judged(folder, TEXTS, prompt_name=name)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_flags_of_several_poolings(tmp_path: Path) -> None:
    flags = ("mean_tokens", "cls_token", "lasttoken")  # in another order than they are joined
    pooling = {f"pooling_mode_{name}": True for name in flags}
    folder = write_sentences(tmp_path, pooling, "Normalize")
    assert settings(folder).pooling == ("first", "mean", "last")
    np.testing.assert_allclose(ours(folder), judged(folder, TEXTS), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "activation", ["Tanh", "linear.Identity", "ReLU", "GELU", "SiLU", "activation.Sigmoid"]
)
def test_dense_modules(tmp_path: Path, activation: str) -> None:
    """Two, as EmbeddingGemma has them: the vectors are cut before they are normalised."""
    folder = write_sentences(tmp_path, {"pooling_mode": "mean"}, "Dense", "Dense", "Normalize")
    kind = f"torch.nn.{'modules.' * ('.' in activation)}{activation}"
    write_dense(folder / "2_Dense", (12, 17), kind)
    write_dense(folder / "3_Dense", (17, 7), "torch.nn.modules.linear.Identity", bias=False)
    np.testing.assert_allclose(ours(folder), judged(folder, TEXTS), rtol=0, atol=TOLERANCE)
    got = ours(folder, truncate_dim=5)
    want = judged(folder, TEXTS, truncate_dim=5, normalize=True)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, rtol=0, atol=TOLERANCE)
    write(folder, modules=chain("Transformer", "Pooling", "Dense", "Dense"))
    want = judged(folder, TEXTS, truncate_dim=5)
    np.testing.assert_allclose(ours(folder, truncate_dim=5), want, rtol=0, atol=TOLERANCE)


GEMMA = BERT | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3TextModel"],
    "head_dim": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "sliding_window": 4,  # two tokens on either side
    "sliding_window_pattern": 2,
    "use_bidirectional_attention": True,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("side", ["left", "right"])
def test_embeddinggemma(tmp_path: Path, side: str) -> None:
    """Its folder: a bidirectional Gemma 3, two Dense modules, prompts; padding on either side.

    transformers computes norms and angles in float32.
    """
    write_model(tmp_path, GEMMA)
    write_special_tokenizer(tmp_path)
    inner = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write(
        tmp_path,
        tokenizer_config=inner | {"padding_side": side},
        modules=chain("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
        config_sentence_transformers={"prompts": PROMPTS, "default_prompt_name": None},
        sentence_bert_config={"max_seq_length": 20, "do_lower_case": False},
        **{"1_Pooling__config": {"word_embedding_dimension": 12, "pooling_mode_mean_tokens": True}},
    )
    identity = "torch.nn.modules.linear.Identity"
    write_dense(tmp_path / "2_Dense", (12, 17), identity, bias=False)
    write_dense(tmp_path / "3_Dense", (17, 12), identity, bias=False)
    for name in (None, "query", "passage"):
        want = judged(tmp_path, TEXTS, **({} if name is None else {"prompt_name": name}))
        np.testing.assert_allclose(ours(tmp_path, name), want, rtol=0, atol=1e-5)
    short = ours(tmp_path, "query", truncate_dim=5)
    want = judged(tmp_path, TEXTS, prompt_name="query", truncate_dim=5, normalize=True)
    np.testing.assert_allclose(short, want, rtol=0, atol=1e-5)


def test_a_prompt_given_as_a_text(tmp_path: Path) -> None:
    folder = write_sentences(tmp_path, {"pooling_mode": "mean", "include_prompt": False})
    want = judged(folder, TEXTS, prompt="then why ")
    np.testing.assert_allclose(ours(folder, prompt="then why "), want, rtol=0, atol=TOLERANCE)


def test_names_of_prompts(tmp_path: Path) -> None:
    folder = write_sentences(tmp_path, {"pooling_mode": "mean"})
    assert prompts(folder) == PROMPTS
    assert settings(folder).prompt == PROMPTS["passage"]
    assert settings(folder, prompt_name="none").prompt == ""
    with pytest.raises(ValueError, match="prompt_name must be one of query, passage, none, got 'q"):
        settings(folder, prompt_name="quer")
    (folder / "config_sentence_transformers.json").unlink()
    assert prompts(folder) == {} and settings(folder).prompt == ""
    with pytest.raises(ValueError, match="has no prompts, got prompt_name 'query'"):
        settings(folder, prompt_name="query")


def test_only_a_prompt_is_no_text(tmp_path: Path) -> None:
    write_model(tmp_path, BERT, special=False)
    own = (*pretrained.load(tmp_path), tokenizer(tmp_path))
    with pytest.raises(ValueError, match="embed: text 2 has no tokens after the prompt, got ' '"):
        embed(*own, ["a", " "], prompt="why ", include_prompt=False)


def test_a_prompt_leaves_room_for_a_text(tmp_path: Path) -> None:
    """Otherwise all texts have the same vector, of the prompt."""
    folder = write_sentences(tmp_path, {"pooling_mode": "mean"})
    own = (*pretrained.load(folder), tokenizer(folder))
    message = "the prompt leaves no room for a text: it has 5 tokens, special tokens included, and"
    for most in (4, 5):
        with pytest.raises(ValueError, match=rf"embed: {message} a text at most {most}, got 'why"):
            embed(*own, TEXTS, prompt="why not so ", max_len=most)
    with pytest.warns(UserWarning, match="embed: cut to 6 tokens: text 1 and 3 more of 5"):
        vectors = embed(*own, TEXTS, prompt="why not so ", max_len=6)
    assert len({tuple(row) for row in vectors.round(6).tolist()}) == 4  # of 4 first words
    with pytest.raises(ValueError, match=rf"contrastive: {message} a text at most 5"):
        finetune.task("contrastive", own[0], own[2], max_len=5, prompt="why not so ")
    with pytest.raises(ValueError, match="colbert: the prompt leaves no room for a text"):
        colbert(*own, TEXTS, marker="so-and-so why ", max_len=5)
    with pytest.raises(ValueError, match="max_len must exceed the 2 special tokens, got 2"):
        colbert(*own, TEXTS, marker="why", max_len=3)


def test_pooling_by_formulas() -> None:
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(3, 7, 5)), np.ones((3, 7), bool)
    mask[0, 4:] = mask[1, :3] = False  # padding on either side
    for skip in (0, 2):
        for name in OWN:
            got, _ = layers.pool(x, pooling=name, mask=mask, skip=skip)
            for row, keep, y in zip(x, mask, got, strict=True):
                own = row[keep][skip:]
                t = np.arange(skip + 1, skip + len(own) + 1)[:, None]
                want = {
                    "first": own[0],
                    "max": own.max(0),
                    "mean": own.mean(0),
                    "sum": own.sum(0),
                    "mean_sqrt_len": own.sum(0) / len(own) ** 0.5,
                    "weighted_mean": (t * own).sum(0) / t.sum(),
                    "last": own[-1],
                }[name]
                np.testing.assert_allclose(y, want, rtol=0, atol=1e-14)
    nothing = layers.pool(x, pooling=OWN, mask=mask, skip=7)[0]
    assert nothing.shape == (3, 35) and not nothing[:2].any()


def test_the_maximum_goes_to_the_first_of_equal_tokens() -> None:
    x = np.asarray([[[1.0, 5.0], [3.0, 5.0], [3.0, 4.0]]])
    y, cache = layers.pool(x, pooling="max")
    assert y.tolist() == [[3.0, 5.0]]
    dx = cache.backward(np.asarray([[10.0, 20.0]]))
    assert dx.tolist() == [[[0.0, 20.0], [10.0, 0.0], [0.0, 0.0]]]


def test_wrong_poolings() -> None:
    x = np.ones((2, 3, 4))
    for pooling, message in [
        ("meen", "pool: pooling must be one of mean, .*did you mean mean"),
        (("mean", "pooler"), "pool: pooling must be one of .*, got 'pooler'"),
        ((), r"pool: pooling must be a name or a tuple of names, got \(\)"),
        (3, "pool: pooling must be a name or a tuple of names, got 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            layers.pool(x, pooling=pooling)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pool: skip must be an int of at least 0, got -1"):
        layers.pool(x, skip=-1)
    _, cache = layers.pool(x, pooling=("mean", "max"))
    with pytest.raises(ValueError, match=r"pool: dy must be \(B, 2 D\), got shape \(2, 7\)"):
        cache.backward(np.ones((2, 7)))


DENSE = {"in_features": 12, "out_features": 7, "activation_function": "torch.nn.Tanh"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation_function": "torch.nn.ELU"}, "activation_function must be of torch.nn, Iden"),
        ({"activation_function": "os.Tanh"}, "activation_function must be of torch.nn, .* got 'os"),
        ({"use_residual": True}, "use_residual must be False, got True"),
        ({"in_features": 0}, "in_features must be an integer from 1"),
        ({"in_features": 11}, r"linear.weight must be of shape \(7, 11\), got \(7, 12\)"),
        ({"bias": False}, "not supported: 'linear.bias'"),
        ({"module_input_name": "token_embeddings"}, "module_input_name must be 'sentence_embed"),
        ({"dropout": 0.1}, "not supported: 'dropout'"),
    ],
)
def test_dense_modules_that_are_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    folder = write_sentences(tmp_path, {"pooling_mode": "mean"}, "Dense")
    write_dense(folder / "2_Dense", (12, 7), "torch.nn.Tanh")
    write(folder, **{"2_Dense__config": DENSE | config})
    with pytest.raises(PretrainedError, match=message):
        settings(folder)


def test_weights_of_a_dense_module_that_are_missing(tmp_path: Path) -> None:
    folder = write_sentences(tmp_path, {"pooling_mode": "mean"}, "Dense")
    write_dense(folder / "2_Dense", (12, 7), "torch.nn.Tanh", bias=False)
    write(folder, **{"2_Dense__config": DENSE})
    with pytest.raises(PretrainedError, match=r"2_Dense/model\.safetensors: has no 'linear.bias'"):
        settings(folder)
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(PretrainedError, match=r"pytorch_model\.bin: is a pickle"):
        settings(folder)


def test_modules_that_do_not_fit_together(tmp_path: Path) -> None:
    write_model(tmp_path, BERT)
    own = (*pretrained.load(tmp_path), tokenizer(tmp_path))
    module = Dense(layers.LinearParams(np.ones((12, 7), np.float32), None))
    with pytest.raises(ValueError, match=r"embed: modules\[1\] must map 7 numbers, its w has shap"):
        embed(*own, TEXTS, modules=(module, module))
    with pytest.raises(ValueError, match=r"embed: modules\[0\] must map 24 numbers"):
        embed(*own, TEXTS, pooling=("max", "mean"), modules=(module,))
    for dim, message in ((8, "must be at most 7, got 8"), (0, "must be an int of at least 1")):
        with pytest.raises(ValueError, match=f"embed: truncate_dim {message}"):
            embed(*own, TEXTS, modules=(module,), truncate_dim=dim)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_sentences(tmp_path, {"pooling_mode": "max", "include_prompt": False})
    own = ["embed", "--model", str(folder), "--dtype", "float64", "--json"]
    for options, name, more in (
        ([], None, {}),
        (["--prompt-name", "query"], "query", {}),
        (["--prompt", "why "], None, {"prompt": "why "}),
        (["--truncate-dim", "5", "--normalize"], None, {"truncate_dim": 5, "normalize": True}),
    ):
        assert main([*own, *options, *TEXTS]) == 0
        rows = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
        np.testing.assert_array_equal(rows, ours(folder, name, **more))
    assert main([*own, "--prompt-name", "document", "a"]) == 1
    message = "settings: prompt_name must be one of query, passage, none, got 'document'"
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*own, "--prompt-name", "query", "--prompt", "why", "a"])


@pytest.mark.parametrize("pooling", ["max", "weighted_mean", ("max", "mean_sqrt_len")])
def test_poolings_are_trained(tmp_path: Path, pooling: Any) -> None:
    """The loss of pairs falls along its gradient, as far as the gradient says."""
    folder = write_sentences(tmp_path, {"pooling_mode": "mean"})
    model, params = pretrained.load(folder, dtype="float64")
    options = {"pooling": pooling, "prompt": "the very ", "include_prompt": False}
    task = finetune.task("contrastive", model, tokenizer(folder), **options)
    pairs = [{"anchor": a, "positive": b} for a, b in itertools.pairwise(TEXTS)]
    batch = task.batch([e for pair in pairs for e in task.examples(pair)], None)
    inputs = (batch.arrays, batch.masks)
    grads = task.of(params, inputs, None)[1].backward()
    rng = np.random.default_rng(0)
    along = tree.map(lambda a: rng.normal(size=a.shape), params)
    eps, pieces = 1e-5, tree.flatten(tree.map(lambda g, a: float((g * a).sum()), grads, along))
    losses = [
        task.of(tree.map(lambda p, a, s=s: p + s * eps * a, params, along), inputs, None)[0]
        for s in (1, -1)
    ]
    slope = float(losses[0] - losses[1]) / (2 * eps)
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(sum(pieces.values()), slope, rtol=1e-6)
    vectors = embed(model, params, tokenizer(folder), TEXTS, **options)
    scores = 20 * vectors[:4] @ vectors[1:].T
    want = np.mean(np.log(np.exp(scores).sum(1)) - np.diag(scores))
    np.testing.assert_allclose(float(task.of(params, inputs, None)[0]), want, rtol=1e-9)


def test_nothing_is_guessed_of_dense_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that do not apply them refuse the model."""
    folder = write_sentences(tmp_path / "model", {"pooling_mode": "mean"}, "Dense")
    write_dense(folder / "2_Dense", (12, 7), "torch.nn.Tanh")
    assert isinstance(settings(folder), Settings)
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"anchor": "a cat", "positive": "a dog"}\n' * 3)
    new = str(tmp_path / "new")
    assert main(["finetune", "--model", str(folder), "--data", str(data), "--out", new]) == 1
    assert "has Dense modules, which are not trained" in capsys.readouterr().err
    file = str(tmp_path / "a.onnx")
    for config, message in (
        (True, "has Dense modules"),
        (False, "has a prompt that is not pooled"),
    ):
        pooling = {"pooling_mode": "mean", "include_prompt": config}
        write(folder, **{"1_Pooling__config": pooling})
        if not config:
            write(folder, modules=chain("Transformer", "Pooling"))
        assert main(["export", "--model", str(folder), "--embeddings", "--out", file]) == 1
        assert message in capsys.readouterr().err
