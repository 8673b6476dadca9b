"""The accounts of a training step, against what NumPy allocates and what the system measures."""

from __future__ import annotations

import gc
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import block_config
from libraries import slow_but

from xformer import GPT, Transformer, backends, training, tree
from xformer.backends.numpy.threads import forget_scratch
from xformer.cli import main
from xformer.cli.memory import alike
from xformer.inspection.ledger import Same, ledger, measured_peak, step_loss_of, steps_of
from xformer.inspection.measure import arguments, measured, saved_by_part
from xformer.layers import EmbedConfig, ExpertsConfig, RelativeConfig, RopeConfig
from xformer.models import Classifier, EncoderDecoder, LanguageModel, LMHead
from xformer.ops import RandomKey
from xformer.training import TrainConfig
from xformer.training.loop import start, train

NUMPY = backends.get("numpy")
SIZES: dict[str, Any] = {"vocab_size": 256, "n_layers": 3, "d_model": 64, "n_heads": 4}
BLOCK: dict[str, Any] = {"d_model": 64, "n_heads": 4, "d_ff": 96}
PLAIN = EmbedConfig(300, 64, 64, positions="none")
T5 = block_config(**BLOCK, norm="rms", bias=False, dropout=0.1)
EXPERTS = block_config(**BLOCK, experts=ExpertsConfig(n_experts=4, top_k=2, d_ff=48))
SOURCE = EmbedConfig(300, 64, 64, max_len=64)

MODELS = {
    "GPT": GPT(**SIZES, max_len=64),
    "dropout": GPT(**SIZES, max_len=64, dropout=0.1),
    "large vocabulary": GPT(**SIZES | {"vocab_size": 4000, "n_layers": 2}, max_len=64),
    "in chunks": GPT(**SIZES | {"vocab_size": 12_000, "n_layers": 2}, max_len=64),
    "in chunks, untied": GPT(**SIZES | {"vocab_size": 6_000}, max_len=64, tied=False),
    "deep": GPT(**SIZES | {"n_layers": 8}, max_len=64),
    "checkpoint": GPT(**SIZES | {"n_layers": 8}, max_len=64, activation_checkpointing=True),
    "reversible": GPT(**SIZES | {"n_layers": 8}, max_len=64, reversible=True),
    "segment memory": GPT(**SIZES, max_len=64, positions="xl", memory_len=100),
    "large segment memory": GPT(
        **SIZES | {"n_layers": 2}, max_len=64, positions="xl", memory_len=600
    ),
    "two kinds of layers": LanguageModel(
        PLAIN,
        (
            block_config(**BLOCK, n_kv_heads=2, gated=True, activation="silu", norm="rms"),
            block_config(**BLOCK, window=(8, None)),
        )
        * 2,
        rotary=RopeConfig(16),
    ),
    "experts": LanguageModel(
        PLAIN,
        (EXPERTS, block_config(**BLOCK), EXPERTS),
        load_balancing_weight=0.01,
        router_z_weight=0.01,
    ),
    "shared": LanguageModel(PLAIN, (block_config(**BLOCK),) * 4, n_shared_layer_groups=2),
    "RoPE by layer": LanguageModel(
        PLAIN, (block_config(**BLOCK),) * 3, rotary=(RopeConfig(16), None, RopeConfig(16, 9.0))
    ),
    "classes": LanguageModel(
        SOURCE, (block_config(**BLOCK),) * 3, causal=False, head=Classifier(5)
    ),
    "T5": EncoderDecoder(
        (T5,) * 2,
        (T5,) * 3,
        EmbedConfig(300, 64, 64, positions="none", dropout=0.1),
        shared_embed=True,
        encoder_relative_bias=RelativeConfig(4),
        decoder_relative_bias=RelativeConfig(4),
        head=LMHead(tied=True),
    ),
    "Transformer": Transformer(300, 300, 64, 4, 2, 2, 64, dropout=0.1, shared_memory=True),
    "Transformer, in chunks": Transformer(300, 5_000, 64, 4, 1, 1, 64),
}
BATCH, LENGTH = 16, 48


def whole(array: np.ndarray) -> np.ndarray:
    """The array that this one views."""
    return array if array.base is None else whole(array.base)


