"""Texts whose further tokens are captured as graphs, as steps are in test_cuda_graphs.py."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from causal_models import NAMES, UNPADDED, causal, seq2seq
from cuda_shim import CublasLt, calling
from cuda_shim.graph import Graph
from devices import is_stand_in
from libraries import ON_DEVICE, only
from nvidia import by_cublas, counted_graphs, memories

import xformer as xf
from xformer import backends, explain, ops, tree
from xformer.backends import Backend
from xformer.backends.cupy.captured import Captured
from xformer.cli import main
from xformer.dispatch.shapes import STORED
from xformer.generation import compiled_decoding as on_host
from xformer.generation import generate, prefill, stream
from xformer.layers.constant import constant
from xformer.layers.kv_cache import KVCache, append
from xformer.ops.greedy import greedy

pytestmark = only(*ON_DEVICE)

RAGGED = [[5, 6, 7, 8, 9], [3], [30, 31, 32]]
EVEN = [[5, 6, 7], [3, 4, 5]]
GPT = xf.GPT(vocab_size=37, n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, max_len=300)
ROLLING = ("mistral", "gemma2", "gemma3_text", "olmo3", "cohere2", "gpt_oss")  # by windows
UNCAPTURED = ("qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "shaw")
WITHIN = {"float32": 2e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}  # of the largest number


@pytest.fixture
def graphs(library: Backend) -> Iterator[list[Any]]:
    with counted_graphs(library) as made:
        yield made


@pytest.fixture
def notes(stand_in: Backend, graphs: list[Graph]) -> list[Graph]:
    """The stand-in's graphs, whose calls can be read."""
    return graphs


def require_same_bits(library: Backend, got: Any, wanted: Any) -> None:
    """Of arrays of the host; on a GPU near them.

    There attention with a mask and without one are compiled by themselves, and fuse other additions
    with multiplications; a product of another shape may have another algorithm.
    """
    for one, exact in zip(got, wanted, strict=True):
        if is_stand_in(library):
            assert one.tobytes() == exact.tobytes()
        size = np.max(np.abs(exact.astype(np.float64)), initial=0)
        assert np.allclose(
            one.astype("f8"), exact.astype("f8"), rtol=0, atol=WITHIN[exact.dtype.name] * size
        )


def on_device(library: Backend, params: Any) -> Any:
    return tree.map(lambda p: library.asarray(np.asarray(p, np.float32)), params)


def lively(library: Backend, model: Any, seed: int = 1) -> Any:
    """Parameters far from uniform."""
    return on_device(library, tree.map(lambda p: p * 6, model.init(seed)))


def written(library: Backend, model: Any, params: Any, prompts: Any, **options: Any) -> Any:
    """The ids, and the bits of all logits that they were chosen by."""
    logits: list[np.ndarray] = []

    def sampler(of: Any, _: Any) -> Any:
        logits.append(library.to_numpy(of))
        return of

    ids = generate(model, params, prompts, sampler=sampler, **options)
    return ids, logits


def launches(graphs: list[Any]) -> list[int]:
    return [graph.launches for graph in graphs]


# ---- The same tokens ----


