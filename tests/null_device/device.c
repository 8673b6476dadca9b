// A CUDA device that computes nothing, in the place of the driver under CuPy.
//
// CuPy's compiled modules call the CUDA runtime and driver through functions that the modules
// cupy_backends.cuda.api.runtime and .driver export as capsules (`__pyx_capi__`). `install` puts
// the functions of this file there, before CuPy is imported. A function that is not replaced still
// calls the real driver, which says that there is no device: nothing passes unseen.
//
// Addresses are numbers without memory behind them. What is read from the device is zero, but a
// single byte, which is a bool, is true. Each call is counted, and given to the sink, if there is
// one. Refused, with CUDA's own error: launches that no device takes, copies outside the
// allocations, streams that are gone, more memory than there is, and during a capture whatever
// waits.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// ---- What is counted ----

enum kind { LAUNCH, GRAPH, H2D, D2H, D2D, MEMSET, WAIT, MALLOC, FREE, LOAD, PINNED, KINDS };
static const char *const NAMES[KINDS] = {"launch", "graph", "H2D",  "D2H",  "D2D",   "memset",
                                         "wait",   "malloc", "free", "load", "pinned"};
static long long calls[KINDS], bytes[KINDS], captured[KINDS];
static unsigned refused;      // bits of kinds that raise
static PyObject *sink = NULL;  // called with kind, name, size, stream, captured
static PyObject *runtime_error = NULL;  // CuPy's

enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400, CAPTURE_UNSUPPORTED = 900 };
enum { CAPTURE_INVALIDATED = 901 };

static intptr_t capturing = 0;  // the stream
static int broken = 0;          // the capture, by a call that it cannot hold
static long long nodes = 0;     // of the capture

// CuPy's exception for an error code of the CUDA runtime; always 0.
static int fail(int code) {
    PyObject *error = PyObject_CallFunction(runtime_error, "i", code);
    if (error) {
        PyErr_SetObject(runtime_error, error);
        Py_DECREF(error);
    }
    return 0;
}

// Counts a call; 0 with an exception where it is refused.
static int noted(enum kind kind, const char *name, size_t size, intptr_t stream) {
    int inside = capturing && (stream == capturing || kind == MALLOC || kind == LOAD);
    calls[kind]++;
    bytes[kind] += size;
    captured[kind] += inside;
    nodes += inside && kind != MALLOC && kind != LOAD;
    if (sink) {
        PyObject *done =
            PyObject_CallFunction(sink, "ssnni", NAMES[kind], name, (Py_ssize_t)size, stream, inside);
        if (!done) return 0;
        Py_DECREF(done);
    }
    if (capturing && kind == WAIT) {
        broken = 1;
        return fail(CAPTURE_UNSUPPORTED);
    }
    if (refused & 1u << kind) {
        PyErr_Format(PyExc_AssertionError, "null device: %s (%s) was refused", NAMES[kind], name);
        return 0;
    }
    return 1;
}

static PyObject *none_or_error(int right) {
    if (!right) return NULL;
    Py_RETURN_NONE;
}

// ---- Memory ----

struct block {
    intptr_t at;
    size_t size;
};
static struct block *blocks = NULL;
static size_t n_blocks = 0, room_for = 0, in_use = 0, peak = 0, capacity = 80000000000u;
static intptr_t next_address = 0x700000000000, next_handle = 0x1000;

static intptr_t malloc_(size_t size, int skip) {
    if (!noted(MALLOC, "malloc", size, 0)) return 0;
    if (in_use + size > capacity) return fail(OUT_OF_MEMORY);
    if (n_blocks == room_for) blocks = realloc(blocks, sizeof *blocks * (room_for = 2 * room_for + 64));
    intptr_t at = next_address;
    next_address += (size / 512 + 2) * 512;  // a gap behind each: an address belongs to one
    blocks[n_blocks++] = (struct block){at, size};
    in_use += size;
    if (in_use > peak) peak = in_use;
    return at;
}

