"""The examples of the pages on embeddings and retrieval run, with small random models.

`test_embed` and `test_search` compare the outputs that are shown, with the real MiniLM.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from sentences import BERT, TEXTS, write, write_model
from test_colbert import write_stanford
from test_rank import CROSS
from test_splade import write_splade
from test_tag import TAGGER

from xformer.cli import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = r"```(python|sh)\n(.*?)```"
INSTALL = "python3 -m venv"


def write_folders(folder: Path) -> None:
    """The models and texts that the pages name."""
    names = ("all-MiniLM-L6-v2", "ms-marco-MiniLM-L6-v2", "bert-base-NER")
    embedder, ranker, tagger = (folder / name for name in names)
    splade, colbert = folder / "splade-model", folder / "colbert-model"
    for path in (embedder, ranker, tagger, splade, colbert, folder / "notes"):
        path.mkdir()
    write_model(embedder, BERT, "float32")
    prompts = {"query": "query: ", "passage": "passage: "}
    write(embedder, config_sentence_transformers={"prompts": prompts})
    write_model(ranker, CROSS, "float32")
    write_model(tagger, TAGGER, "float32")
    write_splade(splade)
    write_stanford(colbert)
    (folder / "documents.txt").write_text("\n".join(TEXTS))
    (folder / "notes" / "a.txt").write_text("\n\n".join(TEXTS))


@pytest.mark.parametrize(("page", "n"), [("sentence-embeddings.md", 8), ("retrieval.md", 5)])
@pytest.mark.filterwarnings("ignore:(colbert|splade|rank). cut to")
def test_the_examples_run(
    page: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"texts": TEXTS, "documents": TEXTS, "queries": TEXTS[:2]}
    blocks = re.findall(BLOCK, (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    blocks = [(kind, code) for kind, code in blocks if not code.startswith(INSTALL)]
    assert len(blocks) == n
    for kind, code in blocks:
        if kind == "python":
            exec(code, namespace)
        else:
            program, *command = shlex.split(code)
            assert program == "xformer" and main(command) == 0, code
    if page == "retrieval.md":
        assert namespace["scores"].shape == (1, len(TEXTS))
