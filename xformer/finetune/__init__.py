"""Fine-tuning of pretrained models, with all parameters or LoRA adapters.

model, params = pretrained.load("SmolLM2-135M")
words = tokenizer("SmolLM2-135M")
task = finetune.task("prefix", model, words)
examples = finetune.examples(task, finetune.read("answers.jsonl", task.fields))
params = finetune.lora.attach(params, rank=8, alpha=16)
for step in finetune.train(task, params, examples, finetune.TrainConfig(200, 8), backend):
    print(step.loss)
finetune.save(model, step.params, "tuned", tokenizer=words, base="SmolLM2-135M")
"""

from xformer.finetune import lora, peft
from xformer.finetune.base import Task
from xformer.finetune.contrastive import contrastive_loss
from xformer.finetune.data import Record, read, split
from xformer.finetune.heads import is_classifier, labels_in, with_classifier
from xformer.finetune.loop import evaluate, run, train
from xformer.finetune.measures import measure
from xformer.finetune.saving import save
from xformer.finetune.tasks import TASKS, examples, suited, task
from xformer.training import TrainConfig

__all__ = [
    "TASKS",
    "Record",
    "Task",
    "TrainConfig",
    "contrastive_loss",
    "evaluate",
    "examples",
    "is_classifier",
    "labels_in",
    "lora",
    "measure",
    "peft",
    "read",
    "run",
    "save",
    "split",
    "suited",
    "task",
    "train",
    "with_classifier",
]
