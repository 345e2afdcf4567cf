// Memory and threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "simd.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

template <class E = float> E *at(const hm_view &x, i64 b, i64 t, i64 h) { return (E *)x.data + b * x.b + t * x.t + h * x.h; }

// Rows of numbers, one after the other.
template <class E> struct Rows {
    const E *data;
    i64 stride;
    const E *operator[](i64 c) const { return data + c * stride; }
};

// Rows of a ring: from row `run` on, those at its front.
template <class E> struct Ring {
    const E *data;
    i64 stride, run, size;
    const E *operator[](i64 c) const { return data + (c < run ? c : c - size) * stride; }
    Ring from(i64 c) const { return {(*this)[c], stride, c < run ? run - c : size, size}; }
};

// Where slot c of a span lies among S: a span that goes beyond the last slot goes on with the first.
HM_INLINE i64 place(i64 c, i64 S) { return c < S ? c : c - S; }

// One head's keys or values from slot c on.
template <class E> Ring<E> slots_from(const hm_view &x, i64 S, i64 b, i64 c, i64 h) {
    return {at<E>(x, b, place(c, S), h), x.t, S - place(c, S), S};
}

// One aligned block, carved in two passes: the first with a null base only measures.
struct Arena {
    char *base = nullptr;
    size_t used = 0;
    float *floats(i64 n) {
        float *p = base ? (float *)(base + used) : nullptr;
        used += round_up(std::max<i64>(n, 1) * (i64)sizeof(float), 64);
        return p;
    }
};

// Memory of its own, for what is carved from an arena in one piece.
struct Block {
    char *p = nullptr;
    Block() = default;
    Block(const Block &) = delete;
    Block(Block &&other) noexcept : p(other.p) { other.p = nullptr; }
    ~Block() { free(p); }
    bool allocate(size_t bytes) {
        const size_t huge = size_t(2) << 20;
        // Strips walk down columns with a stride of several pages; large pages spare the address translation.
        // Only whole ones: the last would take memory that nobody uses.
        size_t align = bytes >= huge ? huge : 64;
        void *found = nullptr;
        if (posix_memalign(&found, align, bytes + 1) == 0) p = (char *)found;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (p && align == huge) madvise(p, bytes / huge * huge, MADV_HUGEPAGE);
#endif
        return p != nullptr;
    }
    // carve(arena) twice: to measure, and to take what was allocated.
    template <class F> bool carve(F carve) {
        Arena mem;
        carve(mem);
        if (!allocate(mem.used)) return false;
        mem = Arena{p};
        carve(mem);
        return true;
    }
};

// Run f(worker) for worker = 0..n-1. A pool may start fewer threads than asked, so threads take worker numbers until none
// is left. No exception may leave a thread: whatever a worker throws, which is bad_alloc, is thrown again by the caller.
template <class F> void run_workers(i64 n, void *parallel, F &&f) {
    if (n <= 1) {
        if (n == 1) f(i64(0));
        return;
    }
    struct Team {
        F *f;
        i64 n;
        std::atomic<i64> next{0};
        std::atomic<bool> failed{false};
        static void work(void *data) {
            Team *team = (Team *)data;
            try {
                for (i64 w; (w = team->next.fetch_add(1)) < team->n;) (*team->f)(w);
            } catch (...) {
                team->failed = true;
            }
        }
    } team;
    team.f = &f;
    team.n = n;
    if (parallel) {
        ((void (*)(void (*)(void *), void *, unsigned, unsigned))parallel)(Team::work, &team, (unsigned)n, 0);
    } else {
        std::vector<std::thread> threads;
        try {
            for (i64 j = 1; j < n; j++) threads.emplace_back(Team::work, &team);
        } catch (...) {  // fewer threads do the same work
        }
        Team::work(&team);
        for (auto &t : threads) t.join();
    }
    if (team.failed) throw std::bad_alloc();
}

// Split n items evenly; worker w of nw gets [begin, end).
struct Share {
    i64 begin, end;
    Share(i64 n, i64 w, i64 nw) : begin(n * w / nw), end(n * (w + 1) / nw) {}
};

i64 workers_for(i64 nthreads, i64 items) { return std::max<i64>(1, std::min(std::max<i64>(nthreads, 1), items)); }

// f(worker, begin, end) for the share of each of nw workers; nobody works where there is nothing.
template <class F> void run_shares(i64 n, i64 nw, void *parallel, F &&f) {
    run_workers(n ? nw : 0, parallel, [&](i64 w) {
        Share mine(n, w, nw);
        f(w, mine.begin, mine.end);
    });
}

}  // namespace