static PyObject *free_(intptr_t at, int skip) {
    if (!noted(FREE, "free", 0, 0)) return NULL;
    for (size_t i = 0; i < n_blocks; ++i)
        if (blocks[i].at == at) {
            in_use -= blocks[i].size;
            blocks[i] = blocks[--n_blocks];
            Py_RETURN_NONE;
        }
    return none_or_error(at ? fail(INVALID_VALUE) : 1);
}

// Whether an allocation holds all of it; 0 with an exception where none does.
static int held(intptr_t at, size_t size) {
    for (size_t i = n_blocks; i-- > 0;)
        if (at >= blocks[i].at && at + size <= blocks[i].at + blocks[i].size) return 1;
    return size ? fail(INVALID_VALUE) : 1;
}

static intptr_t host_alloc(size_t size, unsigned flags, int skip) {
    return noted(PINNED, "hostAlloc", size, 0) ? (intptr_t)malloc(size ? size : 1) : 0;
}

static PyObject *free_host(intptr_t at, int skip) {
    free((void *)at);
    Py_RETURN_NONE;
}

static PyObject *memory_info(int skip) {
    return Py_BuildValue("(nn)", (Py_ssize_t)(capacity - in_use), (Py_ssize_t)capacity);
}

// ---- Copies ----

static int copied(intptr_t to, intptr_t from, size_t size, int kind, intptr_t stream) {
    enum kind counted = kind == 1 ? H2D : kind == 2 ? D2H : D2D;
    if (!noted(counted, "memcpy", size, stream)) return 0;
    if (counted != D2H && !held(to, size)) return 0;
    if (counted != H2D && !held(from, size)) return 0;
    if (counted == D2H) memset((void *)to, size == 1, size);
    return 1;
}

static PyObject *memcpy_(intptr_t to, intptr_t from, size_t size, int kind, int skip) {
    return none_or_error(noted(WAIT, "memcpy", 0, 0) && copied(to, from, size, kind, 0));
}

static PyObject *memcpy_async(intptr_t to, intptr_t from, size_t size, int kind, intptr_t stream, int skip) {
    return none_or_error(copied(to, from, size, kind, stream));
}

static PyObject *memset_async(intptr_t at, int value, size_t size, intptr_t stream, int skip) {
    return none_or_error(noted(MEMSET, "memset", size, stream) && held(at, size));
}

static PyObject *memset_(intptr_t at, int value, size_t size, int skip) {
    return memset_async(at, value, size, 0, 0);
}

// ---- Streams, events, graphs ----

static intptr_t *streams = NULL;
static size_t n_streams = 0;

static intptr_t new_stream(void) {
    streams = realloc(streams, sizeof *streams * (n_streams + 1));
    return streams[n_streams++] = next_handle += 16;
}
static intptr_t stream_create(int skip) { return new_stream(); }
static intptr_t stream_with_flags(unsigned flags, int skip) { return new_stream(); }
static intptr_t stream_with_priority(unsigned flags, int priority, int skip) { return new_stream(); }

// 1 of a stream that is there: the default ones (0 to 2) always are.
static int is_stream(intptr_t stream) {
    for (size_t i = 0; i < n_streams; ++i)
        if (streams[i] == stream) return 1;
    return stream >= 0 && stream <= 2 ? 1 : fail(INVALID_HANDLE);
}

static PyObject *stream_destroy(intptr_t stream, int skip) {
    for (size_t i = 0; i < n_streams; ++i)
        if (streams[i] == stream) streams[i] = streams[--n_streams];
    Py_RETURN_NONE;
}