@pytest.mark.parametrize(
    "name, prompts",
    [
        pytest.param(name, prompts, id=f"{name}-{kind}")
        for name in NAMES
        # Only positions that are added to embeddings go with padding.
        for kind, prompts in (
            [("even", EVEN) if name in UNPADDED else ("ragged", RAGGED)]
            + ([("one", EVEN[:1]), ("even", EVEN)] if name in ("gpt2", "mistral") else [])
        )
        if name not in UNCAPTURED
    ],
)
def test_every_kind_of_model(
    library: Backend, graphs: list[Any], name: str, prompts: list[list[int]]
) -> None:
    """The same ids and bits; behind a window keys are grouped otherwise, and sums rounded so."""
    model, params = causal(name)
    params = on_device(library, params)
    wanted = written(library, model, params, prompts, max_new_tokens=6)
    assert not graphs
    got = written(library, model, params, prompts, max_new_tokens=6, compiled=True)
    assert launches(graphs) == [4]  # the first token is the prompt's, the second is made as it is
    assert got[0] == wanted[0]
    if name not in ROLLING:
        require_same_bits(library, got[1], wanted[1])
        return
    for own, exact in zip(got[1], wanted[1], strict=True):
        np.testing.assert_allclose(own, exact, rtol=0, atol=2e-4 * abs(exact).max())


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_the_likeliest(library: Backend, graphs: list[Any], name: str) -> None:
    """They are chosen in the graph, and each text ends by itself.

    One call decodes 11 tokens, those after a stop id in vain; the first of these is no launch.
    """
    model, params = causal(name)
    params = on_device(library, params)
    free = generate(model, params, RAGGED, max_new_tokens=12)
    stop = {free[0][2], free[1][7]}
    wanted = list(stream(model, params, RAGGED, max_new_tokens=12, stop=stop))
    assert len({tuple(i is None for i in step) for step in wanted}) > 1
    assert (
        list(stream(model, params, RAGGED, max_new_tokens=12, stop=stop, compiled=True)) == wanted
    )
    assert launches(graphs) == [10]
    if is_stand_in(library):
        assert {"isfinite", "argmax", "where"} <= {call.name for call in graphs[0].calls}


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNCAPTURED])
def test_the_likeliest_of_every_kind_of_model(
    library: Backend, graphs: list[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In calls of 4 tokens, beyond windows; texts have padding, where a model has it."""
    monkeypatch.setattr(on_host, "MOST", 4)
    model, params = causal(name)
    params, prompts = on_device(library, params), EVEN if name in UNPADDED else RAGGED
    wanted = generate(model, params, prompts, max_new_tokens=8)
    assert generate(model, params, prompts, max_new_tokens=8, compiled=True) == wanted
    assert launches(graphs) == [6]


@pytest.mark.parametrize("length", [60, 120])
def test_more_columns_and_splits(library: Backend, graphs: list[Any], length: int) -> None:
    """At 64 columns, then at 128 and 256: a graph each; keys are split from 128 on."""
    prompts = [[i % 37 for i in range(length)], [i % 31 for i in range(length - 50)]]
    params, options = lively(library, GPT), {"max_new_tokens": 20}
    wanted = written(library, GPT, params, prompts, **options)
    got = written(library, GPT, params, prompts, **options, compiled=True)
    assert got[0] == wanted[0]
    require_same_bits(library, got[1], wanted[1])


def test_columns_are_doubled(
    library: Backend, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never more than wanted; the state of before is left."""
    columns: list[int] = []
    made = on_host.CompiledTokens._open

    def opened(self: Any, n: int) -> None:
        made(self, n)
        columns.append(self._state.capacity)

    monkeypatch.setattr(on_host, "LEAST", 4)
    monkeypatch.setattr(on_host.CompiledTokens, "_open", opened)
    params = lively(library, GPT)
    wanted = written(library, GPT, params, RAGGED, max_new_tokens=40)
    got = written(library, GPT, params, RAGGED, max_new_tokens=40, compiled=True)
    assert columns == [10, 20, 40, 44]
    assert launches(graphs) == [4, 9, 19, 3]
    assert got[0] == wanted[0]
    require_same_bits(library, got[1], wanted[1])
    graphs.clear(), columns.clear()
    ids = generate(GPT, params, RAGGED, max_new_tokens=40)
    assert generate(GPT, params, RAGGED, max_new_tokens=40, compiled=True) == ids
    assert (columns, launches(graphs)) == ([10, 20, 40, 44], [4, 9, 19, 3])  # a call each


@pytest.mark.parametrize("sliding_context", [False, True])
def test_the_contexts_end(library: Backend, graphs: list[Any], sliding_context: bool) -> None:
    """Up to it tokens are captured; beyond, the last ones are read anew for each."""
    model = xf.GPT(vocab_size=37, n_layers=1, d_model=8, n_heads=2, max_len=12)
    params, n = lively(library, model), 12 if sliding_context else 8
    for is_greedy in (True, False):
        graphs.clear()
        options: Any = {"max_new_tokens": n, "sliding_context": sliding_context}
        options |= {} if is_greedy else {"sampler": lambda logits, _: logits * 0.5}
        wanted = generate(model, params, [[1, 2, 3, 4, 5], [6]], **options)
        assert generate(model, params, [[1, 2, 3, 4, 5], [6]], **options, compiled=True) == wanted
        assert launches(graphs) == [6]


def test_batches_one_after_the_other(
    library: Backend, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts grow by turns, two tokens a call, each in columns of its own."""
    monkeypatch.setattr(on_host, "MOST", 2)
    params = lively(library, GPT)
    wanted = [generate(GPT, params, p, max_new_tokens=8) for p in (RAGGED, EVEN)]
    both = [stream(GPT, params, p, max_new_tokens=8, compiled=True) for p in (RAGGED, EVEN)]
    steps = list(zip(*both, strict=True))
    for i, ids in enumerate(wanted):
        assert [list(row) for row in zip(*(step[i] for step in steps), strict=True)] == ids
    assert launches(graphs) == [6, 6]


def test_a_prefix_stays_what_it_was(library: Backend, graphs: list[Any]) -> None:
    params = lively(library, GPT)
    text = prefill(GPT, params, RAGGED)
    more = prefill(GPT, params, [[1], [2, 3], [4]], after=text)  # whose padding stands in the midst
    for prefix in (text, more):
        wanted = generate(GPT, params, prefix, max_new_tokens=6)
        for _ in range(2):
            assert generate(GPT, params, prefix, max_new_tokens=6, compiled=True) == wanted


@pytest.mark.parametrize("stored", STORED)
def test_weights_in_two_bytes(library: Backend, graphs: list[Any], stored: str) -> None:
    pytest.importorskip("ml_dtypes", reason="there is no bfloat16: ml_dtypes is missing")
    weights = library.cast_params(lively(library, GPT), stored)
    for n in (1, 130):
        prompts = [[i % 37 for i in range(n)], [7]]
        wanted = written(library, GPT, weights, prompts, max_new_tokens=5)
        got = written(library, GPT, weights, prompts, max_new_tokens=5, compiled=True)
        assert got[0] == wanted[0]
        require_same_bits(library, got[1], wanted[1])
    assert launches(graphs) == [3, 3]


def test_logits_that_are_no_numbers(
    library: Backend, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are found when the ids are read; the ids before are yielded, also those of the same call."""
    params = lively(library, GPT)
    table = library.to_numpy(params.embed.positions).copy()
    table[6] = np.nan  # in the third token's own place
    params = params._replace(embed=params.embed._replace(positions=library.asarray(table)))
    for compiled, most in ((False, 64), (True, 1), (True, 2), (True, 64)):
        monkeypatch.setattr(on_host, "MOST", most)
        steps = stream(GPT, params, EVEN, max_new_tokens=9, compiled=compiled)
        assert [len(next(steps)) for _ in range(4)] == [2] * 4
        with pytest.raises(ValueError, match="generate: the largest logit of each row must be fin"):
            next(steps)


def test_its_memory_goes_with_it(library: Backend, graphs: list[Any]) -> None:
    """At once, not when cycles are looked for."""
    gc.collect()
    gc.disable()
    try:
        require_freed(library, graphs)
    finally:
        gc.enable()


def require_freed(library: Backend, graphs: list[Any]) -> None:
    before = memories(library, graphs)()
    steps = stream(GPT, lively(library, GPT), EVEN, max_new_tokens=9, compiled=True)
    for _ in range(4):
        next(steps)
    held = memories(library, graphs)
    assert held() > before
    steps.close()
    del steps
    graphs.clear()
    assert held() == before


# ---- What a graph is ----


def test_a_graph_is_a_tokens_launches(
    library: Backend, notes: list[Graph], launched: list[Any]
) -> None:
    """Kernels and products of `extend`; keys and values are written once, in place."""
    params = lively(library, GPT)
    state = GPT.decode(params, library.asarray(np.asarray(EVEN)), GPT.init_state())[1]
    with calling(CublasLt()) as lt:
        fixed = state.preallocate(10)
        launched.clear()
        GPT.decode(params, library.asarray(np.asarray([[1], [2]])), fixed)
        wanted = [(name, grid) for name, grid, _ in launched], len(lt.products)
    list(stream(GPT, params, EVEN, max_new_tokens=8, compiled=True))
    (graph,) = notes
    own = {name for name, _ in wanted[0]}
    noted = [(call.name, call.arguments[0]) for call in graph.calls if call.name in own]
    assert (noted, sum(call.name == "matmul" for call in graph.calls)) == wanted
    assert [name for name, _ in noted].count("append") == 2  # layers
    copied = [call for call in graph.calls if call.name == "__setitem__"]
    assert len(copied) == 3  # new arrays: the length, the chosen ids, the ids of the call so far


@pytest.fixture
def moved(
    library: Backend, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of arrays that the host read, and of those that it brought."""
    read: list[Any] = []
    brought: list[Any] = []
    kind = type(library)
    to_numpy, from_host = kind.to_numpy, kind._from_host
    monkeypatch.setattr(kind, "to_numpy", lambda s, a: read.append(a.shape) or to_numpy(s, a))
    monkeypatch.setattr(kind, "_from_host", lambda s, a: brought.append(a.shape) or from_host(s, a))
    return read, brought


def test_what_the_host_does_for_a_token(
    library: Backend, graphs: list[Any], moved: tuple[list[Any], list[Any]]
) -> None:
    """If it samples, it brings the ids and reads the logits: nothing else goes between."""
    read, brought = moved
    options: Any = {"max_new_tokens": 9, "sampler": lambda logits, _: logits}
    steps = stream(GPT, lively(library, GPT), EVEN, **options, compiled=True)
    for _ in range(4):
        next(steps)
    read.clear(), brought.clear()
    for _ in range(3):
        next(steps)
    assert (read, brought) == ([(2, 37)] * 3, [(2, 1)] * 3)


def test_what_the_host_does_for_many_tokens(
    library: Backend, graphs: list[Any], moved: tuple[list[Any], list[Any]]
) -> None:
    """Greedy ids are read once a call, of up to 64 tokens; they are those of uncompiled texts."""
    read, brought = moved
    n = 1 + 64 + 64 + 3
    model = xf.GPT(vocab_size=37, n_layers=1, d_model=8, n_heads=2, max_len=n + 4)
    params = lively(library, model)
    wanted = generate(model, params, RAGGED, max_new_tokens=n)
    steps = stream(model, params, RAGGED, max_new_tokens=n, compiled=True)
    read.clear(), brought.clear()
    found = [next(steps)]
    assert read == [(3,)]  # ids of the prompts' logits
    given = [(3, 1), (3, 64), ()]  # ids, room for those of the call, the length of the text
    for length, more in ((64, [()]), (64, []), (3, [])):  # the second launch records the graph
        read.clear(), brought.clear()
        found += [next(steps) for _ in range(length)]
        assert (read, brought) == ([(3, 64)], given + more)
    read.clear(), brought.clear()
    assert next(steps, None) is None and not read and not brought
    assert [list(ids) for ids in zip(*found, strict=True)] == wanted
    assert launches(graphs) == [n - 2]


def test_how_many_tokens_a_call_decodes(
    library: Backend, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as read what a GPU reads in about 50 ms, at least one."""
    params = lively(library, GPT)
    attn = GPT.blocks[0].attn
    slots = 256 * 2 * 2 * attn.n_kv_heads * attn.head_width * 4
    size = tree.nbytes(params) + len(EVEN) * slots  # bytes that a token reads
    for reads, most in ((0, 1), (size - 1, 1), (3 * size, 3), (99 * size, 64)):
        monkeypatch.setitem(on_host.READ, True, reads)
        tokens = on_host.compiled_tokens("generate", GPT, params, [[0]], 300, compiled=True)
        assert tokens is not None
        tokens.is_greedy = True
        tokens.begin(prefill(GPT, params, EVEN).state)
        tokens._require_slots(4)
        assert (tokens._state.capacity, tokens._most) == (256, most)


# ---- Who cannot ----


def test_what_cannot_be_captured(library: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy refuses cuBLAS: the message has the place; the text is the same, in more columns too."""
    monkeypatch.setattr(on_host, "LEAST", 4)
    params = lively(library, GPT)
    with by_cublas(library):
        wanted = written(library, GPT, params, RAGGED, max_new_tokens=12)
        with pytest.warns(RuntimeWarning) as said:
            got = written(library, GPT, params, RAGGED, max_new_tokens=12, compiled=True)
        ids = generate(GPT, params, RAGGED, max_new_tokens=12)
        with pytest.warns(RuntimeWarning) as said_again:
            assert generate(GPT, params, RAGGED, max_new_tokens=12, compiled=True) == ids
    assert {str(each.message) for each in said_again} == {str(each.message) for each in said}
    assert got[0] == wanted[0]
    require_same_bits(library, got[1], wanted[1])
    messages = [str(each.message) for each in said]
    assert len(messages) == 2  # the first columns are full after 10 tokens
    place = "xformer.backends.cupy.products.Products.affine: "
    for message in messages:
        assert message.startswith(f"backend {library.name}: no graph: {place}")
        assert "cuBLAS" in message and message.endswith("; steps are made call by call")


def test_experts_cannot_be_captured(library: Backend, graphs: list[Any]) -> None:
    """Theirs are products of more dimensions, which CuPy leaves to cuBLAS."""
    model, params = causal("mixtral")
    params = on_device(library, params)
    wanted = generate(model, params, RAGGED, max_new_tokens=6)
    with pytest.warns(RuntimeWarning, match=r"xformer\.ops\.experts.*: .*cuBLAS"):
        assert generate(model, params, RAGGED, max_new_tokens=6, compiled=True) == wanted


def test_frequencies_that_go_by_the_length(library: Backend, graphs: list[Any]) -> None:
    """In fixed columns nothing can be read again."""
    model, params = causal("llama")
    rope = xf.layers.RopeConfig(4, scaling="dynamic", factor=2.0, max_len=10)
    model, params = _with_rotary(model, rope), on_device(library, params)
    wanted = generate(model, params, RAGGED, max_new_tokens=8)
    with pytest.warns(RuntimeWarning, match="tokens are not compiled: RoPE frequencies change a"):
        assert generate(model, params, RAGGED, max_new_tokens=8, compiled=True) == wanted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, params, RAGGED, max_new_tokens=6, compiled=True)  # 10 columns


def _with_rotary(model: Any, rope: Any) -> Any:
    from dataclasses import replace

    return replace(model, rotary=rope)


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("t5", "the model is an encoder-decoder"),
        ("shaw", "Shaw's relative positions depend on the number of keys"),
        ("strict", "backend array-api-strict compiles nothing"),
    ],
)
def test_tokens_that_are_made_as_ever(library: Backend, who: str, why: str) -> None:
    model, params = seq2seq("t5") if who == "t5" else causal("gpt2" if who == "strict" else who)
    place = backends.get("array-api-strict") if who == "strict" else library
    params = on_device(place, params)
    wanted = generate(model, params, EVEN, max_new_tokens=5)
    with pytest.warns(RuntimeWarning, match=f"generate: tokens are not compiled: {why}"):
        assert generate(model, params, EVEN, max_new_tokens=5, compiled=True) == wanted


def test_the_command_asks_for_it(
    library: Backend, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has no such thing says so; nor is a search compiled."""
    (text := tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    sizes = "--layers 1 --d-model 8 --heads 1 --max-len 8 --batch 2 --steps 2 --data"
    folder = str(tmp_path / "run")
    assert main(["train", *sizes.split(), str(text), "--out", folder]) == 0
    asked = ["generate", "--model", folder, "--prompt", "the", "--max-new-tokens", "5"]
    capsys.readouterr()
    assert main(asked) == 0
    wanted = capsys.readouterr().out
    with pytest.warns(RuntimeWarning, match="generate: tokens are not compiled: backend array-api"):
        assert main([*asked, "--compile", "--backend", "array-api-strict"]) == 0
    assert capsys.readouterr().out == wanted
    with pytest.warns(RuntimeWarning, match="--compile: beam search is not compiled"):
        assert main([*asked, "--compile", "--beams", "2"]) == 0


# ---- Kernels ----


@pytest.mark.parametrize("dtype", ["float32", "float64", *STORED])
@pytest.mark.parametrize("at", [0, 3, 6, 7, -1])
def test_a_column_is_written(library: Backend, dtype: str, at: int) -> None:
    """Keys and values that lie as heads of a product do; a column there is not is left alone."""
    if dtype in STORED:
        pytest.importorskip("ml_dtypes", reason="there is no bfloat16: ml_dtypes is missing")
    rng = np.random.default_rng(at + 1)
    k, v = rng.normal(size=(2, 1, 3, 5)), rng.normal(size=(2, 1, 3, 4))
    held = rng.normal(size=(2, 3, 7, 5)), rng.normal(size=(2, 3, 7, 4))

    def arrays(*hosts: np.ndarray) -> list[Any]:
        kind = "float64" if dtype == "float64" else "float32"
        made = [library.asarray(x.astype(kind)) for x in hosts]
        return [library.cast_params(x, dtype) for x in made] if dtype in STORED else made

    new, kept = arrays(k, v), arrays(*held)
    new = [library.xp.permute_dims(x, (0, 2, 1, 3)) for x in new]
    kv_cache = KVCache(*kept, write_index=library.asarray(np.array(at)))
    assert "append_at" in explain(append, *new, kv_cache=kv_cache).splitlines()[0]
    wanted = [library.to_numpy(library.upcast(x)).copy() for x in kept]
    for x, own in zip(new, wanted, strict=True):
        if 0 <= at < 7:
            own[:, :, at] = library.to_numpy(library.upcast(x))[:, :, 0]
    grown = append(*new, kv_cache=kv_cache)
    assert grown.k is kv_cache.k and grown.v is kv_cache.v
    for x, own in zip((grown.k, grown.v), wanted, strict=True):
        assert library.to_numpy(library.upcast(x)).tobytes() == own.tobytes()


def test_a_past_that_the_kernel_does_not_take(library: Backend) -> None:
    k = library.asarray(np.ones((1, 2, 1, 3), np.float32))
    held, at = library.asarray(np.ones((1, 2, 4, 3), np.float32)), np.array(1)
    turned = library.xp.permute_dims(held, (0, 2, 1, 3))
    double = library.xp.astype(held, np.float64)
    for kv_cache, why in (
        (KVCache(held, held), "the KV cache is not static"),
        (
            KVCache(held, held, write_index=library.asarray(at.astype(np.int32))),
            "kv_cache.write_index must be int64",
        ),
        (
            KVCache(double, double, write_index=library.asarray(at)),
            "keys and values must be of one dtype",
        ),
        (
            KVCache(turned, turned, write_index=library.asarray(at)),
            "the KV cache is not contiguous",
        ),
    ):
        assert why in explain(append, k, k, kv_cache=kv_cache)
    with pytest.raises(ValueError, match="append: a static KV cache takes one token at a time"):
        append(held, held, kv_cache=KVCache(held, held, write_index=library.asarray(at)))


@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize("columns", [100, 300, 1000])
def test_hidden_keys_cost_no_bits(library: Backend, columns: int, n_queries: int) -> None:
    """Attention to columns behind a mask is that to the keys alone, also where those are split."""
    rng = np.random.default_rng(columns)
    n_keys = columns // 3
    shapes = (2, 4, n_queries, 12), (2, 2, columns, 12), (2, 2, columns, 12)
    q, k, v = (library.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes)
    mask = library.asarray((np.arange(columns) < n_keys)[None, None, None, :])
    sinks = library.asarray(rng.normal(size=4).astype(np.float32))
    for extra in ({}, {"sinks": sinks}):
        wanted, _ = ops.sdpa(q, k[:, :, :n_keys, :], v[:, :, :n_keys, :], **extra)
        got, _ = ops.sdpa(q, k, v, **extra, mask=mask)
        require_same_bits(library, [library.to_numpy(got)], [library.to_numpy(wanted)])


def test_parts_that_are_hidden_are_not_read(library: Backend) -> None:
    """Of 4 parts, of 128 keys, what one alone sees: NaN in the others comes nowhere."""
    rng = np.random.default_rng(0)
    for part in range(4):
        shapes = (1, 2, 1, 8), (1, 2, 512, 8), (1, 2, 512, 8)
        q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
        own = np.arange(512) // 128 == part
        k[:, :, ~own] = v[:, :, ~own] = np.nan
        arrays = map(library.asarray, (q, k, v))
        ctx, _ = ops.sdpa(*arrays, mask=library.asarray(own[None, None, None, :]))
        wanted, _ = ops.sdpa(*map(library.asarray, (q, k[:, :, own], v[:, :, own])))
        require_same_bits(library, [library.to_numpy(ctx)], [library.to_numpy(wanted)])


@pytest.mark.parametrize("n_keys", [100, 512])
def test_one_key_that_is_not_hidden(library: Backend, n_keys: int) -> None:
    """Wherever it stands in a part: its value comes out, for the query that sees it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, n, 8)).astype(np.float32) for n in (2, n_keys, n_keys))
    for key in (0, 31, 32, 99, n_keys // 2, n_keys - 1):
        mask = np.zeros((1, 1, 2, n_keys), np.bool_)
        mask[..., 1, key] = True
        ctx, _ = ops.sdpa(*map(library.asarray, (q, k, v)), mask=library.asarray(mask))
        got = library.to_numpy(ctx)
        assert got[:, :, 1].tolist() == v[:, :, key].tolist() and not got[:, :, 0].any()


def test_constants_of_a_step(library: Backend, graphs: list[Any]) -> None:
    """Are brought once, in its first call; other arguments, and dtypes, are other ones."""
    like = library.asarray(np.ones(1, np.float32))
    wanted = ((2, np.float32), (3, np.float32), (3, np.float64))

    def step(state: Any, inputs: Any) -> Any:
        tables = [constant(like, of=counted, args=(n,), dtype=dtype) for n, dtype in wanted]
        return state, ({str(i): inputs["x"] * table for i, table in enumerate(tables)},)

    call: Any = Captured(step, library)
    COUNTED.clear()
    for x in (1.0, 2.0, 3.0):
        _, (results,) = call({"a": like}, {"x": x})
        got = [library.to_numpy(y).tolist() for y in results.values()]
        assert got == [[0.0, x], [0.0, x, 2 * x], [0.0, x, 2 * x]]
    assert COUNTED == [2, 3, 3]
    assert "no step is captured" in explain(constant, like, of=counted, args=(2,))
    for _ in range(2):
        constant(like, of=counted, args=(2,))
    assert COUNTED == [2, 3, 3, 2, 2]


COUNTED: list[int] = []


def counted(n: int) -> list[float]:
    COUNTED.append(n)
    return [float(i) for i in range(n)]


def test_the_likeliest_of_rows(library: Backend) -> None:
    logits = np.array([[1, 3, 2], [np.nan, 1, 2], [-np.inf] * 3, [5, 5, 1]], np.float32)
    assert library.to_numpy(greedy(library.asarray(logits))).tolist() == [1, -1, -1, 0]


def test_numpy_alone_warns_about_nothing(library: Backend) -> None:
    """Without compiled=True nothing is said of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(GPT, GPT.init(), EVEN, max_new_tokens=3)
    assert backends.get("array-api-strict").compiled(lambda: None, ()) is None
