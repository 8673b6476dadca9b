"""Launching on CuPy's arrays, as far as it can be seen without CuPy: what CuPy is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from hanging import SECONDS

ROOT = Path(__file__).parents[1]

# A CuPy that notes what it is asked to compile and to launch.
FAKE = """
import sys, types
import numpy as np

log, current = [], [0]
class ndarray:
    def __init__(self, dtype, device=0, ptr=0):
        self.dtype = np.dtype(dtype)
        self.data = types.SimpleNamespace(device_id=device, ptr=ptr)
class RawKernel:
    asked = None
    def __init__(self, name):
        self.name = name
    @property
    def max_dynamic_shared_size_bytes(self):
        raise AssertionError("the host would wait for the answer")
    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        self.asked = size
    def __call__(self, grid, block, args, *, shared_mem):
        kinds = [a.dtype.name if isinstance(a, np.generic) else type(a).__name__ for a in args]
        log.append((self.name, current[0], grid, block, kinds, shared_mem, self.asked))
        self.asked = None
class RawModule:
    def __init__(self, *, code, options):
        log.append(("compiled", options, "#include" in code, "block_reduce" in code))
    def get_function(self, name):
        return RawKernel(name)
runtime = types.SimpleNamespace(getDevice=lambda: current[0])
sys.modules["cupy"] = types.ModuleType("cupy")
cuda = types.SimpleNamespace(runtime=runtime)
fakes = dict(ndarray=ndarray, RawModule=RawModule, cuda=cuda, empty="empty")
vars(sys.modules["cupy"]).update(fakes)

from xformer.backends.cupy.module import launch
from xformer.backends.cupy.softmax import SOURCE

def run(dtype, *args, shared=0, device=0, vec=0):
    like = ndarray(dtype, device)
    launch(SOURCE, "softmax_forward", like, grid=(2,), block=(32,), args=(like, *args),
           shared=shared, WIDE=vec)
"""


def said(code: str, folder: Path) -> list[str]:
    """What `code` prints behind the fake, in a new interpreter."""
    command = [sys.executable, "-c", f"{FAKE}\n{code}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_compilation_for_each_dtype_and_choice(tmp_path: Path) -> None:
    code = """
for dtype, vec in (("f4", 0), ("f4", 0), ("f8", 0), ("f4", 1), ("f8", 0)):
    run(dtype, vec=vec)
compiled = [entry for entry in log if entry[0] == "compiled"]
print(len(log) - len(compiled), *(" ".join(entry[1]) for entry in compiled), sep="\\n")
print({entry[2:] for entry in compiled})
"""
    assert said(code, tmp_path) == [
        "5",
        "-std=c++17 -DREAL=float -DWIDE=0",
        "-std=c++17 -DREAL=double -DWIDE=0",
        "-std=c++17 -DREAL=float -DWIDE=1",
        "{(False, True)}",  # headers stand in the source: CuPy caches by it
    ]


def test_arguments_have_the_kernels_types(tmp_path: Path) -> None:
    code = """
for dtype in ("f4", "f8"):
    run(dtype, None, 3, 0.5)
    print(*log[-1][4])
for shared in (50000, 50000, 49000, 60000, 100):
    run("f4", shared=shared)
    print(log[-1][5:])
current[0] = 1
run("f4", shared=50000, device=1)
print(log[-1][5:])
"""
    assert said(code, tmp_path) == [
        "ndarray uint64 int float32",  # CuPy hands ints over as long long
        "ndarray uint64 int float64",
        "(50000, 50000)",  # beyond 48 KiB it must be asked for, once of each device
        "(50000, None)",
        "(49000, None)",
        "(60000, 60000)",
        "(100, None)",
        "(50000, 50000)",
    ]


def test_what_is_stored_in_two_bytes(tmp_path: Path) -> None:
    """Numbers are float32, arithmetic is; a source without a form for it is not compiled."""
    code = """
from xformer.backends.cupy.glu import SOURCE as GLU
like = ndarray("f2")
options = dict(WIDE=0, ACTIVATION="silu")
launch(GLU, "glu_forward", like, grid=(2,), block=(32,), args=(like, None, 3, 0.5), **options)
print(log[0][1][:3], *log[1][4])
try:
    run("f2")
