"""Draw the pictures of the README and of look.md (extras `plot`, `hf`), each if it can be.

xformer train --out runs/readme
XFORMER_DATA=folder python docs/make_pictures.py --run runs/readme

All but two need nothing else: `loss.svg` is of the run that is named, and `attention.svg` of
llama2.c's stories260K.bin and tok512.bin, in the folder XFORMER_DATA. A minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np

from xformer.cli import main as xformer
from xformer.plots import read_log, save
from xformer.plots.curves import POINTS, smoothed
from xformer.plots.style import COLOURS, panels, styled
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


def command(*words: str) -> None:
    """Run a command of xformer, as a person would."""
    if xformer(words):
        raise SystemExit(f"xformer {' '.join(words)} failed")


def main() -> None:
    """Draw what can be drawn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a run of `xformer train`")
    run = parser.parse_args().run
    flow()
    curves()
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
