"""Tables of rotary embeddings: every scaling against transformers, and what they promise."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from libraries import only

from xformer import explain, inference
from xformer.backends import Backend
from xformer.layers import RopeConfig, rope_tables
from xformer.layers.rope_tables import cos_sin, frequencies
from xformer.ops import rope

LONG = {
    "short_factor": tuple(1 + i / 8 for i in range(8)),
    "long_factor": tuple(1.5 + i**2 for i in range(8)),
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Parameters of ours, by scaling and note; theta of some checkpoints.
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {"theta": 5e5},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 3.0, "max_len": 40},
    "yarn": {"factor": 4.0, "original_max_len": 64},
    "yarn, factor from lengths": {"original_max_len": 64, "max_len": 192},
    "yarn, factor before lengths": {"factor": 4.0, "original_max_len": 64, "max_len": 192},
    "yarn, not longer": {"factor": 0.5, "original_max_len": 64},
    "yarn, attention": {"factor": 4.0, "original_max_len": 64, "attention_factor": 1.25},
    "yarn, betas": {"factor": 4.0, "original_max_len": 4096, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, not truncated": {"factor": 32.0, "original_max_len": 4096, "truncate": False},
    "yarn, ramp past the last pair": {"factor": 4.0, "original_max_len": 131072},
    "yarn, ramp past the last channel": {
        "factor": 4.0,
        "original_max_len": 10**9,
        "beta_fast": 1e6,
    },
    "yarn, a step": {
        "factor": 4.0,
        "original_max_len": 64,
        "truncate": False,
        "beta_fast": 1.5,
        "beta_slow": 1.5,
    },
    "yarn, no ramp": {"factor": 4.0, "original_max_len": 3},
    "yarn, nothing slow": {"factor": 4.0, "original_max_len": 2, "truncate": False},
    "yarn, mscales": {
        "factor": 40.0,
        "original_max_len": 4096,
        "theta": 5e4,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, one mscale": {"factor": 40.0, "original_max_len": 4096, "mscale": 0.7},
    "llama3": {"theta": 5e5, "original_max_len": 8192, **LLAMA3},
    "llama3, wide": {"original_max_len": 256, **LLAMA3, "high_freq_factor": 30.0},
    "longrope": {"original_max_len": 64, "max_len": 192, **LONG},
    "longrope, factor": {"original_max_len": 64, "max_len": 192, "factor": 8.0, **LONG},
    "longrope, not longer": {"original_max_len": 64, "factor": 0.5, **LONG},
    "longrope, attention": {
        "original_max_len": 64,
        "factor": 3.0,
        "attention_factor": 1.25,
        **LONG,
    },
}
THEIR_NAMES = {"theta": "rope_theta", "original_max_len": "original_max_position_embeddings"}


def config(note: str, **options: Any) -> RopeConfig:
    options = {"width": 16, **CONFIGS[note], **options}
    return RopeConfig(scaling=note.partition(",")[0], **options)


def llama(ours: RopeConfig, head_width: int) -> Any:
    """The configuration of Hugging Face's Llama with these frequencies."""
    from transformers import LlamaConfig

    rope_parameters: dict[str, Any] = {
        "rope_type": ours.scaling.replace("none", "default"),
        "partial_rotary_factor": ours.width / head_width,
        "factor": None,  # yarn reads it, even if to find nothing
    }
    for name, value in vars(ours).items():
        if value is not None and name not in ("width", "interleaved", "scaling", "max_len"):
            value = list(value) if isinstance(value, tuple) else value
            rope_parameters[THEIR_NAMES.get(name, name)] = value
    return LlamaConfig(
        hidden_size=2 * head_width,
        num_attention_heads=2,
        head_dim=head_width,
        max_position_embeddings=ours.max_len or 1000,
        rope_parameters=rope_parameters,
    )


