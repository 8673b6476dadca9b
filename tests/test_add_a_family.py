"""docs/add-a-family.md: its code runs, its extracts are those of the file, its tables are whole."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from xformer import layers, models
from xformer.pretrained import config, family, names, rope

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "add-a-family.md").read_text(encoding="utf-8")
FAMILY = (ROOT / "xformer/pretrained/families/gpt_neox.py").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXTRACTS = [code for code in CODE if code in FAMILY]


def test_the_family_is_shown() -> None:
    shown = "".join(EXTRACTS)
    assert all(part in shown for part in ("BlockConfig(", "fused(", "FAMILY = Family("))


@pytest.mark.parametrize(
    "kind",
    [
        layers.BlockConfig,
        layers.AttentionConfig,
        layers.GatedDeltaNetConfig,
        layers.LatentAttentionConfig,
        layers.FeedForwardConfig,
        layers.ExpertsConfig,
        layers.NormConfig,
        layers.EmbedConfig,
        models.LanguageModel,
    ],
    ids=lambda k: k.__name__,
)
def test_every_option_is_in_a_table(kind: Any) -> None:
    table = PAGE.split(f"([`{kind.__name__}`](")[1].split("\n\n")[1]
    named = {
        name for row in table.splitlines() for name in re.findall("`(.+?)`", row.split("|")[1])
    }
    fields = {field.name for field in dataclasses.fields(kind)}
    others = {
        "hf_config",
        "generation_config",
        "activation_checkpointing",
    }  # none is the family's to say
    assert named == fields - others


@pytest.mark.parametrize(
    "kind",
    [
        *(models.LMHead, models.MaskedLMHead, models.Classifier, models.TokenClassifier),
        *(models.Discriminator, models.Pooler),
    ],
    ids=lambda k: k.__name__,
)
def test_every_head_is_named_with_its_options(kind: Any) -> None:
    options = ", ".join(field.name for field in dataclasses.fields(kind))
    assert f"`{kind.__name__}({options})`" in PAGE


def test_helpers_exist() -> None:
    """What the page says that a family imports."""
    for room, helpers in (
        (names, ("same", "linear", "norm", "attention", "fused", "experts", "Link")),
        (family, ("activation", "rate", "layers", "decoder_head")),
        (config, ("HARMLESS", "NEUTRAL")),
        (rope, ("rope",)),
        (config.Config, ("integer", "number", "flag", "text")),
        (config.Config, ("integers", "numbers", "texts", "sub", "only", "ignore")),
    ):
        assert [name for name in helpers if not hasattr(room, name)] == []
        assert [name for name in helpers if not re.search(rf"`(c\.)?{name}\b", PAGE)] == []
