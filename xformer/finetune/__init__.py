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

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.finetune import lora as lora
    from xformer.finetune import peft as peft
    from xformer.finetune.base_task import Task as Task
    from xformer.finetune.classifier_head import is_classifier as is_classifier
    from xformer.finetune.classifier_head import labels_in as labels_in
    from xformer.finetune.classifier_head import with_classifier as with_classifier
    from xformer.finetune.contrastive import contrastive_loss as contrastive_loss
    from xformer.finetune.data import Record as Record
    from xformer.finetune.data import read as read
    from xformer.finetune.data import split as split
    from xformer.finetune.loop import evaluate as evaluate
    from xformer.finetune.loop import run as run
    from xformer.finetune.loop import train as train
    from xformer.finetune.measures import measure as measure
    from xformer.finetune.saving import save as save
    from xformer.finetune.tasks import TASKS as TASKS
    from xformer.finetune.tasks import examples as examples
    from xformer.finetune.tasks import suited as suited
    from xformer.finetune.tasks import task as task
    from xformer.training import TrainConfig as TrainConfig

later(__name__)
