"""What a command imports, and an interrupt while it does."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_dispatch import python

from xformer import backends, training
from xformer.cli import main
from xformer.cli.command_line import COMMANDS, command_parser
from xformer.cli.errors import by_option, in_words
from xformer.models import GPT

MODULES = {f"xformer.cli.{name.replace('-', '_')}" for name in COMMANDS}
IMPORTED = """
import contextlib, io, json, sys
before = set(sys.modules)
from xformer.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({argv})
print(json.dumps(sorted(set(sys.modules) - before)))
"""
INTERRUPTED = """
import sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from xformer.cli import main
sys.exit(main({argv}))
"""


def imported(argv: list[str], folder: Path) -> set[str]:
    return set(python(IMPORTED.format(argv=argv), folder))


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["tarin"]])
def test_the_list_of_commands_imports_no_command(argv: list[str], tmp_path: Path) -> None:
    modules = imported(argv, tmp_path)
    assert not modules & MODULES
    if argv != ["tarin"]:  # to say "did you mean train?" takes xformer.dispatch.checks
        ours = {name for name in modules if name.partition(".")[0] == "xformer"}
        assert len(ours) < 15 and not modules & {"numpy", "array_api_compat", "tqdm"}


@pytest.mark.parametrize("name", ["train", "finetune", "classify", "memory", "info"])
def test_a_command_imports_no_catalogue_and_few_other_commands(name: str, tmp_path: Path) -> None:
    modules = imported([name, "--help"], tmp_path)
    assert len(modules & MODULES) <= 4  # `finetune` prints as `train` does
    assert "xformer.proofs.catalogue" not in modules


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("xformer.cli.command_line", ["--help"]),
        ("argparse", ["--help"]),
        ("xformer.cli.train", ["train", "--help"]),
        ("numpy", ["info"]),
        ("numpy._core", ["train", "--steps", "1"]),
        ("xformer.models.gpt", ["train", "--steps", "1"]),
        ("xformer.distributed.world", ["train", "--steps", "1"]),
    ],
)
def test_an_interrupt_during_an_import_is_one_line(
    module: str, argv: list[str], tmp_path: Path
) -> None:
    code = INTERRUPTED.format(module=module, argv=argv)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "xformer: interrupted\n")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with paths that are not what is asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("the cat\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes").write_bytes(b"a\xff")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["embed", "--model", "m", "--file", "fil.txt"], "there is no file or folder fil.txt; did"),
        (["tag", "--model", "m", "--file", "folder"], "folder must be a file, it is a folder"),
        (["rank", "q", "--model", "m", "--file", "link"], "link; it is a link to nowhere, which"),
        (["classify", "--model", "m", "--file", "circle"], "circle: too many levels of symb"),
        (["embed", "--model", "m", "--file", "file.txt/x"], "file.txt must be a folder, it is a"),
        (["embed", "--model", "m", "--file", "a\nb"], "there is no file or folder a\\nb"),
        (["embed", "--model", "m", "--file", "bytes"], "bytes is not UTF-8 text: byte 0xff at of"),
        (["embed", "--model", "a\x1bb", "x"], "there is no folder or file a\\x1bb"),
        (["prepare", "file.txt", "file.txt/new"], "file.txt must be a folder, it is a file"),
        (["exercise", "softmax", "--check", "folder"], "folder must be a file, it is a folder"),
        (["exercise", "softmax", "--out", "x/y"], "there is no file or folder x/y"),
        (["train", "--config", "conf.toml"], "--config: there is no file conf.toml"),
        (["plot", "link"], "; it is a link to nowhere, which leads nowhere"),
        (["generate", "--prompt", "x", "--model", "circle"], "circle; it is a link to circle, wh"),
    ],
)
def test_a_path_is_refused_in_words(
    odd: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if argv[0] == "plot":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    before = sorted(odd.iterdir())
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and err.startswith("xformer: error: ")
    assert "Errno" not in err and out == ""
    assert sorted(odd.iterdir()) == before


def test_a_name_that_no_file_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prepare", "a\0b", "out"])
    assert r"must name a file or a folder, got 'a\x00b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "not enough memory"),
        (MemoryError("Unable to allocate 8 TiB"), "not enough memory: Unable to allocate 8 TiB"),
        (OSError(28, "No space left on device"), "no space left on device"),
        (PermissionError(13, "Permission denied", "/a"), "/a: permission denied"),
        (OSError("plain words"), "plain words"),
        (RecursionError(), "RecursionError"),
    ],
)
def test_an_error_in_words(error: Exception, words: str) -> None:
    assert in_words(error) == words


@pytest.mark.parametrize(
    ("message", "words", "said"),
    [
        (
            "attach: rank must be an int of at least 1, got 0",
            "finetune --task causal --model m --data d --lora 0",
            "--lora must be an int of at least 1, got 0",
        ),
        (
            "top_k: k must be an int of at least 1, got -2",
            "generate --model m --prompt p --top-k=-2",
            "--top-k must be an int of at least 1, got -2",
        ),
        (
            "attention: n_heads = 3 must divide d_model = 8, or d_head must be given",
            "train --heads 3 --d-model 8",
            "attention: --heads = 3 must divide --d-model = 8, or d_head must be given",
        ),
        (
            "embed: batch_size must be an int of at least 1, got 0",
            "embed --model m x --batch 0",
            "--batch must be an int of at least 1, got 0",
        ),
        (
            "ledger: length must be an int of at least 1, got 0",
            "memory --model m --seq-len 0",
            "--seq-len must be an int of at least 1, got 0",
        ),
        # of the model, not of the option
        ("layer: rank must be at most 3, got 8", "train --layers 2", None),
        ("GPT: n_layers must be at most 3, got 8", "train --layers 2", None),
        ("a vocabulary with x = 3 is damaged", "train --steps 3", None),
    ],
)
def test_errors_name_the_option(message: str, words: str, said: str | None) -> None:
    args = command_parser()[0].parse_args(words.split())
    assert by_option(message, args) == (said or message)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("train --batch 100000000", "--batch 100000000 texts of 128 tokens need at least "),
        ("train --layers 9 --d-model 999996", "gradients need at least "),
        ("memory --model run --batch 100000000", "--batch 100000000 texts of 64 tokens need "),
        (
            "memory --model run --seq-len 9999999999",
            "for --batch 1 texts of 9999999999 tokens need",
        ),
        ("signal-flow --layers 9000000000000000", "not enough memory; asked for --layers 90"),
    ],
)
def test_what_cannot_fit_is_refused_at_once(
    argv: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if argv.startswith("signal-flow"):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    model = GPT(256, 1, 64, 2, 64, positions="none")
    training.save(tmp_path / "run", model, model.init(0), backends.get("numpy"))
    monkeypatch.setattr("xformer.training.load_corpus", None)  # no text is read
    before = sorted(tmp_path.iterdir())
    assert main(argv.split()) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: not enough memory") and said in err
    assert err.count("\n") == 1 and sorted(tmp_path.iterdir()) == before


def test_memory_that_runs_out_later_names_the_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Any) -> int:
        raise MemoryError

    monkeypatch.setattr("xformer.cli.summary.run", run)
    assert main(["summary", "--model", "m", "--batch", "7", "--seq-len", "9"]) == 1
    said = "xformer: error: not enough memory; asked for --batch 7 --seq-len 9\n"
    assert capsys.readouterr().err == said
    assert main(["summary", "--model", "m"]) == 1
    assert capsys.readouterr().err == "xformer: error: not enough memory\n"


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_divergence_is_one_sentence(
    backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := backends.unavailable_reason(backend)) is not None:
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    argv = "train --preset tiny --layers 1 --steps 9 --lr 1e30 --clip 0 --data text.txt --backend"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main([*argv.split(), backend]) == 1
    said = capfd.readouterr().err.splitlines()
    (err,) = (line for line in said if not line.startswith("xformer: numba compiles kernels once"))
    assert err.startswith("xformer: error: the loss of step ")
