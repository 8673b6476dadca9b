"""Every page runs: block after block, with the packages that it names and no others.

A page is run in a new folder by `pages.run`, and each block must print what the page shows after
it. What takes long is shortened by the table below, which also has what else must hold.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pages
import pytest
from truths import minilm, published

STEPS = "--preset tiny --steps 4 --batch 2 "
TRAIN = {"xformer train ": f"xformer train {STEPS}"}


class Page(NamedTuple):
    """How a page is run.

    folder: what a reader brings: names of published files, and functions that write into a folder
    small: code that takes long, and what is run instead
    apart: words of blocks that are left out if one of these packages is not installed here
    exact: numbers must be those that are shown; if not, they may be off by a twentieth
    then: an expression whose value `check` gets, after all that was printed
    """

    folder: tuple[str | Callable[[Path], Any], ...] = ()
    small: dict[str, str] = {}  # noqa: RUF012 - never changed
    apart: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - never changed
    exact: bool = True
    slow: bool = False
    then: str = ""
    check: Callable[[str, Any], None] = lambda printed, value: None


# ---- What a reader brings ----


def minilm_folder(folder: Path) -> None:
    (folder / "all-MiniLM-L6-v2").symlink_to(minilm())


def books(folder: Path) -> None:
    for name in ("books", "poems"):
        (folder / name).mkdir()
        for i in range(12):
            (folder / name / f"{i}.txt").write_text(f"{i} apples fell from the old tree. " * 30)


def notes(folder: Path) -> None:
    """The three files that docs/retrieval.md searches."""
    texts = {
        "house.md": "# Keys\n\nThe key to the cellar hangs behind the kitchen door.\n\n"
        "# Rules\n\nBicycles must not be left in the stairwell.\n",
        "garden/summer.txt": "Water the tomatoes in the evening, never at noon.\n\n"
        "The hose is in the shed.\n",
        "health.txt": "The dentist has moved to Station Road.\n",
    }
    for name, text in texts.items():
        path = folder / "notes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def smollm(folder: Path) -> None:
    """A small causal model under the name of a published one."""
    import finetuning

    config = finetuning.LLAMA | {"max_position_embeddings": 256, "vocab_size": 256}
    finetuning.write_folder(folder / "SmolLM2-135M", config, "llama")


def t5(folder: Path) -> None:
    import finetuning

    finetuning.write_folder(folder / "t5-small", finetuning.T5, "t5")


def answers(folder: Path) -> None:
    import finetuning

    records = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}."} for i in range(20)]
    finetuning.write_lines(folder / "answers.jsonl", records)


def rankers(folder: Path) -> None:
    """Models that rank, tag and have prompts, and texts to rank."""
    import sentences
    from test_rank import CROSS
    from test_tag import TAGGER

    names = ("ms-marco-MiniLM-L6-v2", "bert-base-NER", "Qwen3-Embedding-0.6B")
    for name, config in zip(names, (CROSS, TAGGER, sentences.BERT), strict=True):
        (folder / name).mkdir()
        sentences.write_model(folder / name, config, "float32")
    prompts = {"prompts": {"query": "query: ", "document": ""}}
    sentences.write(folder / names[-1], config_sentence_transformers=prompts)
    (folder / "documents.txt").write_text("\n".join(sentences.TEXTS))


def pairs(folder: Path) -> None:
    """Texts to rank, and the table that docs/retrieval.md shows, longer."""
    page = pages.text_of("docs/retrieval.md")
    (table,) = re.findall(r"```text\n(query,document,score\n.*?)```", page, re.DOTALL)
    (folder / "pairs.csv").write_text(table + "".join(table.splitlines(keepends=True)[1:]) * 2)
    (folder / "documents.txt").write_text("Crates are nailed shut.\nIt has twelve cylinders.\n")


def sparse(folder: Path) -> None:
    from test_colbert import write_stanford
    from test_splade import write_splade

    for name, write in (("splade-model", write_splade), ("colbert-model", write_stanford)):
        (folder / name).mkdir()
        write(folder / name)


def run_of_gpt(folder: Path) -> None:
    """A run of `xformer train`, as the first command of the README makes one."""
    from xformer.cli import main

    run = folder / "runs/gpt"
    assert main(["train", *STEPS.split(), "--out", str(run)]) == 0


# ---- What must hold beside what is shown ----


def the_readme(printed: str, loss: float) -> None:
    assert loss < 3.5  # from 5.5, the logarithm of 256
    assert "gradients agree" in printed
    (shown,) = re.findall(r"# (gelu on numpy: .*)", pages.text_of("README.md"))
    assert "kernels.activations" not in printed or shown in printed


def the_lesson(printed: str, found: Any) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", printed)]
    assert abs(losses[0] - 3.3) < 1 and losses[-1] < 2.4
    letters, off, loss_off = found
    invented = printed.splitlines()[-2].split()
    assert len(invented) == 10 and set("".join(invented)) <= set(letters)
    assert off < 1e-12 and loss_off < 1e-12


def the_backward(printed: str, value: None) -> None:
    assert printed.startswith("stack.blocks.0.ffn (16, 16, 16) |dy| ")
    told = pages.text_of("docs/backward.md").partition("```text\n")[2].partition("```")[0]
    assert re.findall("^ready: .*$", printed, re.M) == told.splitlines()
    rows = dict(re.findall(r"^(\w+) +(layer 0 .*)$", printed, re.MULTILINE))
    numbers = {name: re.findall(r"layer \d ([\d.]+)", row) for name, row in rows.items()}
    assert numbers.keys() == {"plain", "without", "stopped", "louder"}
    assert numbers["without"][1] == "0.0000"
    assert numbers["without"][0] == numbers["stopped"][0] != numbers["plain"][0]
    assert numbers["stopped"][1] == numbers["plain"][1] == numbers["louder"][1]
    assert "the same bits: True\n" in printed
    losses = re.search(r"loss ([\d.]+), after the gradient ([\d.]+), after K-FAC ([\d.]+)", printed)
    assert losses is not None
    before, gradient, natural = map(float, losses.groups())
    assert natural < gradient < before


def private_training(printed: str, found: Any) -> None:
    """Six steps; the epsilon of all steps is that of the page."""
    ((one, alone),) = re.findall(r"the first norm: ([\d.]+), alone ([\d.]+)", printed)
    assert one == alone
    page = pages.text_of("docs/private-training.md")
    spent = dict(re.findall(r"^noise ([\d.]+): .*, epsilon ([\d.]+)$", page, re.MULTILINE))
    epsilons, curves = found
    assert {noise: f"{epsilon:.2f}" for noise, epsilon in epsilons.items()} == spent
    assert [len(curve) for curve in curves] == [6, 6, 6]
    assert curves[0][-1] < curves[0][0]
    assert printed.endswith("the norms of each example alone: True\n")


def attribution(printed: str, errors: list[float]) -> None:
    """The last layer's input is nearest: after it there are only a few steps."""
    assert errors[-1] == min(errors) < 0.02