def traced_peak(model: Any, batch: int, length: int, **options: Any) -> int:
    """The bytes that Python and NumPy allocated at most in some steps of the training loop."""
    source = Same(arguments(model, batch, length, "float32")[1])
    config = TrainConfig(steps_of(model, length), batch_size=batch, **options)
    loss = step_loss_of(model)
    gc.collect()
    forget_scratch()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        state = [
            start(model.init(), config, loss=loss)
        ]  # handed over, so that nothing here keeps it
        for _ in train(loss, state.pop(), source, config, NUMPY, donate=True):
            pass
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


QUICK = ("GPT", "dropout", "two kinds of layers", "experts", "T5")  # tracing memory takes long


@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_the_peak_is_what_is_allocated(name: str) -> None:
    found = ledger(MODELS[name], batch=BATCH, length=LENGTH)
    assert found.peak == pytest.approx(traced_peak(MODELS[name], BATCH, LENGTH), rel=0.06)


def test_of_a_tied_table_there_are_three_in_the_end() -> None:
    """The gradients of its two uses, and their sum."""
    large = GPT(6000, 1, 64, 4, 16)
    for batch in (1, 8):
        found = ledger(large, batch=batch, length=16)
        assert found.peak == pytest.approx(traced_peak(large, batch, 16), rel=0.02)


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "lion", "adafactor", "muon"])
def test_of_every_optimiser_too(optimiser: str) -> None:
    """At one short sequence, where the update takes most, unless it writes over all."""
    wide = GPT(256, 3, 192, 4, 16)
    found = ledger(wide, batch=1, length=8, optimiser=optimiser)
    assert (found.update > found.backward) == (optimiser != "adam")
    assert found.peak == pytest.approx(traced_peak(wide, 1, 8, optimiser=optimiser), rel=0.06)


def test_the_state_is_that_of_the_optimiser() -> None:
    params = MODELS["GPT"].init()
    for optimiser in ("sgd", "adamw", "adafactor", "muon"):
        found = ledger(MODELS["GPT"], batch=1, length=4, optimiser=optimiser)
        own = TrainConfig(1, optimiser=optimiser).chosen_optimiser().init(params)
        assert found.state == tree.nbytes(own), optimiser
        assert found.params == found.grads == tree.nbytes(params)


@pytest.mark.parametrize("name", MODELS)
def test_the_saved_set_is_all_that_is_saved(name: str) -> None:
    network = MODELS[name]
    parts = saved_by_part(network, BATCH, LENGTH, "float32")
    assert sum(parts.values()) == measured(network, BATCH, LENGTH, "float32").saved


def test_a_layer_is_charged_what_its_cache_holds() -> None:
    """Each array once, of no parameter: x, which two caches of a layer hold, is one array."""
    model = MODELS["GPT"]
    params, tokens = model.init(), np.zeros((BATCH, LENGTH), np.int64)
    _, cache = model.loss(params, tokens, tokens, dropout_key=RandomKey(0))
    own = {id(leaf) for leaf in tree.flatten(params).values()}
    found = ledger(model, batch=BATCH, length=LENGTH).saved
    assert list(found) == [
        "embedding", "layer 0", "layer 1", "layer 2", "around the layers", "head", "loss",
    ]  # fmt: skip
    seen: set[int] = set()
    for i, block in enumerate(cache.model.hidden.stack.blocks):
        arrays = [a for a in tree.flatten(block).values() if isinstance(a, np.ndarray)]
        leaves = {id(a): a for a in map(whole, arrays)}
        new = [a for key, a in leaves.items() if key not in own | seen]
        # Views of parameters, reshaped, are no memory.
        weights = list(tree.flatten(params).values())
        new = [a for a in new if not any(np.may_share_memory(a, w) for w in weights)]
        seen |= leaves.keys()
        assert found[f"layer {i}"] == tree.nbytes(new)
    assert found["loss"] > BATCH * LENGTH * 256 * 4  # the logits, and some for each token


