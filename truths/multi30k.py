"""German to English on Multi30k (arXiv:1605.00459) by an encoder-decoder from nothing.

The model of arXiv:1706.03762, small: 3 + 3 layers of width 256, its norms before the sublayers,
one table of 6,000 byte pairs for both languages and for the output. It learns 29,000 pairs of
sentences by that paper's schedule and label smoothing, and translates the 1,000 sentences of the
2016 Flickr test set, greedily and by beam search, judged by sacrebleu. In a checkout, with the
files train, val and test_2016_flickr, each .de.gz and .en.gz, in the folder multi30k of another
(without them the script says where to get them):

    pip install -e '.[truths,hf,plot]' && XFORMER_DATA=folder python truths/multi30k.py

A run that was stopped goes on when it is called again. `xformer generate` and `xformer attention`
take the model that it leaves: `--model runs/multi30k`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from needed import DATA, require_files, require_package
from tqdm import tqdm

from xformer import backends, optim, tree
from xformer.cli import main as xformer
from xformer.cli.progress import each
from xformer.generation import beam_search, generate, prefill
from xformer.layers import AttentionConfig, BlockConfig, EmbedConfig, FeedForwardConfig
from xformer.models import EncoderDecoder, LMHead
from xformer.training import (
    Pairs,
    Run,
    State,
    Step,
    Subwords,
    TrainConfig,
    evaluate,
    interruptible,
    loss_of,
    parallel,
    start,
    train,
    train_bpe,
)
from xformer.training.batch import IGNORED

PARTS = ("train", "val", "test_2016_flickr")
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCAB_SIZE, WIDTH, N_LAYERS, DROPOUT = 6000, 256, 3, 0.1
STEPS, WARMUP, MAX_TOKENS, MAX_LEN = 1000, 800, 2000, 100
EMA, SMOOTHING = 0.998, 0.1
BATCH, MAX_NEW = 50, 80  # of sentences that are translated together, tokens of a translation
SHOWN = 10  # translations
BAR = 25.0  # BLEU that was wanted beforehand


class Corpus(NamedTuple):
    """Sentences and their translations, and the vocabulary of both."""

    words: Subwords
    train: list[tuple[str, str]]
    validation: list[tuple[str, str]]
    test: list[tuple[str, str]]


def main() -> int:
    """Train, translate, print how well, and compare the BLEU of beam search with the bar."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/multi30k"), help="of the run")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="where to draw cross-attention (extra plot)")
    args = parser.parse_args()
    require_files(DATA, *(f"multi30k/{part}.{end}.gz" for part in PARTS for end in ("de", "en")))
    require_package("tokenizers", "hf")
    require_package("sacrebleu", "truths")
    if args.picture is not None:
        require_package("matplotlib", "plot")
    corpus = read(DATA / "multi30k")
    model = translator(corpus.words.size)
    state = trained(model, corpus, args.out, args.steps)
    params = state.averaged
    minutes = f"{state.seconds / 60:.1f} minutes of training"
    held_out = pairs_of(corpus, corpus.validation).held_out()
    loss = evaluate(loss_of(model, ignore_index=IGNORED), params, held_out, backends.get("numpy"))
    print(f"{state.step} steps, {minutes}; validation loss {loss:.3f} nats a token", flush=True)
    sources, references = zip(*corpus.test, strict=True)
    for n_beams in dict.fromkeys((1, args.beams)):
        begun = time.perf_counter()
        ours = translate(model, params, corpus.words, sources, n_beams)
        bleu, signature = score(ours, references)
        seconds = time.perf_counter() - begun
        print(f"{named(n_beams)}: BLEU {bleu:.1f} ({signature}) in {seconds:.0f} s", flush=True)
    print(f"\n| German | ours, {named(args.beams)} | reference |\n|---|---|---|")
    for i in np.linspace(0, len(sources) - 1, SHOWN).astype(int):
        print(f"| {sources[i]} | {ours[i]} | {references[i]} |")
    drawn = args.picture is None or draw(args.out, short(sources), args.picture)
    return 0 if bleu > BAR and drawn else 1


def read(folder: Path) -> Corpus:
    """The three parts, and a vocabulary learnt from the first."""
    parts = [parallel(folder / f"{part}.de.gz", folder / f"{part}.en.gz") for part in PARTS]
    texts = [text for pair in parts[0] for text in pair]
    counted = each(texts, "learning byte pairs", "texts")
    return Corpus(train_bpe(counted, VOCAB_SIZE, specials=(PAD, BOS, EOS)), *parts)


def translator(vocab_size: int) -> EncoderDecoder:
    """The model: one table for the tokens of both languages and for the output."""
    attn = AttentionConfig(WIDTH, 4, dropout=DROPOUT)
    block = BlockConfig(attn, FeedForwardConfig(2 * WIDTH), dropout=DROPOUT)
    embed = EmbedConfig(
        vocab_size, WIDTH, WIDTH, max_len=2 * MAX_LEN, scale=WIDTH**0.5, dropout=DROPOUT
    )
    layers = (block,) * N_LAYERS
    return EncoderDecoder(layers, layers, embed, shared_embed=True, head=LMHead(tied=True))


