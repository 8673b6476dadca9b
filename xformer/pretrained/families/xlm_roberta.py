"""XLM-RoBERTa (arXiv:1911.02116): RoBERTa with a vocabulary for a hundred languages."""

from __future__ import annotations

from xformer.pretrained.families import roberta

FAMILY = roberta.family("XLMRoberta", vocab_size=30522)
