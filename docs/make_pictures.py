"""Draw the pictures of the README and of pages in docs (extras `plot`, `hf`).

xformer train --out runs/readme
XFORMER_DATA=folder python docs/make_pictures.py --run runs/readme

Some need something else: `loss.svg` is of the run that is named, `attention.svg` of llama2.c's
stories260K.bin and tok512.bin, in the folder XFORMER_DATA, `attribution.svg` of the folder
all-MiniLM-L6-v2 here. `private-training.svg` needs the extra `test-private`. Some minutes on two
cores.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xformer import hooks, tree
from xformer.cli import main as xformer
from xformer.dispatch import unfused
from xformer.inspection.measure import saved_by_part
from xformer.models import GPT
from xformer.plots import read_log, save
from xformer.plots.curves import POINTS, smoothed
from xformer.plots.style import COLOURS, line_of, panels, styled
from xformer.training import load_corpus, unigram_loss

PICTURES = Path(__file__).resolve().parent / "pictures"
DATA = Path(os.environ.get("XFORMER_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
STORY = "Once upon a time, there was a little girl named Lily."


@styled()
def loss_curve(run: Path) -> Path:
    """Training and validation loss of a run of `xformer train`, with the unigram baseline."""
    log = read_log(run)
    measured = np.isfinite(log.validation)
    losses = log.validation[measured]
    baseline = unigram_loss(load_corpus())
    figure, ((axes,),) = panels(1, 1, (8, 3.4))
    axes.plot(log.seconds, log.loss, color=COLOURS[0], alpha=0.3, lw=0.7)
    axes.plot(log.seconds, smoothed(log.loss), color=COLOURS[0], label="training, smoothed")
    name = f"validation, {losses[-1]:.2f} at the end"
    axes.plot(log.seconds[measured], losses, color=COLOURS[1], **POINTS, label=name)
    name = f"unigram model, {baseline:.2f}"
    axes.axhline(baseline, color="#666666", ls="--", lw=1, label=name)
    axes.set(
        title="xformer train: Python's standard library, byte by byte",
        xlabel="seconds on two cores, NumPy",
        ylabel="nats per byte",
        xlim=(0, 1.01 * log.seconds[-1]),
    )
    axes.legend()
    return save(figure, PICTURES / "loss.svg")


@styled()
def idea() -> Path:
    """An op: its forward, its cache and its backward, beside the formulas of RMSNorm."""
    figure, ((axes,),) = panels(1, 1, (8, 3.6))
    axes.set(xlim=(0, 16), ylim=(0, 7.2))
    axes.axis("off")
    rstd = r"\mathrm{rstd}"
    forward = (
        rf"$\hat{{x}} = x\;{rstd},\quad {rstd} = (\mathrm{{mean}}(x^2) + \epsilon)^{{-1/2}}$",
        r"$y = w \odot \hat{x}$",
    )
    dxhat = r"d\hat{x}"
    backward = (
        rf"$dx = {rstd}\,({dxhat} - \hat{{x}}\;\mathrm{{mean}}({dxhat} \odot \hat{{x}})),\quad "
        rf"{dxhat} = dy \odot w$",
        r"$dw = \sum_{\mathrm{rows}} dy \odot \hat{x}$",
    )
    rows = (
        (4.8, "y, cache = rms_norm(x, w)", forward),
        (0.3, "dx, dw = cache.backward(dy)", backward),
    )
    for (bottom, code, formulas), colour in zip(rows, COLOURS[:2], strict=True):
        axes.add_patch(_box(2, bottom, 12, 2.1, colour))
        axes.text(2.4, bottom + 1.05, code, va="center", family="monospace", fontsize=9.5)
        for height, formula in zip((1.5, 0.6), formulas, strict=True):
            axes.text(7.3, bottom + height, formula, va="center", fontsize=10)
    axes.add_patch(_box(5.6, 3.15, 4.8, 0.9, COLOURS[6]))
    axes.text(8, 3.6, "cache:  x,  w,  rstd", ha="center", va="center", fontsize=9.5)
    arrows = (
        (1.2, 5.85, 2, 5.85),
        (14, 5.85, 14.8, 5.85),
        (14.8, 1.35, 14, 1.35),
        (2, 1.35, 1.2, 1.35),
    )
    for x, y, to_x, to_y in (*arrows, (8, 4.8, 8, 4.05), (8, 3.15, 8, 2.4)):
        axes.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "->", "lw": 1.2})
    for x, y, name in (
        (0.6, 5.85, "x, w"),
        (15.3, 5.85, "y"),
        (15.3, 1.35, "dy"),
        (0.6, 1.35, "dx, dw"),
    ):
        axes.text(x, y, name, ha="center", va="center", fontsize=10.5)
    return save(figure, PICTURES / "idea.svg")


def _box(left: float, bottom: float, width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    style = {"boxstyle": "round,pad=0,rounding_size=0.25", "fc": "white", "ec": colour, "lw": 1.3}
    return FancyBboxPatch((left, bottom), width, height, **style)


def curves() -> None:
    """Two short runs, side by side: `xformer plot`."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [f"{folder}/lr {lr}" for lr in ("0.005", "0.0005")]
        for run in runs:
            options = ("--lr", run.split()[-1], "--validate-every", "20", "--out", run)
            command("train", "--preset", "tiny", *options)
        command("plot", *runs, "--out", str(PICTURES / "curves.svg"))