except TypeError as error:
    print(error)
"""
    assert said(code, tmp_path) == [
        "('-std=c++17', '-DREAL=float', '-DSTORED=float16') ndarray uint64 int float32",
        "softmax.cu is for float32, float64, got float16",
    ]


def test_lists_travel_by_value(tmp_path: Path) -> None:
    """As one value of as many bytes, which CuPy copies into the arguments."""
    code = """
given = []
RawKernel.__call__ = lambda self, grid, block, args, *, shared_mem: given.extend(args)
arrays = [ndarray("f4", ptr=ptr) for ptr in (512, 2**47)]
run("f4", [*arrays, None], [7, 2**40])
for value in given[1:]:
    print(type(value).__name__, value.size, value.itemsize, value.view(np.int64).tolist())
try:
    run("f4", [ndarray("f4"), ndarray("f4", 1)])
except ValueError as error:
    print(error)
"""
    assert said(code, tmp_path) == [
        f"ndarray 1 24 [512, {2**47}, 0]",
        f"ndarray 1 16 [7, {2**40}]",
        "softmax_forward: arrays must lie on the current device, cuda:0, got one on cuda:1: "
        "call it within backend.active()",
    ]


def test_launches_where_the_arrays_are(tmp_path: Path) -> None:
    """On the current device, where new arrays are made too; arrays of another are refused."""
    code = """
for current[0], device in ((0, 0), (1, 1), (0, 1)):
    try:
        run("f4", device=device)
    except ValueError as error:
        print(error)
try:
    run("f4", ndarray("f4", 2))
except ValueError as error:
    print(error)
print([entry[1] for entry in log if entry[0] != "compiled"])
class Mine(ndarray):
    pass
like = Mine("f4")
launch(SOURCE, "softmax_forward", like, grid=(1,), block=(32,), args=(like,), WIDE=0)
launch(SOURCE, "softmax_forward", like, grid=(1, 0), block=(32,), args=(like,), WIDE=0)
print(len(log))
try:
    launch(SOURCE, "softmax_forward", np.ones(3), grid=(1,), block=(32,), args=(), WIDE=0)
except TypeError as error:
    print(error)
"""
    assert said(code, tmp_path) == [
        "softmax_forward: arrays must lie on the current device, cuda:0, got one on cuda:1: "
        "call it within backend.active()",
        "softmax_forward: arrays must lie on the current device, cuda:0, got one on cuda:2: "
        "call it within backend.active()",
        "[0, 1]",
        "4",
        "launch: arrays must be CuPy's, got ndarray of numpy",
    ]


def test_products_round_to_tf32_within_the_context(tmp_path: Path) -> None:
    """CuPy's own setting, as it was before, also after an error."""
    code = """
import xformer.backends
from xformer.backends.cupy import tf32
linalg = types.ModuleType("cupy._core._routines_linalg")
linalg.COMPUTE_TYPE_TF32, now = 7, {"float32": 1, "float64": 1}
linalg.get_compute_type = lambda dtype: now[np.dtype(dtype).name]
linalg.set_compute_type = lambda dtype, kind: now.__setitem__(np.dtype(dtype).name, kind)
core = types.ModuleType("cupy._core")
core._routines_linalg = linalg
sys.modules |= {"cupy._core": core, "cupy._core._routines_linalg": linalg}
try:
    with tf32():
        pass
except ImportError as error:
    print(type(error).__name__, str(error)[:28])
xformer.backends.get = lambda name: print("asked for", name)
with tf32():
    print(now)
    with tf32():
        print(now)
    print(now)
print(now)
linalg.set_compute_type("float32", 2)
try:
    with tf32():
        raise KeyError
except KeyError:
    print(now)
"""
    inside, outside = "{'float32': 7, 'float64': 1}", "{'float32': 1, 'float64': 1}"
    assert said(code, tmp_path) == [
        "Unusable backend cupy cannot be used:",
        *("asked for cupy", inside, "asked for cupy", inside, inside, outside),
        *("asked for cupy", "{'float32': 2, 'float64': 1}"),
    ]


