"""`python -m benchmarks.scaling`: the figures of a cluster worked out by hand, and the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling import Hardware, Plan, Work, cost, exact_sums
from xformer import GPT

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "scaling-model.md").read_text(encoding="utf-8")
H100 = Hardware()
TOKENS = 65536


@pytest.fixture(scope="module")
def seven() -> Work:
    return scaling.work("Llama-2-7B", scaling.opened("Llama-2-7B"))


def test_figures_of_seven_billion_parameters(seven: Work) -> None:
    """Worked out by hand, before this model: GB a GPU, ms of communication, seconds a step."""
    assert seven.n_params == 6_738_415_616
    for n_gpus, gigabytes, milliseconds in ((8, 50.5, 96), (64, 41.7, 121)):
        c = cost(seven, H100, Plan(n_gpus, 1, 1), TOKENS)
        assert c.states / 1e9 == pytest.approx(gigabytes, abs=0.05)
        assert c.data * 1e3 == pytest.approx(milliseconds, abs=0.5)
        assert c.compute == pytest.approx(6.3, abs=0.05)
    tensor = cost(seven, H100, Plan(1, 8, 1), TOKENS)
    assert tensor.tensor / tensor.compute == pytest.approx(0.41, abs=0.005)
    two_levels, flat = exact_sums(seven, H100, 64)
    assert two_levels / c.compute == pytest.approx(0.027, abs=0.0005)
    assert flat / c.compute == pytest.approx(0.09, abs=0.001)
    assert exact_sums(seven, H100, 8) == pytest.approx((0.0956,) * 2, abs=1e-4)


def test_the_bubble_of_a_pipeline(seven: Work) -> None:
    """4 stages with 32 micro-batches: 3 of 35 parts of the time are waiting."""
    tokens = 8 * seven.length
    c = cost(seven, H100._replace(inside=1e30), Plan(1, 1, 4), tokens)
    assert c.pipeline / c.step == pytest.approx(3 / 35)
    assert cost(seven, H100, Plan(1, 1, 1), tokens).pipeline == 0


def test_by_hand() -> None:
    """A cluster and a model of round numbers."""
    hardware = Hardware("toy", 1e3, 0.5, 1e6, 4, inside=100.0, across=80.0, link=20.0)
    load = Work("toy", 1600, 8, 4, 10, 5, 6.0, kept=100.0, block=1000.0, head=400.0)
    # A GPU has 10 tokens a step, and a group of 2 x 2 GPUs 40: 8 micro-batches of 5.
    c = cost(load, hardware, Plan(4, 2, 2), 10)
    assert c.compute == 10 * 6 / 500
    # 4 all-reduces in 4 layers of 40 tokens of 20 bytes, each sent twice by half.
    assert c.tensor == pytest.approx(4 * 4 * 40 * 20 / 100)
    # One stage waits for the other once in 8 micro-batches; half of each token is sent both ways.
    assert c.pipeline == pytest.approx((c.compute + c.tensor) / 8 + 2 * 20 * 40 / 2 / 20)
    # The group of 4 spans two nodes with 2 members in each: half of the 80.
    assert c.data == pytest.approx(3 / 4 * 6 * 400 / 40)
    assert c.states == (6 + 12 / 4) * 400
    assert c.activations == 2 * 4 * (100 + 2 * 20 * 5) + 1400 / 2
    assert c.fits(hardware) and not c.fits(hardware._replace(memory=c.memory))


def test_plans_divide_model_and_gpus() -> None:
    load = Work("toy", 1600, 12, 6, 10, 5, 6.0, 100.0, 1000.0, 400.0)
    found = list(scaling.plans(load, H100, 16, 10))
    assert all(plan.data * plan.tensor * plan.pipeline == 16 for plan in found)
    assert {plan.tensor for plan in found} == {1, 2}  # 6 heads
    assert {plan.pipeline for plan in found} == {1, 2, 4}  # 12 layers
    assert Plan(1, 1, 1).name == "one GPU"
    assert Plan(4, 1, 2).name == "data 4 x pipeline 2"


def test_saved_bytes_are_those_of_the_library() -> None:
    model = GPT(64, n_layers=3, d_model=32, n_heads=4, max_len=16)
    load = scaling.work("gpt", model)
    assert (load.n_layers, load.n_heads, load.width, load.length) == (3, 4, 32, 16)
    assert load.kept == 2 * 16 * 32  # the input, in bfloat16
    assert load.block > 10 * load.kept
    assert load.head > 2 * 16 * 64 / 2


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main([]) == 0
    begin, end = scaling.BEGIN, scaling.END
    assert PAGE[PAGE.index(begin) + len(begin) : PAGE.index(end)] == capsys.readouterr().out


def test_the_sentences_of_the_page(seven: Work) -> None:
    seventy = scaling.work("Llama-2-70B", scaling.opened("Llama-2-70B"))
    for load, more in ((seven, "41 %"), (seventy, "21 %")):
        c = cost(load, H100, Plan(1, 8, 1), TOKENS)
        assert f"{100 * c.tensor / c.compute:.0f} %" == more and more in PAGE
    few, many = (cost(seven, H100, Plan(512, 1, 1), tokens) for tokens in (8192, TOKENS))
    shares = [f"{100 * c.data / c.step:.0f} %" for c in (few, many)]
    assert shares == ["13 %", "2 %"] and all(share in PAGE for share in shares)
    for n_gpus in scaling.GPUS:
        assert scaling.chosen(seven, H100, n_gpus, TOKENS)[0].plan == Plan(n_gpus, 1, 1)
    for link in re.findall(r"\]\(([^):]+)\)", PAGE):
        assert (DOCS / link).is_file(), link


def test_a_picture(seven: Work, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = scaling.draw([seven], H100, (8, 64), TOKENS, tmp_path / "s.svg")
    assert path.read_text(encoding="utf-8").startswith("<?xml")


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("no lines\n", encoding="utf-8")
    for options, message in (
        (
            ["--model", "Llama-2-7B", "--tokens", "5000"],
            "--tokens: must be a multiple of 4096, a sequence of Llama-2-7B",
        ),
        (["--model", "nowhere"], "--model: "),
        (["--seq-len", "0"], "--model: summary: length must be"),
    ):
        with pytest.raises(SystemExit) as error:
            scaling.main(options)
        assert error.value.code == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"page\.md must hold the lines <!-- scaling --> and"):
        scaling.main(["--model", "Llama-2-7B", "--page", str(page)])