def the_derivatives(printed: str, curves: list[list[float]]) -> None:
    errors = [float(e) for e in re.findall(r"(?:along v:|differ by) (\S+)", printed)]
    assert len(errors) == 2 and max(errors) < 1e-12
    assert "layer_norm: gradients agree (relative error at most 1e-12)" in printed
    # Both begin at the same sharpness, and come near 2 / lr.
    rates, starts, ends = zip(*curves, strict=True)
    assert starts[0] == starts[1] == pytest.approx(6.14, abs=0.1)
    assert ends == pytest.approx([2 / lr for lr in rates], rel=0.25)
    (least, _), (convex, largest) = (
        [float(x) for x in re.findall(r"-?[\d.]+", line)]
        for line in re.findall(r"^(?:Hessian|Gauss-Newton) \[(.*)\]", printed, re.MULTILINE)
    )
    assert least < -1 < -0.1 < convex < largest
    if importlib.util.find_spec("torch"):
        assert printed.rstrip().endswith("True")


def the_rounding(printed: str, found: Any) -> None:
    """Two formats, 40 steps: what the page says of them holds."""
    plain, last = found
    # Gradients below 2^-10 are 0 in E4M3, unless the loss is scaled.
    assert last["float8_e4m3, operands of matmuls"] > plain + 0.4
    assert last["float8_e4m3, operands, loss x 256"] < plain + 0.1
    # A block of four bits has a scale of its own.
    assert last["mxfp4, operands of matmuls"] < plain + 0.1
    # Small updates of four-bit weights are lost, unless they are rounded at random.
    assert last["mxfp4, weights, to nearest"] > plain + 0.4
    assert last["mxfp4, weights, stochastically"] < last["mxfp4, weights, to nearest"] - 0.2
    assert "float32: 5.07" in printed


def without_norm(printed: str, found: Any) -> None:
    """What the page says of five models holds for small ones too."""
    losses, activations, gradients = (
        {kind: np.array(each[i]) for kind, each in found.items()} for i in range(3)
    )
    for kind in ("ReZero", "Fixup"):
        assert (activations[kind] == activations[kind][0]).all()
    assert activations["no norms, plain"][-1] > 100 * activations["Fixup"][-1]
    assert gradients["no norms, plain"][0] > 1e3 * gradients["pre-LN"][0]
    np.testing.assert_allclose(gradients["Fixup"], gradients["Fixup"].mean(), rtol=0.2)
    plain, rezero = losses.pop("no norms, plain"), losses.pop("ReZero")
    assert plain[0] > 1000 and plain[-5:].mean() > 50
    assert rezero[0] < 6 and rezero[-5:].mean() < rezero[0] - 0.3
    for kind, each in losses.items():
        assert each[0] < 6 and each[-5:].mean() < 4.5, kind
        assert each[-5:].mean() < rezero[-5:].mean() - 0.2, kind