def test_checkpointing_leaves_a_layer_its_input() -> None:
    plain, spare = (
        ledger(GPT(**SIZES, max_len=64, activation_checkpointing=c), batch=BATCH, length=LENGTH)
        for c in (False, True)
    )
    assert spare.saved["layer 1"] == BATCH * LENGTH * 64 * 4
    assert spare.saved["layer 1"] < plain.saved["layer 1"] / 10
    assert spare.layer_work > plain.layer_work  # the layer that runs again
    assert spare.peak < plain.peak


@pytest.mark.slow
def test_of_a_large_model_only_a_layer_is_made() -> None:
    gpt = GPT(1000, 48, 256, 4, 64)
    tracemalloc.start()
    found = ledger(gpt, batch=1, length=8)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.update > 4 * 4 * 48 * 12 * 256**2
    assert most < found.update / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "length"),
    [
        (GPT(256, 4, 128, 4, 128), 8, 128),
        (GPT(256, 4, 128, 4, 128, dropout=0.1), 8, 128),
        (GPT(5000, 2, 256, 4, 64), 8, 64),
        (GPT(20_000, 2, 64, 4, 128), 16, 128),
        (GPT(5000, 4, 512, 8, 64), 1, 32),
        (GPT(65, 6, 384, 6, 256), 4, 256),
        (GPT(65, 6, 384, 6, 256, activation_checkpointing=True), 4, 256),
        (Transformer(2000, 2000, 256, 4, 3, 3, 64, dropout=0.1), 16, 32),
    ],
    ids=[
        *("small", "dropout", "vocabulary", "chunks", "wide", "char-GPT", "char-GPT again"),
        "Transformer",
    ],
)
def test_a_process_that_trains_takes_as_much(model: Any, batch: int, length: int) -> None:
    peak = measured_peak(model, batch=batch, length=length)
    if peak is None:
        pytest.skip("this system does not tell the memory of a process")
    assert ledger(model, batch=batch, length=length).peak == pytest.approx(peak, rel=0.1)


def test_the_command_prints_the_accounts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS["GPT"]
    training.save(tmp_path / "gpt", model, model.init(), NUMPY)
    command = ["memory", "--model", str(tmp_path / "gpt"), "--batch", "16", "--seq-len", "64"]
    assert main([*command, "--measure"]) == 0
    printed, said = capsys.readouterr()
    assert "layers 0-2" in printed and "each" in printed and "peak" in printed
    assert said == "measuring: training for a few steps\n"
    if NUMPY.memory().peak is not None:  # which not every system tells
        row = r"^  measured +[\d.]+ MB  the items above explain (\d+)\.\d% of it$"
        (share,) = re.findall(row, printed, re.MULTILINE)
        assert 90 < int(share) < 105
    assert main([*command, "--activation-checkpointing", "--optimiser", "lion", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    spare = GPT(**SIZES, max_len=64, activation_checkpointing=True)
    wanted = ledger(spare, batch=16, length=64, optimiser="lion")
    assert found["saved"] == wanted.saved and found["optimiser"] == "lion"
    assert found["peak"] == pytest.approx(wanted.peak, rel=0.01)
    assert found["measured"] is None


def test_layers_that_keep_as_much_are_one_row() -> None:
    saved = {"embedding": 0, "layer 0": 3, "layer 1": 2, "layer 2": 2, "layer 3": 3, "head": 1}
    assert list(alike(saved)) == [("layers 0, 3", 3), ("layers 1-2", 2), ("head", 1)]


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    gpt = MODELS["GPT"]
    for options, message in (
        ({"batch": 0, "length": 8}, "ledger: batch must be an int of at least 1, got 0"),
        ({"batch": 1, "length": 8, "dtype": "float16"}, "dtype must be float32 or float64"),
        ({"batch": 1, "length": 8, "optimiser": "sgdm"}, "optimiser must be one of sgd, "),
    ):
        for function in (ledger, measured_peak):
            with pytest.raises(ValueError, match=message):
                function(gpt, **options)
    bare = LanguageModel(PLAIN, (block_config(**BLOCK),), head=None)
    with pytest.raises(ValueError, match="the model must have a loss"):
        ledger(bare, batch=1, length=8)


def test_a_process_that_fails_says_why() -> None:
    """A length beyond the positions, which only the process finds out."""
    with pytest.raises(RuntimeError, match="the process that trains failed: ValueError: embed"):
        measured_peak(MODELS["GPT"], batch=1, length=65)
