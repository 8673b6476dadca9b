// Runs kernels on a CPU: blocks one after the other in a shuffled order, the threads of a block as
// fibers in a shuffled order, each up to its next barrier. Stops at the first
//  - access outside the arguments' arrays and the block's shared memory;
//  - race: two threads touch one place, one of them writing, with no barrier between (another
//    block: at all; atomic updates do not race with each other);
//  - read of shared memory that the block has not written;
//  - barrier that some threads do not reach, or reach at another line; warp operation whose lanes
//    do not come; deadlock;
//  - geometry no device has, or arguments that are not the kernel's.
#include "shim.h"

#include <link.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" {
const shim::Entry* shim_entries(int* count);
}

namespace {

constexpr size_t STACK = 128 << 10, MAX_THREADS = 1024;
constexpr size_t MAX_SHARED = 99 << 10;  // of a block on sm_120, the least of all
constexpr unsigned NEVER = 0;

enum State { READY, AT_BARRIER, IN_WARP, DONE };

struct Thread {
    State state;
    shim::Site site;
    // of the warp operation it waits in, and its outcome
    const char* what;
    unsigned mask;
    uint64_t value, outcome;
    int source;
    bool ballot;
    unsigned seen[32];  // what it knows of its warp's lanes: how many warp barriers they had passed
    bool started;
    jmp_buf here;
    ucontext_t context;
};

// What was last done with one place: up to four bytes.
struct Cell {
    unsigned written, read;        // the interval between barriers; NEVER
    unsigned writer, write_stamp;  // thread in its block, and its count of warp barriers
    unsigned readers, read_stamp;  // lanes of one warp, and the latest of their counts
    unsigned read_warp;            // that warp; MANY: threads of several
    bool atomic;
};
constexpr unsigned MANY = ~0u;

struct Region {
    uintptr_t low, high;
    unsigned grain;
    Cell* cells;
};

std::vector<Thread> threads(MAX_THREADS);
char* stacks;
bool failed;
bool watching;  // a fiber runs
std::string message;
unsigned current, n_threads;
unsigned interval = NEVER, block_start, launch_start;  // intervals are counted over all launches
struct Span {
    uintptr_t low, high;
    unsigned grain;
    std::string name;
};

std::vector<Span> spans;                 // of the arrays
std::vector<Region> regions, variables;  // global memory; the variables in shared memory
std::vector<Cell> global_cells, shared_cells;
alignas(16) char dynamic_memory[MAX_SHARED];
uintptr_t module_low, module_high, module_base;
uintptr_t program_counter;  // behind the watched instruction
const shim::Entry* entry;
shim::Arg arguments[64];

int find_module(dl_phdr_info* info, size_t, void*) {
    const uintptr_t own = reinterpret_cast<uintptr_t>(&current);
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& segment = info->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        low = std::min<uintptr_t>(low, info->dlpi_addr + segment.p_vaddr);
        high = std::max<uintptr_t>(high, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
    }
    if (own < low || own >= high) return 0;
    module_low = low, module_high = high, module_base = info->dlpi_addr;
    return 1;
}

std::string where() {
    char text[160];
    snprintf(text, sizeof text, "%s, block (%u, %u, %u), thread (%u, %u, %u): ", entry->name,
             blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    return text;
}

// ---- Fibers ----

void set_thread(unsigned t) {
    current = t;
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
}

#ifdef __SANITIZE_ADDRESS__
// The sanitizer must know which stack is in use.
ucontext_t scheduler;
const void* scheduler_stack;
size_t scheduler_size;

void leave_for_good(bool for_good) {
    watching = false;
    void* own = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &own, scheduler_stack, scheduler_size);
    swapcontext(&threads[current].context, &scheduler);
    __sanitizer_finish_switch_fiber(own, &scheduler_stack, &scheduler_size);
}
#else
jmp_buf scheduler;  // _setjmp: swapcontext would call the system at every switch

void leave_for_good(bool for_good) {
    watching = false;
    if (for_good || _setjmp(threads[current].here) == 0) _longjmp(scheduler, 1);
}
#endif

// From a fiber back to the scheduler, until it is resumed.
void leave() { leave_for_good(false); }

void run_kernel() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
    entry->call(entry->kernel, arguments);
    threads[current].state = DONE;
    leave_for_good(true);
}