def test_where_products_go(tmp_path: Path) -> None:
    """cuBLASLt is given CuPy's current device and stream, its switch of TF32, and its memory."""
    code = """
from xformer.backends.cupy import driver
from xformer.backends.cupy.module import driver_of
linalg = types.ModuleType("cupy._core._routines_linalg")
linalg.COMPUTE_TYPE_TF32, kind = 7, [7]
linalg.get_compute_type = lambda dtype: kind[0]
core = types.ModuleType("cupy._core")
core._routines_linalg = linalg
sys.modules |= {"cupy._core": core, "cupy._core._routines_linalg": linalg}
cuda = sys.modules["cupy"].cuda
cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=90)
cuda.alloc = lambda size: ("of the pool", size)
class Mine(ndarray):
    pass
own = driver_of(Mine).CUBLASLT
print(*own.stream_of([ndarray("f4")]), own.allocate(5))
kind[0], current[0] = 1, 1
print(*own.stream_of([ndarray("f4", 1)]))
try:
    own.stream_of([ndarray("f4", 1), ndarray("f4")])
except ValueError as error:
    print(error)
"""
    assert said(code, tmp_path) == [
        "0 90 True ('of the pool', 5)",
        "1 90 False",
        "linear: arrays must lie on the current device, cuda:1, got one on cuda:0: "
        "call it within backend.active()",
    ]


def test_what_a_graph_asks_for(tmp_path: Path) -> None:
    """A pool and a stream of its own, waited for around what is done there, not where it is noted;
    an error ends the capture."""
    code = """
from contextlib import contextmanager
from xformer.backends.cupy.driver import Graph as OfCupy
cuda = sys.modules["cupy"].cuda
class Graph:
    def launch(self):
        print("launched")
class Stream:
    def __init__(self, non_blocking):
        print("not blocking", non_blocking)
    def __enter__(self):
        print("its stream")
    def __exit__(self, *error):
        print("the stream of before")
    def synchronize(self):
        print("waited for its own")
    def begin_capture(self):
        print("captures")
    def end_capture(self):
        print("ends")
        return Graph()
current = types.SimpleNamespace(synchronize=lambda: print("waited for the current one"))
cuda.get_current_stream = lambda: current
left = dict(free_all_blocks=lambda: print("freed"), total_bytes=lambda: 0)
cuda.MemoryPool = lambda: types.SimpleNamespace(malloc="malloc of its own pool", **left)
cuda.Stream = Stream
@contextmanager
def using_allocator(malloc):
    print(malloc)
    try:
        yield
    finally:
        print("malloc of before")
cuda.using_allocator = using_allocator
pool = types.SimpleNamespace(free_all_blocks=lambda: print("gives back what is free"))
sys.modules["cupy"].get_default_memory_pool = lambda: pool
graph = OfCupy()
with graph.apart():
    print("work")
with graph.recording():
    print("work")
graph.launch()
try:
    with graph.recording():
        raise NotImplementedError("cuBLAS")
except NotImplementedError as error:
    print(error)
def fails(self):
    print("fails")
    raise TypeError("the last error")
Stream.end_capture = Stream.synchronize = fails
for context in (graph.recording, graph.apart):  # the first error is the one to show
    for error in (KeyboardInterrupt("interrupt"), MemoryError("memory"), SyntaxError("compile")):
        try:
            with context():
                raise error
        except BaseException as shown:
            print(type(shown).__name__)
try:
    with graph.recording():  # nothing has failed but the graph
        print("work")
except TypeError as error:
    print(error)
del graph, context
"""
    names = ("KeyboardInterrupt", "MemoryError", "SyntaxError")
    begun = ["waited for the current one", "gives back what is free"]
    inside = ["malloc of its own pool", "its stream"]
    outside = ["the stream of before", "malloc of before"]
    assert said(code, tmp_path) == [
        "not blocking True",
        *(*begun, *inside, "work", *outside, "waited for its own"),
        *(*inside, "captures", "work", "ends", *outside, "launched"),
        *(*inside, "captures", "ends", *outside, "cuBLAS"),
        *(line for name in names for line in (*inside, "captures", "fails", *outside, name)),
        *(line for name in names for line in (*begun, *inside, "fails", *outside, name)),
        *(*inside, "captures", "work", "fails", *outside, "the last error"),
        "freed",
    ]


