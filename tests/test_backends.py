"""`xformer.backends`: what is here, arrays there and back, and why something cannot be used."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from inspect import ismodule
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hanging import SECONDS
from libraries import LIBRARIES

import xformer as xf
from xformer import backends, dispatch, finetune, pretrained, training, tree
from xformer.backends import Backend, Generator, Memory, Unusable
from xformer.dispatch import library_of
from xformer.finetune.base_task import Example
from xformer.finetune.pairs import Classify

ROOT = Path(__file__).parents[1]
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64")


def python(code: str, folder: Path, **environment: str) -> str:
    """What `code` prints in a new interpreter, run in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- Which there are ----


def test_available() -> None:
    here = backends.available()
    assert set(here) <= set(backends.NAMES)
    assert {"numpy", "array-api-strict"} <= set(here)
    assert [name for name in backends.NAMES if name in here] == list(here)
    for name in backends.NAMES:
        why_not = backends.unavailable_reason(name)
        assert (why_not is None) == (name in here)
        assert why_not is None or name in why_not


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tensorflow", ""),
        ("", ""),
        ("base", ""),
        ("NumPy", "; did you mean numpy?"),
        ("array_api_strict", "; did you mean array-api-strict?"),
    ],
)
def test_unknown_name(name: str, meant: str) -> None:
    message = f"backend must be one of {', '.join(backends.NAMES)}, got {name!r}{meant}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        backends.get(name)
    with pytest.raises(ValueError, match=r"^backend must be one of"):
        backends.unavailable_reason(name)


def test_numpy_is_the_default() -> None:
    assert backends.get().name == "numpy"


