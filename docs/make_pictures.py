"""Draw the pictures of the README and of these pages (extra `plot`).

xformer train --out runs/readme
python docs/make_pictures.py runs/readme
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from xformer.training import load_corpus, unigram_loss

PICTURES = Path(__file__).resolve().parent / "pictures"


def loss_curve(run: Path) -> Path:
    """Training and validation loss of a run of `xformer train`, with the unigram baseline."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    measured = [row for row in rows if row["validation"] is not None]
    baseline = unigram_loss(load_corpus())
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    seconds = [row["seconds"] for row in rows]
    axes.plot(seconds, [row["loss"] for row in rows], color="#9db8d9", lw=0.8, label="training")
    axes.plot(
        [row["seconds"] for row in measured],
        [row["validation"] for row in measured],
        color="#1f4e8c",
        marker="o",
        ms=3.5,
        label=f"validation, {measured[-1]['validation']:.2f} at the end",
    )
    axes.axhline(baseline, color="#b5651d", ls="--", lw=1, label=f"unigram model, {baseline:.2f}")
    axes.set(
        xlabel="seconds on two cores, NumPy",
        ylabel="nats per byte",
        title="xformer train: Python's standard library, byte by byte",
        xlim=(0, seconds[-1]),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = PICTURES / "loss.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path


def main() -> None:
    """Draw everything from the run named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of `xformer train`")
    PICTURES.mkdir(exist_ok=True)
    print(loss_curve(parser.parse_args().run))


if __name__ == "__main__":
    main()