def an_onnx_step(printed: str, value: None) -> None:
    first, last = re.findall(r"loss (\S+), norm", printed)
    assert float(first) == pytest.approx(4.5, abs=0.1) and float(last) < 0.6 * float(first)


# ---- All pages ----

STORIES = ("stories260K.bin", "tok512.bin")
ROUNDING = {
    'FORMATS, STEPS = ("bfloat16", "float8_e5m2", "float8_e4m3", "mxfp4"), 200': (
        'FORMATS, STEPS = ("float8_e4m3", "mxfp4"), 40'
    ),
    '    "every result, loss x 256": {"rounds": "results", "scale": 256.0},\n': "",
}
MPI = {f"mpiexec -n {n} xformer": "xformer" for n in (2, 4)}
SHARED = {
    "mpiexec -f hosts -n 8 xformer": "xformer",
    "srun --mpi=pmi2 xformer": "xformer",
    "/shared/books": "books",
    "/shared/runs/books": "shared",
    "world = nccl.world()": "assert nccl.world",
}
CHECK = "xformer exercise softmax --check "

PAGES: dict[str, Page] = {
    "README.md": Page(
        (lambda folder: (folder / "README.md").symlink_to(pages.ROOT / "README.md"), smollm),
        {
            "xformer train": f"xformer train {STEPS}",
            "xformer gradcheck": "xformer gradcheck --only softmax",
            "python -m pytest": ": ",
        },
        apart={"xf.kernels": ("numba",)},
        then="float(loss)",
        check=the_readme,
    ),
    "docs/accuracy.md": Page(
        small={
            "--digits 50": "--digits 50 --only softmax",
            "--only layer_norm": "--only softmax",
        }
    ),
    "docs/add-a-family.md": Page(),
    "docs/add-a-layer.md": Page(),
    "docs/attribution-patching.md": Page(
        (minilm_folder,),
        apart={"# transformer-lens": ("transformer-lens",)},
        then="np.abs(exact - by_token).max(axis=1).tolist()",
        check=attribution,
    ),
    "docs/backward.md": Page(check=the_backward),
    "docs/bring-your-own-array.md": Page(
        small={"--arrays mparray": "--arrays mparray --only softmax"}
    ),
    "docs/command-line.md": Page(),
    "docs/compile.md": Page(),
    "docs/data.md": Page(
        ("tinyshakespeare.txt", "multi30k", books),
        {"bpe:8192": "bpe:260", "xformer train": f"xformer train {STEPS}"},
    ),
    "docs/derivatives.md": Page(
        small={"STEPS, EVERY = 800, 40": "STEPS, EVERY = 200, 200"},
        apart={"# torch": ("torch",)},
        then="[(lr, *map(float, curve)) for lr, curve in curves.items()]",
        check=the_derivatives,
    ),
    "docs/finetuning.md": Page(
        (*STORIES, "tinyshakespeare.txt", smollm, answers),
        {"--lora 8": "--lora 8 --steps 4", "--steps 400": "--steps 6"},
        apart={"peft": ("torch", "transformers", "peft")},
        slow=True,
    ),
    "docs/generation.md": Page((*STORIES, smollm, t5), slow=True),
    "docs/lesson.md": Page(
        exact=False,
        slow=True,
        then="(letters, float(off), float(abs(loss - gpt_loss)))",
        check=the_lesson,
    ),
    "docs/lectures/README.md": Page(small={CHECK: "true "}),
    "docs/look.md": Page(
        (*STORIES, run_of_gpt),
        {
            "xformer train --preset tiny": "xformer train --steps 4 --preset tiny",
            "xformer train --log-to": f"xformer train {STEPS} --out other --log-to",
            "tensorboard --logdir runs": "",
            "--seq-len 128": "--seq-len 64",
        },
        apart={"--log-to": ("tensorboard", "tensorboardx", "wandb")},
        exact=False,
        slow=True,
    ),
    "docs/onnx.md": Page((run_of_gpt, minilm_folder), check=an_onnx_step),
    "docs/private-training.md": Page(
        small={"BATCH, STEPS = 16, 64, 200": "BATCH, STEPS = 16, 64, 6"},
        then="({s: epsilon(float(s), 200) for s in ('0.5', '1.0')}, list(curves.values()))",
        check=private_training,
    ),
    "docs/retrieval.md": Page(
        (minilm_folder, notes, sparse, pairs), {"--task rank": "--task rank --steps 1 --batch 2"}
    ),
    "docs/rounding.md": Page(
        small=ROUNDING,
        then="(float(np.mean(plain[-10:])),"
        " {', '.join(at): float(np.mean(losses[-10:])) for at, losses in curves.items()})",
        slow=True,
        check=the_rounding,
    ),
    "docs/scaling.md": Page((books,), TRAIN | MPI | SHARED, slow=True),
    "docs/sentence-embeddings.md": Page((minilm_folder, rankers), {"cp -r": ": "}),
    "docs/training.md": Page(
        (books, smollm),
        {
            "xformer train   ": f"xformer train {STEPS}",
            "xformer train --data": f"xformer train {STEPS} --data",
            "xformer train --from": f"xformer train {STEPS} --from",
            "bpe:8000": "bpe:260",
            "--steps 3000": "",
        },
    ),
    "docs/transformer-xl.md": Page(small=TRAIN | {"--max-new-tokens 1000": "--max-new-tokens 10"}),
    "docs/without-norm.md": Page(
        small={
            "LAYERS, STEPS = 24, 100": "LAYERS, STEPS = 10, 20",
            "d_model=32": "d_model=16",
        },
        then="{kind: [np.array(losses[kind]).tolist(), flow.activations.tolist(),"
        " flow.gradients.tolist()] for kind, flow in flows.items()}",
        slow=True,
        check=without_norm,
    ),
}
# Pages whose blocks print what is shown, without more.
for _name in ("checkpointing", "optimisers", "reformer", "schedules", "tensor-parallel"):
    PAGES[f"docs/{_name}.md"] = Page(slow=_name == "reformer")