def test_graphs_count_in_the_memory(tmp_path: Path) -> None:
    """As long as there are such, or arrays of theirs, which are in no other pool.

    CuPy's pools keep what they have freed when they go: they are emptied before.
    """
    code = """
from xformer.backends.cupy import driver
class Pool(str):
    size = 0
    def free_all_blocks(self):
        print("freed", self)
    def total_bytes(self):
        return self.size
pools = iter([Pool("one"), Pool("another")])
cuda = sys.modules["cupy"].cuda
cuda.MemoryPool, cuda.Stream = lambda: next(pools), lambda non_blocking: None
sys.modules["cupy"].get_default_memory_pool = lambda: "of all else"
first, second = driver.Graph(), driver.Graph()
print(*sorted(driver.pools()))
del first
print(*driver.pools())
another, another.size = second._pool, 5
del second, another
print(*driver.pools())
for pool in driver.pools()[1:]:
    pool.size = 0
print(*driver.pools())
"""
    assert said(code, tmp_path) == [
        *("another of all else one", "freed one", "of all else another"),
        *("freed another", "freed another", "of all else another"),
        *("freed another", "freed another", "of all else"),
    ]


def test_packages_that_do_not_fit_are_said_once(tmp_path: Path) -> None:
    """Another cuda.core: AttributeError or TypeError at import. A reason, and a RuntimeWarning."""
    code = """
import warnings
def broken(error):
    class Loader:
        create_module = staticmethod(lambda spec: None)
        @staticmethod
        def exec_module(module):
            raise error
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name in ("nvmath", "cudnn"):
                return importlib.machinery.ModuleSpec(name, Loader)
    return Finder
for error in (AttributeError("no attribute 'experimental'"), TypeError("takes 2 arguments")):
    packages("cuda", "cuda.core", "cuda.bindings", "cuda.pathfinder", "nvmath", "nvmath.bindings")
    sys.meta_path.insert(0, broken(error))
    for name, find in (("nvmath", driver.bindings), ("cudnn", driver.frontend)):
        sys.modules.pop(name)
        sys.modules.pop(f"{name}.bindings", None)
        find.cache_clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert find() is find()
        (one,) = said
        print(one.category.__name__, find() == str(one.message)[14:], one.message)
    sys.meta_path.pop(0)
"""
    texts = "AttributeError: no attribute 'experimental'", "TypeError: takes 2 arguments"
    assert said(PACKAGES + code, tmp_path) == [
        f"RuntimeWarning True backend cupy: {name} cannot be called: {text}"
        for text in texts
        for name in ("cuBLASLt", "cuDNN")
    ]


# Packages of NVIDIA's that are there, without anything in them, or are not.
PACKAGES = """
import importlib.machinery
from xformer.backends.cupy import cudnn_support, driver
def packages(*there, **contents):
    for name in ("nvmath", "nvmath.bindings", "cudnn", "cuda", "cuda.core", "cuda.bindings",
                 "cuda.pathfinder"):
        sys.modules[name] = module = types.ModuleType(name) if name in there else None
        if module is not None:
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
            vars(module).update(contents.get(name.replace(".", "_"), {}))
    driver.bindings.cache_clear()
    driver.frontend.cache_clear()
    assert driver.bindings() is driver.bindings() and driver.frontend() is driver.frontend()
def fails(said):
    def call():
        raise RuntimeError(said)
    return call
"""


