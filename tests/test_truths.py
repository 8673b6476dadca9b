"""The scripts in truths/: published figures that come out again."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from truths import published

import xformer as xf
from xformer import training, tree
from xformer.ops import RandomKey
from xformer.plots import read_log

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.stem for path in (ROOT / "truths").glob("*.py") if path.stem != "needed")
sys.path.append(str(ROOT / "truths"))  # where `python truths/NAME.py` finds `needed`


def script(name: str) -> ModuleType:
    """A file of truths/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "truths" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = {
    "digits": [],
    "microgpt": ["names.txt"],
    "nanogpt": ["tinyshakespeare.txt"],
    "multi30k": [
        f"multi30k/{part}.{end}.gz"
        for part in ("train", "val", "test_2016_flickr")
        for end in ("de", "en")
    ],
}
WITHOUT_SKLEARN = """
import importlib.util, runpy, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "sklearn" else find_spec(name, *more)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_its_data_a_script_says_where_to_get_it(name: str, tmp_path: Path) -> None:
    """One message and status 1, no traceback; digits has its data from a package."""
    command = [sys.executable, str(ROOT / "truths" / f"{name}.py")]
    if not FILES[name]:
        command[1:1] = ["-c", WITHOUT_SKLEARN]
    env = os.environ | {"XFORMER_DATA": str(tmp_path), "PYTHONPATH": str(ROOT / "truths")}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    if not FILES[name]:
        assert done.stderr == f"{name}.py needs sklearn: pip install -e '.[truths]'\n"
        return
    lines = done.stderr.splitlines()
    assert lines[0] == f"{name}.py needs files that are not in {tmp_path}:"
    assert [line.strip() for line in lines[1:-2:3]] == FILES[name]
    assert all(re.fullmatch(r"    from https://\S+, (file|folder) \S+", x) for x in lines[2:-2:3])
    assert all(re.fullmatch(r"    SHA-256 [0-9a-f]{64}", line) for line in lines[3:-2:3])
    assert lines[-1] == f"  XFORMER_DATA=FOLDER python truths/{name}.py"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for names in FILES.values() for name in names])
def test_the_sha256_of_a_file_is_that_of_the_published_one(name: str) -> None:
    _, sha256 = script("needed").PUBLISHED[name]
    assert hashlib.sha256(published(name).read_bytes()).hexdigest() == sha256


@pytest.mark.slow
def test_microgpt_comes_out_again() -> None:
    """All 1,000 losses of Adam in float64, and the 20 names that are drawn after them."""
    names = published("names.txt").read_text(encoding="utf-8")
    trace = json.loads(published("microgpt_trace.json").read_text(encoding="utf-8"))
    microgpt = script("microgpt")
    losses, samples = microgpt.replay(names)
    assert len(losses) == 1000
    np.testing.assert_allclose(losses, trace["losses"], rtol=0, atol=1e-9)
    assert samples == trace["samples"] == microgpt.NAMES.split() and len(samples) == 20
    assert all(loss == trace["losses"][step - 1] for step, loss in microgpt.LOSSES.items())
    first = [3.365966947584851, 3.424272783871772, 3.177802125458052]  # as its author printed them
    np.testing.assert_allclose(losses[:3], first, rtol=0, atol=1e-9)


def test_microgpt_has_4192_parameters() -> None:
    microgpt = script("microgpt")
    model = microgpt.microgpt(27)
    params = microgpt.initial(model, microgpt.random.Random(42))
    trained = tree.flatten(tree.trained(params))
    assert sum(leaf.size for leaf in trained.values()) == 4192
    assert len(trained) == 9  # no weight of a norm is among them


def test_the_gradients_of_digits_are_right() -> None:
    """Its backward is written in the script, so that nobody else has checked it."""
    digits = script("digits")
    params = tree.map(lambda p: p.astype(np.float64), digits.initial(seed=1))
    rng = np.random.default_rng(0)
    patches, classes = rng.normal(size=(3, 4, 16)), np.array([1, 0, 7])
    key = RandomKey(0, step=1)

    def value(params: object) -> float:
        return float(digits.loss(params, patches, classes, key)[0])

    grads = digits.loss(params, patches, classes, key)[1]
    grads = grads._replace(loss=Float64(grads.loss)).backward()
    direction = tree.map(lambda p: rng.normal(size=p.shape), params)
    products = tree.map(lambda g, d: float(np.sum(g * d)), grads, direction)
    expected = sum(tree.flatten(products).values())
    h = 1e-6  # a wider step crosses kinks of ReLU
    ahead, behind = (
        value(tree.map(lambda p, d, s=s: p + s * h * d, params, direction)) for s in (1, -1)
    )
    assert (ahead - behind) / (2 * h) == pytest.approx(expected, rel=1e-6)


class Float64:
    """The cache of a loss, for a gradient in float64."""

    def __init__(self, cache: object) -> None:
        self.cache = cache

    def backward(self, dloss: np.ndarray) -> np.ndarray:
        return self.cache.backward(dloss.astype(np.float64))


def test_digits_cuts_images_into_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    train, train_classes, test, test_classes = script("digits").split()
    assert (train.shape, test.shape) == ((1437, 4, 16), (360, 4, 16))
    assert train.dtype == np.float32 and train.min() == -1 and train.max() == 1
    assert np.bincount(test_classes).min() >= 34 and len(train_classes) == 1437
    # Of the 1,797 images each is in one part, its patches side by side as in the image.
    from sklearn.datasets import load_digits

    images = load_digits().images / 8 - 1
    row = test[5].reshape(2, 2, 4, 4).transpose(0, 2, 1, 3).reshape(8, 8)
    assert np.sum(np.all(np.isclose(images, row), axis=(1, 2))) == 1


@pytest.mark.slow
def test_digits_are_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 97 % of 360 images that it has not seen."""
    pytest.importorskip("sklearn")
    monkeypatch.setattr("sys.argv", ["digits.py"])
    assert script("digits").main() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    (share,) = re.findall(r"epoch  30  test accuracy (\d+\.\d+)%", last)
    assert float(share) > 97