PAGES |= {f"docs/lectures/{n}.md": Page() for n in range(1, 7)}
PAGES |= {f"docs/documents/00{n}.md": Page(slow=n in (3, 4)) for n in range(5)}

NOT_RUN = {
    "CONTRIBUTING.md": "the steps of .ci/run",
    "benchmarks/README.md": "each benchmark has a test",
    "docs/browser.md": "it builds the site, a step of .ci/run",
    "docs/cuda.md": "needs a GPU",
    "docs/cuda-kernels.md": "shows parts of a file",
    "docs/cuda-testing.md": "needs a GPU",
    "docs/install.md": "the first steps of .ci/run",
    "docs/ops.md": "measures",
    "docs/scaling-model.md": "has a test: test_benchmark_scaling.py",
}


def test_every_page_is_in_the_table() -> None:
    assert sorted({*PAGES, *NOT_RUN}) == sorted(pages.pages())
    assert not PAGES.keys() & NOT_RUN.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if p.slow else n for n, p in PAGES.items()]
)
def test_a_page_runs_and_prints_what_it_shows(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    codes = [block.code for block in pages.blocks(name)]
    assert all(any(long in code for code in codes) for long in page.small)
    _, missing = pages.closure(*pages.named(name))
    small = {
        code: ""
        for word, packages in page.apart.items()
        for code in codes
        if word in code and missing & {*packages}
    } | page.small
    for thing in page.folder:
        if callable(thing):
            thing(tmp_path)
        elif (path := published(thing)).is_dir():
            shutil.copytree(path, tmp_path / thing)
        else:
            shutil.copy(path, tmp_path)
    try:
        printed, value = pages.run(name, tmp_path, small, page.then)
    except pages.Failed as error:
        told = re.findall(r"No module named '(\w+)|(\w+) is not installed", str(error))
        if absent := missing & {pages.normal(a or b) for a, b in told}:
            pytest.skip(f"{', '.join(absent)} is not installed")
        raise
    is_shorter = False  # and so is what follows
    for block, out in zip(pages.blocks(name), printed, strict=True):
        is_shorter |= block.kind == "python" and any(long in block.code for long in page.small)
        is_run = not any(long in block.code for long in small)
        if block.shown is not None and is_run and not is_shorter:
            pages.require_shown(block, out, page.exact)
    page.check("".join(printed), value)


@pytest.mark.parametrize("name", [*PAGES, "docs/install.md"])
def test_a_page_activates_the_environment_that_it_makes(name: str) -> None:
    """Later commands of a page begin with `xformer`, `pip` or `python`: none of another place."""
    codes = "\n".join(block.code for block in pages.blocks(name) if block.kind == "sh")
    if made := re.findall(r"python3 -m venv (\S+)", codes):
        inside = [f"{folder}/bin/" for folder in made]
        bare = re.findall(r"(?:^|&& )(?:xformer|pip|python) ", codes, re.MULTILINE)
        assert not bare or all(f". {folder}activate" in codes for folder in inside)


def test_what_is_not_published_is_not_installed_from_the_index() -> None:
    for path in [*pages.ROOT.glob("*.md"), *(pages.ROOT / "docs").rglob("*.md")]:
        assert "pip install 'xformer-array" not in path.read_text(encoding="utf-8"), path
