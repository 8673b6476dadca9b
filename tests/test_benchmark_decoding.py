"""`python -m benchmarks.decoding` and `.starts`: beside Hugging Face's transformers, to the same
result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import decoding, harness, starts
from benchmarks.decoding import BY_NAME, Text
from benchmarks.harness import Disagreement

LLAMA = decoding.STORIES | {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 23}
GPT2: dict[str, Any] = {
    **decoding.GPT2,
    **{"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 23},
}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(harness, "SETTLE", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_all_write_the_same_text(
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = Text("gpt2", config, prompt=2, new=12, rounds=1)
    monkeypatch.setitem(BY_NAME, "gpt2", text)
    assert decoding.main(["--shape", "gpt2", "--out", str(tmp_path)]) == 0
    (out,) = tmp_path.glob("decoding-gpt2-*.json")
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == list(decoding.NAMES)
    assert found["different"] > 2
    peer, *_ = found["rows"]
    for row in found["rows"]:
        token = row["token"]
        assert 0 < token["min_ms"] <= token["median_ms"]
        assert token["ratio"] == pytest.approx(token["min_ms"] / peer["token"]["min_ms"])
    if os.path.exists("/proc/self/status"):
        ours = found["rows"][2]
        assert ours["name"] == "xformer numpy" and "torch" not in ours["threads"]
        assert ours["peak_bytes"] < 0.6 * peer["peak_bytes"]
    assert decoding.table(found) in capsys.readouterr().out


def test_another_text_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(decoding, "measure", lambda *_: decoding.check(texts))
    texts = {decoding.PEER: [1, 2, 3], "xformer numpy": [1, 2, 4]}
    assert decoding.main(["--shape", "gpt2", "--out", str(tmp_path)]) == 1
    assert "xformer numpy and transformers write different texts" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert decoding.check({decoding.PEER: [1, 2], "xformer numpy": [1, 2]}) == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_all_start_with_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BY_NAME, "gpt2", Text("gpt2", GPT2, prompt=2, new=2, rounds=1))
    assert starts.main(["--shape", "gpt2", "--rounds", "1", "--out", str(tmp_path)]) == 0
    (out,) = tmp_path.glob("start-gpt2-*.json")
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == list(starts.NAMES)
    assert 0 <= found["difference"] < starts.TOLERANCE
    peer = found["rows"][0]["start"]["min_ms"]
    for row in found["rows"]:
        assert row["start"]["ratio"] == pytest.approx(row["start"]["min_ms"] / peer)
        assert row["start"]["min_ms"] > 10
    assert starts.table(found) in capsys.readouterr().out


def test_other_logits_are_not_reported() -> None:
    right = np.asarray([1.0, -4.0])
    assert starts.check({starts.PEER: right, "xformer numpy": right}) == 0
    for wrong in (right + 1e-3, right * np.nan):
        with pytest.raises(Disagreement, match="xformer numpy differs from torch eager by"):
            starts.check({starts.PEER: right, "xformer numpy": wrong})