static PyObject *device_synchronize(int skip) {
    return none_or_error(noted(WAIT, "deviceSynchronize", 0, 0));
}
static PyObject *stream_synchronize(intptr_t stream, int skip) {
    return none_or_error(is_stream(stream) && noted(WAIT, "streamSynchronize", 0, stream));
}
static PyObject *event_synchronize(intptr_t event, int skip) {
    return none_or_error(noted(WAIT, "eventSynchronize", 0, 0));
}
static intptr_t event_create(int skip) { return ++next_handle; }
static intptr_t event_with_flags(unsigned flags, int skip) { return ++next_handle; }
static PyObject *event_record(intptr_t event, intptr_t stream, int skip) {
    return none_or_error(is_stream(stream));
}
static PyObject *done(intptr_t event_or_stream, int skip) { return PyLong_FromLong(0); }  // success
static PyObject *stream_wait_event(intptr_t stream, intptr_t event, int skip, void *options) {
    return none_or_error(is_stream(stream));
}

struct graph {
    long long nodes;
};
static size_t n_graphs = 0;  // that are there, with what was made of them

static intptr_t new_graph(long long size) {
    struct graph *made = malloc(sizeof *made);
    made->nodes = size;
    n_graphs++;
    return (intptr_t)made;
}
static PyObject *begin_capture(intptr_t stream, int skip, void *options) {
    if (capturing) return none_or_error(fail(CAPTURE_UNSUPPORTED));
    if (!is_stream(stream)) return NULL;
    capturing = stream, broken = 0, nodes = 0;
    Py_RETURN_NONE;
}
static intptr_t end_capture(intptr_t stream, int skip) {
    if (stream != capturing) return fail(INVALID_VALUE);
    capturing = 0;
    return broken ? fail(CAPTURE_INVALIDATED) : new_graph(nodes);
}
static int is_capturing(intptr_t stream, int skip) { return capturing && stream == capturing; }
static intptr_t instantiate(intptr_t graph, int skip) {
    return new_graph(((struct graph *)graph)->nodes);
}
static PyObject *graph_destroy(intptr_t graph, int skip) {
    free((void *)graph);
    n_graphs--;
    Py_RETURN_NONE;
}
static PyObject *graph_launch(intptr_t graph, intptr_t stream, int skip) {
    size_t size = ((struct graph *)graph)->nodes;
    return none_or_error(is_stream(stream) && noted(GRAPH, "graphLaunch", size, stream));
}
static PyObject *graph_upload(intptr_t graph, intptr_t stream, int skip) {
    return none_or_error(is_stream(stream));
}

// ---- Kernels ----

enum { FREELY = 48 << 10, SHARED = 227 << 10, MAX_SHARED = 8 };  // bytes of a block; an attribute

struct function {
    char *name;
    int shared;  // bytes of dynamic shared memory that it may be given
};
static struct function *functions = NULL;
static size_t n_functions = 0;

static intptr_t module_load_data(PyObject *image, int skip) {
    size_t size = PyBytes_Check(image) ? PyBytes_GET_SIZE(image) : 0;
    return noted(LOAD, "moduleLoadData", size, 0) ? ++next_handle : 0;
}
static intptr_t module_get_function(intptr_t module, PyObject *name, int skip) {
    const char *text = PyUnicode_AsUTF8(name);
    if (!text) return 0;
    functions = realloc(functions, sizeof *functions * (n_functions + 1));
    functions[n_functions] = (struct function){strdup(text), FREELY};
    return ++n_functions;  // its handle
}
static PyObject *func_set_attribute(intptr_t function, int attribute, int value, int skip) {
    if (attribute == MAX_SHARED) {
        if (value > SHARED)
            return PyErr_Format(PyExc_AssertionError, "null device: no block has %d bytes of shared memory", value);
        functions[function - 1].shared = value;
    }
    Py_RETURN_NONE;
}
static int func_get_attribute(int attribute, intptr_t function, int skip) { return 0; }

static PyObject *launch_kernel(intptr_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                               unsigned by, unsigned bz, unsigned shared, intptr_t stream,
                               intptr_t args, intptr_t extra, int skip) {
    const struct function *f = &functions[function - 1];
    if (!is_stream(stream) || !noted(LAUNCH, f->name, 0, stream)) return NULL;
    int fits = gx && gy && gz && gx <= 2147483647u && gy <= 65535 && gz <= 65535 && bx && by && bz;
    fits = fits && bx <= 1024 && by <= 1024 && bz <= 64 && (unsigned long)bx * by * bz <= 1024;
    if (fits && shared <= (unsigned)f->shared) Py_RETURN_NONE;
    return PyErr_Format(PyExc_AssertionError,
                        "null device: %s cannot be launched on a grid of (%u, %u, %u), blocks of "
                        "(%u, %u, %u), %u bytes of shared memory (it may have %d)",
                        f->name, gx, gy, gz, bx, by, bz, shared, f->shared);
}