void start(Thread& thread) {
    thread.started = true;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks + STACK * current;
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_kernel, 0);
}

void resume(unsigned t) {
    set_thread(t);
    watching = true;
#ifdef __SANITIZE_ADDRESS__
    if (!threads[t].started) start(threads[t]);
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, stacks + STACK * t, STACK);
    swapcontext(&scheduler, &threads[t].context);
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#else
    if (_setjmp(scheduler) != 0) return;  // it waits, is done, or has failed
    if (threads[t].started) _longjmp(threads[t].here, 1);
    start(threads[t]);
    setcontext(&threads[t].context);
#endif
}

// ---- Barriers and warp operations ----

std::string describe(unsigned t) {
    const char* states[] = {"runs", "waits at __syncthreads", "waits in", "has left the kernel"};
    const Thread& thread = threads[t];
    std::string text = "thread " + std::to_string(t) + " " + states[thread.state];
    if (thread.state == IN_WARP) text += std::string(" ") + thread.what;
    if (thread.state == AT_BARRIER || thread.state == IN_WARP)
        text += std::string(" in ") + thread.site.file + " line " + std::to_string(thread.site.line);
    return text;
}

// Every lane of its mask that has not left the kernel waits in the same operation: let them go on.
bool release_warp(unsigned t) {
    Thread& first = threads[t];
    const unsigned base = t / 32 * 32;
    unsigned present = 0;
    for (unsigned lane = 0; lane < 32 && base + lane < n_threads; ++lane) {
        const Thread& other = threads[base + lane];
        if (!(first.mask >> lane & 1) || other.state == DONE) continue;
        if (other.state != IN_WARP || other.mask != first.mask) return false;
        if (strcmp(other.what, first.what) || other.site.line != first.site.line) return false;
        present |= 1u << lane;
    }
    unsigned vote = 0, known[32] = {};
    const bool orders = !strcmp(first.what, "__syncwarp");  // shuffles order no memory accesses
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(present >> lane & 1)) continue;
        Thread& other = threads[base + lane];
        vote |= (other.value != 0) << lane;
        if (orders) ++other.seen[lane];
        for (unsigned l = 0; l < 32; ++l) known[l] = std::max(known[l], other.seen[l]);
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(present >> lane & 1)) continue;
        Thread& other = threads[base + lane];
        if (other.source >= 0 && !(present >> other.source & 1)) {
            set_thread(base + lane);
            message = where() + first.what + " reads lane " + std::to_string(other.source) +
                      ", which does not take part";
            failed = true;
            return true;
        }
        if (other.source >= 0) other.outcome = threads[base + other.source].value;
        if (other.ballot) other.outcome = vote;
        if (orders) std::copy(known, known + 32, other.seen);
    }
    for (unsigned lane = 0; lane < 32; ++lane)
        if (present >> lane & 1) threads[base + lane].state = READY;
    return true;
}