def attention() -> None:
    """A layer of stories260K."""
    out = str(PICTURES / "attention.svg")
    command("attention", "--model", str(DATA / "stories260K.bin"), STORY, "--out", out)


def flow() -> None:
    """Pre-LN and post-LN."""
    command("signal-flow", "--out", str(PICTURES / "flow.svg"))


@styled()
def sharpness() -> Path:
    """The sharpness of the model of derivatives.md, whose code is run, by learning rate."""
    names = page_names("derivatives.md", "curves")
    figure, ((axes,),) = panels(1, 1, (8, 3.4))
    for colour, (lr, values) in zip(COLOURS, names["curves"].items(), strict=False):
        steps = names["EVERY"] * np.arange(len(values))
        axes.plot(steps, values, color=colour, **POINTS, label=f"sharpness, lr {lr}")
        axes.axhline(2 / lr, color=colour, ls="--", lw=1, label=f"2 / lr = {2 / lr:.1f}")
    axes.set(xlabel="steps of gradient descent", ylabel="largest eigenvalue", ylim=(0, None))
    axes.legend()
    return save(figure, PICTURES / "sharpness.svg")


def page_names(page: str, last: str) -> dict[str, Any]:
    """The names of a page's code, which is run up to the block that makes the name `last`."""
    names: dict[str, Any] = {}
    text = (PICTURES.parent / page).read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
        if last in names:
            break
    return names


@styled()
def private_training() -> Path:
    """The losses of private-training.md, by noise (extra `test-private`, minutes)."""
    names = page_names("private-training.md", "curves")
    figure, ((axes,),) = panels(1, 1, (8, 3.4))
    for colour, (noise, losses) in zip(COLOURS, names["curves"].items(), strict=False):
        spent = f"epsilon {names['epsilon'](noise, len(losses)):.2f}" if noise else "no privacy"
        steps = np.arange(1, len(losses) + 1)
        label = f"noise {noise}, {spent}"
        axes.plot(steps, averaged(losses, 10), color=colour, label=label)
    axes.set(xlabel="step", ylabel="nats per letter, mean of 10 batches")
    axes.legend()
    return save(figure, PICTURES / "private-training.svg")


@styled()
def stepped() -> Path:
    """Peak memory of a backward with an update after it, or inside it, by the number of layers."""
    depths = (1, 2, 4, 8, 12, 16, 20, 24)
    figure, ((axes,),) = panels(1, 1, (8, 3.4))
    kinds = ("after the backward", "inside it", "inside it, donated")
    for i, kind in enumerate(kinds):
        peaks = [_peak_of_update(n, kind) / 1e6 for n in depths]
        axes.plot(depths, peaks, label=f"update {kind}", **line_of(i), **POINTS)
    axes.set(xlabel="layers of width 128", ylabel="MB beyond parameters and cache", ylim=(0, None))
    axes.legend()
    return save(figure, PICTURES / "stepped.svg")