// ---- The device: as an H100 answers ----

static PyObject *ignored(intptr_t handle, int skip) { Py_RETURN_NONE; }
static PyObject *set_device(int device, int skip) { Py_RETURN_NONE; }
static PyObject *ensure_context(void) { Py_RETURN_NONE; }
static int version(int skip) { return 13000; }
static int zero(int skip) { return 0; }
static int one(int skip) { return 1; }
static int no_peer(int a, int b, int skip) { return 0; }
static int memory_type(intptr_t at, int skip) { return 0; }
static intptr_t context(int skip) { return 1; }

static int attribute(int name, int device, int skip) {
    switch (name) {
        case 1: case 2: case 3: return name == 3 ? 64 : 1024;   // threads: block, x, z
        case 5: return 2147483647;                              // grid in x
        case 6: case 7: return 65535;
        case 8: return FREELY;
        case 10: return 32;                                     // warp
        case 16: return 132;                                    // multiprocessors
        case 75: return 9;                                      // compute capability
        case 97: return SHARED;
    }
    return 0;
}

static PyObject *properties(int device, int skip) {
    return Py_BuildValue("{s:y,s:i,s:i,s:i,s:i,s:n}", "name", "null device (as an H100)", "warpSize", 32,
                         "multiProcessorCount", 132, "major", 9, "minor", 0, "totalGlobalMem",
                         (Py_ssize_t)capacity);
}

// ---- Into CuPy ----

#define SKIP "int __pyx_skip_dispatch"
#define OPTIONS(name) SKIP ", struct __pyx_opt_args_13cupy_backends_4cuda_3api_7runtime_" name " *__pyx_optional_args"
#define GRID "unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int"