// All threads wait: at one barrier, or in warp operations of which some can be released.
bool release() {
    unsigned at_barrier = 0, done = 0, one = 0, other = 0;
    bool any = false;
    for (unsigned t = 0; t < n_threads && !failed; ++t)
        if (threads[t].state == IN_WARP) any = release_warp(t) || any;
    if (any || failed) return any;
    for (unsigned t = 0; t < n_threads; ++t) {
        if (threads[t].state == AT_BARRIER) ++at_barrier, one = t;
        else other = t;
        done += threads[t].state == DONE;
    }
    if (at_barrier < n_threads) {
        if (done == n_threads) return false;
        for (unsigned t = 0; t < n_threads && !at_barrier; ++t)
            if (threads[t].state == IN_WARP) one = t;
        if (one == other) other = one ? 0 : n_threads - 1;
        set_thread(one);
        message = where() + "deadlock: " + describe(one) + ", " + describe(other);
        failed = true;
        return false;
    }
    for (unsigned t = 0; t < n_threads; ++t) {
        if (threads[t].site.line != threads[0].site.line || strcmp(threads[t].site.file, threads[0].site.file)) {
            set_thread(t);
            message = where() + "different barriers: " + describe(0) + ", " + describe(t);
            failed = true;
            return false;
        }
    }
    for (unsigned t = 0; t < n_threads; ++t) threads[t].state = READY;
    ++interval;
    return true;
}

// ---- Memory ----

bool in_order(unsigned other, unsigned stamp) {
    return other / 32 == current / 32 && threads[current].seen[other % 32] > stamp;
}

[[noreturn]] __attribute__((noinline)) void stop(const std::string& text) {
    message = where() + text;
    if (program_counter) message += " (@" + std::to_string(program_counter - 1 - module_base) + ")";
    failed = true;
    leave();
    __builtin_unreachable();
}

// Whether something done in that interval is not ordered before now; `same`: by this very thread.
bool unordered(unsigned then, unsigned start) {
    return then >= start && (then == interval || then < block_start);
}

[[noreturn]] void race(const char* what, unsigned then, unsigned other, const char* space) {
    std::string who = then < block_start ? "another block" : "thread " + std::to_string(other);
    stop(std::string("race in ") + space + " memory: " + what + " " + who + " with no barrier between");
}

void touch(Cell& cell, bool write, bool atomic, const char* space, unsigned start) {
    const unsigned lane = current % 32, stamp = threads[current].seen[lane];
    if (unordered(cell.written, start)) {
        const bool own = cell.written == interval && cell.writer == current;
        if (!own && !(atomic && cell.atomic) &&
            !(cell.written == interval && in_order(cell.writer, cell.write_stamp)))
            race(write ? "writes what was written by" : "reads what was written by", cell.written, cell.writer, space);
    }
    if (write && unordered(cell.read, start)) {
        bool ordered = cell.read == interval && cell.read_warp == current / 32;
        for (unsigned l = 0; l < 32 && ordered; ++l)
            if (cell.readers >> l & 1 && l != lane) ordered = threads[current].seen[l] > cell.read_stamp;
        const unsigned one = cell.read_warp == MANY ? 0 : cell.read_warp * 32 + __builtin_ctz(cell.readers);
        if (!ordered) race("writes what was read by", cell.read, one, space);
    }
    if (write) {
        cell.written = interval, cell.writer = current, cell.write_stamp = stamp;
        cell.atomic = atomic;
    } else if (cell.read != interval) {
        // A read of another block stays on record: the latest alone would hide it.
        if (unordered(cell.read, start) && cell.read < block_start) return;
        cell.read = interval, cell.readers = 1u << lane, cell.read_stamp = stamp;
        cell.read_warp = current / 32;
    } else {
        if (cell.read_warp != current / 32) cell.read_warp = MANY;
        cell.readers |= 1u << lane;
        cell.read_stamp = std::max(cell.read_stamp, stamp);
    }
}

void touch_region(const Region& region, uintptr_t at, size_t size, bool write, bool atomic, bool shared) {
    const size_t from = (at - region.low) / region.grain, to = (at + size - 1 - region.low) / region.grain;
    for (size_t i = from; i <= to; ++i) {
        Cell& cell = region.cells[i];
        if (shared && !write && cell.written < block_start)
            stop("reads shared memory that the block has not written");
        touch(cell, write, atomic, shared ? "shared" : "global", shared ? block_start : launch_start);
    }
}

