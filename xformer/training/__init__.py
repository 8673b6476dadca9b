"""Training: text, the loop, checkpoints."""

from xformer.training.checkpoint import CheckpointError, inspect, load, save
from xformer.training.data import Corpus, load_corpus, unigram_loss
from xformer.training.loop import Step, TrainConfig, evaluate, train

__all__ = [
    "CheckpointError",
    "Corpus",
    "Step",
    "TrainConfig",
    "evaluate",
    "inspect",
    "load",
    "load_corpus",
    "save",
    "train",
    "unigram_loss",
]
