"""Training: data, the training loop, and runs with checkpoints."""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.generation.characters import Bytes as Bytes
    from xformer.generation.characters import Characters as Characters
    from xformer.training.batch import Batch as Batch
    from xformer.training.batch import Source as Source
    from xformer.training.checkpoint import CheckpointError as CheckpointError
    from xformer.training.checkpoint import inspect as inspect
    from xformer.training.checkpoint import load as load
    from xformer.training.checkpoint import save as save
    from xformer.training.config import TrainConfig as TrainConfig
    from xformer.training.corpus import Corpus as Corpus
    from xformer.training.corpus import CorpusError as CorpusError
    from xformer.training.corpus import unigram_loss as unigram_loss
    from xformer.training.dashboards import dashboard as dashboard
    from xformer.training.diverged import Diverged as Diverged
    from xformer.training.interrupt import interruptible as interruptible
    from xformer.training.lines import parallel as parallel
    from xformer.training.loop import Step as Step
    from xformer.training.loop import evaluate as evaluate
    from xformer.training.loop import start as start
    from xformer.training.loop import train as train
    from xformer.training.loss import Loss as Loss
    from xformer.training.loss import loss_of as loss_of
    from xformer.training.loss import segment_loss_of as segment_loss_of
    from xformer.training.pairs import Pairs as Pairs
    from xformer.training.prepare import load_corpus as load_corpus
    from xformer.training.prepare import prepare as prepare
    from xformer.training.run import Run as Run
    from xformer.training.shuffled import Rows as Rows
    from xformer.training.state import State as State
    from xformer.training.state import read_state as read_state
    from xformer.training.state import write_state as write_state
    from xformer.training.streams import Streams as Streams
    from xformer.training.texts import Texts as Texts
    from xformer.training.texts import texts as texts
    from xformer.training.token_files import open_corpus as open_corpus
    from xformer.training.vocabulary import Subwords as Subwords
    from xformer.training.vocabulary import Vocabulary as Vocabulary
    from xformer.training.vocabulary import load_vocabulary as load_vocabulary
    from xformer.training.vocabulary import named_vocabulary as named_vocabulary
    from xformer.training.vocabulary import train_bpe as train_bpe
    from xformer.training.windows import Windows as Windows

later(__name__)
