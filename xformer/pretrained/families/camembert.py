"""CamemBERT (arXiv:1911.03894): RoBERTa with a vocabulary for French."""

from __future__ import annotations

from xformer.pretrained.families import roberta

FAMILY = roberta.family("Camembert", vocab_size=30522)
