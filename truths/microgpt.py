"""microgpt (Andrej Karpathy, 2026), with this library's layers and optimiser.

A GPT of 4,192 parameters learns names for 1,000 steps of Adam and then invents 20. Its losses and
names were published for one seed of Python's `random`; here they come out again, in float64, to
1e-9. In a checkout, with names.txt in a folder (without it the script says where to get it):

    XFORMER_DATA=folder python truths/microgpt.py
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
from needed import DATA, require_files

from xformer import optim, tree
from xformer.cli.progress import each
from xformer.layers import AttentionConfig, BlockConfig, EmbedConfig, FeedForwardConfig, NormConfig
from xformer.models import LanguageModel, LMHead

STEPS, CONTEXT, WIDTH, N_HEADS = 1000, 16, 16, 4
N_SAMPLES, TEMPERATURE = 20, 0.5
LOSSES = {
    1: 3.365966947584851,
    2: 3.424272783871772,
    3: 3.177802125458052,
    STEPS: 2.6496944697407576,
}
NAMES = (
    "kamon ann karai jaire vialan karia yeran anna areli kaina "
    "konna keylen liole alerin earan lenne kana lara alela anton"
)


def main() -> int:
    """Train, write names, and compare both with what was published."""
    require_files(DATA, "names.txt")
    start = time.perf_counter()
    losses, samples = replay((DATA / "names.txt").read_text(encoding="utf-8"))
    seconds = time.perf_counter() - start
    furthest = max(abs(losses[step - 1] - loss) for step, loss in LOSSES.items())
    for step in LOSSES:
        print(f"step {step:4}  loss {losses[step - 1]:.12f}")
    print(f"{STEPS} losses in {seconds:.2f} s; these are at most {furthest:.1e} from the published")
    print(f"{N_SAMPLES} names: {', '.join(samples)}")
    same = " ".join(samples) == NAMES
    print(f"the names are{'' if same else ' not'} those published")
    return 0 if same and furthest <= 1e-9 else 1


def replay(text: str) -> tuple[list[float], list[str]]:
    """The losses of all steps and the names after them; draws in the order that was published."""
    rng = random.Random(42)
    documents = [line.strip() for line in text.splitlines() if line.strip()]
    rng.shuffle(documents)
    letters = sorted(set("".join(documents)))
    model = microgpt(len(letters) + 1)
    losses, params = train(model, initial(model, rng), documents, letters)
    return losses, [sample(model, params, letters, rng) for _ in range(N_SAMPLES)]


def microgpt(vocab_size: int) -> LanguageModel:
    """One layer, RMSNorm before each sublayer and after the embedding, none at the end."""
    attn = AttentionConfig(WIDTH, N_HEADS, bias=False)
    ffn = FeedForwardConfig(4 * WIDTH, bias=False)
    block = BlockConfig(attn, ffn, NormConfig("rms"))
    norm = NormConfig("rms")
    embed = EmbedConfig(vocab_size, WIDTH, WIDTH, CONTEXT, positions="learned", norm=norm)
    return LanguageModel(embed, (block,), final_norm=False, head=LMHead(tied=False))


def initial(model: LanguageModel, rng: random.Random) -> Any:
    """Weights drawn as (O, I), row by row; the norms have none, so their ones are frozen."""

    def draw(n_out: int, n_in: int) -> np.ndarray:
        return np.array([[rng.gauss(0, 0.08) for _ in range(n_in)] for _ in range(n_out)])

    assert model.embed is not None
    tables = {
        "embed.table": draw(model.embed.vocab_size, WIDTH),
        "embed.positions": draw(CONTEXT, WIDTH),
    }
    block = "stack.blocks.0"
    for name, n_out, n_in in (
        ("head.w", model.embed.vocab_size, WIDTH),
        (f"{block}.attn.q.w", WIDTH, WIDTH),
        (f"{block}.attn.kv.k.w", WIDTH, WIDTH),
        (f"{block}.attn.kv.v.w", WIDTH, WIDTH),
        (f"{block}.attn.o.w", WIDTH, WIDTH),
        (f"{block}.ffn.up.w", 4 * WIDTH, WIDTH),
        (f"{block}.ffn.down.w", WIDTH, 4 * WIDTH),
    ):
        tables[name] = draw(n_out, n_in).T
    ones = model.init(dtype="float64")
    drawn = tree.unflatten(ones, tree.flatten(ones) | tables)
    return tree.freeze(drawn, "*norm.w")


def train(
    model: LanguageModel, params: Any, documents: list[str], letters: list[str]
) -> tuple[list[float], Any]:
    """The losses of all steps, one document each, and the parameters after them."""
    bos, losses = len(letters), []
    state = optim.adam_init(tree.trained(params))
    for step in each(range(STEPS), "training", "steps"):
        document = documents[step % len(documents)]
        ids = [bos, *map(letters.index, document), bos][: CONTEXT + 1]
        tokens = np.array([ids], np.int64)
        loss, cache = model.loss(params, tokens[:, :-1], tokens[:, 1:])
        lr = 0.01 * (1 - step / STEPS)
        trained, state = optim.adam(
            tree.trained(params), cache.backward(), state, lr=lr, betas=(0.85, 0.99), eps=1e-8
        )
        params = tree.join(params, trained)
        losses.append(float(loss))
    return losses, params


def sample(model: LanguageModel, params: Any, letters: list[str], rng: random.Random) -> str:
    """A name: letters drawn one after another, until one that ends it."""
    bos = len(letters)
    state, token, name = model.init_state(), bos, ""
    for _ in range(CONTEXT):
        logits, state = model.decode(params, np.array([[token]], np.int64), state)
        scores = logits[0] / TEMPERATURE
        exps = np.exp(scores - scores.max())
        (token,) = rng.choices(range(bos + 1), weights=list(exps / exps.sum()))
        if token == bos:
            break
        name += letters[token]
    return name


if __name__ == "__main__":
    raise SystemExit(main())