[[noreturn]] void outside(uintptr_t at, size_t size, bool write, const char* space) {
    char text[200];
    long long nearest = INT64_MAX;
    const char* side = "";
    const Span* one = nullptr;
    for (const Span& span : spans) {
        const long long below = span.low - at, above = at - span.high;
        if (below > 0 && below < nearest) nearest = below, side = "before", one = &span;
        if (above >= 0 && above < nearest) nearest = above, side = "behind", one = &span;
    }
    if (*space || !one)
        snprintf(text, sizeof text, "out of bounds: %s %zu bytes outside %s memory", write ? "writes" : "reads", size, space);
    else
        snprintf(text, sizeof text, "out of bounds: %s %zu bytes, %lld bytes %s %s",
                 write ? "writes" : "reads", size, nearest, side, one->name.c_str());
    stop(text);
}

__attribute__((unused)) void access(const void* address, size_t size, bool write, uintptr_t pc, bool atomic = false) {
    if (!watching) return;
    program_counter = pc;
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (at % std::min<size_t>(size, 16) && !(size & (size - 1))) stop("misaligned address of " + std::to_string(size) + " bytes");
    const auto stack = reinterpret_cast<uintptr_t>(stacks);
    if (at - stack < STACK * n_threads) return;
    auto region = std::upper_bound(regions.begin(), regions.end(), at,
                                   [](uintptr_t at, const Region& r) { return at < r.low; });
    if (region != regions.begin() && at + size <= (--region)->high)
        return touch_region(*region, at, size, write, atomic, false);
    for (const Region& variable : variables)
        if (at >= variable.low && at + size <= variable.high)
            return touch_region(variable, at, size, write, atomic, true);
    const auto dynamic = reinterpret_cast<uintptr_t>(dynamic_memory);
    const bool is_module = at >= module_low && at < module_high;
    if (at - dynamic < MAX_SHARED || (is_module && write)) outside(at, size, write, "shared");
    if (is_module) return;  // constants, threadIdx
    outside(at, size, write, "");
}

}  // namespace

// ---- What shim.h declares, and the compiler calls ----

namespace shim {

void barrier(Site site) {
    threads[current].state = AT_BARRIER;
    threads[current].site = site;
    leave();
}

uint64_t warp(Site site, const char* what, unsigned mask, uint64_t value, int source, bool ballot) {
    program_counter = PC;
    Thread& own = threads[current];
    if (!(mask >> current % 32 & 1)) stop(std::string(what) + ": its mask lacks the calling lane");
    own.state = IN_WARP;
    own.site = site, own.what = what, own.mask = mask;
    own.value = value, own.source = source, own.ballot = ballot;
    leave();
    return own.outcome;
}

void* dynamic_shared() { return dynamic_memory; }

void atomic(const void* address, int size, const void* from) {
    access(address, size, true, reinterpret_cast<uintptr_t>(from), true);
}

void copy(void* to, const void* from, size_t size) { memcpy(to, from, size); }

void fail(const char* format, ...) {
    char text[200];
    program_counter = PC;
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    stop(text);
}

}  // namespace shim

#define HIDDEN extern "C" __attribute__((visibility("hidden")))
#define WATCH(n) \
    HIDDEN void __tsan_read##n(void* p) { access(p, n, false, PC); } \
    HIDDEN void __tsan_write##n(void* p) { access(p, n, true, PC); } \
    HIDDEN void __tsan_unaligned_read##n(void* p) { access(p, n, false, PC); } \
    HIDDEN void __tsan_unaligned_write##n(void* p) { access(p, n, true, PC); }