def test_what_is_missing_of_cublaslt_is_named(tmp_path: Path) -> None:
    """Packages by name, with their extra, the library, the driver; looked for once; no error."""
    code = """
CUDA = ("cuda", "cuda.core", "cuda.bindings", "cuda.pathfinder")
def needed(get_version, without=None):
    lt = types.SimpleNamespace(get_version=get_version)
    there = ["nvmath", *CUDA] + (["nvmath.bindings"] if without is None else [])
    packages(*(name for name in there if name != without), nvmath_bindings={"cublasLt": lt})
    return driver.bindings()
packages("cuda", "cuda.pathfinder")
print(driver.bindings())
for name in CUDA[1:]:
    print(needed(lambda: 1, name))
print(needed(fails('Failure finding "libcublasLt.so.13 or libcublasLt.so.12"')))
print(needed(fails("CUDA driver is not found (libcuda.so.1)")))
print(needed(fails("CUBLAS_STATUS_NOT_INITIALIZED")))
lt = needed(lambda: 130100)
print(lt is sys.modules["nvmath.bindings"].cublasLt, driver.beside()["cuBLASLt"])
"""
    cannot, install = "cuBLASLt cannot be called: ", ": pip install 'xformer-array[nvmath]'"
    assert said(PACKAGES + code, tmp_path) == [
        f"{cannot}packages nvmath-python, cuda-core, cuda-bindings are not installed{install}",
        f"{cannot}package cuda-core is not installed{install}",
        f"{cannot}package cuda-bindings is not installed{install}",
        f"{cannot}package cuda-pathfinder is not installed{install}",
        f'{cannot}libcublasLt was not found (Failure finding "libcublasLt.so.13 or '
        "libcublasLt.so.12\"): pip install 'xformer-array[cuda13]', or for CUDA 12: pip install "
        "'xformer-array[cuda12]'",
        f"{cannot}there is no NVIDIA driver (CUDA driver is not found (libcuda.so.1))",
        f"{cannot}RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED",
        "True 130100",
    ]


def test_what_is_missing_of_cudnn_is_named(tmp_path: Path) -> None:
    """An old library too; and cuda-bindings, which the frontend imports only in later calls."""
    code = """
def needed(backend_version, *there):
    packages("cuda", *there, cudnn={"backend_version": backend_version})
    return driver.frontend()
print(needed(None))
print(needed(lambda: cudnn_support.OLDEST, "cudnn"))
both = "cudnn", "cuda.bindings"
print(needed(fails("Unable to find symbol cudnnGetVersion"), *both))
print(needed(lambda: 91501, *both))
print(needed(lambda: 91600, *both) is sys.modules["cudnn"], driver.beside()["cuDNN"])
"""
    cannot, install = "cuDNN cannot be called: ", ": pip install 'xformer-array[cudnn]'"
    older = ", or for CUDA 12: pip install 'xformer-array[cudnn-cu12]'"
    assert said(PACKAGES + code, tmp_path) == [
        f"{cannot}packages nvidia-cudnn-frontend, cuda-bindings are not installed{install}",
        f"{cannot}package cuda-bindings is not installed{install}",
        f"{cannot}libcudnn was not found (Unable to find symbol cudnnGetVersion){install}{older}",
        f"cuDNN is too old: its version is 91501, 91600 is needed{install}{older}",
        "True 91600",
    ]


def test_extras_bring_the_packages_that_are_named() -> None:
    """All that NVIDIA's bindings import; of each CUDA its own bindings and library."""
    from xformer.backends.cupy import packages

    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = {
        name: {re.split(r"[<>=\[]", line)[0] for line in lines}
        for name, lines in content["project"]["optional-dependencies"].items()
    }
    for extra, modules in packages.PACKAGES.items():
        assert set(modules.values()) <= extras[extra], extra
    assert extras["cudnn"] - extras["cudnn-cu12"] == {"nvidia-cudnn-cu13"}
    assert extras["cudnn-cu12"] - extras["cudnn"] == {"nvidia-cudnn-cu12"}
    assert "cuda-bindings" in extras["cuda12"] & extras["cuda13"]


def test_where_attention_goes(tmp_path: Path) -> None:
    """To CuPy's device, which must be that of the arrays, and its stream."""
    code = """
from xformer.backends.cupy import driver
cuda = sys.modules["cupy"].cuda
cuda.Device = lambda number: types.SimpleNamespace(compute_capability=("90", "120")[number])
cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=11 + current[0])
for current[0] in (0, 1):
    print(*driver.attention_stream_of([ndarray("f2", current[0])]))
try:
    driver.attention_stream_of(iter([ndarray("f2", 1), ndarray("f2", 0)]))
except ValueError as error:
    print(error)
"""
    assert said(code, tmp_path) == [
        "0 11 90",
        "1 12 120",
        "sdpa: arrays must lie on the current device, cuda:1, got one on cuda:0: call it within "
        "backend.active()",
    ]
