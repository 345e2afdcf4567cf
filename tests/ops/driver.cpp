// The native kernel as a program of its own, for processors and compilers that Python does not run on; processors.py drives it.
//
// Request:  name; which allocation fails (-1: none); buffers (size, bytes), the first of which is the structure; addresses in them
//           (buffer, offset, buffer pointed into, offset there; pointed into -1: the thread pool).
// Answer:   status; where the allocation failed (0 nowhere, 1 in the caller, 2 in a worker); the buffers.
// Numbers are 64 bits wide. A buffer has its exact size, so that a sanitizer finds what lies beside it.

#include <cstdio>
#include <string>

#include "kernel.cpp"

#if defined(HM_GOMP)
extern "C" void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);
static void *const POOL = (void *)GOMP_parallel;
#else
static void *const POOL = nullptr;
#endif

#if defined(__SANITIZE_THREAD__)
extern "C" const char *__tsan_default_options() { return "halt_on_error=1"; }  // the program ends at the first race
#endif

static std::atomic<i64> until_failure{-1};
static std::atomic<i64> failed_in{0};
static std::thread::id caller;

static void *allocate(size_t size) {
    if (until_failure.load() >= 0 && until_failure.fetch_sub(1) == 0) {
        failed_in = std::this_thread::get_id() == caller ? 1 : 2;
        throw std::bad_alloc();
    }
    if (void *found = malloc(size ? size : 1)) return found;
    throw std::bad_alloc();
}
void *operator new(size_t size) { return allocate(size); }
void *operator new[](size_t size) { return allocate(size); }
void *operator new(size_t size, const std::nothrow_t &) noexcept { return malloc(size ? size : 1); }  // std::stable_sort can do without
void operator delete(void *p) noexcept { free(p); }
void operator delete[](void *p) noexcept { free(p); }
void operator delete(void *p, size_t) noexcept { free(p); }
void operator delete[](void *p, size_t) noexcept { free(p); }

static void read(void *to, size_t size) {
    if (size && fread(to, 1, size, stdin) != size) exit(0);
}
static i64 read_number() {
    i64 n;
    read(&n, sizeof n);
    return n;
}

template <class A> int call(int (*entry)(const A *), const void *p) { return entry((const A *)p); }

static int run(const std::string &name, const void *p) {
#define HM_CALL(entry) if (name == #entry) return call(entry, p);
    HM_CALL(hm_forward) HM_CALL(hm_backward) HM_CALL(hm_conv_forward) HM_CALL(hm_conv_backward) HM_CALL(hm_gate_forward)
    HM_CALL(hm_gate_backward) HM_CALL(hm_project_forward)
    HM_CALL(hm_project_backward) HM_CALL(hm_layer_forward) HM_CALL(hm_layer_backward) HM_CALL(hm_ungate)
    HM_CALL(hm_step) HM_CALL(hm_model) HM_CALL(hm_scan_forward) HM_CALL(hm_scan_backward)
    return name == "hm_panel" ? hm_panel() : -1;
}

int main() {
    caller = std::this_thread::get_id();
    for (;;) {
        std::string name(read_number(), ' ');
        read(&name[0], name.size());
        i64 failing = read_number();
        std::vector<std::pair<char *, i64>> buffers(read_number());
        for (auto &[data, size] : buffers) {
            size = read_number();
            data = (char *)malloc(size);
            read(data, size);
        }
        for (i64 n = read_number(); n > 0; n--) {
            i64 from = read_number(), offset = read_number(), to = read_number(), there = read_number();
            void *address = to < 0 ? POOL : buffers[to].first + there;
            memcpy(buffers[from].first + offset, &address, sizeof address);
        }
        failed_in = 0, until_failure = failing;
        i64 status = run(name, buffers.empty() ? nullptr : buffers[0].first), where = 0;
        until_failure = -1, where = failed_in;
        fwrite(&status, sizeof status, 1, stdout);
        fwrite(&where, sizeof where, 1, stdout);
        for (auto &[data, size] : buffers) {
            fwrite(data, 1, size, stdout);
            free(data);
        }
        fflush(stdout);
    }
}
