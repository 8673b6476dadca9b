"""Pictures: what is read from logs, models and options, and what is drawn of it."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import block_config

import xformer as xf
from xformer import ops, pretrained, training
from xformer.cli import main
from xformer.dispatch import kernel
from xformer.layers import BlockConfig, EmbedConfig, RelativeConfig, RopeConfig
from xformer.models import EncoderDecoder, LanguageModel, LMHead
from xformer.plots import Log, read_log, save, training_curves
from xformer.plots.attention import MOST, attention_picture
from xformer.plots.curves import large, rates, small, smoothed
from xformer.plots.flow import _apart, at_initialisation, flow, flow_picture
from xformer.plots.maps import attention_maps
from xformer.plots.style import styled

NUMPY = xf.backends.get("numpy")
PNG, SVG = b"\x89PNG", b"<?xml"


def row(step: float, **other: Any) -> dict[str, Any]:
    """A line of a log."""
    usual = {"loss": 4 / step, "norm": 1 / step, "lr": 1e-3, "tokens": 100 * step}
    return {"step": step, **usual, "seconds": 0.5 * step, "memory": 1, "validation": None, **other}


def write_log(folder: Path, rows: list[Any], end: str = "\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    (folder / "log.jsonl").write_text("\n".join(lines) + end)
    return folder


@pytest.fixture
def drawing() -> None:
    pytest.importorskip("matplotlib")


# Logs


def test_a_log_is_read_from_its_folder_or_file(tmp_path: Path) -> None:
    run = write_log(
        tmp_path / "gpt", [row(1), row(2, validation=1.5), row(4, loss=None, norm=None)]
    )
    for path in (run, run / "log.jsonl"):
        log = read_log(path)
        assert log.name == "gpt"
        np.testing.assert_array_equal(log.step, [1, 2, 4])
        np.testing.assert_array_equal(log.loss, [4, 2, np.nan])
        np.testing.assert_array_equal(log.norm, [1, 0.5, np.nan])
        np.testing.assert_array_equal(log.validation, [np.nan, 1.5, np.nan])
        np.testing.assert_array_equal(log.tokens, [100, 200, 400])


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = write_log(tmp_path / "a", [row(1), row(2), '{"step": 3, "lo'], end="")
    np.testing.assert_array_equal(read_log(run).step, [1, 2])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([row(1), '{"step": 2,'], r"log\.jsonl, line 2: must be a JSON object, [^:]*$"),
        ([row(1), "", row(2)], r"log\.jsonl, line 2: must be a JSON object"),
        (["[1, 2]"], r"log\.jsonl, line 1: must be a JSON object, got \[1, 2\]"),
        ([row(1), {"step": 2, "loss": 1.0}], r"line 2: norm, lr, tokens, seconds missing"),
        ([row(1), row(2, loss="low")], r"line 2: loss must be a number, got 'low'"),
        ([row(1), row(2, lr=True)], r"line 2: lr must be a number, got True"),
        ([row(1, tokens=10**400)], r"line 1: tokens must be a number"),
        ([row(1), {**row(2), "step": None}], r"line 2: step must be a whole number .*, got None"),
        ([row(1.5)], r"line 1: step must be a whole number above 0, got 1\.5"),
        ([row(math.nan)], r"line 1: step must be a whole number above 0, got nan"),
        ([row(1, seconds=math.inf)], r"line 1: seconds must be a number, got inf"),
        ([row(2), row(2)], r"line 2: steps must rise, got 2 after 2"),
        (["\udcff"], r"line 1: must be a JSON object"),
    ],
)
def test_a_damaged_log_is_refused(tmp_path: Path, lines: list[Any], message: str) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    data = "".join(f"{text}\n" for text in texts).encode(errors="surrogateescape")
    (tmp_path / "log.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_log(tmp_path)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no run of xformer train: there is no .*log"):
        read_log(tmp_path)
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"log\.jsonl holds no step yet"):
        read_log(tmp_path)


def test_smoothed_is_a_mean_over_neighbours() -> None:
    values = np.random.default_rng(0).normal(size=523)
    values[[0, 100, 101, 522]] = np.nan
    found = smoothed(values)
    for i in (1, 2, 50, 99, 102, 260, 521):
        half = min(i, 5)
        assert found[i] == pytest.approx(np.nanmean(values[i - half : i + half + 1]))
    assert np.isnan(found[[0, 100, 101, 522]]).all() and np.isfinite(found).sum() == 519
    np.testing.assert_allclose(smoothed(values[:99]), values[:99], atol=1e-14)


def test_a_line_that_falls_is_not_shifted() -> None:
    values = np.linspace(9, 1, 1000)
    np.testing.assert_allclose(smoothed(values)[:-10], values[:-10], rtol=1e-12)


def test_speed_leaves_validation_out(tmp_path: Path) -> None:
    seconds = np.cumsum([0.1 + 5.0 * (i % 50 == 0) for i in range(1, 401)])
    rows = [row(i, seconds=float(s)) for i, s in enumerate(seconds, 1)]
    log = read_log(write_log(tmp_path / "a", rows))
    at, speed = rates(log.step, log)
    assert len(at) == 40 and at[0] == 5.5
    np.testing.assert_allclose(speed, 1000)


@pytest.mark.parametrize(
    ("value", "top", "text"),
    [(6e-4, 1e-3, "0.0006"), (5e-5, 2e-4, "0.5e-4"), (0, 1e-5, "0"), (0.5, 3.0, "0.5")],
)
def test_small_numbers_share_a_power_of_ten(value: float, top: float, text: str) -> None:
    assert small(value, top) == text


def test_large_numbers_are_short() -> None:
    assert [large(v) for v in (0, 1500, 250_000, 2.5e6)] == ["0", "1,500", "250,000", "2.5M"]


# Curves


def curves(figure: Any) -> list[Any]:
    loss, lr, norm, speed = figure.axes
    assert [a.get_title(loc="left") for a in (lr, speed)] == [
        "learning rate",
        "tokens per second, without validation",
    ]
    return [loss, lr, norm, speed]


def test_one_run_has_its_values_and_its_validation(drawing: None, tmp_path: Path) -> None:
    rows = [row(i, validation=2.0 / i if i % 100 == 0 else None) for i in range(1, 301)]
    log = read_log(write_log(tmp_path / "a", rows))
    loss, lr, norm, _ = curves(training_curves([log]))
    raw, smooth, points = loss.lines
    np.testing.assert_array_equal(raw.get_ydata(), log.loss)
    np.testing.assert_array_equal(smooth.get_ydata(), smoothed(log.loss))
    np.testing.assert_array_equal(points.get_xdata(), [100, 200, 300])
    assert [text.get_text() for text in loss.get_legend().get_texts()] == [
        "training, smoothed",
        "validation, 0.007 at best",
    ]
    np.testing.assert_array_equal(lr.lines[0].get_ydata(), log.lr)
    assert norm.get_yscale() == "log" and len(norm.lines) == 2


def test_runs_are_told_apart(drawing: None, tmp_path: Path) -> None:
    logs = [
        read_log(write_log(tmp_path / name, [row(i, validation=1.0) for i in range(1, n)]))
        for name, n in (("a", 120), ("b", 300), ("c", 7))
    ]
    figure = training_curves(logs, x="tokens")
    loss, lr, *_ = curves(figure)
    assert len({line.get_color() for line in lr.lines}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert lr.lines[1].get_xdata()[-1] == 29900
    # Training and validation of a run have one colour.
    assert loss.lines[0].get_color() == loss.lines[1].get_color() == lr.lines[0].get_color()


def test_long_names_fit_the_picture(drawing: None, tmp_path: Path) -> None:
    log = read_log(write_log(tmp_path / "a", [row(1), row(2)]))
    long = log._replace(name="a path of $n$ letters, and a 猫/" * 9)
    figure = training_curves([long, long, long])
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_a_legend_says_what_is_there(drawing: None, tmp_path: Path) -> None:
    rows = [row(i) for i in range(1, 120)]
    short, long = (read_log(write_log(tmp_path / str(n), rows[:n])) for n in (20, 119))
    best = short._replace(validation=np.ones(20))
    for logs, texts in (
        ([short, short], ["training"]),
        ([short, long], ["training, smoothed"]),
        ([short, best], ["training", "validation"]),
    ):
        loss, *_ = curves(training_curves(logs))
        assert [text.get_text() for text in loss.get_legend().get_texts()] == texts
    assert training_curves([short]).get_suptitle() == "20"


def test_ten_runs_are_told_apart(drawing: None, tmp_path: Path) -> None:
    logs = [read_log(write_log(tmp_path / str(i), [row(1), row(2)])) for i in range(10)]
    _, lr, *_ = curves(training_curves(logs))
    assert len({(line.get_color(), line.get_linestyle()) for line in lr.lines}) == 10


@pytest.mark.parametrize(
    "rows",
    [
        [row(1)],
        [row(1, loss=None, norm=None), row(2, loss=None, norm=None)],
        [row(1, norm=0.0, lr=0.0, seconds=0.0), row(2, norm=0.0, lr=0.0, seconds=0.0)],
        [row(3, validation=1.0)],
    ],
    ids=["one step", "no losses", "zeros", "a validation"],
)
def test_short_and_empty_runs_are_drawn(drawing: None, tmp_path: Path, rows: list[Any]) -> None:
    log = read_log(write_log(tmp_path / "a", rows))
    for logs in ([log], [log, log]):
        path = save(training_curves(logs), tmp_path / "a.png")
        assert path.read_bytes()[:4] == PNG


def test_curves_refuse_what_makes_no_sense(drawing: None, tmp_path: Path) -> None:
    log = read_log(write_log(tmp_path / "a", [row(1)]))
    with pytest.raises(ValueError, match="there are no runs"):
        training_curves([])
    with pytest.raises(ValueError, match="x must be one of step, tokens, seconds, got 'hours'"):
        training_curves([log], x="hours")


# Files


def a_log() -> Log:
    one = np.array([1.0, 2.0])
    return Log("a", one, one, one, one, one, one, one)


def test_the_same_picture_is_the_same_file(drawing: None, tmp_path: Path) -> None:
    for name, start in (("a.svg", SVG), ("a.PNG", PNG)):
        first = save(training_curves([a_log()]), tmp_path / "deep" / name).read_bytes()
        assert first.startswith(start)
        assert save(training_curves([a_log()]), tmp_path / "deep" / name).read_bytes() == first


def test_a_picture_that_cannot_be_written_leaves_the_old_one(
    drawing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = training_curves([a_log()])
    path = tmp_path / "a.svg"
    path.write_text("the old one")

    def broken(part: Path, **_: Any) -> None:
        part.write_text("<svg")
        raise OSError(errno.ENOSPC, "no space left", str(part))

    monkeypatch.setattr(figure, "savefig", broken)
    with pytest.raises(OSError, match=f"^{path} cannot be written: no space left$"):
        save(figure, path)
    assert path.read_text() == "the old one" and list(tmp_path.iterdir()) == [path]


def test_other_formats_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(tmp_path / "nothing"), "--out", "a.pdf"]) == 1
    assert "a picture must end in .png or .svg, got a.pdf" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'xformer-array\[plot\]'"), styled():
        pass


@pytest.mark.parametrize(
    "command",
    [["plot", "nothing"], ["attention", "a", "--model", "no"], ["signal-flow", "--layers", "0"]],
)
def test_a_command_says_so_before_any_work(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(command) == 1
    assert "matplotlib is not installed: pip install" in capsys.readouterr().err


def test_no_window_is_opened(drawing: None, tmp_path: Path) -> None:
    """pyplot, which alone knows windows, is not even imported."""
    write_log(tmp_path / "gpt", [row(1), row(2)])
    code = (
        "import sys; from xformer.cli import main; status = main(['plot', 'gpt']); "
        "assert 'matplotlib.pyplot' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "curves.png\n"), done.stderr
    assert (tmp_path / "curves.png").read_bytes()[:4] == PNG


def test_the_command_plots_runs(
    drawing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(write_log(tmp_path / n / "gpt", [row(1), row(2)])) for n in ("one", "two")]
    out = tmp_path / "c.svg"
    assert main(["plot", *runs, "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.read_bytes().startswith(SVG)
    assert main(["plot", str(tmp_path / "three"), "--out", str(out)]) == 1
    assert "three is no run of xformer train" in capsys.readouterr().err


# Attention


def block(**options: Any) -> BlockConfig:
    return block_config(**{"d_model": 12, "n_heads": 6, "d_ff": 8} | options)


def embed(**options: Any) -> EmbedConfig:
    return EmbedConfig(**{"vocab_size": 17, "width": 12, "d_model": 12, "max_len": 16} | options)


DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}),
    "bidirectional": ({}, {"causal": False}),
    "post": ({"norm_placement": "post"}, {}),
    "window": ({"window": (2, None)}, {}),
    "window on both sides": ({"window": (1, 2)}, {"causal": False}),
    "softcap": ({"softcap": 0.7}, {}),
    "sinks": ({"sinks": True}, {}),
    "groups": ({"n_kv_heads": 2}, {}),
    "scale": ({"scale": 1.3, "n_kv_heads": 1}, {}),
    "alibi": ({}, {"alibi": True}),
    "relative": ({}, {"relative_bias": RelativeConfig(6, n_buckets=8, max_distance=6)}),
    "rotary, norms": ({"qk_norm": "head", "d_head": 4}, {"rotary": RopeConfig(4)}),
    "parallel": ({"parallel": True}, {}),
    "shaw": ({"shaw_max_distance": 2}, {}),
    "checkpoint": ({}, {"activation_checkpointing": True}),
}


def perturbed(params: Any, std: float = 0.5) -> Any:
    """No table of zeros, which would make options invisible."""
    rng = np.random.default_rng(1)
    return xf.tree.map(lambda p: p + rng.normal(0, std, p.shape), params)


def by_definition(core: Any, options: dict[str, Any]) -> np.ndarray:
    """Probabilities from queries and keys, a head, a query and a key at a time."""
    q, k = core.q, core.k
    n_batch, n_heads, n_queries, _ = q.shape
    n_keys = k.shape[2]
    left, right = options["window"] or (None, None)
    found = np.zeros((n_batch, n_heads, n_queries, n_keys))
    for b, h, i in np.ndindex(n_batch, n_heads, n_queries):
        scores = {}
        for j in range(n_keys):
            near = (left is None or j >= i - left) and (right is None or j <= i + right)
            if (options["causal"] and j > i) or not near:
                continue
            key = k[b, h * k.shape[1] // n_heads, j]
            if options["shaw"] is not None:
                last = len(options["shaw"]) // 2
                key = key + options["shaw"][last + min(max(j - i, -last), last)]
            score = float(q[b, h, i] @ key) * core.scale
            if options["softcap"] is not None:
                score = options["softcap"] * math.tanh(score / options["softcap"])
            scores[j] = score + (0.0 if options["bias"] is None else options["bias"][h, i, j])
        total = sum(math.exp(s) for s in scores.values())
        if options["sinks"] is not None:
            total += math.exp(options["sinks"][h])
        for j, score in scores.items():
            found[b, h, i, j] = math.exp(score) / total
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_maps_are_what_the_definition_says(name: str) -> None:
    own, around = DECODERS[name]
    model = LanguageModel(embed(), (block(**own),) * 2, **around)
    params = perturbed(model.init(dtype="float64"))
    tokens = np.random.default_rng(0).integers(0, 17, (2, 7))
    found = attention_maps(model, params, tokens)["self"]
    assert len(found) == 2
    with xf.reference_only():  # which keeps the queries and keys by these names
        _, cache = replace(model, activation_checkpointing=False).forward(params, tokens)
    for layer, (probs, kept) in enumerate(zip(found, cache.hidden.stack.blocks, strict=True)):
        attn = kept.attn.sublayer
        options: dict[str, Any] = {
            "causal": model.causal,
            "window": own.get("window"),
            "softcap": own.get("softcap"),
            "sinks": params.stack.blocks[layer].attn.sinks,
            "shaw": params.stack.blocks[layer].attn.shaw and params.stack.blocks[layer].attn.shaw.k,
            "bias": bias_of(model, params, tokens.shape[1]),
        }
        np.testing.assert_allclose(probs, by_definition(attn.core, options), rtol=1e-10, atol=1e-14)
        if not own.get("sinks"):
            np.testing.assert_allclose(probs.sum(axis=-1), 1, rtol=1e-12)


def bias_of(model: LanguageModel, params: Any, length: int) -> np.ndarray | None:
    if model.alibi:
        like = np.zeros(())
        return xf.layers.alibi(6, n_queries=length, n_keys=length, like=like).reshape(6, length, -1)
    if model.relative_bias is not None:
        sizes = {"n_queries": length, "n_keys": length}
        return xf.layers.relative_bias(
            params.stack.relative_bias, **sizes, config=model.relative_bias
        )[0][0]
    return None


def test_maps_of_an_encoder_decoder() -> None:
    layers = (block(), block(n_kv_heads=2))
    model = EncoderDecoder(layers, layers, embed(), embed(vocab_size=11), head=LMHead(tied=True))
    params = perturbed(model.init(dtype="float64"))
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(0, 17, (1, 5)), rng.integers(0, 11, (1, 4))
    found = attention_maps(model, params, src, tgt)
    assert {k: [p.shape for p in v] for k, v in found.items()} == {
        "encoder": [(1, 6, 5, 5)] * 2,
        "decoder": [(1, 6, 4, 4)] * 2,
        "cross": [(1, 6, 4, 5)] * 2,
    }
    with xf.reference_only():
        _, cache = model.forward(params, src, tgt)
    usual = dict.fromkeys(("window", "softcap", "sinks", "shaw", "bias"))
    for kind, causal, stack, name in (
        ("encoder", False, cache.encode.stack, "attn"),
        ("decoder", True, cache.decode.stack, "attn"),
        ("cross", False, cache.decode.stack, "cross"),
    ):
        for probs, kept in zip(found[kind], stack.blocks, strict=True):
            core = getattr(kept, name).sublayer.core
            expected = by_definition(core, {**usual, "causal": causal})
            np.testing.assert_allclose(probs, expected, rtol=1e-10, atol=1e-14)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """A kernel of attention whose cache has no probabilities, as fused ones have none."""

    @kernel(ops.sdpa, "numpy")
    def fused(*args: Any, **options: Any) -> tuple[Any, None]:
        with xf.reference_only():
            return ops.sdpa(*args, **options)[0], None

    yield
    ops.sdpa.import_kernels("numpy").pop(0)  # the last registered is the first


def test_maps_do_not_need_a_kernel_that_keeps_them(forgetful: None) -> None:
    model = LanguageModel(embed(), (block(),))
    params, tokens = model.init(dtype="float64"), np.zeros((1, 3), np.int64)
    _, cache = model.forward(params, tokens)
    assert cache.hidden.stack.blocks[0].attn.sublayer.core is None
    (probs,) = attention_maps(model, params, tokens)["self"]
    np.testing.assert_allclose(probs.sum(axis=-1), 1)


def test_maps_refuse_what_does_not_go_together() -> None:
    model = LanguageModel(embed(), (block(),))
    tokens = np.zeros((1, 3), np.int64)
    with pytest.raises(ValueError, match="LanguageModel has no target"):
        attention_maps(model, model.init(), tokens, tokens)
    with pytest.raises(TypeError, match="model must be one of"):
        attention_maps("gpt", None, tokens)
    pair = EncoderDecoder((block(),), (block(),), embed(), embed())
    with pytest.raises(ValueError, match="EncoderDecoder needs a target"):
        attention_maps(pair, pair.init(), tokens)


def test_a_picture_has_a_panel_a_head_and_names_tokens(drawing: None, tmp_path: Path) -> None:
    probs = np.random.default_rng(0).dirichlet(np.ones(3), size=(5, 2))
    figure = attention_picture(probs, ["$a", "猫b$"], [" the", "\n", "encyclopaedias"], title="$")
    panels = [axes for axes in figure.axes if axes.images and axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == [f"head {i}" for i in range(5)]
    for axes, head in zip(panels, probs, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), head)
    texts = [t.get_text() for t in panels[0].get_yticklabels()]
    assert texts == ["$a", "\\u732bb$"]
    texts = [t.get_text() for t in panels[-1].get_xticklabels()]
    assert texts == ["the", "\\n", "encyclopaed\N{HORIZONTAL ELLIPSIS}"]
    assert figure.axes[-1].get_ylabel() == "share of attention"
    assert save(figure, tmp_path / "a.png").read_bytes()[:4] == PNG  # no warning of a glyph


def test_labels_shrink_with_their_panels(drawing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names, sizes = ["a"] * 10, []
    for widest in (24, 1.5):  # inches, of which two panels of 10 tokens want 3
        monkeypatch.setattr("xformer.plots.attention.WIDEST", widest)
        figure = attention_picture(np.ones((2, 10, 10)) / 10, names, names)
        sizes.append({label.get_fontsize() for label in figure.axes[0].get_yticklabels()})
    assert sizes == [{7.0}, {3.5}]


def test_a_picture_refuses_what_does_not_fit(drawing: None) -> None:
    with pytest.raises(ValueError, match=r"probs must be \(H, 2, 3\) by the tokens, got .*\(1, 3"):
        attention_picture(np.zeros((1, 3, 3)), ["a", "b"], ["a", "b", "c"])
    many = ["a"] * (MOST + 1)
    with pytest.raises(ValueError, match="1 to 64 tokens fit a picture, got 65 and 65"):
        attention_picture(np.zeros((1, len(many), len(many))), many, many)


@pytest.fixture
def gpt(tmp_path: Path) -> str:
    """A GPT over bytes, as xformer train leaves it."""
    model = xf.GPT(vocab_size=256, n_layers=2, d_model=8, n_heads=2, max_len=32)
    training.save(tmp_path / "gpt", model, model.init(), NUMPY)
    return str(tmp_path / "gpt")


def test_the_command_draws_a_trained_model(
    drawing: None, gpt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.png"
    assert main(["attention", "--model", gpt, "a text", "--layer", "0", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n" and out.read_bytes()[:4] == PNG
    for options, message in (
        (["a text", "--layer", "2"], "--layer must lie in [0, 2), got 2"),
        (["a text", "--kind", "cross"], "--kind and --target need an encoder-decoder"),
        (["a text" * 20], "a picture shows at most 64 tokens, got 120"),
        ([""], "the text must hold at least one token"),
    ):
        assert main(["attention", "--model", gpt, *options, "--out", str(out)]) == 1
        assert message in capsys.readouterr().err


@pytest.fixture
def t5(tmp_path: Path) -> str:
    """A T5 of random weights with a tokenizer beside it."""
    pytest.importorskip("tokenizers")
    words = training.train_bpe(["the quick brown fox"], 270, specials=("<pad>", "<s>", "</s>"))
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 3}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    names = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    model = pretrained.model({**names, **sizes, **ids, "vocab_size": words.size})
    pretrained.save(model, model.init(), tmp_path / "t5")
    words.save(tmp_path / "t5")
    return str(tmp_path / "t5")


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_the_command_draws_an_encoder_decoder(
    drawing: None, t5: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.svg"
    options = ["--kind", kind, "--out", str(out)]
    assert main(["attention", "--model", t5, "the fox", "--target", "quick", *options]) == 0
    assert capsys.readouterr().out == f"{out}\n" and out.read_bytes().startswith(SVG)
    out.unlink()
    assert main(["attention", "--model", t5, "the fox", *options]) == 0
    assert capsys.readouterr().out.startswith(f"{out}\ntarget: ")
    assert out.is_file()


@pytest.fixture
def translator(tmp_path: Path) -> Path:
    """An encoder-decoder and its words, as a run of `training.Pairs` leaves them."""
    pytest.importorskip("tokenizers")
    words = training.train_bpe(["the quick brown fox"], 270, specials=("<pad>", "<s>", "</s>"))
    table = embed(vocab_size=words.size, max_len=80)
    model = EncoderDecoder((block(),), (block(),), table, shared_embed=True, head=LMHead())
    training.save(tmp_path / "mt", model, model.init(), NUMPY)
    words.save(tmp_path / "mt")
    return tmp_path / "mt"


def test_the_commands_take_an_encoder_decoder_of_ones_own(
    drawing: None,
    translator: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, drawn = translator / "a.svg", {}

    def picture(probs: Any, queries: list[str], keys: list[str], **options: Any) -> Any:
        drawn.update(queries=queries, keys=keys, **options)
        return attention_picture(probs, queries, keys, **options)

    monkeypatch.setattr("xformer.cli.attention.attention_picture", picture)
    command = ["attention", "--model", str(translator), "fox", "--target", "the", "--out", str(out)]
    assert main(command) == 0 and out.read_bytes().startswith(SVG)
    assert drawn["keys"][-1] == drawn["queries"][-1] == "</s>"  # a source ends as in training
    assert drawn["labels"] == ("token written", "token of the source")
    command = ["generate", "--model", str(translator), "--prompt", "fox", "--max-new-tokens", "2"]
    assert main(command) == 0
    read = len(drawn["keys"])
    assert f"{read} prompt tokens in " in capsys.readouterr().err


def test_a_model_without_its_words_is_refused(
    drawing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = xf.Transformer(11, 13, 8, 2, 1, 1, 7)
    training.save(tmp_path, model, model.init(), NUMPY)
    assert main(["attention", "--model", str(tmp_path), "a"]) == 1
    assert capsys.readouterr().err == (
        f"xformer: error: {tmp_path}: the vocabulary must have 11 and 13 tokens, like the "
        "EncoderDecoder, got 256 bytes, because the folder has no vocabulary\n"
    )


# Flow


@pytest.mark.parametrize("norm", ["pre", "post", "sandwich", "output", "none"])
def test_flow_is_what_layers_give(norm: str) -> None:
    """Outputs by models cut after each layer, gradients by the whole backward."""
    model = LanguageModel(embed(), (block(norm_placement=norm),) * 3, head=LMHead(tied=False))
    # Without norms, outputs of size 1e4 would grow from 0.5, and rounding with them.
    params = perturbed(model.init(dtype="float64"), 0.1 if norm == "none" else 0.5)
    tokens, targets = np.random.default_rng(0).integers(0, 17, (2, 2, 7))
    found = flow(model, params, tokens, targets, "own")
    assert found.name == "own" and found.depth == 3
    for n in (1, 2, 3):
        cut = replace(model, blocks=model.blocks[:n], final_norm=False, head=None)
        stack = params.stack._replace(blocks=params.stack.blocks[:n], norm=None)
        y, _ = cut.forward(params._replace(stack=stack, head=None), tokens)
        assert found.activations[n - 1] == pytest.approx(np.sqrt(np.mean(y**2)), rel=1e-12)
    grads = model.loss(params, tokens, targets)[1].backward().stack.blocks
    for got, block_grads in zip(found.gradients, grads, strict=True):
        total = sum(np.sum(leaf**2) for leaf in xf.tree.flatten(block_grads).values())
        assert got == pytest.approx(math.sqrt(total), rel=1e-12)


def test_parallel_blocks_and_checkpointing_flow_too() -> None:
    tokens, targets = np.random.default_rng(0).integers(0, 17, (2, 2, 7))
    bare = {"parallel": True, "norm_placement": "none"}
    for own, around in (
        ({"parallel": True}, {}),
        (bare, {}),
        ({}, {"activation_checkpointing": True}),
    ):
        model = LanguageModel(embed(), (block(**own),) * 2, **around)
        found = flow(model, model.init(dtype="float64"), tokens, targets)
        assert np.all(found.activations > 0) and np.all(found.gradients > 0)
    shared = replace(model, n_shared_layer_groups=1)
    with pytest.raises(TypeError, match="whose layers share nothing"):
        flow(shared, shared.init(), tokens, targets)


def test_depth_weakens_the_last_gradient_before_norms_only() -> None:
    """arXiv:2002.04745, theorem 1: as L^-1/2 of pre-LN, not at all of post-LN."""
    ends = {
        (norm, depth): at_initialisation(norm, depth, d_model=32).gradients[-1]
        for norm in ("pre", "post")
        for depth in (2, 18)
    }
    assert 2.2 < ends["pre", 2] / ends["pre", 18] < 4.5  # sqrt(9) = 3
    assert 0.6 < ends["post", 2] / ends["post", 18] < 1.6


def test_without_norms_outputs_grow_unless_the_blocks_start_as_the_identity() -> None:
    flows = {kind: at_initialisation(kind, 12, 32) for kind in ("none", "rezero", "fixup")}
    growth = {kind: each.activations[-1] / each.activations[0] for kind, each in flows.items()}
    assert growth["none"] > 50 and growth["rezero"] == growth["fixup"] == 1
    assert flows["none"].gradients[0] > 1e3 * flows["fixup"].gradients[0]
    np.testing.assert_allclose(flows["fixup"].gradients, flows["fixup"].gradients[0], rtol=0.1)
    for name in ("none", "rezero", "fixup"):
        assert flows[name].gradients.all() and flows[name].name == name
    with pytest.raises(ValueError, match="norm_placement must be one of"):
        at_initialisation("fixed", 2)


def test_post_norm_outputs_have_size_one() -> None:
    found = at_initialisation("post", 4, d_model=16)
    np.testing.assert_allclose(found.activations, 1, rtol=1e-3)  # but for eps


def test_flows_are_drawn(drawing: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "flow.svg"
    small_ones = ["--layers", "2", "3", "--d-model", "8", "--heads", "2", "--out", str(out)]
    assert main(["signal-flow", *small_ones, "--norms", "pre", "sandwich"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5 and printed[0].startswith("pre, 2 layers: gradient norm ")
    assert out.read_bytes().startswith(SVG)
    flows = [at_initialisation(norm, 3, 8, 2) for norm in ("pre", "post")]
    assert len(flow_picture(flows).axes) == 2
    figure = flow_picture([at_initialisation("pre", n, 8, 2) for n in (1, 2)])
    assert all(tick == int(tick) for axes in figure.axes for tick in axes.get_xticks())
    assert _apart(range(1, 13)) == [1, 2, 3, 4, 5, 7, 9, 12] and _apart([4]) == [4]
    with pytest.raises(ValueError, match="there are no flows"):
        flow_picture([])
    assert main(["signal-flow", "--layers", "0"]) == 1
    assert "n_layers must be an int of at least 1, got 0" in capsys.readouterr().err
