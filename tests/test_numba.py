"""Kernels compiled by numba: as exact as the reference, in any layout, and only where asked for."""

from __future__ import annotations

import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from test_kernels import LAYOUTS, laid_out, require_exact
from test_numpy_kernels import CASES, drawn, named, results
from test_optim_kernels import CASES as UPDATES
from test_optim_kernels import drawn as drawn_leaves
from test_optim_kernels import flat, wide

from xformer import backends, dispatch, inference, ops, tree
from xformer.base.lock import locked
from xformer.base.typing import Array
from xformer.dispatch import Kernel, Overridable
from xformer.optim.adam import adam_update
from xformer.proofs.catalogue import cases

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import KERNELS, jit, single_op, vectors
from xformer.backends.numba.program import native
from xformer.backends.numba.single_op import Eager
from xformer.cli import main

NUMPY = backends.get("numpy")
RECORDED = [op for op in dispatch.ops() if op.import_kernels("numba.kernels")]
COMPILED = {op: Kernel(one := Eager(op, least=0), "numpy", one.unsupported) for op in RECORDED}
ADAM = next(one for one in KERNELS if one.op is adam_update)
ADAM = Eager(adam_update, donates=ADAM.donates, varying=ADAM.varying, least=0)
COMPILED[adam_update] = Kernel(ADAM, "numpy", ADAM.unsupported)


ROWWISE = (ops.gelu, ops.glu, ops.layer_norm, ops.rms_norm, ops.embedding)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        yield


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("op", ROWWISE, ids=lambda op: op.__name__)
def test_as_exact_as_the_reference(op: Overridable, layout: Callable[[Any], Any]) -> None:
    """On the catalogue's cases, as tests/test_kernels.py does it of all other kernels."""
    ran = 0
    for case in (case for case in cases() if case.subject == op.__name__):
        fn, args = case.build(NUMPY, "float32")
        if fn.func is op:
            args = tree.map(lambda x: laid_out(layout, x), args)
            if op is ops.rms_norm and args[1] is None:
                continue  # dx of equal elements is less than a rounding of its terms
            if not COMPILED[op].unsupported(*args, **fn.keywords):
                require_exact(NUMPY, COMPILED[op], op, args, fn.keywords, layout)
                ran += 1
    assert ran