// The type of each is compared with CuPy's: a release that has other arguments is refused.
static const struct {
    const char *name, *type;
    void *function;
} RUNTIME[] = {
    {"_ensure_context", "PyObject *(void)", ensure_context},
    {"deviceCanAccessPeer", "int (int, int, " SKIP ")", no_peer},
    {"deviceGetAttribute", "int (int, int, " SKIP ")", attribute},
    {"deviceSynchronize", "PyObject *(" SKIP ")", device_synchronize},
    {"driverGetVersion", "int (" SKIP ")", version},
    {"eventCreate", "intptr_t (" SKIP ")", event_create},
    {"eventCreateWithFlags", "intptr_t (unsigned int, " SKIP ")", event_with_flags},
    {"eventDestroy", "PyObject *(intptr_t, " SKIP ")", ignored},
    {"eventQuery", "PyObject *(intptr_t, " SKIP ")", done},
    {"eventRecord", "PyObject *(intptr_t, intptr_t, " SKIP ")", event_record},
    {"eventSynchronize", "PyObject *(intptr_t, " SKIP ")", event_synchronize},
    {"free", "PyObject *(intptr_t, " SKIP ")", free_},
    {"freeHost", "PyObject *(intptr_t, " SKIP ")", free_host},
    {"getDevice", "int (" SKIP ")", zero},
    {"getDeviceCount", "int (" SKIP ")", one},
    {"getDeviceProperties", "PyObject *(int, " SKIP ")", properties},
    {"graphDestroy", "PyObject *(intptr_t, " SKIP ")", graph_destroy},
    {"graphExecDestroy", "PyObject *(intptr_t, " SKIP ")", graph_destroy},
    {"graphInstantiate", "intptr_t (intptr_t, " SKIP ")", instantiate},
    {"graphLaunch", "PyObject *(intptr_t, intptr_t, " SKIP ")", graph_launch},
    {"graphUpload", "PyObject *(intptr_t, intptr_t, " SKIP ")", graph_upload},
    {"hostAlloc", "intptr_t (size_t, unsigned int, " SKIP ")", host_alloc},
    {"malloc", "intptr_t (size_t, " SKIP ")", malloc_},
    {"memGetInfo", "PyObject *(" SKIP ")", memory_info},
    {"memcpy", "PyObject *(intptr_t, intptr_t, size_t, int, " SKIP ")", memcpy_},
    {"memcpyAsync", "PyObject *(intptr_t, intptr_t, size_t, int, intptr_t, " SKIP ")", memcpy_async},
    {"memset", "PyObject *(intptr_t, int, size_t, " SKIP ")", memset_},
    {"memsetAsync", "PyObject *(intptr_t, int, size_t, intptr_t, " SKIP ")", memset_async},
    {"pointerGetMemoryType", "int (intptr_t, " SKIP ")", memory_type},
    {"runtimeGetVersion", "int (" SKIP ")", version},
    {"setDevice", "PyObject *(int, " SKIP ")", set_device},
    {"streamBeginCapture", "PyObject *(intptr_t, " OPTIONS("streamBeginCapture") ")", begin_capture},
    {"streamCreate", "intptr_t (" SKIP ")", stream_create},
    {"streamCreateWithFlags", "intptr_t (unsigned int, " SKIP ")", stream_with_flags},
    {"streamCreateWithPriority", "intptr_t (unsigned int, int, " SKIP ")", stream_with_priority},
    {"streamDestroy", "PyObject *(intptr_t, " SKIP ")", stream_destroy},
    {"streamEndCapture", "intptr_t (intptr_t, " SKIP ")", end_capture},
    {"streamIsCapturing", "int (intptr_t, " SKIP ")", is_capturing},
    {"streamQuery", "PyObject *(intptr_t, " SKIP ")", done},
    {"streamSynchronize", "PyObject *(intptr_t, " SKIP ")", stream_synchronize},
    {"streamWaitEvent", "PyObject *(intptr_t, intptr_t, " OPTIONS("streamWaitEvent") ")", stream_wait_event},
    {NULL},
}, DRIVER[] = {
    {"ctxGetCurrent", "intptr_t (" SKIP ")", context},
    {"funcGetAttribute", "int (int, intptr_t, " SKIP ")", func_get_attribute},
    {"funcSetAttribute", "PyObject *(intptr_t, int, int, " SKIP ")", func_set_attribute},
    {"launchKernel", "PyObject *(intptr_t, " GRID ", intptr_t, intptr_t, intptr_t, " SKIP ")", launch_kernel},
    {"moduleGetFunction", "intptr_t (intptr_t, PyObject *, " SKIP ")", module_get_function},
    {"moduleLoadData", "intptr_t (PyObject *, " SKIP ")", module_load_data},
    {"moduleUnload", "PyObject *(intptr_t, " SKIP ")", ignored},
    {NULL},
};

static int replace(PyObject *capsules, const char *name, const char *type, void *function) {
    PyObject *old = PyDict_GetItemString(capsules, name);
    const char *found = old ? PyCapsule_GetName(old) : "nothing";
    if (!found) return 0;
    if (strcmp(found, type)) {
        PyErr_Format(PyExc_ImportError, "the null device has %s as %s, CuPy as %s", name, type, found);
        return 0;
    }
    PyObject *new = PyCapsule_New(function, found, NULL);
    Py_INCREF(old);  // for ever: the new one has its name
    int failed = !new || PyDict_SetItemString(capsules, name, new);
    Py_XDECREF(new);
    return !failed;
}

