"""Training: data, the training loop, and runs with checkpoints."""

from xformer.generation.vocabulary import Bytes, Characters
from xformer.training.batch import Batch, Source
from xformer.training.checkpoint import CheckpointError, inspect, load, save
from xformer.training.config import TrainConfig
from xformer.training.corpus import Corpus, CorpusError, unigram_loss
from xformer.training.dashboards import dashboard
from xformer.training.diverged import Diverged
from xformer.training.interrupt import interruptible
from xformer.training.lines import parallel
from xformer.training.loop import Step, evaluate, start, train
from xformer.training.loss import Loss, loss_of, segment_loss_of
from xformer.training.pairs import Pairs
from xformer.training.prepare import load_corpus, prepare
from xformer.training.rows import Rows
from xformer.training.run import Run
from xformer.training.state import State, read_state, write_state
from xformer.training.streams import Streams
from xformer.training.texts import Texts, texts
from xformer.training.token_files import open_corpus
from xformer.training.vocabulary import (
    Subwords,
    Vocabulary,
    load_vocabulary,
    named_vocabulary,
    train_bpe,
)
from xformer.training.windows import Windows

__all__ = [
    "Batch",
    "Bytes",
    "Characters",
    "CheckpointError",
    "Corpus",
    "CorpusError",
    "Diverged",
    "Loss",
    "Pairs",
    "Rows",
    "Run",
    "Source",
    "State",
    "Step",
    "Streams",
    "Subwords",
    "Texts",
    "TrainConfig",
    "Vocabulary",
    "Windows",
    "dashboard",
    "evaluate",
    "inspect",
    "interruptible",
    "load",
    "load_corpus",
    "load_vocabulary",
    "loss_of",
    "named_vocabulary",
    "open_corpus",
    "parallel",
    "prepare",
    "read_state",
    "save",
    "segment_loss_of",
    "start",
    "texts",
    "train",
    "train_bpe",
    "unigram_loss",
    "write_state",
]