def test_nowhere_to_keep_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba says it when a function is decorated, which is at import."""

    def enable_caching(function: Any) -> None:
        raise RuntimeError("cannot cache function 'f': no locator available")

    monkeypatch.setattr(jit.Function, "enable_caching", enable_caching)
    for decorate in (jit.elementwise, jit.rowwise):
        with pytest.raises(backends.Unusable, match=r"no locator available\): .* NUMBA_CACHE_DIR"):
            decorate(lambda x: x)


def test_machine_code_is_of_all_files_of_loops(tmp_path: Path) -> None:
    """What a function calls is compiled with it, and where that has changed it is made anew."""
    folder = tmp_path / "loops"
    folder.mkdir()
    shutil.copy(jit.__file__, folder / "jit.py")
    begin, inner = "from loops.jit import rowwise\n", folder / "inner.py"
    outer = "from loops.inner import inner\n@rowwise\ndef outer(x):\n    return inner(x)\n"
    (folder / "outer.py").write_text(begin + outer, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    env |= {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    code = "from loops.outer import outer; print(outer(0), sum(outer.stats.cache_hits.values()))"

    def run() -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        return done.stdout or done.stderr[-2000:]

    inner.write_text(f"{begin}@rowwise\ndef inner(x):\n    return x + 1\n", encoding="utf-8")
    assert [run(), run()] == ["1 0\n", "1 1\n"]
    inner.write_text(f"{begin}@rowwise\ndef inner(x):\n    return x + 20\n", encoding="utf-8")
    assert run() == "20 0\n"


def test_one_process_at_a_time_keeps_machine_code(tmp_path: Path) -> None:
    """Two at once would mix up what they compiled for different arguments."""
    kept: list[int] = []
    folder = tmp_path / "new"
    jit._save(kept.append, folder, 1)
    with locked(folder, "compiles"):
        jit._save(kept.append, folder, 2)
    jit._save(kept.append, folder, 3)
    assert kept == [1, 3]
    assert vectors.vector_matrix._cache.save_overload.func is jit._save


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "garbage": lambda data: b"garbage" * 100,
    "one bit": lambda data: data[:9] + bytes([data[9] ^ 1]) + data[10:],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_damaged_machine_code_counts_as_missing(damage: str, ending: str, tmp_path: Path) -> None:
    file = jit._CacheFile(str(tmp_path), "f", "sources")
    file.save("key", bytes(200))
    assert file.load("key") == bytes(200)
    (path,) = tmp_path.glob(f"*.{ending}")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert file.load("key") is None
    file.save("key", bytes(300))
    assert file.load("key") == bytes(300)
    assert jit._CacheFile(str(tmp_path), "f", "other sources").load("key") is None


def test_damaged_machine_code_is_compiled_again(tmp_path: Path) -> None:
    """And it is written over, so that the next process finds it."""
    folder = tmp_path / "loops"
    folder.mkdir()
    shutil.copy(jit.__file__, folder / "jit.py")
    begin = "from loops.jit import rowwise\n@rowwise\ndef one(x):\n    return x + 1\n"
    (folder / "code.py").write_text(begin, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    env |= {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    code = "from loops.code import one; print(one(0), sum(one.stats.cache_hits.values()))"

    def run() -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        return done.stdout or done.stderr[-2000:]

    assert [run(), run()] == ["1 0\n", "1 1\n"]
    (index,) = (tmp_path / "cache").rglob("code.one*.nbi")
    index.write_bytes(b"")
    assert [run(), run()] == ["1 0\n", "1 1\n"]


def test_only_what_python_calls_gets_machine_code(tmp_path: Path) -> None:
    """What only loops call is linked into them, in one version for literals and other integers."""
    folder = tmp_path / "loops"
    folder.mkdir()
    code = "from xformer.backends.numba.jit import rowwise\n"
    code += "@rowwise\ndef inner(x, y):\n    return x + y\n"
    code += "@rowwise\ndef outer(x):\n    return inner(x, 1) + inner(x, x)\n"
    (folder / "code.py").write_text(code, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    env |= {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    code = "from loops.code import inner, outer; "
    code += "print(outer(3), len(inner.overloads), len(inner.linked.overloads), inner(3, 4))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "10 0 1 7\n", done.stderr[-2000:]


def test_it_is_said_once_that_code_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "xformer"):
        jit._say_compiling.cache_clear()
        assert jit._load(lambda signature: None, "of one") is None
        assert jit._load(lambda signature: None, "of another") is None
        assert jit._load(lambda signature: "code", "stored") == "code"
    (said,) = caplog.messages
    assert said.startswith("numba compiles kernels once") and str(jit.folder()) in said


def test_it_is_said_that_code_cannot_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(*overload: Any) -> None:
        raise OSError(28, "No space left on device")

    jit._say_unstored.cache_clear()
    jit._save(save, tmp_path, "one")
    jit._save(save, tmp_path, "another")
    (said,) = caplog.messages
    assert said == (
        f"machine code cannot be kept in {jit.folder()}: No space left on device; the next "
        "process compiles"
    )


def test_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-up"]) == 0
    capsys.readouterr()
    assert main(["warm-up"]) == 0
    said = capsys.readouterr().out
    assert said == f"nothing to compile: the machine code of all kernels is in {jit.folder()}\n"
    assert all("address" in vars(kernel) for kernel in native.KERNELS)


def test_without_a_compiler() -> None:
    """With NUMBA_DISABLE_JIT the backend says it; `xf.compile` calls the function itself."""
    code = "import numpy as np, xformer as xf; step = xf.compile(lambda x: 2 * x)\n"
    code += "print(step(np.ones(3))[0], step.explain()); xf.kernels('numba').__enter__()"
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == (
        "2.0 backend numpy compiles nothing here: the function is called as it is\n"
    )
    assert "backend numba cannot be used: the environment variable NUMBA_DISABLE_JIT" in done.stderr


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_adam(layout: Callable[[Any], Any], donate: bool) -> None:
    n_trees, _, options = UPDATES[adam_update]
    for option in options:
        trees = [[laid_out(layout, x) for x in leaves] for leaves in drawn_leaves(n_trees)]
        exact = flat(adam_update.reference(*wide(trees), **option))
        plain = flat(adam_update.reference(*trees, **option))
        before = [x.copy() for x in flat(trees)]
        got = flat(COMPILED[adam_update].run(*trees, **option, donate=donate))
        replaced = [x for i in (0, 2, 3) for x in trees[i]]
        if donate:
            for a, x in zip(got, replaced, strict=True):
                assert x.size < 2 or (a is x) == (x.flags.forc and x.flags.writeable)
        else:
            assert all(map(np.array_equal, flat(trees), before))
        for a, p, wanted in zip(got, plain, exact, strict=True):
            assert a.shape == np.shape(p) and a.dtype == np.float32
            off, off_plain = (np.max(np.abs(x - wanted), initial=0) for x in (a, p))
            rounding = 2 * np.finfo(np.float32).eps * np.max(np.abs(wanted), initial=0)
            assert off <= 2 * off_plain + rounding, a.shape
    doubles = [[x.astype(np.float64) for x in leaves] for leaves in trees]
    assert COMPILED[adam_update].unsupported(*doubles, **option) == "only float32"


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("n_threads", [2, 3, 7])
def test_adam_on_threads(n_threads: int, donate: bool) -> None:
    """Shares begin and end within leaves; more threads than numbers, too."""
    option = UPDATES[adam_update][2][0]
    for trees in (drawn_leaves(4), [[np.ones((), np.float32)]] * 4):
        trees = [[x.copy() for x in leaves] for leaves in trees]
        with threadpoolctl.threadpool_limits(1, user_api="blas"):
            wanted = flat(ADAM(*trees, **option))
        with threadpoolctl.threadpool_limits(n_threads, user_api="blas"):
            got = flat(ADAM(*trees, **option, donate=donate))
        for a, b in zip(got, wanted, strict=True):
            assert np.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_adam_step_after_step() -> None:
    """In place; whatever gradients are, and if moments may not be written over."""
    option, rng = UPDATES[adam_update][2][0], np.random.default_rng(1)
    shapes = (7,), (3, 5), (2, 3, 4)
    trees = [[rng.random(shape, np.float32) for shape in shapes] for _ in range(4)]
    p, _, m, v = trees

    def require_exact(grads: list[Array]) -> tuple[Any, ...]:
        assert COMPILED[adam_update].unsupported(p, grads, m, v, **option) is None
        wanted = flat(adam_update.reference(p, grads, m, v, **option))
        got = ADAM(p, grads, m, v, **option, donate=True)
        for a, b in zip(flat(got), wanted, strict=True):
            assert np.allclose(a, b, rtol=1e-6, atol=1e-7)
        return got

    def gradients() -> list[Array]:
        return [rng.random(shape, np.float32) for shape in shapes]

    for _ in range(3):  # each with its own gradients
        got = require_exact(gradients())
        assert all(map(operator.is_, flat(got), [*p, *m, *v]))
    turned = [np.asfortranarray(g) for g in gradients()]
    require_exact(turned)
    frozen = gradients()
    for g in frozen:
        g.flags.writeable = False
    require_exact(frozen)
    m[1].flags.writeable = False
    before = m[1].copy()
    got = require_exact(gradients())
    assert got[1][1] is not m[1] and np.array_equal(m[1], before)
    m[1].flags.writeable = True
    before = [x.copy() for x in flat(trees)]
    assert not set(map(id, flat(ADAM(p, gradients(), m, v, **option)))) & {*map(id, p)}
    assert all(map(np.array_equal, flat(trees), before))  # without donate nothing is written over


def test_adam_of_other_leaves() -> None:
    """It reads memory: no other dtype, and of another shape no more than there is."""
    p, option = np.ones(3, np.float32), UPDATES[adam_update][2][0]
    for i in (1, 2, 3):
        leaves = [[p], [p], [p], [p]]
        leaves[i] = [p.astype(np.float64)]
        assert ADAM.unsupported(*leaves, **option) == "only float32"
        leaves[i] = [np.full(1, 0.5, np.float32)]
        assert ADAM.unsupported(*leaves, **option) is None
        wanted = flat(adam_update.reference(*leaves, **option))
        for a, b in zip(flat(ADAM(*leaves, **option)), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, strict=True)


BLOCKS = [c for c in CASES if c[0] in COMPILED and c[0] is not ops.linear_cross_entropy]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("case", BLOCKS, ids=named)
def test_several_blocks_are_as_exact(case: Any, layout: Callable[[Any], Any]) -> None:
    op, shapes, options = case
    args = tuple(x if x is None else layout(x) for x in drawn(shapes, "float32"))
    if COMPILED[op].unsupported(*args, **options) is None:
        require_exact(NUMPY, COMPILED[op], op, args, options, layout)
    else:
        assert options["eps_inside"] is False


@pytest.mark.parametrize("case", BLOCKS, ids=named)
def test_nan_and_infinity_stay(case: Any) -> None:
    """Where the reference has a number that is not finite there is the same one, and no other."""
    op, shapes, options = case
    args = drawn(shapes, "float32")
    if COMPILED[op].unsupported(*args, **options) is not None:
        assert options["eps_inside"] is False
        return
    x = args[0].reshape(-1, args[0].shape[-1])
    x[0, 0] = np.nan
    if op in (ops.gelu, ops.glu):  # in sums over rows it makes NaN, here or there
        x[1, :2] = np.inf, -np.inf
    with np.errstate(all="ignore"):
        wanted = results(op.reference, args, options)
        got = results(COMPILED[op].run, args, options)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        np.testing.assert_array_equal(np.isinf(one), np.isinf(other))


def test_only_where_asked_for() -> None:
    x = np.ones((300, 400), np.float32)
    assert backends.unavailable_reason("numba") is None
    assert "numba" not in dispatch.explain(ops.gelu, x)
    with backends.get("numba").active():
        said = dispatch.explain(ops.gelu, x)
        assert said.startswith("gelu on numpy: xformer.backends.numba.kernels.activations.gelu")
        assert "only float32" in dispatch.explain(ops.gelu, x.astype("float64"))
        assert "fewer than" in dispatch.explain(ops.gelu, x[0])
        assert type(ops.gelu(x)[1]) is single_op.Saved
        with inference():
            dropped = ops.gelu(x)[1]
    with pytest.raises(RuntimeError, match=r"within inference\(\)"):
        dropped.backward(x)