#ifndef __SANITIZE_ADDRESS__
WATCH(1) WATCH(2) WATCH(4) WATCH(8) WATCH(16)
HIDDEN void __tsan_read_range(void* p, size_t n) { if (n) access(p, n, false, PC); }
HIDDEN void __tsan_write_range(void* p, size_t n) { if (n) access(p, n, true, PC); }
HIDDEN void __tsan_vptr_update(void**, void*) {}
HIDDEN void __tsan_func_entry(void*) {}
HIDDEN void __tsan_func_exit() {}
HIDDEN void __tsan_init() {}
#endif

// ---- Launching ----

namespace {

std::string argument(int i, int64_t item = -1) {
    return "argument " + std::to_string(i) + (item < 0 ? "" : "[" + std::to_string(item) + "]");
}

std::string list(uint64_t count) { return "a list of " + std::to_string(count); }

std::string wrong_arguments(const shim::Arg* args, int count) {
    if (count != entry->count)
        return "takes " + std::to_string(entry->count) + " arguments, got " + std::to_string(count);
    for (int i = 0; i < count; ++i) {
        const shim::Arg& arg = args[i];
        const char type = entry->types[i];
        const std::string one = std::string{entry->kinds[i], ':', type};
        const int wanted = entry->counts[i];
        for (uint64_t k = 0; k < std::max<uint64_t>(arg.count, 1) && (int)arg.count == wanted; ++k) {
            const shim::Arg& item = arg.count ? arg.items[k] : arg;
            const bool fits = type == item.type || type == '*' || (item.kind == 'p' && !item.bits);
            if (item.kind != entry->kinds[i] || !fits)
                return argument(i, arg.count ? k : -1) + " must be " + one + ", got " + item.kind + ":" + item.type;
        }
        if ((int)arg.count != wanted)
            return argument(i) + " must be " + (wanted ? list(wanted) + " of " : "") + one + ", got " +
                   (arg.count ? list(arg.count) : std::string{arg.kind, ':', arg.type});
    }
    return "";
}

std::string wrong_geometry(dim3 grid, dim3 block, size_t shared) {
    if (!grid.x || grid.x > INT32_MAX || !grid.y || grid.y > 65535 || !grid.z || grid.z > 65535)
        return "no device has such a grid";
    if (!block.x || !block.y || !block.z || block.x > 1024 || block.y > 1024 || block.z > 64 ||
        (size_t)block.x * block.y * block.z > MAX_THREADS)
        return "no device has such a block";
    if (shared > MAX_SHARED)
        return "wants " + std::to_string(shared) + " bytes of shared memory, of " + std::to_string(MAX_SHARED);
    return "";
}

void map_spans(int count) {
    spans.clear();
    for (int i = 0; i < count; ++i)
        for (uint64_t k = 0; k < std::max<uint64_t>(arguments[i].count, 1); ++k) {
            const bool listed = arguments[i].count;
            const shim::Arg& a = listed ? arguments[i].items[k] : arguments[i];
            if (a.kind != 'p') continue;
            const unsigned size = strchr("fiI", a.type) ? 4 : strchr("?bB", a.type) ? 1 : strchr("hHeE", a.type) ? 2 : 4;
            spans.push_back({(uintptr_t)a.low, (uintptr_t)a.high, size, argument(i, listed ? k : -1)});
        }
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.low < b.low; });
}

// The arrays, those that overlap as one, with what has been done to each of their places.
void map_regions() {
    regions.clear();
    size_t total = 0;
    for (const Span& span : spans) {
        if (span.low >= span.high) continue;
        if (!regions.empty() && span.low < regions.back().high) {
            Region& merged = regions.back();
            merged.high = std::max(merged.high, span.high);
            merged.grain = std::min(merged.grain, span.grain);
        } else regions.push_back({span.low, span.high, span.grain, nullptr});
    }
    for (const Region& r : regions) total += (r.high - r.low + r.grain - 1) / r.grain;
    if (global_cells.size() < total) global_cells.resize(total);
    total = 0;
    for (Region& r : regions) {
        r.cells = &global_cells[total];
        total += (r.high - r.low + r.grain - 1) / r.grain;
    }
}