// install(runtime, driver): the modules, before anything else of CuPy is imported.
static PyObject *install(PyObject *self, PyObject *args) {
    PyObject *runtime, *driver;
    if (!PyArg_ParseTuple(args, "OO", &runtime, &driver)) return NULL;
    runtime_error = PyObject_GetAttrString(runtime, "CUDARuntimeError");
    PyObject *ours = PyObject_GetAttrString(runtime, "__pyx_capi__");
    PyObject *theirs = PyObject_GetAttrString(driver, "__pyx_capi__");
    if (!runtime_error || !ours || !theirs) return NULL;
    for (int i = 0; RUNTIME[i].name; ++i)
        if (!replace(ours, RUNTIME[i].name, RUNTIME[i].type, RUNTIME[i].function)) return NULL;
    for (int i = 0; DRIVER[i].name; ++i)
        if (!replace(theirs, DRIVER[i].name, DRIVER[i].type, DRIVER[i].function)) return NULL;
    Py_RETURN_NONE;
}

// counts(): {kind: (calls, bytes, calls within a capture)} since the process began.
static PyObject *counts(PyObject *self, PyObject *none) {
    PyObject *found = PyDict_New();
    for (int i = 0; found && i < KINDS; ++i) {
        PyObject *row = Py_BuildValue("(LLL)", calls[i], bytes[i], captured[i]);
        if (!row || PyDict_SetItemString(found, NAMES[i], row)) Py_CLEAR(found);
        Py_XDECREF(row);
    }
    return found;
}

// held(): what is there now; peak: the most bytes since `forget_peak`.
static PyObject *now(PyObject *self, PyObject *none) {
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n}", "bytes", in_use, "peak", peak, "blocks", n_blocks,
                         "streams", n_streams, "graphs", n_graphs);
}

static PyObject *forget_peak(PyObject *self, PyObject *none) {
    peak = in_use;
    Py_RETURN_NONE;
}

// What Python code asks CuPy's modules by name: `device` puts these there.
static PyObject *get_attribute(PyObject *self, PyObject *args) {
    int name, of;
    return PyArg_ParseTuple(args, "ii", &name, &of) ? PyLong_FromLong(attribute(name, of, 0)) : NULL;
}
static PyObject *get_properties(PyObject *self, PyObject *of) { return properties(0, 0); }
static PyObject *get_memory(PyObject *self, PyObject *none) { return memory_info(0); }

static PyObject *set_capacity(PyObject *self, PyObject *size) {
    capacity = PyLong_AsSize_t(size);
    return none_or_error(!PyErr_Occurred());
}

// add_node(): work of a library that is captured with the rest.
static PyObject *add_node(PyObject *self, PyObject *none) {
    nodes += capturing != 0;
    Py_RETURN_NONE;
}

static PyObject *set_sink(PyObject *self, PyObject *function) {
    Py_XSETREF(sink, function == Py_None ? NULL : Py_NewRef(function));
    Py_RETURN_NONE;
}

// refuse(kinds): each call of these raises AssertionError from now on.
static PyObject *refuse(PyObject *self, PyObject *kinds) {
    refused = 0;
    for (int i = 0; i < KINDS; ++i) {
        PyObject *name = PyUnicode_FromString(NAMES[i]);
        int found = name ? PySequence_Contains(kinds, name) : -1;
        Py_XDECREF(name);
        if (found < 0) return NULL;
        refused |= (unsigned)found << i;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"add_node", add_node, METH_NOARGS, NULL},
    {"install", install, METH_VARARGS, NULL},   {"counts", counts, METH_NOARGS, NULL},
    {"held", now, METH_NOARGS, NULL},           {"forget_peak", forget_peak, METH_NOARGS, NULL},
    {"set_capacity", set_capacity, METH_O, NULL}, {"set_sink", set_sink, METH_O, NULL},
    {"refuse", refuse, METH_O, NULL},           {"deviceGetAttribute", get_attribute, METH_VARARGS, NULL},
    {"getDeviceProperties", get_properties, METH_O, NULL},
    {"memGetInfo", get_memory, METH_NOARGS, NULL}, {NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "null_device_driver", NULL, -1, METHODS};
PyMODINIT_FUNC PyInit_null_device_driver(void) { return PyModule_Create(&MODULE); }