@pytest.mark.parametrize("length", [7, 64, 65, 150])
@pytest.mark.parametrize("note", [note for note in CONFIGS if note != "none"])
def test_frequencies_are_those_of_transformers(note: str, length: int) -> None:
    pytest.importorskip("torch")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    ours = config(note)
    their_init = utils.ROPE_INIT_FUNCTIONS[ours.scaling]
    wanted, wanted_factor = their_init(llama(ours, 24), seq_len=length)
    got, factor = frequencies(ours, length)
    assert factor == pytest.approx(wanted_factor, rel=1e-15)
    # Theirs are powers in float32, of exponents in float32; yarn's ramp is a difference of them.
    assert np.allclose(got, wanted.numpy(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [7, 150])
@pytest.mark.parametrize("note", CONFIGS)
def test_tables_are_those_of_transformers(note: str, length: int) -> None:
    torch = pytest.importorskip("torch")
    llamas = pytest.importorskip("transformers.models.llama.modeling_llama")
    ours = config(note, width=24 if "longrope" not in note else 16)
    theirs = llamas.LlamaRotaryEmbedding(llama(ours, ours.width))
    positions = np.array([np.arange(length), np.maximum(np.arange(length) - 3, 0)])  # padding left
    cos, sin = theirs(torch.ones(1), torch.tensor(positions))
    got = rope_tables(ours, like=np.ones(1), length=length, positions=positions)
    half = ours.width // 2
    # Their angles, up to 150, are float32: 2^-17 off.
    assert np.allclose(got.cos, cos[..., :half].numpy(), rtol=0, atol=2e-5)
    assert np.allclose(got.sin, sin[..., :half].numpy(), rtol=0, atol=2e-5)


def test_llama3_is_a_ramp_over_turns() -> None:
    ours = config("llama3, wide", width=32)
    powers = 1e4 ** -np.linspace(0, 1, 16, endpoint=False)
    cos_sin = 256 * powers / (2 * np.pi)
    assert {0, 1, 2} == set(np.digitize(cos_sin, [1, 30]))  # all three kinds are there
    wanted = powers * np.interp(cos_sin, [1, 30], [1 / 8, 1])
    assert np.allclose(frequencies(ours, 5)[0], wanted, rtol=1e-14)


def test_yarn_is_a_ramp_over_pairs() -> None:
    ours = config("yarn, betas", width=32, factor=10.0)
    powers = 1e4 ** -np.linspace(0, 1, 16, endpoint=False)
    cos_sin = 4096 * powers / (2 * np.pi)
    last_fast, first_slow = (cos_sin >= 8).sum() - 1, 16 - (cos_sin <= 2).sum()
    assert 0 < last_fast < first_slow - 1 < 15
    wanted = powers * np.interp(np.arange(16), [last_fast, first_slow], [1, 1 / 10])
    got, factor = frequencies(ours, 5)
    assert np.allclose(got, wanted, rtol=1e-13)
    assert factor == pytest.approx(1.2302585, rel=1e-7)  # 0.1 ln 10 + 1


def test_dynamic_reaches_the_trained_length_at_its_slowest() -> None:
    """At twice the length with a factor of 1, the slowest pair turns as far as before."""
    ours = config("dynamic", factor=1.0)
    short, long = (np.array(frequencies(ours, length)[0]) for length in (40, 80))
    assert np.array_equal(short, frequencies(config("none", theta=1e4), 1)[0])
    assert long[0] == 1 and long[-1] * 2 == pytest.approx(short[-1], rel=1e-14)


@pytest.mark.parametrize("note", ["none", "yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tables_are_cos_and_sin_to_rounding(library: Backend, note: str, dtype: str) -> None:
    """Also at positions where an angle in float32 would be off by far more than that."""
    ours = config(note, interleaved=True)
    positions = [0, 1, 149, 8191, 131071]
    like = library.asarray(np.ones(1), dtype)
    got = rope_tables(ours, like=like, length=150, positions=library.asarray(positions))
    f, factor = frequencies(ours, 150)
    angles = np.array(positions)[:, None] * np.array(f)
    for table, wanted in ((got.cos, np.cos(angles)), (got.sin, np.sin(angles))):
        assert table.dtype == like.dtype and tuple(table.shape) == (5, 8)
        limit = 2 * factor * np.finfo(dtype).eps
        assert np.allclose(library.to_numpy(table), factor * wanted, rtol=0, atol=limit)
    assert got.interleaved is True


@only("jax")
def test_without_float64_angles_are_float32(library: Backend) -> None:
    import jax

    with jax.enable_x64(False):  # warnings are errors
        got = rope_tables(config("yarn"), like=library.xp.ones(1), length=150)
        cos, sin = np.asarray(got.cos), np.asarray(got.sin)
    assert cos.dtype == "float32"
    wanted = rope_tables(config("yarn"), like=np.ones(1), length=150)
    assert np.allclose(cos, wanted.cos, rtol=0, atol=2e-5)
    assert np.allclose(sin, wanted.sin, rtol=0, atol=2e-5)


@only("numpy")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("note", ["none", "yarn, attention", "longrope"])
def test_the_next_position_is_a_row_of_a_table(library: Backend, note: str, dtype: str) -> None:
    """Kept, so that nobody may write to it; the same bits."""
    given: dict[str, Any] = {"config": config(note), "length": 0, "dtype": np.dtype(dtype)}
    with inference():
        for place in (0, 1, 255, 256, 63, 131071, -1):
            positions = np.array([place])
            assert explain(cos_sin, positions, **given).startswith(
                "cos_sin on numpy: xformer.backends.numpy.cos_sin.cos_sin"
            )
            found = cos_sin(positions, **given)
            for table, wanted in zip(found, cos_sin.reference(positions, **given), strict=True):
                assert table.dtype == dtype and table.shape == (1, 8)
                assert np.array_equal(table, wanted)
                with pytest.raises(ValueError, match="read-only"):
                    table[0, 0] = 2
        assert cos_sin(positions, **given)[0].base is cos_sin(positions, **given)[0].base
        others = (
            explain(cos_sin, positions, **given | {"length": 900}),
            explain(cos_sin, np.array([3, 4]), **given),
        )
    for said in (*others, explain(cos_sin, positions, **given)):
        assert ": the reference" in said and "not one position within inference()" in said


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_positions_are_rows(library: Backend, dtype: str) -> None:
    like = library.asarray(np.ones(1))
    plain = rope_tables(config("yarn"), like=like, length=9)
    host = np.array([[8, 0, 0, 3], [5, 6, 7, 8]])
    positions = library.asarray(host, dtype)
    for chosen, rows in ((positions, host), (positions[0, :], host[0])):
        got = rope_tables(config("yarn"), like=like, length=9, positions=chosen)
        for table, all_rows in ((got.cos, plain.cos), (got.sin, plain.sin)):
            assert np.array_equal(library.to_numpy(table), library.to_numpy(all_rows)[rows])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("note", ["none", "llama3", "yarn"])
def test_scores_depend_on_distance_alone(library: Backend, note: str, interleaved: bool) -> None:
    rng = np.random.default_rng(17)
    q, k = (library.asarray(rng.normal(size=(1, 1, 1, 19)).repeat(6, axis=2)) for _ in range(2))
    ours = config(note, interleaved=interleaved)
    scores = []
    for start in (0, 1000):
        positions = library.asarray(np.arange(6) + start)
        tables = rope_tables(ours, like=q, length=6, positions=positions)._asdict()
        scores.append(library.to_numpy(rope(q, **tables)[0] @ rope(k, **tables)[0].mT)[0, 0])
    assert np.allclose(*scores, rtol=1e-11, atol=1e-11)
    assert np.allclose(scores[0][1:, 1:], scores[0][:-1, :-1], rtol=1e-13, atol=1e-13)
    assert not np.allclose(scores[0][0, 1:], scores[0][0, :-1], rtol=0.01)


def test_the_attention_factor_scales_what_is_turned(library: Backend) -> None:
    x = library.asarray(np.random.default_rng(19).normal(size=(2, 3, 5, 19)))
    tables = rope_tables(config("yarn, attention"), like=x, length=5)
    y, x = library.to_numpy(rope(x, **tables._asdict())[0]), library.to_numpy(x)
    norm = np.linalg.norm
    assert np.allclose(norm(y[..., :16], axis=-1), 1.25 * norm(x[..., :16], axis=-1), rtol=1e-13)
    assert np.array_equal(y[..., 16:], x[..., 16:])


def test_no_positions(library: Backend) -> None:
    got = rope_tables(config("longrope"), like=library.asarray(np.ones(1)), length=0)
    assert tuple(got.cos.shape) == tuple(got.sin.shape) == (0, 8)


YARN = {"width": 16, "scaling": "yarn", "factor": 4.0, "original_max_len": 64}
LONGROPE = {"width": 16, "scaling": "longrope", **CONFIGS["longrope"]}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 0}, ValueError, "width must be an int of at least 2, got 0"),
        ({"width": 7}, ValueError, "width must be even, got 7"),
        ({"width": 8.0}, ValueError, "width must be an int of at least 2, got 8.0"),
        ({"theta": 1}, ValueError, "theta must be larger than 1 and finite, got 1"),
        ({"theta": np.inf}, ValueError, "theta must be larger than 1 and finite, got inf"),
        ({"theta": None}, TypeError, "theta must be a number, got NoneType"),
        ({"interleaved": 1}, TypeError, "interleaved must be a bool, got 1"),
        (YARN | {"beta_slow": 1e-320}, ValueError, "beta_slow must lie in [1e-06, 1e+06]..."),
        (YARN | {"beta_fast": 1e308}, ValueError, "beta_fast must lie in [1e-06, 1e+06]..."),
        (YARN | {"truncate": None}, TypeError, "truncate must be a bool, got None"),
        *(
            (
                {"scaling": scaling},
                ValueError,
                "scaling must be one of none, linear, dynamic, yarn, llama3, longrope, got "
                f"{scaling!r}",
            )
            for scaling in ("default", None, ["yarn"])
        ),
        ({"scaling": "linear"}, ValueError, 'scaling "linear" needs factor'),
        ({"scaling": "dynamic", "factor": 2.0}, ValueError, 'scaling "dynamic" needs max_len'),
        (YARN | {"original_max_len": None}, ValueError, 'scaling "yarn" needs original_max_len'),
        (YARN | {"factor": None}, ValueError, 'scaling "yarn" needs factor or max_len'),
        (
            {"scaling": "llama3", "factor": 8.0, "original_max_len": 8192, "low_freq_factor": 1.0},
            ValueError,
            'scaling "llama3" needs high_freq_factor',
        ),
        (LONGROPE | {"short_factor": None}, ValueError, 'scaling "longrope" needs short_factor'),
        (LONGROPE | {"max_len": None}, ValueError, 'scaling "longrope" needs factor or max_len'),
        ({"factor": 2.0}, ValueError, 'scaling "none" does not use factor'),
        (
            YARN | {"low_freq_factor": 1.0},
            ValueError,
            'scaling "yarn" does not use low_freq_f...',
        ),
        (LONGROPE | {"truncate": False}, ValueError, 'scaling "longrope" does not use truncate'),
        (YARN | {"factor": 0}, ValueError, "factor must be positive and finite, got 0"),
        (YARN | {"factor": np.nan}, ValueError, "factor must lie in [-inf, inf], got nan"),
        (YARN | {"factor": "4"}, TypeError, "factor must be a number, got str"),
        (YARN | {"attention_factor": -1.0}, ValueError, "attention_factor must be positive and..."),
        (YARN | {"beta_slow": 0.0}, ValueError, "beta_slow must be positive and finite, got 0"),
        (YARN | {"beta_fast": None}, TypeError, "beta_fast must be a number, got NoneType"),
        (
            YARN | {"beta_fast": 0.5},
            ValueError,
            "beta_fast must be at least beta_slow = 1, got 0.5",
        ),
        (YARN | {"mscale": -1}, ValueError, "mscale must lie in [0, inf], got -1"),
        (
            YARN | {"original_max_len": 1},
            ValueError,
            "original_max_len must be an int of at least 2, got 1",
        ),
        (YARN | {"max_len": 64.0}, ValueError, "max_len must be an int of at least 1, got 64.0"),
        (
            {"scaling": "llama3", "original_max_len": 9, **LLAMA3, "high_freq_factor": 1.0},
            ValueError,
            "high_freq_factor must be larger than low_freq_factor = 1, got 1",
        ),
        (
            {"scaling": "dynamic", "factor": 2.0, "max_len": 9, "width": 2},
            ValueError,
            'scaling "dynamic" needs a width of at least 4, got 2',
        ),
        (
            LONGROPE | {"long_factor": (1.0, 2.0)},
            ValueError,
            "long_factor must be a tuple of R/2 = 8, got (1.0, 2.0)",
        ),
        (
            LONGROPE | {"short_factor": [1.0] * 8},
            ValueError,
            "short_factor must be a tuple of R/2 = 8, got [1.0...",
        ),
        (
            LONGROPE | {"long_factor": (1.0,) * 7 + (0.0,)},
            ValueError,
            "long_factor[7] must be positive and finite, got 0",
        ),
    ],
)
def test_bad_configurations(options: Any, error: Any, message: str) -> None:
    whole = re.escape(message.removesuffix("...")) + ("" if message.endswith("...") else "$")
    with pytest.raises(error, match=f"^rotary: {whole}"):
        RopeConfig(**{"width": 16} | options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": -1}, ValueError, "length must be an int of at least 0, got -1"),
        ({"length": 3.0}, ValueError, "length must be an int of at least 0, got 3.0"),
        ({"like": None}, TypeError, "like must be an array, got None"),
        ({"like": np.ones(1, int)}, TypeError, "like must be float32 or float64, got int64"),
        ({"positions": [0, 1]}, TypeError, "positions must be an integer array, got list"),
        (
            {"positions": np.ones(3)},
            TypeError,
            "positions must be an integer array, got dtype float64",
        ),
        (
            {"positions": np.ones((1, 1, 3), int)},
            ValueError,
            "positions must be (T,) or (B, T), got shape (1, 1, 3)",
        ),
        (
            {"positions": np.array(3)},
            ValueError,
            "positions must be (T,) or (B, T), got shape ()",
        ),
    ],
)
def test_bad_input(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^rotary: {re.escape(message)}$"):
        rope_tables(RopeConfig(width=4), **{"like": np.ones(1), "length": 3} | options)