def test_multi30k_goes_from_texts_to_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of a tiny model on 20 pairs; then again, with a bar that its BLEU is above."""
    for package in ("tokenizers", "sacrebleu", "matplotlib"):
        pytest.importorskip(package)
    multi30k = script("multi30k")
    (tmp_path / "multi30k").mkdir()
    texts = {
        "de": "Ein kleiner Hund läuft mit dem Ball {} weg.\n",
        "en": "A small dog runs away with ball {}.\n",
    }
    for part, n in (("train", 20), ("val", 3), ("test_2016_flickr", 3)):
        for language, text in texts.items():
            lines = "".join(text.format(i) for i in range(n))
            path = tmp_path / "multi30k" / f"{part}.{language}.gz"
            path.write_bytes(gzip.compress(lines.encode()))
    sizes = {"VOCAB_SIZE": 300, "WIDTH": 8, "N_LAYERS": 1, "MAX_NEW": 3, "SHOWN": 2}
    for name, value in {"DATA": tmp_path, **sizes}.items():
        monkeypatch.setattr(multi30k, name, value)
    run, picture = tmp_path / "run", tmp_path / "cross.svg"
    monkeypatch.setattr("sys.argv", ["multi30k.py", "--out", str(run), "--steps", "2"])
    assert multi30k.main() == 1
    printed, progress = capsys.readouterr()
    assert re.search(r"^5 beams: BLEU 0\.\d \(nrefs:1\|.*\) in \d+ s$", printed, re.MULTILINE)
    assert "| German | ours, 5 beams | reference |" in printed and progress == ""
    model, _ = training.load(run, xf.backends.get("numpy"))
    assert model == multi30k.translator(training.load_vocabulary(run).size)

    monkeypatch.setattr(multi30k, "BAR", -1.0)
    sys.argv += ["--picture", str(picture), "--beams", "1"]
    assert multi30k.main() == 0
    assert "<!-- token written -->" in picture.read_text(encoding="utf-8")


def test_nanogpt_begins_as_nanogpt(tmp_path: Path) -> None:
    """Its initial loss, learning rates and run folder, in two steps on a small text."""
    nanogpt = script("nanogpt")
    text = "To be, or not to be: that is the question.\n" * 60
    state = nanogpt.trained(text, tmp_path, steps=2)
    log = read_log(tmp_path)
    n_characters = len(set(text))
    assert log.loss[0] == pytest.approx(math.log(n_characters), rel=0.04)  # nearly uniform
    np.testing.assert_allclose(log.lr, [1e-3 / 101, 2e-3 / 101], rtol=1e-12)
    assert (state.step, state.best_step) == (2, 2) and np.isfinite(state.best)
    model, _ = training.load(tmp_path, xf.backends.get("numpy"))
    assert training.load_vocabulary(tmp_path).size == model.embed.vocab_size == n_characters


def test_nanogpt_has_its_sizes() -> None:
    nanogpt = script("nanogpt")
    text = published("tinyshakespeare.txt").read_text(encoding="utf-8")
    assert len(set(text)) == 65 and int(0.9 * len(text)) == 1_003_854
    model = xf.GPT(65, 4, 128, 4, 64, activation="gelu", bias=False)
    params = tree.flatten(nanogpt.initial(model))
    # As its train.py reports it: 0.80 M, without the positions.
    assert sum(p.size for n, p in params.items() if n != "embed.positions") == 795_904
    assert params["stack.blocks.0.attn.q.w"].std() == pytest.approx(0.02, rel=0.02)
    assert params["stack.blocks.3.ffn.down.w"].std() == pytest.approx(0.02 / 8**0.5, rel=0.02)
    assert params["embed.positions"].std() == pytest.approx(0.02, rel=0.05)