void map_shared(size_t dynamic, const uint64_t* offsets, int n_variables) {
    variables.clear();
    for (int i = 0; i < n_variables; ++i) {
        const uintptr_t low = module_base + offsets[2 * i];
        variables.push_back({low, low + offsets[2 * i + 1], 1, nullptr});
    }
    const auto buffer = reinterpret_cast<uintptr_t>(dynamic_memory);
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(dynamic_memory, dynamic);
    __asan_poison_memory_region(dynamic_memory + dynamic, MAX_SHARED - dynamic);
#endif
    if (dynamic) variables.push_back({buffer, buffer + dynamic, 1, nullptr});
    size_t total = 0;
    for (Region& v : variables) {
        v.grain = (v.high - v.low) % 4 == 0 ? 4 : 1;
        total += (v.high - v.low) / v.grain;
    }
    if (shared_cells.size() < total) shared_cells.resize(total);
    total = 0;
    for (Region& v : variables) {
        v.cells = &shared_cells[total];
        total += (v.high - v.low) / v.grain;
    }
}

void run_block(std::vector<unsigned>& order) {
    block_start = ++interval;
    for (const Region& v : variables) memset((void*)v.low, 0xff, v.high - v.low);  // NaN
    for (unsigned t = 0; t < n_threads; ++t) {
        threads[t].state = READY;
        threads[t].started = false;
        for (unsigned& seen : threads[t].seen) seen = 0;
        threads[t].seen[t % 32] = 1;
    }
    do {
        for (unsigned t : order)
            if (!failed && threads[t].state == READY) resume(t);
    } while (!failed && release());
}

}  // namespace

// Runs `name`; 0, or 1 and why not in `text`. offsets: place in the library
// and size of each shared variable.
extern "C" __attribute__((visibility("default")))
int shim_launch(const char* name, const unsigned* geometry, uint64_t shared,
                           const shim::Arg* args, int count, const uint64_t* offsets,
                           int n_variables, uint64_t seed, char* text, size_t room) {
    if (!stacks) {
        stacks = (char*)mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        dl_iterate_phdr(find_module, nullptr);
    }
    failed = false;
    message = "";
    int n_entries = 0;
    entry = nullptr;
    for (const shim::Entry* e = shim_entries(&n_entries); n_entries--; ++e)
        if (!strcmp(e->name, name)) entry = e;
    gridDim = {geometry[0], geometry[1], geometry[2]};
    blockDim = {geometry[3], geometry[4], geometry[5]};
    if (!entry) message = std::string("no kernel is called ") + name;
    if (message.empty()) message = wrong_arguments(args, count);
    if (message.empty()) message = wrong_geometry(gridDim, blockDim, shared);
    if (message.empty()) {
        std::copy(args, args + count, arguments);
        n_threads = blockDim.x * blockDim.y * blockDim.z;
        map_spans(count);
        map_regions();
        map_shared(shared, offsets, n_variables);
        launch_start = interval + 1;
        std::mt19937_64 random(seed);
        std::vector<uint64_t> blocks((uint64_t)gridDim.x * gridDim.y * gridDim.z);
        for (uint64_t b = 0; b < blocks.size(); ++b) blocks[b] = b;
        std::vector<unsigned> order(n_threads);
        for (unsigned t = 0; t < n_threads; ++t) order[t] = t;
        std::shuffle(blocks.begin(), blocks.end(), random);
        std::shuffle(order.begin(), order.end(), random);
        for (uint64_t b : blocks) {
            blockIdx = {(unsigned)(b % gridDim.x), (unsigned)(b / gridDim.x % gridDim.y),
                        (unsigned)(b / gridDim.x / gridDim.y)};
            run_block(order);
            if (failed) break;
        }
    } else {
        message = std::string(name) + ": " + message;
        failed = true;
    }
    snprintf(text, room, "%s", message.c_str());
    return failed;
}
