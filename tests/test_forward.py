"""Forward passes by programs: vectors, classes, validation, with the numbers of call by call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from sentences import BERT, LLAMA, TEXTS, write_model
from test_finetune import MODELS, examples, made

from xformer import backends, finetune, kernels, pretrained, tree
from xformer.backends.numba.program import run as programs
from xformer.compiling import Forward, bucket, records
from xformer.finetune import TrainConfig
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import batches, classify, embed
from xformer.training import evaluate

CLASSIFIER = BERT | {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "no", "1": "yes"},
}
NUMPY, NUMBA = backends.get("numpy"), backends.get("numba")
RECORDS: dict[str, list[dict[str, Any]]] = {
    "causal": [{"text": "abcdefg"}],
    "prefix": [{"prompt": "1+2=", "completion": "3"}],
    "masked": [{"text": "hello there"}],
    "classify": [{"text": "ab", "label": 1}, {"text": "cd", "label": 0}],
    "seq2seq": [{"source": "abc", "target": "cba"}],
    "contrastive": [{"anchor": "ab", "positive": "ba"}, {"anchor": "c", "positive": "cc"}],
    "classify-pairs": [{"text": "ab", "text_pair": "c", "label": 1}],
    "tag": [{"words": ["ab", "c"], "tags": [1, 0]}],
    "rank": [{"query": "ab", "document": "c", "score": 0.5}],
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Programs that are recorded meanwhile."""
    found: list[Any] = []
    init = programs.Recorded.__init__

    def noted(self: Any, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        found.append(self)

    monkeypatch.setattr(programs.Recorded, "__init__", noted)
    return found


def opened(folder: Path, config: dict[str, Any], dtype: str = "float32") -> tuple[Any, Any, Any]:
    path = write_model(folder, config, "float32")
    return (*pretrained.load(path, dtype=dtype), tokenizer(path))


@pytest.mark.parametrize(("config", "pooling"), [(BERT, "mean"), (BERT, "pooler"), (LLAMA, "last")])
def test_vectors(config: dict[str, Any], pooling: str, tmp_path: Path, recorded: list[Any]) -> None:
    """Texts one by one, and in batches; what was given before stays as it was."""
    own = opened(tmp_path, config)
    wanted = embed(*own, TEXTS, pooling=pooling)
    assert not recorded
    with kernels("numba"):
        for _ in range(2):
            single = [embed(*own, [text], pooling=pooling) for text in TEXTS]
            np.testing.assert_allclose(np.concatenate(single), wanted, atol=1e-5)
            np.testing.assert_allclose(embed(*own, TEXTS, pooling=pooling), wanted, atol=1e-5)
    # one text of up to 16 tokens, one of more, and five of them
    assert len(recorded) == 3
    for program in recorded:  # what has no kernel is of tokens, not of their vectors
        slow = [one for one in program.code if one.native is None and "matmul" not in one.name]
        assert all(x.size <= 5 * 24 * 3 for one in slow for x in one.outs)


def test_classes(tmp_path: Path, recorded: list[Any]) -> None:
    own = opened(tmp_path, CLASSIFIER)
    wanted = classify(*own, TEXTS)
    with kernels("numba"):
        for _ in range(2):
            np.testing.assert_allclose(classify(*own, TEXTS), wanted, atol=1e-5)
    assert len(recorded) == 1


def test_what_has_no_kernels_is_not_recorded(tmp_path: Path, recorded: list[Any]) -> None:
    own = opened(tmp_path, BERT, "float64")
    wanted = embed(*own, TEXTS)
    with kernels("numba"):
        for _ in range(2):
            np.testing.assert_allclose(embed(*own, TEXTS), wanted, atol=1e-12)
        assert not recorded and not records(own[1])


def test_lengths_come_in_few_buckets() -> None:
    lengths = np.arange(1, 2049)
    padded = np.asarray([bucket(int(n)) for n in lengths])
    assert (padded >= lengths).all() and (padded[64:] <= lengths[64:] * 1.25).all()
    assert [bucket(n) for n in (1, 16, 17, 128, 129, 200, 257)] == [16, 16, 32, 128, 160, 224, 320]
    assert len(set(padded[:512])) <= 16


def test_batches_follow_the_padded_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "NUMPY_TOKENS", 64)
    found = list(batches._batches([16, 32, 16, 32, 32], 9, NUMPY, in_order=False))
    assert found == [[1, 3], [4, 0], [2]]


def test_results_stay(recorded: list[Any]) -> None:
    forward, w = Forward(lambda w, x: x * w), np.ones((), np.float32)
    with kernels("numba"):
        kept = [forward(w, np.full(1, i, np.float32)) for i in range(4)]
    assert [float(x[0]) for x in kept] == [0, 1, 2, 3] and len(recorded) == 1


@pytest.mark.parametrize("name", MODELS)
def test_validation(name: str, tmp_path: Path, recorded: list[Any]) -> None:
    """Of a task: the same mean, by programs that are kept from call to call."""
    task, params = made(name, tmp_path)
    params = tree.map(lambda p: p.astype(np.float32), params)
    found = examples(task, *RECORDS[name] * 4)
    size = 2 * len(RECORDS[name])
    wanted = finetune.evaluate(task, params, found, NUMPY, batch_size=size)
    for _ in range(3):
        got = finetune.evaluate(task, params, found, NUMBA, batch_size=size)
        assert got == pytest.approx(wanted, rel=1e-5)
    assert len(recorded) == 1
    # another loss, of the same arrays
    loss = lambda params, batch, place: (task.loss(params, batch, place)[0], None)  # noqa: E731
    (one,) = [task.batch(found[:size], np.random.default_rng(0))]
    whole = evaluate(task, params, [one, one], NUMBA)
    assert evaluate(loss, params, [one], NUMBA) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["prefix", "classify", "contrastive"])
def test_fine_tuning(name: str, adapted: bool, tmp_path: Path, recorded: list[Any]) -> None:
    """Steps are programs where states are donated."""
    task, params = made(name, tmp_path)
    params = tree.map(lambda p: p.astype(np.float32), params)
    if adapted:
        params = finetune.lora.attach(params, rank=2, alpha=4)
    found = examples(task, *RECORDS[name] * 4)
    config = TrainConfig(steps=4, batch_size=2 * len(RECORDS[name]), lr=1e-3, warmup=1)
    losses = []
    for name in ("numpy", "numba"):
        own, place = tree.map(np.array, params), backends.get(name)
        steps = finetune.train(task, own, found, config, place, found, donate=True)
        losses.append([(step.loss, step.validation or 0) for step in steps])
        assert bool(recorded) == (name == "numba")
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