def pairs_of(corpus: Corpus, part: Sequence[tuple[str, str]]) -> Pairs:
    """Batches of about MAX_TOKENS tokens of either language."""
    sources, targets = zip(*part, strict=True)
    options: Any = {"bos_id": corpus.words.bos_id, "eos_id": corpus.words.eos_id}
    return Pairs(
        source_ids(corpus.words, sources),
        [corpus.words.encode(text) for text in targets],
        max_tokens=MAX_TOKENS,
        max_len=MAX_LEN,
        multiple=1,
        **options,
    )


def source_ids(words: Subwords, texts: Sequence[str]) -> list[list[int]]:
    """What the encoder reads: the tokens of a sentence, and its end."""
    assert words.eos_id is not None
    return [[*words.encode(text), words.eos_id] for text in texts]


def trained(model: EncoderDecoder, corpus: Corpus, folder: Path, steps: int) -> State:
    """The state after the last step of a run in `folder`, begun or gone on with."""
    backend = backends.get("numpy")
    source, held_out = (pairs_of(corpus, part) for part in (corpus.train, corpus.validation))
    config = TrainConfig(
        steps, schedule="noam", warmup=WARMUP, ema=EMA, eval_every=source.per_epoch
    )
    optimiser = optim.grouped(optim.Rule("*", "adam", options={"betas": (0.9, 0.98), "eps": 1e-9}))
    schedule = optim.schedules.noam(WIDTH, WARMUP)
    params = model.init(seed=0)
    n_params = sum(leaf.size for leaf in tree.flatten(params).values())
    print(f"{len(corpus.train):,} pairs, {source.per_epoch} batches; {n_params:,} parameters")
    about = {"model": repr(model), "training": repr(config), "data": source.fingerprint()}
    with Run(folder, backend, about, model=model, every=source.per_epoch) as run:
        corpus.words.save(folder)
        state = run.begin(start(params, config, optimiser))
        bar = tqdm(total=steps, initial=state.step, unit="step", disable=None)
        with bar, interruptible() as stopping:
            updates = train(
                loss_of(model, label_smoothing=SMOOTHING, ignore_index=IGNORED),
                state,
                source,
                config,
                backend,
                held_out=list(held_out.held_out()),
                optimiser=optimiser,
                schedule=schedule,
                donate=True,
            )
            for step in run.record(updates, stopping):
                state = step.state
                show(bar, step)
    return state


def show(bar: Any, step: Step) -> None:
    """A step on the bar, and a line for each validation; where there is no bar, more lines."""
    bar.update()
    bar.set_postfix_str(f"loss {step.loss:.3f}", refresh=False)
    if step.validation is not None:
        smoothed = f"validation {step.validation:.3f} with smoothed targets"
        bar.write(f"step {step.step}: {smoothed}, {step.seconds:.0f} s")
    elif bar.disable and step.step % 10 == 0:
        bar.write(f"step {step.step}: loss {step.loss:.3f}, {step.seconds:.0f} s")
    sys.stdout.flush()


def translate(
    model: EncoderDecoder, params: Any, words: Subwords, texts: Sequence[str], n_beams: int
) -> list[str]:
    """The translations of texts, those of about one length together."""
    rows, sentences = source_ids(words, texts), [""] * len(texts)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    options: Any = {"max_new_tokens": MAX_NEW, "stop": (words.eos_id,)}
    for first in each(range(0, len(order), BATCH), f"translating, {named(n_beams)}", "batches"):
        part = order[first : first + BATCH]
        prefix = prefill(model, params, [rows[i] for i in part], start_id=words.bos_id)
        if n_beams == 1:
            ids = generate(model, params, prefix, **options)
        else:
            beams = beam_search(model, params, prefix, n_beams=n_beams, **options)
            ids = [best.ids for best, *_ in beams]
        for i, row in zip(part, ids, strict=True):
            sentences[i] = words.decode(row).strip()
    return sentences


def named(n_beams: int) -> str:
    """How a translation is searched."""
    return "greedy" if n_beams == 1 else f"{n_beams} beams"


def score(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """BLEU by sacrebleu, and its signature."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    result = metric.corpus_score(list(translations), [list(references)])
    return result.score, str(metric.get_signature())


def short(texts: Sequence[str]) -> str:
    """The first sentence of 8 to 12 words, for a picture that can be read."""
    return next(text for text in texts if 8 <= len(text.split()) <= 12)


def draw(folder: Path, text: str, path: Path) -> bool:
    """The cross-attention of the run's model while it translates a text; whether that worked."""
    return xformer(["attention", "--model", str(folder), text, "--out", str(path)]) == 0


if __name__ == "__main__":
    raise SystemExit(main())