def _peak_of_update(n_layers: int, kind: str) -> int:
    """Bytes of gradients, temporaries and new parameters at the peak, on NumPy."""
    model = GPT(vocab_size=257, n_layers=n_layers, d_model=128, n_heads=4, max_len=16)
    params = model.init(seed=0)
    tokens, targets = np.random.default_rng(0).integers(0, 257, (2, 2, 16))
    with unfused():
        _, cache = model.loss(params, tokens, targets)

    def update(_: str, params: Any, grads: Any) -> Any:
        return tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads)

    tracemalloc.start()
    if kind == "after the backward":
        update("", params, cache.backward())
    else:
        hooks.stepped(cache, params, update, donate=kind.endswith("donated"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@styled()
def attribution() -> Path:
    """Estimates and exact effects of attribution-patching.md, whose code is run.

    The folder all-MiniLM-L6-v2 must be in the current folder.
    """
    names = page_names("attribution-patching.md", "exact")
    words = names["tokenizer"](names["folder"])
    pairs = zip(*names["ids"].tolist(), strict=True)
    both = [[words.decode([i]) for i in pair] for pair in pairs]
    labels = [a if a == b else f"{b}\n{a}" for a, b in both]
    labels[0], labels[-1] = "[CLS]", "[SEP]"
    figure, ((left, right),) = panels(1, 2, (9.5, 3.4))
    most = max(np.abs(names[name]).max() for name in ("exact", "by_token"))
    for axes, name, title in (
        (left, "by_token", "estimate, one backward"),
        (right, "exact", "activation patching"),
    ):
        image = axes.imshow(names[name], cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
        axes.set(
            title=title, xticks=range(len(labels)), xticklabels=labels, ylabel="input of layer"
        )
        axes.tick_params(axis="x", labelsize=7.5)
        axes.grid(visible=False)
    figure.colorbar(image, ax=[left, right], label="effect on the similarity")
    return save(figure, PICTURES / "attribution.svg")


@styled()
def without_norm() -> Path:
    """Losses, outputs and gradients of the models that the first program of the page trains."""
    page = (PICTURES.parent / "without-norm.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    figure, (axes,) = panels(1, 3, (11.5, 3.6))
    for i, (kind, losses) in enumerate(namespace["losses"].items()):
        line, flow = line_of(i) | {"label": kind}, namespace["flows"][kind]
        layers = np.arange(1, flow.depth + 1)
        axes[0].plot(np.arange(1, len(losses) + 1), averaged(losses, 10), **line)
        axes[1].plot(layers, flow.activations, **line)
        axes[2].plot(layers, flow.gradients, **line)
    titles = "loss, nats a byte", "output of each layer, rms", "gradient of each layer, norm"
    for each, title, xlabel in zip(axes, titles, ("step", "layer", "layer"), strict=True):
        each.set(title=title, xlabel=xlabel, yscale="log")
    axes[0].set(ylim=(2.4, 8), yticks=(3, 4, 5, 6, 8), yticklabels=("3", "4", "5", "6", "8"))
    axes[0].minorticks_off()
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return save(figure, PICTURES / "without-norm.svg")


@styled()
def rounding() -> Path:
    """Losses of the models that the last program of rounding.md trains."""
    page = (PICTURES.parent / "rounding.md").read_text(encoding="utf-8")
    made: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(program, made)
    figure, (axes,) = panels(1, len(made["KINDS"]), (15, 3.6), sharey=True)
    for panel, kind in zip(axes, made["KINDS"], strict=True):
        curves = {"float32": made["plain"]} | {f: made["curves"][f, kind] for f in made["FORMATS"]}
        for i, (format, losses) in enumerate(curves.items()):
            steps = np.arange(1, len(losses) + 1)
            panel.plot(steps, averaged(losses, 10), **line_of(i), label=format)
        panel.set(title=kind, xlabel="step", ylim=(2.2, 5))
    axes[0].set_ylabel("loss, nats a byte")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    return save(figure, PICTURES / "rounding.svg")


def averaged(values: Sequence[float], n: int) -> np.ndarray:
    """The mean of each value and of those before it, n in all."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - n, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


@styled()
def saved_bytes() -> Path:
    """Bytes that a training step saves for backward, over the number of layers."""
    depths = (1, 2, 4, 8, 12, 16, 20, 24)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "activation checkpointing": {"activation_checkpointing": True},
        "reversible": {"reversible": True},
    }
    figure, ((axes,),) = panels(1, 1, (8, 3.4))
    for i, (name, options) in enumerate(kinds.items()):
        models = (GPT(256, n, 128, 4, 128, **options) for n in depths)
        saved = [sum(saved_by_part(model, 8, 128, "float32").values()) for model in models]
        axes.plot(depths, [n / 1e6 for n in saved], **line_of(i), **POINTS, label=name)
    axes.set(
        title="GPT of width 128, 8 sequences of 128 tokens: saved for backward, without parameters",
        xlabel="layers",
        ylabel="MB",
        yscale="log",
        ylim=(1, None),
        xlim=(0, 1.02 * depths[-1]),
    )
    axes.legend()
    return save(figure, PICTURES / "reversible.svg")


def command(*words: str) -> None:
    """Run a command of xformer, as a person would."""
    if xformer(words):
        raise SystemExit(f"xformer {' '.join(words)} failed")


def main() -> None:
    """Draw what can be drawn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a run of `xformer train`")
    run = parser.parse_args().run
    idea()
    saved_bytes()
    flow()
    curves()
    sharpness()
    stepped()
    private_training()
    if Path("all-MiniLM-L6-v2").is_dir():
        attribution()
    else:
        print("attribution.svg is not drawn: there is no folder all-MiniLM-L6-v2 here")
    print(without_norm())
    print(rounding())
    if (DATA / "stories260K.bin").is_file():
        attention()
    else:
        print(f"attention.svg is not drawn: there is no stories260K.bin in {DATA}")
    if run is not None:
        print(loss_curve(run))
    else:
        print("loss.svg is not drawn: --run names no run")


if __name__ == "__main__":
    main()