@pytest.mark.parametrize("name", ["cupy", "torch", "jax", "array-api-strict"])
def test_missing_library_says_how_to_install_it(name: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules[{name.replace("-", "_")!r}] = None  # importing it raises ImportError
import xformer.backends
assert xformer.backends.unavailable_reason({name!r})
try:
    xformer.backends.get({name!r})
except xformer.backends.Unusable as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    said = python(code, tmp_path)
    assert said.startswith(f"backend {name} cannot be used: "), said
    package = "array-api-strict" if name == "array-api-strict" else "xformer-array["
    assert f"Install it with pip install {package}" in said.replace("'", ""), said


# A CuPy without a device, as far as the backend looks at it.
FAKE_CUPY = """
import sys, types
class CUDARuntimeError(RuntimeError):
    pass
def count():
    {answer}
runtime = types.SimpleNamespace(getDeviceCount=count, CUDARuntimeError=CUDARuntimeError)
class Device:
    compute_capability = "80"
    def __init__(self, id=0):
        self.id = id
cuda = types.SimpleNamespace(runtime=runtime, Device=Device)
ndarray = type("ndarray", (), {{}})
fakes = {{
    "cupy": dict(cuda=cuda, __version__={version!r}, ndarray=ndarray, empty=None),
    "cupyx": {{}},
    "cupyx.scipy": dict(special=None),
    "array_api_compat.cupy": {{}},
}}
for name, content in fakes.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)
import xformer.backends
{use}
"""
NO_DEVICE = {
    "driver": 'raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")',
    "zero": "return 0",
}
NO_DRIVER = (
    'raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient for '
    'CUDA runtime version")'
)


def behind_fake(answer: str, use: str, folder: Path, version: str = "14.2.0") -> str:
    return python(FAKE_CUPY.format(answer=answer, use=use, version=version), folder)


@pytest.mark.parametrize("answer", NO_DEVICE)
def test_cupy_without_a_device(answer: str, tmp_path: Path) -> None:
    use = "print(xformer.backends.unavailable_reason('cupy'))"
    said = behind_fake(NO_DEVICE[answer], use, tmp_path)
    assert "backend cupy cannot be used: no CUDA device is visible" in said
    assert ("cudaErrorNoDevice" in said) == (answer == "driver")


def test_cupy_devices(tmp_path: Path) -> None:
    use = """
for name in (None, "cuda", "cuda:1"):
    print(xformer.backends.get("cupy", name).device.id)
for name in ("cuda:2", "cuda:", "cuda:x", "cuda:-1", "cpu"):
    try:
        xformer.backends.get("cupy", name)
    except ValueError as error:
        print(error)
"""
    said = behind_fake("return 2", use, tmp_path).splitlines()
    assert said[:3] == ["0", "0", "1"]
    assert said[3] == "backend cupy has devices cuda:0 to cuda:1, got 'cuda:2'"
    assert len(said) == 8


def test_cupy_without_a_driver(tmp_path: Path) -> None:
    said = behind_fake(NO_DRIVER, "print(xformer.backends.unavailable_reason('cupy'))", tmp_path)
    assert (
        "cupy cannot be used: there is no NVIDIA driver, or it is too old for CuPy's CUDA" in said
    )
    assert "cudaErrorInsufficientDriver" in said


def test_cupy_that_is_too_old(tmp_path: Path) -> None:
    oldest = {
        extra.partition("cupy-")[2].partition(">=")[2]
        for extra in (line for lines in extras("cuda12", "cuda13") for line in lines)
        if extra.startswith("cupy-")
    }
    assert oldest == {"14.2"}  # what device.OLDEST says below
    use = "print(xformer.backends.unavailable_reason('cupy'))"
    for version in ("13.6.0", "14.1.9", "9.0"):
        said = behind_fake("return 1", use, tmp_path, version)
        assert f"it needs CuPy 14.2 or newer, this is {version}. Install it with pip" in said
    for version in ("14.2.0", "14.10.0rc1", "15.0.0a1"):
        assert behind_fake("return 1", use, tmp_path, version) == "None"


def test_cupy_that_is_demanded_must_be_there() -> None:
    """`pytest --backend cupy` does not skip the tests of CUDA's kernels."""
    if backends.unavailable_reason("cupy") is None:
        pytest.skip("there is a CUDA device")
    names = {"kernels": "test_no_rows", "sdpa": "test_nothing", "models": "test_training_loop"}
    tests = [f"tests/test_cuda_{file}.py::{test}" for file, test in names.items()]
    command = [sys.executable, "-m", "pytest", "--backend", "cupy", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *tests], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert "3 errors" in done.stdout and done.returncode == 1, done.stdout
    assert done.stdout.count("backend cupy cannot be used") >= 3


def test_cupy_on_a_device_with_too_little_shared_memory(tmp_path: Path) -> None:
    use = """
import cupy
cupy.cuda.runtime.getDeviceProperties = lambda i: {"name": b"Tesla T4"}
for cupy.cuda.Device.compute_capability in ("75", "80", "121"):
    print(xformer.backends.unavailable_reason("cupy"))
"""
    assert behind_fake("return 1", use, tmp_path).splitlines() == [
        "backend cupy cannot be used: its kernels need compute capability 8.0 or higher, "
        "Tesla T4 (cuda:0) has 7.5",
        *("None", "None"),
    ]


def extras(*names: str) -> list[list[str]]:
    """What the project's extras of these names ask for."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [content["project"]["optional-dependencies"][name] for name in names]


def test_cupy_with_too_little_memory(tmp_path: Path) -> None:
    """In a transfer, and in whatever runs in the context of the backend, on its device."""
    use = """
import cupy
current, before = [0], []
class OutOfMemoryError(MemoryError):
    pass
def asarray(host):
    raise OutOfMemoryError(
        f"Out of memory allocating {host.nbytes:,} bytes on device {current[0]}."
    )
def enter(self):
    before.append(current[0])
    current[0] = self.id
def leave(self, *_):
    current[0] = before.pop()
cupy.cuda.Device.__enter__, cupy.cuda.Device.__exit__ = enter, leave
cupy.cuda.memory = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
cupy.cuda.runtime.memGetInfo = lambda: (10**9 * current[0], 80 * 10**9)
cupy.cuda.runtime.getDeviceProperties = lambda i: {"name": f"NVIDIA No. {i}".encode()}
cupy.get_default_memory_pool = lambda: types.SimpleNamespace(free_bytes=lambda: 5 * 10**8)
cupy.asarray = asarray
backend = xformer.backends.get("cupy", "cuda:1")
for attempt in (lambda: backend.asarray([1.0, 2.0]), lambda: asarray(backend.xp.host)):
    backend.xp.host = types.SimpleNamespace(nbytes=4096)
    try:
        with backend.active():
            attempt()
    except MemoryError as error:
        print(error)
    print(current)
try:
    with backend.active():
        raise KeyError("other errors pass")
except KeyError:
    print(current)
"""
    said = behind_fake("return 2", use, tmp_path).splitlines()
    for line, size in ((said[0], "16"), (said[2], "4,096")):
        assert line == (
            f"backend cupy: Out of memory allocating {size} bytes on device 1. Of the 80.0 GB of "
            "NVIDIA No. 1 (cuda:1) 1.0 GB are free, and 500.0 MB in pieces that are too small; "
            "smaller batches, or activation_checkpointing=True of the model, need less"
        )
    assert [said[1], *said[3:]] == ["[0]"] * 3


# ---- Devices ----


def test_numpy_has_one_device() -> None:
    assert backends.get("numpy", "cpu").name == "numpy"
    with pytest.raises(ValueError, match=r"^backend numpy has one device, cpu, got 'cuda'$"):
        backends.get("numpy", "cuda")


def test_strict_devices() -> None:
    devices = {backends.get("array-api-strict", d).asarray([1.0]).device for d in (None, "device1")}
    assert len(devices) == 2
    message = r"^backend array-api-strict has devices CPU_DEVICE, device1, device2, got 'gpu'$"
    with pytest.raises(ValueError, match=message):
        backends.get("array-api-strict", "gpu")


def test_torch_devices() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert backends.get("torch", "cpu").asarray([1.0]).device.type == "cpu"
    with pytest.raises(ValueError, match=r"^backend torch has no device 'gpu': "):
        backends.get("torch", "gpu")
    if torch.cuda.is_available():
        assert backends.get("torch", "cuda").asarray([1.0]).device.type == "cuda"
    else:
        with pytest.raises(Unusable, match=r"^backend torch cannot use cuda: no CUDA device is vi"):
            backends.get("torch", "cuda")


def test_jax_devices() -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    assert backends.get("jax", "cpu").asarray([1.0]).device.platform == "cpu"
    with pytest.raises(Unusable, match=r"^backend jax cannot use nowhere: "):
        backends.get("jax", "nowhere")


# ---- Arrays there and back ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(library: Backend, dtype: str) -> None:
    for shape in ((), (0,), (3, 0, 2), (2, 3)):
        host = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        array = library.asarray(host)
        assert str(array.dtype).endswith(dtype)
        back = library.to_numpy(array)
        assert isinstance(back, np.ndarray)
        assert (back.dtype, back.shape) == (host.dtype, host.shape)
        assert np.array_equal(back, host)
        named = library.to_numpy(library.asarray(host.tolist(), dtype))
        assert named.dtype == host.dtype
        assert np.array_equal(named.reshape(shape), host)


def test_extreme_values_survive(library: Backend) -> None:
    for dtype in ("float32", "float64"):
        info = np.finfo(dtype)
        host = np.array([info.max, info.min, info.tiny, np.inf, -np.inf, np.nan, -0.0], dtype)
        back = library.to_numpy(library.asarray(host))
        assert np.array_equal(back, host, equal_nan=True)
        assert np.signbit(back[-1])
    for dtype in ("int32", "int64", "uint8"):
        limits = np.iinfo(dtype)
        host = np.array([limits.min, limits.max], dtype)
        assert np.array_equal(library.to_numpy(library.asarray(host)), host)


def test_any_host_memory_is_taken(library: Backend) -> None:
    base = np.arange(24.0).reshape(4, 6)
    readonly = base.copy()
    readonly.flags.writeable = False
    for host in (
        base.T,
        base[::2, ::-3],
        readonly,
        base.astype(">f8"),
        np.broadcast_to(1.0, (3, 2)),
    ):
        array = library.asarray(host)
        assert np.array_equal(library.to_numpy(array), host)
        assert np.array_equal(library.to_numpy(array + 1), host + 1)  # a native array


@pytest.mark.parametrize("dtype", ["float16", "longdouble", "complex64", "complex128"])
def test_other_types_are_refused(library: Backend, dtype: str) -> None:
    name = np.dtype(dtype).name
    able = " and ".join(library.dtypes)
    message = f"^backend {library.name} computes in {able}, not {name}"
    with pytest.raises(ValueError, match=message):
        library.asarray([1.0], dtype)
    with pytest.raises(ValueError, match=message):
        library.asarray(np.ones(2, dtype))


def test_what_is_no_dtype_is_refused(library: Backend) -> None:
    for dtype in ("bfloat99", "torch.float32", object()):
        with pytest.raises(ValueError, match=r": dtype must be a name like float32 or int64, got"):
            library.asarray([1.0], dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"computes in .*, not str"):
        library.asarray(["text"])
    with pytest.raises(ValueError, match=r"computes in .*, not object"):
        library.asarray([None])
    with pytest.raises(ValueError, match=r"inhomogeneous"):
        library.asarray([[1.0], [1.0, 2.0]])
    for dtype in ("float16", "int64", "bool"):
        with pytest.raises(ValueError, match=f"computes in .*, not {dtype}"):
            library.generator(0, dtype)


def test_jax_without_float64(tmp_path: Path) -> None:
    """JAX as it is after importing: no float64, no int64."""
    pytest.importorskip("jax", reason="jax is not installed")
    code = """
import warnings; warnings.simplefilter("error")
import numpy as np
import xformer
from xformer import backends
b = backends.get("jax")
assert b.dtypes == ("float32",), b.dtypes
try:
    b.asarray([1.0])
except ValueError as error:
    print(error)
assert b.asarray([1, 2]).dtype == "int32"
assert b.asarray(np.array([1, 2], np.uint64)).dtype == "uint32"
assert b.to_numpy(b.generator(0).integers((3,), high=2**31)).dtype == "int32"
try:
    b.asarray([2**31])
except ValueError as error:
    print(error)
x = b.asarray(np.ones((5, 7)), "float32")
key = xformer.RandomKey(2**64 - 1, 2**32 - 1, 2**32 - 1)
for rate in (0.3, 0.5, 0.7, 1 - 1e-12):
    y, cache = xformer.ops.dropout(x, rate=rate, key=key)
    wanted, _ = xformer.ops.dropout(np.ones((5, 7)), rate=rate, key=key)
    assert np.array_equal(np.asarray(y) > 0, wanted > 0), rate
gpt = xformer.GPT(vocab_size=5, n_layers=1, d_model=4, n_heads=2, max_len=3, dropout=0.1)
tokens = b.asarray([[1, 2, 3]])
params = gpt.init(backend="jax")
loss, cache = gpt.loss(params, tokens, tokens, dropout_key=xformer.RandomKey(0), ignore_index=-1)
cache.backward()
from xformer.backends.jax import enable_float64
enable_float64()
assert backends.get("jax").asarray([1.0]).dtype == "float64"
"""
    said = python(code, tmp_path, JAX_PLATFORMS="cpu").splitlines()
    assert said == [
        "backend jax computes in float32, not float64; "
        "xformer.backends.jax.enable_float64() lets JAX compute in float64",
        "backend jax: values do not fit in int32; "
        "xformer.backends.jax.enable_float64() lets JAX compute in float64",
    ]


# ---- The rest of what a backend offers ----


def test_arrays_belong_to_the_backend(library: Backend) -> None:
    x = library.asarray([1.0, 2.0], "float32")
    assert library_of(type(x)) == LIBRARIES[library.name].replace("-", "_")
    assert library.xp.isdtype(x.dtype, "real floating")
    assert {"float32", "float64"} == set(library.dtypes)


def test_memory_is_plausible(library: Backend) -> None:
    before = library.memory()
    assert isinstance(before, Memory)
    arrays, after = [], before
    while len(arrays) < 16 and not _has_grown(before, after):  # first what other tests have freed
        arrays.append(library.asarray(np.ones((2**21, 4)), "float64") + 1)  # 64 MiB, written to
        library.synchronize()
        after = library.memory()
    for number in (*before, *after):
        assert number is None or 2**16 < number < 2**40
    if after.in_use is not None and after.peak is not None:
        assert after.in_use <= 1.01 * after.peak
        assert after.peak >= 2**21 * 4 * 8
    assert before.in_use is None or _has_grown(before, after)


def _has_grown(before: Memory, after: Memory) -> bool:
    if before.in_use is None or after.in_use is None:
        return after is not before  # one array is enough
    return after.in_use - before.in_use > 2**25


def test_synchronize_waits_for_the_work(library: Backend) -> None:
    x = library.asarray(np.full((300, 300), 0.5), "float32")
    y = x @ x @ x
    library.synchronize()
    assert getattr(y, "is_ready", lambda: True)()  # JAX tells
    assert (library.to_numpy(y) == 300 * 300 / 8).all()


def test_describe(library: Backend) -> None:
    line = library.describe()
    assert "\n" not in line
    assert line == (
        f"{library.name} {library.version} on {library.device_name()}, {', '.join(library.dtypes)}"
    )
    assert library.version[0].isdigit()
    assert library.device_name()


# ---- Random numbers ----


def draws(rng: Generator) -> list[object]:
    return [
        rng.normal((3, 5), mean=1.0, std=2.0),
        rng.uniform((7,), low=-2.0, high=3.0),
        rng.integers((2, 3), low=-4, high=9),
        rng.full((2,), 0.1),
        rng.normal(()),
    ]


def test_generator_is_the_same_everywhere(library: Backend) -> None:
    wanted = draws(backends.get("numpy").generator(7, "float64"))
    for dtype in ("float32", "float64"):
        drawn = [library.to_numpy(x) for x in draws(library.generator(7, dtype))]
        for got, exact in zip(drawn, wanted, strict=True):
            exact = np.asarray(exact)
            if exact.dtype == np.float64:  # rounded once, from the float64 number
                exact = exact.astype(dtype)
            assert got.dtype == exact.dtype
            assert got.shape == exact.shape
            assert np.array_equal(got, exact)


def test_generator_follows_its_seed() -> None:
    backend = backends.get("numpy")
    a, b, c = (backend.generator(seed).normal((5,)) for seed in (1, 1, 2))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
    rng = backend.generator(1)
    assert not np.array_equal(rng.normal((5,)), rng.normal((5,)))


def test_generator_draws_what_it_says() -> None:
    rng = backends.get("numpy").generator(3, "float64")
    x = rng.normal((100_000,), mean=3.0, std=0.5)
    assert abs(x.mean() - 3.0) < 0.01
    assert abs(x.std() - 0.5) < 0.01
    u = rng.uniform((100_000,), low=-1.0, high=3.0)
    assert u.min() >= -1.0
    assert u.max() < 3.0
    assert abs(u.mean() - 1.0) < 0.02
    assert set(rng.integers((1000,), low=-1, high=2).tolist()) == {-1, 0, 1}
    assert np.array_equal(rng.full((2, 2), 0.5), np.full((2, 2), 0.5))
    assert rng.normal((0, 3)).shape == (0, 3)


# ---- By name or by object ----

PUBLIC = ("xformer", *(m.__name__ for n in xf.__all__ if ismodule(m := getattr(xf, n))))
GPT = xf.GPT(11, 1, 8, 2, 6)
TRANSFORMER = xf.Transformer(7, 7, 8, 2, 1, 1, 6)
IDS = np.arange(12).reshape(2, 6) % 11
BATCH = training.Batch((IDS, IDS), {}, 12, 12)
CONFIG = training.TrainConfig(steps=1, batch_size=2, warmup=1)


def public() -> Iterator[tuple[str, Any]]:
    """Functions, classes and their methods in __all__ of public modules, by dotted name."""
    seen: set[int] = set()
    for module in map(importlib.import_module, PUBLIC):
        for name in getattr(module, "__all__", vars(module)):
            found = getattr(module, name)
            members = vars(found).items() if inspect.isclass(found) else ()
            members = [(k, one) for k, one in members if k[0] != "_" or k == "__call__"]
            for path, one in ((name, found), *((f"{name}.{k}", v) for k, v in members)):
                if inspect.isroutine(one) or inspect.isclass(one):
                    if id(one) not in seen:
                        yield path, one
                    seen.add(id(one))


def losses(backend: Any) -> Any:
    state = training.start(GPT.init(0), CONFIG)
    source = SimpleNamespace(batch=lambda i: BATCH)
    return [s.loss for s in training.train(training.loss_of(GPT), state, source, CONFIG, backend)]


def stored(write: Any) -> Callable[[Any], bytes]:
    def files(backend: Any) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder, "x"), backend)
            return b"".join(p.read_bytes() for p in sorted(Path(folder).rglob("*.safetensors")))

    return files


def from_files(read: Any) -> Callable[[Any], Any]:
    def of(backend: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return read(Path(folder), backend)

    return of


def tuned(what: str, backend: Any) -> Any:
    """What a function of `finetune` returns, for one example of three ids."""
    model = pretrained.model({**GPT2, "architectures": ["GPT2LMHeadModel"]})
    task = finetune.Task(model, None, 6)
    params, example = model.init(0), Example(IDS[0, :3], IDS[0, 1:4])
    if what == "loss":
        return task.loss(params, task.batch([example], np.random.default_rng(0)), backend)[0]
    if what == "evaluate":
        return finetune.evaluate(task, params, [example], backend)
    if what == "train":
        return [s.loss for s in finetune.train(task, params, [example], CONFIG, backend)]
    return finetune.run("unused", task, params, [example], CONFIG, backend).about


def measured(backend: Any) -> Any:
    """The accuracy and F1 of a classifier for one example."""
    model = pretrained.model(
        {**GPT2, "architectures": ["GPT2ForSequenceClassification"], "num_labels": 2}
    )
    task = Classify(model, None, 6)
    return finetune.measure(task, model.init(0), [Example(IDS[0, :3], np.int64(1))], backend)


GPT2 = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}


def loaded(folder: Path, backend: Any) -> Any:
    training.save(folder, GPT, GPT.init(0), "numpy")
    return training.load(folder, backend)[1]


def pretrained_loaded(folder: Path, backend: Any) -> Any:
    model = pretrained.model({**GPT2, "architectures": ["GPT2LMHeadModel"]})
    pretrained.save(model, model.init(0), folder)
    return pretrained.load(folder, backend)[1]


CALLS: dict[str, Callable[[Any], Any]] = {
    "GPT.init": lambda b: GPT.init(0, b),
    "LanguageModel.init": lambda b: GPT.init(0, b),
    "Transformer.init": lambda b: TRANSFORMER.init(0, b),
    "EncoderDecoder.init": lambda b: TRANSFORMER.init(0, b),
    "evaluate": lambda b: training.evaluate(training.loss_of(GPT), GPT.init(0), [BATCH], b),
    "train": losses,
    "save": stored(lambda folder, b: training.save(folder, GPT, GPT.init(0), b)),
    "load": from_files(loaded),
    "pretrained.load": from_files(pretrained_loaded),
    "write_state": stored(lambda path, b: training.write_state(path, {"a": IDS}, b)),
    "Run": lambda b: training.Run("unused", b, {}).backend.name,
    "Task.loss": lambda b: tuned("loss", b),
    "finetune.evaluate": lambda b: tuned("evaluate", b),
    "finetune.measure": measured,
    "finetune.train": lambda b: tuned("train", b),
    "run": lambda b: tuned("run", b),
    "loss_of": lambda b: training.loss_of(GPT)(GPT.init(0), BATCH, b)[0],
    "kernels": lambda b: chosen_within(b),
    "get": lambda b: backends.get(b).name,
}
# A user's own loss gets the object; a Generator is made by a Backend.
OBJECTS = {"Loss.__call__", "Generator"}


def chosen_within(backend: Any) -> str:
    with xf.kernels(backend):
        return dispatch.chosen_kernels()


def test_every_public_function_takes_a_name_or_an_object() -> None:
    """By its signature: each of them has a call below."""
    found = set()
    for path, one in public():
        try:
            parameters = inspect.signature(one).parameters
        except (TypeError, ValueError):
            continue
        if "backend" in parameters and path not in OBJECTS:
            annotation = str(parameters["backend"].annotation)
            assert annotation.replace("backends.", "") == "str | Backend", path
            found.add(path.rpartition("finetune.")[2])
    assert len(found) >= 11
    assert found <= {name.removeprefix("finetune.").removeprefix("pretrained.") for name in CALLS}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_by_name_and_by_object(call: Callable[[Any], Any]) -> None:
    one, other = (call(b) for b in ("numpy", backends.get("numpy")))
    one, other = (tree.flatten({"": found}) for found in (one, other))
    assert one.keys() == other.keys()
    assert all(np.array_equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


def test_an_object_has_a_device() -> None:
    with pytest.raises(ValueError, match="a Backend has a device: give the name 'numpy'"):
        backends.get(backends.get("numpy"), "cpu")
