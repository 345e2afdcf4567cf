// The HyperMLP/HyperGLU operator on a CPU, float32: forward, backward, decoding, and the two elementwise companions of the
// layer (twin depthwise convolutions, sigmoid gates). Plain C++17 with compiler vector types; called from Python by ctypes.
//
// Legend
//   B batch, T rows (new tokens), S slots (cached + new), H heads, G routing heads (2H for glu, H for relu)
//   K key width, V value width, R1 R2 mixing ranks, L lags that have parameters (block_size)
//   span   rows of one batch entry that are the last rows of one sequence of slots
//   strip  m consecutive rows of a span with all slots any of them sees: the unit of work, one head at a time
//   b, h, g  batch entry, head, routing head;  i  row within a strip;  p  position of a row on the slot axis;  c  slot
//   u      lag parameter index of a (row, slot) pair: u = c + L-1-p, so lag 0 is u = L-1
//   z scores, h hidden, a activations, w readout weights;  t1 = z A1, t2 = a B2;  e1 = dh B1, e2 = dw A2
//
// One buffer, two layouts. A strip matrix is stored in *lag layout*: row i, column u. There the mixing operators are plain
// matrix products, every row ends in the same column u = L-1, and the future simply falls off the right end. The element of
// (row i, slot c) sits at column c + L-1-p0-i, so the same memory read with row stride ld-1 is the *time layout*, which the
// products with k and v need. Cells of a row left of its first slot (older than the sequence) are kept at zero.
//
// Every product goes through one register-blocked micro-kernel: MR rows by one panel of NR columns.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define HM_API extern "C" __attribute__((visibility("default")))

using i64 = int64_t;

// ---------------------------------------------------------------------------------------------------------------------------
// Arguments (mirrored field by field by a ctypes.Structure; every integer is 64 bits wide so that there is no padding)

// A tensor (batch, time, head, width) whose last dimension is contiguous; strides count floats.
struct hm_view {
    float *data;
    i64 b, t, h;
};

struct hm_args {
    i64 B, T, S, H, G, K, V, R1, R2, L;
    i64 act;                   // 0 glu: softplus(h_scale) * relu(h_gate), head j pairs routing heads j and j + H;  1 relu
    i64 norm;                  // 1: o is divided by rho = sqrt(sum h_gate^2 + eps);  0: rho = 1
    i64 shortcut1, shortcut2;  // D = shortcut + diag
    double eps;
    i64 n_spans;
    const i64 *spans;          // n_spans x [batch, row_begin, row_end, slot_begin, slot_end]; no row is in two spans
    i64 nthreads;
    void *parallel;            // null (std::thread) or a function like libgomp's GOMP_parallel
    hm_view q, k, v, s1, s2;   // (B,T,G,K) (B,S,G,K) (B,S,H,V) (B,T,G,R1) (B,T,H,R2)
    const float *A1, *B1, *diag1;  // (G,L,R1) (G,L,R1) (G,L); A1 null: R1 is the identity; diag1 may be null
    const float *A2, *B2, *diag2;  // (H,L,R2) (H,L,R2) (H,L); likewise
    hm_view o;                 // (B,T,H,V), written by forward, read by backward
    float *rho;                // (B,T,H) contiguous, written by forward, read by backward
    hm_view dout;              // backward only, from here on
    hm_view dq, dk, dv, ds1, ds2;
    float *dA1, *dB1, *ddiag1, *dA2, *dB2, *ddiag2;  // may be null where the operator or its diagonal is absent
};

struct hm_conv_args {
    i64 B, T, C, W;
    i64 nthreads;
    void *parallel;
    hm_view x;                   // (B,T,C); the field h of every view here is ignored
    const float *wk, *wv;        // (C,W), tap W-1 meets the current token
    const i64 *pos;              // (B,T) position of each token in its own sequence, or null
    const float *history;        // (B,W-1,C) inputs before t = 0, or null for zeros
    hm_view yk, yv;              // forward: written;  backward: ignored
    hm_view dyk, dyv, dx;        // backward
    float *dwk, *dwv;            // backward, (C,W)
};

struct hm_gate_args {
    i64 N, C;
    i64 nthreads;
    void *parallel;
    const float *x, *g;          // (N,C), row strides below; x null: ones, so that y = sigmoid(g)
    float *y;
    i64 x_row, g_row, y_row;
    const float *dy;
    float *dx, *dg;              // dx is not written where x is null
    i64 dy_row, dx_row, dg_row;
};

// One product of a few rows with a weight matrix: y = x w^T + bias.
struct hm_linear_entry {
    const float *x, *w, *bias;   // (N,in) (out,in) contiguous (out) or null
    float *y;                    // (N,out) contiguous
    i64 x_row, in, out;
};

struct hm_linear_args {
    i64 N, entries;
    i64 nthreads;
    void *parallel;
    const hm_linear_entry *entry;
};

// A linear layer: (out,in) contiguous, bias may be null; w null: there is no such layer.
struct hm_weights {
    const float *w, *bias;
};

// One token for each row of the batch through a whole layer. In `mix`, span b is the row of batch entry b and its last slot the
// new one, k and v are the cache, and q, s1, s2, o, rho are not read: hm_step makes them.
struct hm_step_args {
    hm_args mix;
    i64 C, W;                              // width, taps of the convolutions
    const float *x;                        // (B,C)
    i64 x_row;
    const float *history;                  // (B,W-1,C), the inputs before x
    i64 history_b;
    const float *conv_k, *conv_v;          // (C,W) or null
    hm_weights q, k, v, gate_qk, gate_vo, control1, control2, out;
    float *y;                              // (B,C)
};

// Mamba's selective scan, channel by channel: h = exp(delta A) h + delta x B, y = C h.
struct hm_scan_args {
    i64 B, T, E, N;                        // batch, time, channels, state width
    i64 rows, group;                       // tokens of a block, channels of a group (whole pairs of vectors)
    i64 nthreads;
    void *parallel;
    const float *x, *delta;                // (B,T,E)
    const float *A;                        // (N,E), at most 0
    const float *in, *out;                 // (B,T,N), the B and C of the paper
    const unsigned char *begins;           // (B,T), nonzero: h is emptied first; or null
    const float *state;                    // (B,N,E), h before the first token
    float *y, *last;                       // (B,T,E) (B,N,E), written by forward
    float *marks;                          // (B,blocks,N,E), h before each block: written by forward, or null
    const float *dy, *dlast;               // backward only, from here on
    float *dx, *ddelta;
    float *dA, *dstate;                    // (B,N,E), dA still to be summed over the batch
    float *din, *dout;                     // (groups,B,T,N), still to be summed over the groups
};

namespace {

// ---------------------------------------------------------------------------------------------------------------------------
// Vectors

#if defined(__AVX512F__)
constexpr int VL = 16, NV = 2, MR = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__) || defined(__AVX__)
constexpr int VL = 8, NV = 2, MR = 6;    // 12 accumulators of 16 registers
#elif defined(__ARM_NEON) || defined(__aarch64__)
constexpr int VL = 4, NV = 4, MR = 6;    // 24 accumulators of 32 registers
#else
constexpr int VL = 4, NV = 2, MR = 6;
#endif
constexpr int NR = NV * VL;
constexpr int TL = 96;    // lag columns worked on at a time: their parameters and MR rows fit in the first cache
constexpr int TC = 96;    // slots packed at a time: TC x V floats, and the next ones on their way, fit in the second cache
constexpr i64 M_STRIP = 96, M_SINGLE = 132;  // rows of a strip; a span no longer than M_SINGLE is one strip
constexpr i64 ROW_PATH = 3;                  // spans of so few rows read k and v in place (decoding)
constexpr i64 DB = 512;                      // slots of one decoding block
static_assert(TL % NR == 0 && TC % NR == 0, "tiles hold whole panels");
static_assert(DB % (2 * VL) == 0, "blocks hold whole pairs of vectors");

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef float v4_mem __attribute__((vector_size(16), aligned(4), may_alias));

#define HM_INLINE inline __attribute__((always_inline))

HM_INLINE vf load(const float *p) { return *(const vf_mem *)p; }
HM_INLINE void store(float *p, vf x) { *(vf_mem *)p = x; }
HM_INLINE vf splat(float x) { return x - vf{}; }
HM_INLINE vf zeros_if(vi mask, vf x) { return (vf)((vi)x & ~mask); }
HM_INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
HM_INLINE vf relu(vf x) { return zeros_if((vi)(x <= 0.0f), x); }  // this way round a NaN stays a NaN

inline float sum(vf x) {
    float part[VL], s = 0;
    memcpy(part, &x, sizeof part);
    for (int j = 0; j < VL; j++) s += part[j];
    return s;
}

#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
#define HM_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define HM_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, v4i{i, j, k, l})
#endif

HM_INLINE void transpose4(v4 &a, v4 &b, v4 &c, v4 &d) {
    v4 ab0 = HM_SHUFFLE(a, b, 0, 4, 1, 5), ab1 = HM_SHUFFLE(a, b, 2, 6, 3, 7);
    v4 cd0 = HM_SHUFFLE(c, d, 0, 4, 1, 5), cd1 = HM_SHUFFLE(c, d, 2, 6, 3, 7);
    a = HM_SHUFFLE(ab0, cd0, 0, 1, 4, 5);
    b = HM_SHUFFLE(ab0, cd0, 2, 3, 6, 7);
    c = HM_SHUFFLE(ab1, cd1, 0, 1, 4, 5);
    d = HM_SHUFFLE(ab1, cd1, 2, 3, 6, 7);
}

// The elementary functions work on pairs of vectors: their chains of dependent steps are long, and two chains side by side
// keep the arithmetic units busy.
struct pair {
    vf x, y;
};
struct pair_mask {
    vi x, y;
};
#define HM_PAIR_OPERATOR(op)                                                                    \
    HM_INLINE pair operator op(pair a, pair b) { return {a.x op b.x, a.y op b.y}; }             \
    HM_INLINE pair operator op(pair a, float b) { return {a.x op b, a.y op b}; }                \
    HM_INLINE pair operator op(float a, pair b) { return {a op b.x, a op b.y}; }
HM_PAIR_OPERATOR(+)
HM_PAIR_OPERATOR(-)
HM_PAIR_OPERATOR(*)
HM_PAIR_OPERATOR(/)
#undef HM_PAIR_OPERATOR
HM_INLINE pair_mask operator<=(pair a, float b) { return {(vi)(a.x <= b), (vi)(a.y <= b)}; }
HM_INLINE pair_mask operator<(pair a, float b) { return {(vi)(a.x < b), (vi)(a.y < b)}; }
HM_INLINE pair zeros_if(pair_mask m, pair a) { return {zeros_if(m.x, a.x), zeros_if(m.y, a.y)}; }
HM_INLINE pair pick(pair_mask m, pair a, pair b) { return {pick(m.x, a.x, b.x), pick(m.y, a.y, b.y)}; }
HM_INLINE pair relu(pair a) { return {relu(a.x), relu(a.y)}; }
HM_INLINE pair both(float a) { return {splat(a), splat(a)}; }
HM_INLINE pair load2(const float *p) { return {load(p), load(p + VL)}; }
HM_INLINE void store2(float *p, pair a) { store(p, a.x), store(p + VL, a.y); }
constexpr int VL2 = 2 * VL;
static_assert(NR % VL2 == 0, "panels hold whole pairs");

// 2^n for n in the low bits of each float
HM_INLINE vf power_of_two(vf shifted) { return (vf)(((vi)shifted << 23) + (127 << 23)); }

// exp of x <= 0; results below the smallest normal number are zero.
HM_INLINE pair exp_negative(pair x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that can be read from the low bits
    pair_mask tiny = x < -87.3f;
    x = pick(tiny, both(-87.3f), x);
    pair shifted = x * 1.44269504f + magic;
    pair n = shifted - magic;
    pair r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    pair r2 = r * r, high = r * 0.0013901293277740479f + 0.008363170549273491f;
    pair low = r * 0.16666577756404877f + 0.5f;
    pair p = (high * r + 0.04166685417294502f) * r2 + low;
    p = p * r2 + (r + 1.0f);
    return zeros_if(tiny, p * pair{power_of_two(shifted.x), power_of_two(shifted.y)});
}

// log(1 + e) for 0 <= e <= 1, with relative accuracy also near 0.
HM_INLINE pair log1p_unit(pair e) {
    pair e2 = e * e, e4 = e2 * e2;
    pair a = e * -0.4999949336051941f + 0.9999999403953552f, b = e * -0.2484297752380371f + 0.3331909477710724f;
    pair c = e * -0.1366320699453354f + 0.1910598874092102f, d = e * -0.029504956677556038f + 0.07822549343109131f;
    pair low = b * e2 + a, high = d * e2 + c;
    return ((e4 * 0.005232624243944883f + high) * e4 + low) * e;
}

HM_INLINE pair minus_abs(pair a) { return {(vf)((vi)a.x | INT32_MIN), (vf)((vi)a.y | INT32_MIN)}; }
HM_INLINE pair softplus(pair x) { return relu(x) + log1p_unit(exp_negative(minus_abs(x))); }
HM_INLINE pair sigmoid_from(pair x, pair e) {  // e = exp(-|x|)
    return pick(x < 0.0f, e, both(1.0f)) / (1.0f + e);
}
HM_INLINE pair sigmoid(pair x) { return sigmoid_from(x, exp_negative(minus_abs(x))); }

// f over n floats in vectors; the last incomplete vector goes through a zero-filled copy.
template <class F> HM_INLINE void each_vector(i64 n, F f) {
    i64 j = 0;
    for (; j + VL <= n; j += VL) f(j, VL);
    if (j < n) f(j, n - j);
}
HM_INLINE vf load_some(const float *p, i64 n) {
    if (n == VL) return load(p);
    vf x{};
    memcpy(&x, p, n * sizeof(float));
    return x;
}
HM_INLINE void store_some(float *p, vf x, i64 n) {
    if (n == VL) store(p, x);
    else memcpy(p, &x, n * sizeof(float));
}

template <class F> HM_INLINE void each_pair(i64 n, F f) {
    i64 j = 0;
    for (; j + VL2 <= n; j += VL2) f(j, VL2);
    if (j < n) f(j, n - j);
}
HM_INLINE pair load2_some(const float *p, i64 n) {
    if (n == VL2) return load2(p);
    pair x{};
    memcpy(&x, p, n * sizeof(float));
    return x;
}
HM_INLINE void store2_some(float *p, pair x, i64 n) {
    if (n == VL2) store2(p, x);
    else memcpy(p, &x, n * sizeof(float));
}

i64 round_up(i64 n, i64 unit) { return (n + unit - 1) / unit * unit; }
i64 round_down(i64 n, i64 unit) { return n / unit * unit; }

// ---------------------------------------------------------------------------------------------------------------------------
// Memory and threads

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

struct Block {
    char *p = nullptr;
    Block() = default;
    Block(const Block &) = delete;
    Block(Block &&other) noexcept : p(other.p) { other.p = nullptr; }
    ~Block() { free(p); }
    bool allocate(size_t bytes) {
        const size_t huge = size_t(2) << 20;
        // Strips walk down columns with a stride of several pages; large pages spare the address translation.
        size_t align = bytes >= huge ? huge : 64;
        p = (char *)aligned_alloc(align, round_up(bytes + 1, align));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
        if (p && align == huge) madvise(p, round_up(bytes + 1, align), MADV_HUGEPAGE);
#endif
        return p != nullptr;
    }
};

// Run f(worker) for worker = 0..n-1. A pool may start fewer threads than asked, so threads take worker numbers until none
// is left.
template <class F> void run_workers(i64 n, void *parallel, F &&f) {
    if (n <= 1) {
        if (n == 1) f(i64(0));
        return;
    }
    struct Team {
        F *f;
        i64 n;
        std::atomic<i64> next{0};
        static void work(void *data) {
            Team *team = (Team *)data;
            for (i64 w; (w = team->next.fetch_add(1)) < team->n;) (*team->f)(w);
        }
    } team;
    team.f = &f;
    team.n = n;
    if (parallel) {
        ((void (*)(void (*)(void *), void *, unsigned, unsigned))parallel)(Team::work, &team, (unsigned)n, 0);
        return;
    }
    std::vector<std::thread> threads;
    for (i64 j = 1; j < n; j++) {
        try {
            threads.emplace_back(Team::work, &team);
        } catch (...) {
            break;  // fewer threads do the same work
        }
    }
    Team::work(&team);
    for (auto &t : threads) t.join();
}

// Split n items evenly; worker w of nw gets [begin, end).
struct Share {
    i64 begin, end;
    Share(i64 n, i64 w, i64 nw) : begin(n * w / nw), end(n * (w + 1) / nw) {}
};

// ---------------------------------------------------------------------------------------------------------------------------
// The micro-kernel: C (rows x NVEC vectors) from A (rows x k) and a panel of B (k x NVEC vectors, row stride bs).
//   Set: C = A B     Add: C += A B     Mix: C = X * d + A B   (d one value per column: the diagonal part of an operator)
//   ByRow: A[i,k] = a[i*as + k]        ByCol: A[i,k] = a[i + k*as], the transposed operand

enum Mode { Set, Add, Mix };
enum Layout { ByRow, ByCol };

template <int ROWS, int NVEC, Mode MODE, Layout LAY>
HM_INLINE void micro(i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc, const float *x, i64 ldx,
                     const float *d) {
    vf acc[ROWS][NVEC];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NVEC; j++)
            acc[i][j] = MODE == Mix ? load(x + i * ldx + j * VL) * load(d + j * VL) : vf{};
#pragma GCC unroll 2
    for (i64 p = 0; p < k; p++) {
        vf bv[NVEC];
#pragma GCC unroll 16
        for (int j = 0; j < NVEC; j++) bv[j] = load(b + j * VL);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            float ai = LAY == ByRow ? a[i * as + p] : a[i];
#pragma GCC unroll 16
            for (int j = 0; j < NVEC; j++) acc[i][j] += ai * bv[j];
        }
        b += bs;
        if (LAY == ByCol) a += as;
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NVEC; j++) {
            float *at = c + i * ldc + j * VL;
            store(at, MODE == Add ? load(at) + acc[i][j] : acc[i][j]);
        }
}

template <int ROWS, int NVEC, Mode MODE, Layout LAY>
__attribute__((noinline)) void micro_fixed(i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc,
                                           const float *x, i64 ldx, const float *d) {
    micro<ROWS, NVEC, MODE, LAY>(k, a, as, b, bs, c, ldc, x, ldx, d);
}

template <int NVEC, Mode MODE, Layout LAY, int ROWS = MR>
HM_INLINE void micro_rows(i64 rows, i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc,
                          const float *x = nullptr, i64 ldx = 0, const float *d = nullptr) {
    if (ROWS == MR && rows == MR) micro<MR, NVEC, MODE, LAY>(k, a, as, b, bs, c, ldc, x, ldx, d);
    else if (rows == ROWS) micro_fixed<ROWS, NVEC, MODE, LAY>(k, a, as, b, bs, c, ldc, x, ldx, d);
    else if constexpr (ROWS > 1) micro_rows<NVEC, MODE, LAY, ROWS - 1>(rows, k, a, as, b, bs, c, ldc, x, ldx, d);
}

// Add into columns of an array that ends before the panel does.
template <Layout LAY>
HM_INLINE void add_panel(i64 rows, i64 cols, i64 k, const float *a, i64 as, const float *b, i64 bs, float *c, i64 ldc) {
    if (cols >= NR) return micro_rows<NV, Add, LAY>(rows, k, a, as, b, bs, c, ldc);
    float tmp[MR * NR];
    micro_rows<NV, Set, LAY>(rows, k, a, as, b, bs, tmp, NR);
    for (i64 i = 0; i < rows; i++)
        for (i64 j = 0; j < cols; j++) c[i * ldc + j] += tmp[i * NR + j];
}

// Rank-wide products (columns = the R of an operator, padded to Rp): half a panel is enough for a small R.
constexpr int NVH = NV / 2, NRH = NVH * VL;
i64 rank_pad(i64 R) { return R <= NRH ? NRH : round_up(R, NR); }

template <Layout LAY>
HM_INLINE void add_rank(i64 rows, i64 Rp, i64 k, const float *a, i64 as, const float *b, float *c) {
    if (Rp == NRH) return micro_rows<NVH, Add, LAY>(rows, k, a, as, b, Rp, c, Rp);
    for (i64 r = 0; r < Rp; r += NR) micro_rows<NV, Add, LAY>(rows, k, a, as, b + r, Rp, c + r, Rp);
}

// n rows of `depth` floats, transposed into panels [n/NR][depth][NR]; missing rows are zero.
void pack_transposed(const float *src, i64 stride, i64 n, i64 depth, float *dst) {
    for (i64 c = 0; c < n; c += NR, dst += depth * NR) {
        i64 rows = std::min<i64>(NR, n - c);
        const float *from = src + c * stride;
        i64 full = round_down(rows, 4), d4 = round_down(depth, 4);
        for (i64 s = 0; s < full; s += 4)
            for (i64 p = 0; p < d4; p += 4) {
                const float *at = from + s * stride + p;
                __builtin_prefetch(at + (8 + p / 4 % 4) * stride);  // the rows after next, a line of each per 16 floats
                v4 a0 = *(const v4_mem *)at, a1 = *(const v4_mem *)(at + stride);
                v4 a2 = *(const v4_mem *)(at + 2 * stride), a3 = *(const v4_mem *)(at + 3 * stride);
                transpose4(a0, a1, a2, a3);
                float *to = dst + p * NR + s;
                *(v4_mem *)to = a0;
                *(v4_mem *)(to + NR) = a1;
                *(v4_mem *)(to + 2 * NR) = a2;
                *(v4_mem *)(to + 3 * NR) = a3;
            }
        for (i64 s = 0; s < NR; s++)
            for (i64 p = s < full ? d4 : 0; p < depth; p++) dst[p * NR + s] = s < rows ? from[s * stride + p] : 0.0f;
    }
}

// n rows of `width` floats into panels [width/NR][TC rows, one spare][NR]; missing columns are zero.
// The spare row keeps panels from falling on the same cache sets.
constexpr i64 PANEL = (TC + 1) * NR;
void pack_panels(const float *src, i64 stride, i64 n, i64 width, float *dst) {
    i64 full = round_down(width, NR);
    for (i64 s = 0; s < n; s++) {
        const float *from = src + s * stride;
        float *to = dst + s * NR;
        for (i64 j = 0; j < full; j += NR, to += PANEL)
            for (int v = 0; v < NV; v++) store(to + v * VL, load(from + j + v * VL));
        if (full < width)
            for (i64 j = 0; j < NR; j++) to[j] = full + j < width ? from[full + j] : 0.0f;
    }
}

// m rows of `width` floats, multiplied by a scalar per row (or 1), into a padded matrix with row stride ld.
void pack_rows(const float *src, i64 stride, i64 m, i64 width, const float *scale, float *dst, i64 ld) {
    for (i64 i = 0; i < m; i++) {
        float f = scale ? scale[i] : 1.0f, *to = dst + i * ld;
        const float *from = src + i * stride;
        each_vector(width, [&](i64 j, i64 n) { store_some(to + j, load_some(from + j, n) * f, n); });
        for (i64 j = width; j < ld; j++) to[j] = 0.0f;
    }
}

// ---------------------------------------------------------------------------------------------------------------------------
// A mixing operator with its parameters in the two forms the products want, for u in [u0, L)

struct Factor {            // A or B of one operator, all its heads
    const float *rows;     // [head][u][Rp], for sums over u
    i64 head_rows;
    const float *cols;     // [head][u / NR][R][NR], for sums over the rank
    i64 head_cols;
};

struct Operator {
    i64 R = 0, Rp = 0, u0 = 0, Lp = 0, L = 0, heads = 0;
    const float *A = nullptr, *B = nullptr, *diag = nullptr;
    bool shortcut = false;
    Factor fa{}, fb{};
    float *d = nullptr;    // [head][u]: shortcut + diag; ones for an absent operator, zero from L on

    bool present() const { return A != nullptr; }
    const float *rows(const Factor &f, i64 head, i64 u) const { return f.rows + head * f.head_rows + (u - u0) * Rp; }
    const float *cols(const Factor &f, i64 head, i64 u) const { return f.cols + head * f.head_cols + (u - u0) * R; }
    const float *diagonal(i64 head, i64 u) const { return d + head * (Lp - u0) + (u - u0); }

    void describe(const float *a, const float *b, const float *dg, bool sc, i64 rank, i64 n_heads, i64 n_lags, i64 first) {
        A = a, B = b, diag = dg, shortcut = sc, heads = n_heads, L = n_lags;
        R = a ? rank : 0;
        Rp = R ? rank_pad(R) : 0;
        u0 = first;
        Lp = round_up(L, NR);
    }
    void carve(Arena &mem, bool rows_of_both) {
        d = mem.floats(heads * (Lp - u0));
        if (!present()) return;
        // Readers of `rows` stop at L, so parameters whose rank fills a panel are used where they are.
        for (auto *f : {&fa, &fb}) {
            bool own = R != Rp && (rows_of_both || f == first_sum);
            f->head_rows = own ? (L - u0) * Rp : L * R;
            f->rows = own ? mem.floats(heads * f->head_rows) : (f == &fa ? A : B) + u0 * R;
            f->head_cols = (Lp - u0) * R;
            f->cols = rows_of_both || f != first_sum ? mem.floats(heads * f->head_cols) : nullptr;
        }
    }
    // Which factor the forward pass sums over u with: A for z A1, B for a B2. Backward needs both of both.
    Factor *first_sum = nullptr;

    void fill(i64 head, bool rows_of_both) {
        float *dd = d + head * (Lp - u0);
        for (i64 u = u0; u < Lp; u++) {
            float value = present() ? (shortcut ? 1.0f : 0.0f) + (diag && u < L ? diag[head * L + u] : 0.0f) : 1.0f;
            dd[u - u0] = u < L ? value : 0.0f;
        }
        if (!present()) return;
        for (auto *f : {&fa, &fb}) {
            const float *src = (f == &fa ? A : B) + (head * L + u0) * R;
            if (R != Rp && (rows_of_both || f == first_sum))
                pack_rows(src, R, L - u0, R, nullptr, (float *)f->rows + head * f->head_rows, Rp);
            if (f->cols) pack_transposed(src, R, L - u0, R, (float *)f->cols + head * f->head_cols);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------------
// Strips

struct Strip {
    i64 b, row, m;        // batch entry, first row, number of rows
    i64 p0, sb, L;        // position of the first row, first slot of the sequence, lags
    i64 c0, n;            // first slot any row sees, number of slots up to the last row
    i64 ubase, W, Wp;     // lag column y stands for u = ubase + y; W columns exist, Wp is W in whole panels

    Strip(i64 b, i64 row, i64 m, i64 p0, i64 sb, i64 L) : b(b), row(row), m(m), p0(p0), sb(sb), L(L) {
        c0 = std::max(sb, p0 - L + 1);
        n = last() - c0 + 1;
        ubase = round_down(std::max<i64>(0, sb + L - 1 - last()), NR);
        W = L - ubase;
        Wp = round_up(W, NR);
    }
    i64 last() const { return p0 + m - 1; }
    i64 first_slot(i64 i) const { return std::max(sb, p0 + i - L + 1); }             // of row i
    i64 first_lag(i64 i) const { return std::max<i64>(0, sb + L - 1 - p0 - i) - ubase; }  // of row i, as a column y
    i64 lag_of(i64 c, i64 i) const { return c + L - 1 - p0 - i - ubase; }            // column y of (row i, slot c)
    double cost() const { return double(m) * double(n) + 64.0 * double(m); }
};

i64 margin(i64 m) { return round_up(m + NR, 16); }  // left of column y = 0: slots that have left a row's window
// The row stride is an odd number of cache lines, so that walking down a column does not fall on one cache set.
i64 strip_ld(i64 Wp, i64 m) {
    i64 ld = round_up(Wp + 2 * margin(m), 16);
    return (ld / 16) % 2 ? ld : ld + 16;
}

std::vector<Strip> cut_span(const i64 *span, i64 L) {
    std::vector<Strip> strips;
    i64 rows = span[2] - span[1];
    if (rows <= 0) return strips;
    i64 count = rows <= M_SINGLE ? 1 : (rows + M_STRIP - 1) / M_STRIP;
    i64 each = round_up((rows + count - 1) / count, MR);
    for (i64 r = 0; r < rows; r += each)
        strips.emplace_back(span[0], span[1] + r, std::min(each, rows - r), span[4] - rows + r, span[3], L);
    return strips;
}

// A strip matrix: base points at row 0, column y = 0.
struct Matrix {
    float *base;
    i64 ld;
    float *lag(i64 i, i64 y) const { return base + i * ld + y; }
    float *time(const Strip &s, i64 i, i64 c) const { return base + i * ld + s.lag_of(c, i); }
};

// Memory that will be wanted soon, asked for a little at a time while something else is computed.
struct Ahead {
    const float *data = nullptr;
    i64 stride = 0, rows = 0, width = 0, row = 0, col = 0;
    HM_INLINE void some(i64 lines) {
        for (; lines > 0 && row < rows; lines--) {
            __builtin_prefetch(data + row * stride + col, 0, 2);
            col += 16;
            if (col >= width) col = 0, row++;
        }
    }
};

template <class F> HM_INLINE void row_groups(i64 m, F f) {
    for (i64 i = 0; i < m; i += MR) f(i, std::min<i64>(MR, m - i));
}

// t += X(:, ya..yb) F: the sums over lags, a row group at a time. X points at column ya.
HM_INLINE void reduce_group(const Strip &s, i64 i, i64 rows, const float *X, i64 ldx, i64 ya, i64 yb, const Operator &op,
                            const Factor &f, i64 head, float *t) {
    i64 y = std::max(ya, s.first_lag(i + rows - 1));
    if (y >= yb) return;
    add_rank<ByRow>(rows, op.Rp, yb - y, X + i * ldx + y - ya, ldx, op.rows(f, head, s.ubase + y), t + i * op.Rp);
}

// C = X * D + t Fᵀ over columns ya..yb (whole panels). X and C point at column ya.
HM_INLINE void expand_group(const Strip &s, i64 i, i64 rows, const float *X, i64 ldx, i64 ya, i64 yb, const Operator &op,
                            const Factor &f, i64 head, const float *t, float *C, i64 ldc) {
    for (i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR)); y < yb; y += NR)
        micro_rows<NV, Mix, ByRow>(rows, op.R, t + i * op.Rp, op.Rp, op.R ? op.cols(f, head, s.ubase + y) : nullptr, NR,
                                   C + i * ldc + y - ya, ldc, X + i * ldx + y - ya, ldx,
                                   op.diagonal(head, s.ubase + y));
}

// Rows of a group start at different lags; cells before a row's own start do not exist.
HM_INLINE void clear_before_start(const Strip &s, i64 i, i64 rows, float *X, i64 ldx, i64 ya, i64 yb) {
    i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
    for (i64 r = i; r < i + rows; r++) {
        i64 end = std::min(yb, s.first_lag(r));
        if (end > y) memset(X + r * ldx + y - ya, 0, (end - y) * sizeof(float));
    }
}

// Zero what no row group writes: the cells older than the sequence.
void clear_older(const Strip &s, Matrix X) {
    for (i64 i = 0; i < s.m; i++) memset(X.lag(i, 0), 0, s.first_lag(i) * sizeof(float));
}

// gF[y] += Σ_i X[i,y] t[i]: the gradient of a factor, columns ya..yb. X points at column ya, gF at y = 0.
void scatter_lags(const Strip &s, const float *X, i64 ldx, i64 ya, i64 yb, const float *t, i64 Rp, float *gF) {
    yb = std::min(yb, s.W);
    for (i64 y = ya; y < yb; y += MR) {
        i64 cols = std::min<i64>(MR, yb - y), i = 0;
        while (i < s.m && s.first_lag(i) > y + cols - 1) i++;
        if (i < s.m) add_rank<ByCol>(cols, Rp, s.m - i, X + i * ldx + y - ya, ldx, t + i * Rp, gF + y * Rp);
    }
}

// X = a srcᵀ into a strip matrix (scores z = q kᵀ, or dw = dõ vᵀ), and t = X F on the fly while its columns are in cache.
void score(const Strip &s, const float *a, i64 lda, i64 depth, const float *src, i64 src_t, Matrix X, float *pack,
           const Operator &op, const Factor &f, i64 head, float *t) {
    if (op.present()) memset(t, 0, s.m * op.Rp * sizeof(float));
    clear_older(s, X);
    i64 done = 0;
    for (i64 j = 0; j < s.n; j += TC) {
        i64 width = std::min<i64>(TC, s.n - j), ca = s.c0 + j;
        pack_transposed(src + j * src_t, src_t, width, depth, pack);
        Ahead next{src + (j + width) * src_t, src_t, std::min<i64>(TC, s.n - j - width), depth};
        const i64 lines = 1 + depth * TC / 16 / (TC / NR * round_up(s.m, MR) / MR);
        for (i64 c = ca; c < ca + width; c += NR) {
            const float *panel = pack + (c - ca) * depth;
            row_groups(s.m, [&](i64 i, i64 rows) {
                next.some(lines);
                if (c > s.p0 + i + rows - 1 || c + NR <= s.first_slot(i)) return;  // all future, or all left the window
                micro_rows<NV, Set, ByRow>(rows, depth, a + i * lda, lda, panel, NR, X.time(s, i, c), X.ld - 1);
            });
        }
        i64 upto = std::min(s.W, s.lag_of(ca + width, s.m - 1));  // columns complete in every row
        if (upto <= done) continue;
        if (op.present())
            row_groups(s.m, [&](i64 i, i64 rows) {
                reduce_group(s, i, rows, X.lag(0, done), X.ld, done, upto, op, f, head, t);
            });
        done = upto;
    }
    for (i64 i = 0; i < s.m; i++) memset(X.lag(i, s.W), 0, (s.Wp - s.W) * sizeof(float));  // panels overshoot the newest lag
}

constexpr i64 LDT = TC + 16;  // row stride of a time tile

// Columns ca..ca+width of a strip matrix in time layout, zero where a slot does not exist for a row.
void time_tile(const Strip &s, Matrix X, i64 ca, i64 width, float *tile) {
    for (i64 i = 0; i < s.m; i++) {
        float *to = tile + i * LDT;
        i64 from = std::min(std::max(s.first_slot(i), ca), ca + width);
        i64 end = std::max(std::min(s.p0 + i + 1, ca + width), from);
        memset(to, 0, (from - ca) * sizeof(float));
        memcpy(to + from - ca, X.time(s, i, from), (end - from) * sizeof(float));
        memset(to + end - ca, 0, (ca + width - end) * sizeof(float));
    }
}

// acc (m x width, row stride ld) += tile · src rows, with the source packed in panels.
void read_tile(const Strip &s, const float *tile, i64 ca, i64 width, const float *panels, i64 cols, float *acc, i64 ld,
               Ahead ahead = Ahead()) {
    const i64 share = 1 + (ahead.rows * round_up(cols, 16) / 16) / (round_up(cols, NR) / NR * round_up(s.m, MR) / MR);
    for (i64 j = 0; j < cols; j += NR, panels += PANEL)
        row_groups(s.m, [&](i64 i, i64 rows) {
            ahead.some(share);
            i64 from = std::max(s.first_slot(i) - ca, i64(0)), end = std::min(s.p0 + i + rows - ca, width);
            if (from < end)
                micro_rows<NV, Add, ByRow>(rows, end - from, tile + i * LDT + from, LDT, panels + from * NR, NR,
                                           acc + i * ld + j, ld);
        });
}

// Where gradients of slots are collected: the output itself, or a private copy of part of it.
struct SlotSum {
    float *data;
    i64 t, first;
    float *row(i64 c) const { return data + (c - first) * t; }
};

// out[c] += Σ_i tile[i,c] x[i]  (x: m rows of cols floats, row stride ldx, padded to whole panels)
void scatter_tile(const Strip &s, const float *tile, i64 ca, i64 width, const float *x, i64 ldx, i64 cols, SlotSum out) {
    for (i64 j = 0; j < cols; j += NR)
        for (i64 c = 0; c < width; c += MR) {
            i64 slots = std::min<i64>(MR, width - c);
            i64 from = std::max(ca + c - s.p0, i64(0)), end = std::min(ca + c + slots - 1 + s.L - s.p0, s.m);
            if (from >= end) continue;
            float *to = out.row(ca + c) + j;
            for (i64 r = 0; r < slots; r++) __builtin_prefetch(to + r * out.t, 1);
            add_panel<ByCol>(slots, cols - j, end - from, tile + from * LDT + c, LDT, x + from * ldx + j, ldx, to, out.t);
        }
}

// ---------------------------------------------------------------------------------------------------------------------------
// Activations over one row of a tile

// a = act(h) and the running sum of squares of the gate
void activate_row(bool glu, i64 n, const float *gate, const float *scale, float *a, float *squares) {
    pair sq{};
    for (i64 j = 0; j < n; j += VL2) {
        pair hg = load2(gate + j);
        sq = sq + hg * hg;
        store2(a + j, glu ? softplus(load2(scale + j)) * relu(hg) : relu(hg));
    }
    store(squares, load(squares) + (sq.x + sq.y));
}

// In: da, dw and h. Out: a, dh in place of h, ddiag2 += dw * a. The norm contributes pull * h_gate, pull = dρ/ρ.
void activate_row_backward(bool glu, i64 n, float *gate, float *scale, const float *da, const float *dw, float pull,
                           float *a, float *gdiag) {
    for (i64 j = 0; j < n; j += VL2) {
        pair hg = load2(gate + j), d = load2(da + j), act = relu(hg);
        pair_mask off = hg <= 0.0f;
        if (glu) {
            pair hs = load2(scale + j), e = exp_negative(minus_abs(hs)), sp = relu(hs) + log1p_unit(e);
            store2(scale + j, d * act * sigmoid_from(hs, e));
            d = d * sp;
            act = act * sp;
        }
        store2(gate + j, zeros_if(off, d) + pull * hg);
        store2(a + j, act);
        store2(gdiag + j, load2(gdiag + j) + load2(dw + j) * act);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------
// The whole problem

struct Plan {
    const hm_args &p;
    i64 parts;                    // routing heads per head: 2 (gate, scale) or 1
    bool glu;
    Operator op1, op2;
    std::vector<Strip> strips;    // of spans that go by strips
    std::vector<Strip> rows;      // single rows that are decoded in place
    i64 m_max = 0, Wp_max = 0, u0 = 0;
    i64 Kp, Vp;
    bool covered_all = true;
    std::vector<uint8_t> covered;  // (B,T)

    Plan(const hm_args &args, bool backward) : p(args), parts(args.act == 0 ? 2 : 1), glu(args.act == 0) {
        covered.assign(p.B * p.T, 0);
        std::vector<i64> order(p.n_spans);
        for (i64 j = 0; j < p.n_spans; j++) order[j] = j;
        std::stable_sort(order.begin(), order.end(),
                         [&](i64 x, i64 y) { return p.spans[5 * x] < p.spans[5 * y]; });
        u0 = p.L;
        for (i64 j : order) {
            const i64 *span = p.spans + 5 * j;
            for (i64 r = span[1]; r < span[2]; r++) covered[span[0] * p.T + r] = 1;
            i64 count = span[2] - span[1];
            if (!backward && count <= ROW_PATH)
                for (i64 r = 0; r < count; r++) rows.emplace_back(span[0], span[1] + r, 1, span[4] - count + r, span[3], p.L);
            else
                for (const Strip &s : cut_span(span, p.L)) strips.push_back(s);
        }
        for (uint8_t x : covered) covered_all = covered_all && x;
        for (const Strip &s : strips) {
            m_max = std::max(m_max, s.m);
            Wp_max = std::max(Wp_max, s.Wp);
            u0 = std::min(u0, s.ubase);
        }
        Kp = round_up(p.K, NR);
        Vp = round_up(p.V, NR) + (p.V > NR ? 16 : 0);  // an odd number of cache lines for the usual widths
        op1.describe(p.A1, p.B1, p.diag1, p.shortcut1 != 0, p.R1, p.G, p.L, u0);
        op2.describe(p.A2, p.B2, p.diag2, p.shortcut2 != 0, p.R2, p.H, p.L, u0);
        op1.first_sum = &op1.fa;
        op2.first_sum = &op2.fb;
    }
    Plan(const Plan &) = delete;
    i64 routing(i64 h, i64 part) const { return h + part * p.H; }
    void carve(Arena &mem, bool backward) {
        op1.carve(mem, backward);
        op2.carve(mem, backward);
    }
    void fill(bool backward) {
        run_workers(strips.empty() ? 0 : std::min<i64>(std::max<i64>(p.nthreads, 1), p.G), p.parallel, [&](i64 w) {
            Share mine(p.G, w, std::min<i64>(std::max<i64>(p.nthreads, 1), p.G));
            for (i64 g = mine.begin; g < mine.end; g++) {
                op1.fill(g, backward);
                if (g < p.H) op2.fill(g, backward);
            }
        });
    }
    i64 workers(i64 items) const { return std::max<i64>(1, std::min(std::max<i64>(p.nthreads, 1), items)); }
    // Rows of (B, T, heads, width) in no span are zero.
    void clear_uncovered(const hm_view &x, i64 heads, i64 width) const {
        if (covered_all || !x.data) return;
        for (i64 b = 0; b < p.B; b++)
            for (i64 t = 0; t < p.T; t++)
                if (!covered[b * p.T + t])
                    for (i64 h = 0; h < heads; h++) memset(x.data + b * x.b + t * x.t + h * x.h, 0, width * sizeof(float));
    }
};

float *at(const hm_view &x, i64 b, i64 t, i64 h) { return x.data + b * x.b + t * x.t + h * x.h; }

// t * s, the controls of the rows applied; padding columns are zero.
void apply_controls(const Strip &s, const hm_view &control, i64 head, i64 R, i64 Rp, const float *t, float *ts) {
    for (i64 i = 0; i < s.m; i++) {
        const float *sc = at(control, s.b, s.row + i, head), *from = t + i * Rp;
        float *to = ts + i * Rp;
        each_vector(R, [&](i64 r, i64 n) { store_some(to + r, load_some(from + r, n) * load_some(sc + r, n), n); });
        for (i64 r = R; r < Rp; r++) to[r] = 0.0f;
    }
}

// ds = t * e, the gradient of the controls
void write_controls(const Strip &s, const hm_view &out, i64 head, i64 R, i64 Rp, const float *t, const float *e) {
    for (i64 i = 0; i < s.m; i++, t += Rp, e += Rp) {
        float *to = at(out, s.b, s.row + i, head);
        each_vector(R, [&](i64 r, i64 n) { store_some(to + r, load_some(t + r, n) * load_some(e + r, n), n); });
    }
}

// What one worker needs for one strip.
struct Work {
    Matrix z[2], h[2], dw;
    float *q[2], *t1[2], *t1s[2], *e1[2], *e1s[2], *t2, *t2s, *e2, *e2s;
    float *pack, *tile, *out, *squares, *dout, *pull, *rrho, *a, *da, *dq;

    void carve(Arena &mem, const Plan &P, bool backward) {
        i64 m = P.m_max, ld = strip_ld(P.Wp_max, m), off = margin(m);
        auto matrix = [&]() {
            float *p = mem.floats(m * ld + NR);
            return Matrix{p ? p + off : nullptr, ld};
        };
        for (i64 g = 0; g < P.parts; g++) {
            z[g] = matrix();
            q[g] = mem.floats(m * P.Kp);
            t1[g] = mem.floats(m * P.op1.Rp);
            t1s[g] = mem.floats(m * P.op1.Rp);
        }
        t2 = mem.floats(m * P.op2.Rp);
        t2s = mem.floats(m * P.op2.Rp);
        i64 panels = PANEL * std::max(P.Kp, round_up(P.p.V, NR)) / NR;
        pack = mem.floats(std::max(panels, TC * std::max(P.p.K, P.p.V)));
        tile = mem.floats(m * LDT + NR);
        squares = mem.floats(m * VL);
        if (!backward) {
            out = mem.floats(m * P.Vp);
            return;
        }
        for (i64 g = 0; g < P.parts; g++) {
            h[g] = matrix();
            e1[g] = mem.floats(m * P.op1.Rp);
            e1s[g] = mem.floats(m * P.op1.Rp);
        }
        dw = matrix();
        e2 = mem.floats(m * P.op2.Rp);
        e2s = mem.floats(m * P.op2.Rp);
        dout = mem.floats(m * P.Vp);
        pull = mem.floats(m);
        rrho = mem.floats(m);
        a = mem.floats(m * (TL + 16));
        da = mem.floats(m * (TL + 16));
        dq = mem.floats(m * P.Kp);
    }
};

// Ask for the rows of a strip in a tensor (B,T,heads,width), to be read or written later.
template <int WRITE> void prefetch_strip(const Strip &s, const hm_view &x, i64 head, i64 width) {
    for (i64 i = 0; i < s.m; i++)
        for (i64 j = 0; j < width; j += 16) __builtin_prefetch(at(x, s.b, s.row + i, head) + j, WRITE, 2);
}

void scores_of_head(const Plan &P, const Strip &s, i64 head, Work &w) {
    const hm_args &p = P.p;
    for (i64 part = 0; part < P.parts && P.op1.present(); part++) prefetch_strip<0>(s, p.s1, P.routing(head, part), p.R1);
    if (P.op2.present()) prefetch_strip<0>(s, p.s2, head, p.R2);
    for (i64 part = 0; part < P.parts; part++) {
        i64 g = P.routing(head, part);
        pack_rows(at(p.q, s.b, s.row, g), p.q.t, s.m, p.K, nullptr, w.q[part], P.Kp);
        score(s, w.q[part], P.Kp, p.K, at(p.k, s.b, s.c0, g), p.k.t, w.z[part], w.pack, P.op1, P.op1.fa, g, w.t1[part]);
        if (P.op1.present()) apply_controls(s, p.s1, g, p.R1, P.op1.Rp, w.t1[part], w.t1s[part]);
    }
}

void forward_strip(const Plan &P, const Strip &s, i64 head, Work &w) {
    const hm_args &p = P.p;
    scores_of_head(P, s, head, w);

    // h = z R1, a = act(h) in place of z_gate, t2 = a B2: one sweep, a few rows by TL lags at a time.
    memset(w.squares, 0, s.m * VL * sizeof(float));
    if (P.op2.present()) memset(w.t2, 0, s.m * P.op2.Rp * sizeof(float));
    for (i64 ya = 0; ya < s.Wp; ya += TL) {
        i64 yb = std::min(ya + TL, s.Wp);
        row_groups(s.m, [&](i64 i, i64 rows) {
            i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
            if (y >= yb) return;
            for (i64 part = 0; part < P.parts; part++) {
                Matrix &z = w.z[part];
                expand_group(s, i, rows, z.lag(0, ya), z.ld, ya, yb, P.op1, P.op1.fb, P.routing(head, part), w.t1s[part],
                             z.lag(0, ya), z.ld);
                clear_before_start(s, i, rows, z.lag(0, ya), z.ld, ya, yb);
            }
            for (i64 r = i; r < i + rows; r++)
                activate_row(P.glu, yb - y, w.z[0].lag(r, y), P.glu ? w.z[1].lag(r, y) : nullptr, w.z[0].lag(r, y),
                             w.squares + r * VL);
            if (P.op2.present())
                reduce_group(s, i, rows, w.z[0].lag(0, ya), w.z[0].ld, ya, std::min(yb, s.W), P.op2, P.op2.fb, head, w.t2);
        });
    }
    if (P.op2.present()) apply_controls(s, p.s2, head, p.R2, P.op2.Rp, w.t2, w.t2s);

    // w = a R2ᵀ in place, as far as the next slots need it, then õ += w v.
    Matrix a = w.z[0];
    memset(w.out, 0, s.m * P.Vp * sizeof(float));
    i64 done = P.op2.present() ? 0 : s.Wp;
    for (i64 j = 0; j < s.n; j += TC) {
        i64 width = std::min<i64>(TC, s.n - j), ca = s.c0 + j;
        i64 need = std::min(s.Wp, round_up(std::max<i64>(s.lag_of(ca + width, 0), 0), NR));
        if (need > done) {
            row_groups(s.m, [&](i64 i, i64 rows) {
                expand_group(s, i, rows, a.lag(0, done), a.ld, done, need, P.op2, P.op2.fa, head, w.t2s, a.lag(0, done), a.ld);
            });
            done = need;
        }
        if (j + width == s.n) prefetch_strip<1>(s, p.o, head, p.V);
        time_tile(s, a, ca, width, w.tile);
        pack_panels(at(p.v, s.b, ca, head), p.v.t, width, p.V, w.pack);
        Ahead next{at(p.v, s.b, ca + width, head), p.v.t, std::min<i64>(TC, s.n - j - width), p.V};
        read_tile(s, w.tile, ca, width, w.pack, p.V, w.out, P.Vp, next);
    }
    for (i64 i = 0; i < s.m; i++) {
        float rho = p.norm ? sqrtf(sum(load(w.squares + i * VL)) + (float)p.eps) : 1.0f;
        p.rho[(s.b * p.T + s.row + i) * p.H + head] = rho;
        float *o = at(p.o, s.b, s.row + i, head), inv = 1.0f / rho;
        const float *from = w.out + i * P.Vp;
        each_vector(p.V, [&](i64 j, i64 n) { store_some(o + j, load_some(from + j, n) * inv, n); });
    }
}

// ---------------------------------------------------------------------------------------------------------------------------
// Few rows against many slots: k, v and the parameters are read where they are, once per stage. A row is cut in blocks of DB
// slots whose sums are added in order, so that the result does not depend on the number of threads.

// out[c] = x · row c, rows of `width` floats
void dots(i64 n, const float *rows, i64 stride, const float *x, i64 width, float *out) {
    i64 full = round_down(width, VL), c = 0;
    for (; c + 4 <= n; c += 4) {
        const float *r = rows + c * stride;
        vf a0{}, a1{}, a2{}, a3{};
        for (i64 j = 0; j < full; j += VL) {
            vf xv = load(x + j);
            a0 += xv * load(r + j);
            a1 += xv * load(r + stride + j);
            a2 += xv * load(r + 2 * stride + j);
            a3 += xv * load(r + 3 * stride + j);
        }
        v4 s[4][VL / 4];
        memcpy(s[0], &a0, sizeof a0), memcpy(s[1], &a1, sizeof a1), memcpy(s[2], &a2, sizeof a2), memcpy(s[3], &a3, sizeof a3);
        for (int i = 0; i < 4; i++)
            for (int j = 1; j < VL / 4; j++) s[i][0] += s[i][j];
        transpose4(s[0][0], s[1][0], s[2][0], s[3][0]);
        v4 total = (s[0][0] + s[1][0]) + (s[2][0] + s[3][0]);
        *(v4_mem *)(out + c) = total;
        for (i64 i = 0; i < 4; i++)
            for (i64 j = full; j < width; j++) out[c + i] += x[j] * r[i * stride + j];
    }
    for (; c < n; c++) {
        const float *r = rows + c * stride;
        vf a{};
        for (i64 j = 0; j < full; j += VL) a += load(x + j) * load(r + j);
        float s = sum(a);
        for (i64 j = full; j < width; j++) s += x[j] * r[j];
        out[c] = s;
    }
}

// acc += Σ_c x[c] · row c
void weighted_sum(i64 n, const float *x, const float *rows, i64 stride, i64 width, float *acc) {
    i64 c = 0;
    for (; c + 4 <= n; c += 4) {
        const float *r = rows + c * stride;
        each_vector(width, [&](i64 j, i64 k) {
            vf s = load_some(acc + j, k);
            s += x[c] * load_some(r + j, k);
            s += x[c + 1] * load_some(r + stride + j, k);
            s += x[c + 2] * load_some(r + 2 * stride + j, k);
            s += x[c + 3] * load_some(r + 3 * stride + j, k);
            store_some(acc + j, s, k);
        });
    }
    for (; c < n; c++) {
        const float *r = rows + c * stride;
        each_vector(width, [&](i64 j, i64 k) { store_some(acc + j, load_some(acc + j, k) + x[c] * load_some(r + j, k), k); });
    }
}

struct RowWork {
    const Plan &P;
    std::vector<i64> first_block;  // of each unit (row, head)
    std::vector<i64> first_slot;   // offset of each unit's slots in z
    float *z, *t1, *t2, *squares, *out, *mixed;
    i64 slots = 0, blocks = 0;

    explicit RowWork(const Plan &plan) : P(plan) {
        for (const Strip &s : P.rows)
            for (i64 h = 0; h < P.p.H; h++) {
                first_block.push_back(blocks), first_slot.push_back(slots);
                blocks += (s.n + DB - 1) / DB;
                slots += round_up(s.n, VL);
            }
        first_block.push_back(blocks);
    }
    void carve(Arena &mem) {
        z = mem.floats(P.parts * slots);
        t1 = mem.floats(blocks * P.parts * P.p.R1);
        t2 = mem.floats(blocks * P.p.R2);
        squares = mem.floats(blocks);
        out = mem.floats(blocks * P.p.V);
        mixed = mem.floats(blocks * std::max(P.p.R1, P.p.R2));  // t1 or t2 with the controls applied, for each block its own
    }
    // One block: which unit, row and head it belongs to, its slots [j, j + n) of the row, the lag index u of the first.
    struct Piece {
        i64 unit, k;
        const Strip &s;
        i64 h, j, n, u;
    };
    Piece piece(i64 unit, i64 k) const {
        const Strip &s = P.rows[unit / P.p.H];
        i64 j = (k - first_block[unit]) * DB;
        return {unit, k, s, unit % P.p.H, j, std::min(DB, s.n - j), s.c0 + j + s.L - 1 - s.p0};
    }
    void run() const {
        i64 units = (i64)first_block.size() - 1, nw = P.workers(units), threads = P.workers(blocks);
        if (units >= threads) {  // whole rows per worker: the threads meet once
            run_workers(nw, P.p.parallel, [&](i64 w) {
                Share mine(units, w, nw);
                for (i64 unit = mine.begin; unit < mine.end; unit++) {
                    for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) scores(piece(unit, k));
                    for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) activations(piece(unit, k));
                    for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) readout(piece(unit, k));
                    finish(unit);
                }
            });
            return;
        }
        for (auto stage : {&RowWork::scores, &RowWork::activations, &RowWork::readout})
            run_workers(threads, P.p.parallel, [&](i64 w) {
                Share mine(blocks, w, threads);
                i64 unit = std::upper_bound(first_block.begin(), first_block.end(), mine.begin) - first_block.begin() - 1;
                for (i64 k = mine.begin; k < mine.end; k++) {
                    while (first_block[unit + 1] <= k) unit++;
                    (this->*stage)(piece(unit, k));
                }
            });
        for (i64 unit = 0; unit < units; unit++) finish(unit);
    }
    // Sum of the partial results of a unit's blocks, times the row's controls.
    void gather(const float *partial, i64 width, i64 offset, i64 R, i64 unit, const float *control, float *t) const {
        for (i64 r = 0; r < R; r++) t[r] = 0.0f;
        for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++)
            for (i64 r = 0; r < R; r++) t[r] += partial[k * width + offset + r];
        for (i64 r = 0; r < R; r++) t[r] *= control[r];
    }
    void scores(Piece b) const {  // z and this block's share of t1
        const hm_args &p = P.p;
        i64 R1 = P.op1.R;
        for (i64 part = 0; part < P.parts; part++) {
            i64 g = P.routing(b.h, part);
            float *x = z + part * slots + first_slot[b.unit] + b.j, *t = t1 + (b.k * P.parts + part) * p.R1;
            dots(b.n, at(p.k, b.s.b, b.s.c0 + b.j, g), p.k.t, at(p.q, b.s.b, b.s.row, g), p.K, x);
            memset(t, 0, R1 * sizeof(float));
            if (R1) weighted_sum(b.n, x, p.A1 + (g * p.L + b.u) * R1, R1, R1, t);
        }
    }
    void activations(Piece b) const {  // h, a in place of z_gate, and this block's share of t2 and of the norm
        const hm_args &p = P.p;
        i64 R1 = P.op1.R, R2 = P.op2.R;
        float hidden[2][DB] = {};  // DB is a whole number of pairs
        float *t = mixed + b.k * std::max(p.R1, p.R2), *a = z + first_slot[b.unit] + b.j, sq[VL] = {};
        for (i64 part = 0; part < P.parts; part++) {
            i64 g = P.routing(b.h, part);
            const float *x = z + part * slots + first_slot[b.unit] + b.j;
            if (!R1) {
                memcpy(hidden[part], x, b.n * sizeof(float));
                continue;
            }
            gather(t1, P.parts * p.R1, part * p.R1, R1, b.unit, at(p.s1, b.s.b, b.s.row, g), t);
            dots(b.n, p.B1 + (g * p.L + b.u) * R1, R1, t, R1, hidden[part]);
            mix_in(b.n, x, p.shortcut1, p.diag1 ? p.diag1 + g * p.L + b.u : nullptr, hidden[part]);
        }
        activate_row(P.glu, round_up(b.n, VL2), hidden[0], hidden[1], hidden[0], sq);  // cells beyond n are zero
        squares[b.k] = sum(load(sq));
        memcpy(a, hidden[0], b.n * sizeof(float));
        memset(t2 + b.k * p.R2, 0, R2 * sizeof(float));
        if (R2) weighted_sum(b.n, a, p.B2 + (b.h * p.L + b.u) * R2, R2, R2, t2 + b.k * p.R2);
    }
    void readout(Piece b) const {  // w and this block's share of õ
        const hm_args &p = P.p;
        i64 R2 = P.op2.R;
        float weight[DB], *t = mixed + b.k * std::max(p.R1, p.R2);
        const float *a = z + first_slot[b.unit] + b.j, *x = a;
        if (R2) {
            gather(t2, p.R2, 0, R2, b.unit, at(p.s2, b.s.b, b.s.row, b.h), t);
            dots(b.n, p.A2 + (b.h * p.L + b.u) * R2, R2, t, R2, weight);
            mix_in(b.n, a, p.shortcut2, p.diag2 ? p.diag2 + b.h * p.L + b.u : nullptr, weight);
            x = weight;
        }
        memset(out + b.k * p.V, 0, p.V * sizeof(float));
        weighted_sum(b.n, x, at(p.v, b.s.b, b.s.c0 + b.j, b.h), p.v.t, p.V, out + b.k * p.V);
    }
    static void mix_in(i64 n, const float *x, bool shortcut, const float *diag, float *y) {
        float one = shortcut ? 1.0f : 0.0f;
        if (diag)
            for (i64 c = 0; c < n; c++) y[c] += x[c] * (one + diag[c]);
        else if (shortcut)
            for (i64 c = 0; c < n; c++) y[c] += x[c];
    }
    void finish(i64 unit) const {
        const hm_args &p = P.p;
        const Strip &s = P.rows[unit / p.H];
        i64 h = unit % p.H;
        float sq = 0.0f, *o = at(p.o, s.b, s.row, h);
        for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++) sq += squares[k];
        float rho = p.norm ? sqrtf(sq + (float)p.eps) : 1.0f, inv = 1.0f / rho;
        p.rho[(s.b * p.T + s.row) * p.H + h] = rho;
        memset(o, 0, p.V * sizeof(float));
        for (i64 k = first_block[unit]; k < first_block[unit + 1]; k++)
            for (i64 j = 0; j < p.V; j++) o[j] += out[k * p.V + j];
        for (i64 j = 0; j < p.V; j++) o[j] *= inv;
    }
};

// ---------------------------------------------------------------------------------------------------------------------------
// Backward

// Gradients of the parameters of one head, collected by one worker; [u][Rp] from u0 on.
struct ParamSum {
    float *A1[2], *B1[2], *diag1[2], *A2, *B2, *diag2;
    void carve(Arena &mem, const Plan &P) {
        i64 lags = P.op1.Lp - P.u0;
        for (i64 part = 0; part < P.parts; part++) {
            A1[part] = mem.floats(lags * P.op1.Rp);
            B1[part] = mem.floats(lags * P.op1.Rp);
            diag1[part] = mem.floats(lags);
        }
        A2 = mem.floats(lags * P.op2.Rp);
        B2 = mem.floats(lags * P.op2.Rp);
        diag2 = mem.floats(lags);
    }
};

// dõ = do/ρ and the pull of the norm: dρ/ρ = -(do·o)/ρ².
void output_gradient(const Plan &P, const Strip &s, i64 head, Work &w) {
    const hm_args &p = P.p;
    for (i64 i = 0; i < s.m; i++) {
        float rho = p.norm ? p.rho[(s.b * p.T + s.row + i) * p.H + head] : 1.0f;
        const float *d = at(p.dout, s.b, s.row + i, head), *o = at(p.o, s.b, s.row + i, head);
        vf dot{};
        each_vector(p.V, [&](i64 j, i64 n) { dot += load_some(d + j, n) * load_some(o + j, n); });
        w.rrho[i] = 1.0f / rho;
        w.pull[i] = p.norm ? -sum(dot) * w.rrho[i] * w.rrho[i] : 0.0f;
    }
    pack_rows(at(p.dout, s.b, s.row, head), p.dout.t, s.m, p.V, w.rrho, w.dout, P.Vp);
}

void backward_strip(const Plan &P, const Strip &s, i64 head, Work &w, const ParamSum &sums, const SlotSum *dk, SlotSum dv) {
    const hm_args &p = P.p;
    const Operator &op1 = P.op1, &op2 = P.op2;
    const i64 lda = TL + 16;

    // Once more forward: z, h, and t2 = a B2 with a only in a tile.
    scores_of_head(P, s, head, w);
    if (op2.present()) memset(w.t2, 0, s.m * op2.Rp * sizeof(float));
    for (i64 part = 0; part < P.parts; part++) clear_older(s, w.h[part]);
    memset(w.squares, 0, VL * sizeof(float));  // ρ is given; the sum is not used here
    for (i64 ya = 0; ya < s.Wp; ya += TL) {
        i64 yb = std::min(ya + TL, s.Wp);
        row_groups(s.m, [&](i64 i, i64 rows) {
            i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
            if (y >= yb) return;
            for (i64 part = 0; part < P.parts; part++) {
                expand_group(s, i, rows, w.z[part].lag(0, ya), w.z[part].ld, ya, yb, op1, op1.fb, P.routing(head, part),
                             w.t1s[part], w.h[part].lag(0, ya), w.h[part].ld);
                clear_before_start(s, i, rows, w.h[part].lag(0, ya), w.h[part].ld, ya, yb);
            }
            if (!op2.present()) return;
            for (i64 r = i; r < i + rows; r++)
                activate_row(P.glu, yb - y, w.h[0].lag(r, y), P.glu ? w.h[1].lag(r, y) : nullptr, w.a + r * lda + y - ya,
                             w.squares);
            reduce_group(s, i, rows, w.a, lda, ya, std::min(yb, s.W), op2, op2.fb, head, w.t2);
        });
    }

    // dw = dõ vᵀ and e2 = dw A2
    output_gradient(P, s, head, w);
    score(s, w.dout, P.Vp, p.V, at(p.v, s.b, s.c0, head), p.v.t, w.dw, w.pack, op2, op2.fa, head, w.e2);
    if (op2.present()) {
        apply_controls(s, p.s2, head, p.R2, op2.Rp, w.t2, w.t2s);
        apply_controls(s, p.s2, head, p.R2, op2.Rp, w.e2, w.e2s);
        write_controls(s, p.ds2, head, p.R2, op2.Rp, w.t2, w.e2);
    }

    // Through R2 and the activation: dh in place of h, w in place of dw, e1 = dh B1 on the way.
    for (i64 part = 0; part < P.parts && op1.present(); part++) memset(w.e1[part], 0, s.m * op1.Rp * sizeof(float));
    for (i64 ya = 0; ya < s.Wp; ya += TL) {
        i64 yb = std::min(ya + TL, s.Wp), u = s.ubase + ya;
        float *dw = w.dw.lag(0, ya);
        row_groups(s.m, [&](i64 i, i64 rows) {
            i64 y = std::max(ya, round_down(s.first_lag(i + rows - 1), NR));
            for (i64 r = i; r < i + rows; r++)  // the products below reach over all rows of a column group
                memset(w.a + r * lda, 0, (std::min(y, yb) - ya) * sizeof(float));
            if (y >= yb) return;
            expand_group(s, i, rows, dw, w.dw.ld, ya, yb, op2, op2.fb, head, w.e2s, w.da, lda);
            for (i64 r = i; r < i + rows; r++)
                activate_row_backward(P.glu, yb - y, w.h[0].lag(r, y), P.glu ? w.h[1].lag(r, y) : nullptr,
                                      w.da + r * lda + y - ya, w.dw.lag(r, y), w.pull[r], w.a + r * lda + y - ya,
                                      sums.diag2 + u - P.u0 + y - ya);
            if (op1.present())
                for (i64 part = 0; part < P.parts; part++)
                    reduce_group(s, i, rows, w.h[part].lag(0, ya), w.h[part].ld, ya, std::min(yb, s.W), op1, op1.fb,
                                 P.routing(head, part), w.e1[part]);
        });
        if (!op2.present()) {
            row_groups(s.m, [&](i64 i, i64 rows) {
                for (i64 r = i; r < i + rows; r++) memcpy(w.dw.lag(r, ya), w.a + r * lda, (yb - ya) * sizeof(float));
            });
            continue;
        }
        scatter_lags(s, dw, w.dw.ld, ya, yb, w.t2s, op2.Rp, sums.A2 + (s.ubase - P.u0) * op2.Rp);
        scatter_lags(s, w.a, lda, ya, yb, w.e2s, op2.Rp, sums.B2 + (s.ubase - P.u0) * op2.Rp);
        row_groups(s.m, [&](i64 i, i64 rows) {
            expand_group(s, i, rows, w.a, lda, ya, yb, op2, op2.fa, head, w.t2s, dw, w.dw.ld);
        });
    }
    for (i64 j = 0; j < s.n; j += TC) {
        i64 width = std::min<i64>(TC, s.n - j);
        time_tile(s, w.dw, s.c0 + j, width, w.tile);
        scatter_tile(s, w.tile, s.c0 + j, width, w.dout, P.Vp, p.V, dv);
    }

    // Through R1 and the scores.
    for (i64 part = 0; part < P.parts; part++) {
        i64 g = P.routing(head, part);
        Matrix z = w.z[part], dh = w.h[part];
        if (op1.present()) {
            apply_controls(s, p.s1, g, p.R1, op1.Rp, w.e1[part], w.e1s[part]);
            write_controls(s, p.ds1, g, p.R1, op1.Rp, w.t1[part], w.e1[part]);
        }
        memset(w.dq, 0, s.m * P.Kp * sizeof(float));
        i64 done = 0;
        for (i64 j = 0; j < s.n; j += TC) {
            i64 width = std::min<i64>(TC, s.n - j), ca = s.c0 + j;
            i64 need = std::min(s.Wp, round_up(std::max<i64>(s.lag_of(ca + width, 0), 0), NR));
            for (; op1.present() && done < need; done = std::min(done + TL, need)) {
                i64 ya = done, yb = std::min(done + TL, need), u = s.ubase + ya;
                if (p.diag1)
                    for (i64 i = 0; i < s.m; i++) {
                        float *sum = sums.diag1[part] + u - P.u0, *x = dh.lag(i, ya), *zz = z.lag(i, ya);
                        for (i64 y = round_down(std::max<i64>(s.first_lag(i) - ya, 0), VL); y < yb - ya; y += VL)
                            store(sum + y, load(sum + y) + load(x + y) * load(zz + y));
                    }
                scatter_lags(s, z.lag(0, ya), z.ld, ya, yb, w.e1s[part], op1.Rp, sums.A1[part] + (s.ubase - P.u0) * op1.Rp);
                scatter_lags(s, dh.lag(0, ya), dh.ld, ya, yb, w.t1s[part], op1.Rp, sums.B1[part] + (s.ubase - P.u0) * op1.Rp);
                row_groups(s.m, [&](i64 i, i64 rows) {
                    expand_group(s, i, rows, dh.lag(0, ya), dh.ld, ya, yb, op1, op1.fa, g, w.e1s[part], dh.lag(0, ya), dh.ld);
                });
            }
            time_tile(s, dh, ca, width, w.tile);
            pack_panels(at(p.k, s.b, ca, g), p.k.t, width, p.K, w.pack);
            read_tile(s, w.tile, ca, width, w.pack, p.K, w.dq, P.Kp);
            scatter_tile(s, w.tile, ca, width, w.q[part], P.Kp, p.K, dk[part]);
        }
        for (i64 i = 0; i < s.m; i++) memcpy(at(p.dq, s.b, s.row + i, g), w.dq + i * P.Kp, p.K * sizeof(float));
    }
}

// The strips of all heads in order (head, batch, time), cut into one run per worker of about equal cost. A worker adds to the
// outputs dk, dv itself, except in the (head, batch) unit it shares with workers before it: there it has a private copy.
struct Schedule {
    struct Run {
        i64 begin, end;        // items; item = head * strips + strip
        i64 shared_end;        // items [begin, shared_end) belong to a unit that an earlier worker began
        i64 first = 0, last = 0;   // slots [first, last) of the private copy
        float *copy = nullptr;
        std::vector<ParamSum> sums;  // one per head from head_begin on
        i64 head_begin = 0;
    };
    std::vector<Run> runs;

    Schedule(const Plan &P, i64 nw) {
        i64 per_head = (i64)P.strips.size(), items = per_head * P.p.H;
        auto unit_begins = [&](i64 k) { return k % per_head == 0 || P.strips[k % per_head].b != P.strips[k % per_head - 1].b; };
        double total = 0.0;
        for (const Strip &s : P.strips) total += s.cost() * (double)P.p.H;
        double share = total / (double)nw, sum = 0.0, best = 1e300;
        std::vector<i64> cut{0};
        i64 k = 0, unit_cut = 0;
        // Cut at the item nearest to the even share, or at the start of a unit if one is nearly as near: no copy then.
        for (i64 w = 1; w < nw; w++) {
            double target = share * (double)w;
            best = 1e300;
            double before = sum;
            i64 j = k;
            for (double at_j = before; j < items; j++) {
                if (unit_begins(j) && std::fabs(at_j - target) < best) best = std::fabs(at_j - target), unit_cut = j;
                if (at_j > target + 0.05 * share) break;
                at_j += P.strips[j % per_head].cost();
            }
            i64 here = k;
            double at_here = before;
            while (here < items && at_here + 0.5 * P.strips[here % per_head].cost() < target)
                at_here += P.strips[here % per_head].cost(), here++;
            if (best < 0.05 * share && unit_cut >= k) here = unit_cut;
            while (k < here) sum += P.strips[k % per_head].cost(), k++;
            cut.push_back(here);
        }
        cut.push_back(items);
        for (i64 w = 0; w < nw; w++) {
            Run r;
            r.begin = cut[w], r.end = cut[w + 1], r.shared_end = r.begin;
            if (r.begin < r.end) {
                r.head_begin = r.begin / per_head;
                r.sums.resize((r.end - 1) / per_head - r.head_begin + 1);
                if (!unit_begins(r.begin)) {
                    r.first = INT64_MAX;
                    do {
                        const Strip &s = P.strips[r.shared_end % per_head];
                        r.first = std::min(r.first, s.c0);
                        r.last = std::max(r.last, s.last() + 1);
                        r.shared_end++;
                    } while (r.shared_end < r.end && !unit_begins(r.shared_end));
                }
            }
            runs.push_back(std::move(r));
        }
    }
};

// Output u, r of a parameter gradient is the sum over the workers' collections, in their order.
template <class Get>
void write_param(const Plan &P, const Schedule &schedule, float *out, i64 head, i64 out_head, i64 R, i64 Rp, Share lags, Get get) {
    if (!out) return;
    std::vector<const float *> parts;
    for (const auto &run : schedule.runs) {
        i64 j = head - run.head_begin;
        if (j >= 0 && j < (i64)run.sums.size()) parts.push_back(get(run.sums[j]));
    }
    for (i64 u = lags.begin; u < lags.end; u++)
        for (i64 r = 0; r < R; r++) {
            float s = 0.0f;
            if (u >= P.u0)
                for (const float *part : parts) s += part[(u - P.u0) * Rp + r];
            out[(out_head * P.p.L + u) * R + r] = s;
        }
}

int run_backward(const hm_args &p) {
    Plan P(p, true);
    i64 per_head = (i64)P.strips.size(), items = per_head * p.H, nw = P.workers(items);
    Schedule schedule(P, nw);
    i64 width = P.parts * p.K + p.V;  // of a private copy: dk of every part, dv

    Block shared, collected;
    std::vector<Block> own(nw);
    auto carve_all = [&](Arena &fixed, Arena &sums) {
        P.carve(fixed, true);
        for (auto &run : schedule.runs) {
            for (auto &sum : run.sums) sum.carve(sums, P);
            if (run.shared_end > run.begin) run.copy = sums.floats((run.last - run.first) * width);
        }
    };
    Arena fixed, sums;
    carve_all(fixed, sums);
    if (!shared.allocate(fixed.used) || !collected.allocate(sums.used)) return 1;
    size_t sums_bytes = sums.used;
    fixed = Arena{shared.p}, sums = Arena{collected.p};
    carve_all(fixed, sums);
    std::vector<Work> work(nw);
    for (i64 w = 0; w < nw && items; w++) {
        Arena mem;
        work[w].carve(mem, P, true);
        if (!own[w].allocate(mem.used)) return 1;
        mem = Arena{own[w].p};
        work[w].carve(mem, P, true);
    }
    P.fill(true);

    run_workers(nw, p.parallel, [&](i64 w) {
        Share rows(p.B * p.S, w, nw), bytes((i64)sums_bytes, w, nw);
        memset(collected.p + bytes.begin, 0, bytes.end - bytes.begin);
        for (i64 j = rows.begin; j < rows.end; j++) {
            for (i64 g = 0; g < p.G; g++) memset(at(p.dk, j / p.S, j % p.S, g), 0, p.K * sizeof(float));
            for (i64 h = 0; h < p.H; h++) memset(at(p.dv, j / p.S, j % p.S, h), 0, p.V * sizeof(float));
        }
    });
    P.clear_uncovered(p.dq, p.G, p.K);
    if (P.op1.present()) P.clear_uncovered(p.ds1, p.G, p.R1);
    if (P.op2.present()) P.clear_uncovered(p.ds2, p.H, p.R2);

    run_workers(items ? nw : 0, p.parallel, [&](i64 w) {
        auto &run = schedule.runs[w];
        for (i64 k = run.begin; k < run.end; k++) {
            i64 head = k / per_head;
            const Strip &s = P.strips[k % per_head];
            SlotSum dk[2], dv;
            for (i64 part = 0; part < P.parts; part++)
                dk[part] = k < run.shared_end ? SlotSum{run.copy + part * p.K, width, run.first}
                                              : SlotSum{at(p.dk, s.b, 0, P.routing(head, part)), p.dk.t, 0};
            dv = k < run.shared_end ? SlotSum{run.copy + P.parts * p.K, width, run.first}
                                    : SlotSum{at(p.dv, s.b, 0, head), p.dv.t, 0};
            backward_strip(P, s, head, work[w], run.sums[head - run.head_begin], dk, dv);
        }
    });

    run_workers(nw, p.parallel, [&](i64 w) {
        for (const auto &run : schedule.runs) {
            if (!run.copy) continue;
            i64 head = run.begin / per_head, b = P.strips[run.begin % per_head].b;
            Share slots(p.S, w, nw);  // the same cuts for every copy: a slot is added to by one thread, in the order of copies
            i64 begin = std::max(slots.begin, run.first) - run.first, end = std::min(slots.end, run.last) - run.first;
            for (i64 j = begin; j < end; j++) {
                const float *from = run.copy + j * width;
                for (i64 part = 0; part < P.parts; part++, from += p.K) {
                    float *to = at(p.dk, b, run.first + j, P.routing(head, part));
                    for (i64 x = 0; x < p.K; x++) to[x] += from[x];
                }
                float *to = at(p.dv, b, run.first + j, head);
                for (i64 x = 0; x < p.V; x++) to[x] += from[x];
            }
        }
        Share lags(p.L, w, nw);
        for (i64 h = 0; h < p.H; h++) {
            for (i64 part = 0; part < P.parts; part++) {
                i64 g = P.routing(h, part);
                write_param(P, schedule, p.dA1, h, g, p.R1, P.op1.Rp, lags, [&](const ParamSum &x) { return x.A1[part]; });
                write_param(P, schedule, p.dB1, h, g, p.R1, P.op1.Rp, lags, [&](const ParamSum &x) { return x.B1[part]; });
                write_param(P, schedule, p.ddiag1, h, g, 1, 1, lags, [&](const ParamSum &x) { return x.diag1[part]; });
            }
            write_param(P, schedule, p.dA2, h, h, p.R2, P.op2.Rp, lags, [&](const ParamSum &x) { return x.A2; });
            write_param(P, schedule, p.dB2, h, h, p.R2, P.op2.Rp, lags, [&](const ParamSum &x) { return x.B2; });
            write_param(P, schedule, p.ddiag2, h, h, 1, 1, lags, [&](const ParamSum &x) { return x.diag2; });
        }
    });
    return 0;
}

int run_forward(const hm_args &p) {
    Plan P(p, false);
    i64 items = (i64)P.strips.size() * p.H, nw = P.workers(items);
    Block shared;
    RowWork rows(P);
    Arena mem;
    P.carve(mem, false);
    rows.carve(mem);
    if (!shared.allocate(mem.used)) return 1;
    mem = Arena{shared.p};
    P.carve(mem, false);
    rows.carve(mem);
    std::vector<Block> own(nw);
    std::vector<Work> work(nw);
    for (i64 w = 0; w < nw && items; w++) {
        Arena mine;
        work[w].carve(mine, P, false);
        if (!own[w].allocate(mine.used)) return 1;
        mine = Arena{own[w].p};
        work[w].carve(mine, P, false);
    }
    P.clear_uncovered(p.o, p.H, p.V);
    if (!P.covered_all)
        for (i64 j = 0; j < p.B * p.T; j++)
            for (i64 h = 0; h < p.H && !P.covered[j]; h++) p.rho[j * p.H + h] = 1.0f;
    if (items) {
        P.fill(false);
        // Strips are independent, so any order gives the same result: whoever is free takes the next. One batch entry and
        // head after the other, because then its k and v stay in cache; the long strips at the end of a sequence first.
        std::vector<std::pair<const Strip *, i64>> order;
        for (auto end = P.strips.rbegin(), begin = end; begin != P.strips.rend(); begin = end) {
            while (end != P.strips.rend() && end->b == begin->b) ++end;
            for (i64 h = 0; h < p.H; h++)
                for (auto s = begin; s != end; ++s) order.emplace_back(&*s, h);
        }
        std::atomic<i64> next{0};
        run_workers(nw, p.parallel, [&](i64 w) {
            for (i64 k; (k = next.fetch_add(1)) < items;) forward_strip(P, *order[k].first, order[k].second, work[w]);
        });
    }
    if (!P.rows.empty()) rows.run();
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------------
// The twin depthwise convolutions

constexpr i64 CONV_ROWS = 8;  // rows per block: taps stay in registers while a column of the block is computed

struct Conv {
    const hm_conv_args &p;
    std::vector<float> taps;  // [2][W][C], tap j meets the token j steps back
    explicit Conv(const hm_conv_args &args) : p(args), taps(2 * args.W * args.C) {
        for (i64 j = 0; j < p.W; j++)
            for (i64 c = 0; c < p.C; c++) {
                taps[j * p.C + c] = p.wk[c * p.W + p.W - 1 - j];
                taps[(p.W + j) * p.C + c] = p.wv[c * p.W + p.W - 1 - j];
            }
    }
    const float *k(i64 j) const { return taps.data() + j * p.C; }
    const float *v(i64 j) const { return taps.data() + (p.W + j) * p.C; }
    const float *x(i64 b, i64 t) const {  // t may reach into the history
        return t >= 0 ? at(p.x, b, t, 0) : p.history + (b * (p.W - 1) + p.W - 1 + t) * p.C;
    }
    i64 reach(i64 b, i64 t) const {  // how many taps see anything at row t
        i64 n = p.history ? p.W : std::min(p.W, t + 1);
        return p.pos ? std::max<i64>(0, std::min(n, p.pos[b * p.T + t] + 1)) : n;
    }
    // Full reach for rows t..t+n-1
    bool plain(i64 b, i64 t, i64 n) const {
        for (i64 r = t; r < t + n; r++)
            if (r >= p.T || reach(b, r) < p.W || r < p.W - 1) return false;
        return true;
    }
    i64 blocks() const { return (p.T + CONV_ROWS - 1) / CONV_ROWS; }

    void forward_block(i64 b, i64 t) const {
        i64 n = std::min(CONV_ROWS, p.T - t);
        if (p.W == 4 && n == CONV_ROWS && plain(b, t, n)) {
            const float *in = x(b, t - 3);
            float *yk = at(p.yk, b, t, 0), *yv = at(p.yv, b, t, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                vf k0 = load_some(k(0) + c, k_), k1 = load_some(k(1) + c, k_), k2 = load_some(k(2) + c, k_),
                   k3 = load_some(k(3) + c, k_), v0 = load_some(v(0) + c, k_), v1 = load_some(v(1) + c, k_),
                   v2 = load_some(v(2) + c, k_), v3 = load_some(v(3) + c, k_);
                vf x3 = load_some(in + c, k_), x2 = load_some(in + p.x.t + c, k_), x1 = load_some(in + 2 * p.x.t + c, k_);
                for (i64 r = 0; r < CONV_ROWS; r++) {
                    vf x0 = load_some(in + (3 + r) * p.x.t + c, k_);
                    store_some(yk + r * p.yk.t + c, k0 * x0 + k1 * x1 + k2 * x2 + k3 * x3, k_);
                    store_some(yv + r * p.yv.t + c, v0 * x0 + v1 * x1 + v2 * x2 + v3 * x3, k_);
                    x3 = x2, x2 = x1, x1 = x0;
                }
            });
            return;
        }
        for (i64 r = t; r < t + n; r++) {
            i64 taps_here = reach(b, r);
            float *yk = at(p.yk, b, r, 0), *yv = at(p.yv, b, r, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                vf sk{}, sv{};
                for (i64 j = 0; j < taps_here; j++) {
                    vf xv = load_some(x(b, r - j) + c, k_);
                    sk += load_some(k(j) + c, k_) * xv;
                    sv += load_some(v(j) + c, k_) * xv;
                }
                store_some(yk + c, sk, k_);
                store_some(yv + c, sv, k_);
            });
        }
    }
    // dx of rows t..t+n-1, and their share of the tap gradients (gk, gv: [W][C], as `taps`)
    void backward_block(i64 b, i64 t, float *gk, float *gv) const {
        i64 n = std::min(CONV_ROWS, p.T - t);
        if (p.W == 4 && n == CONV_ROWS && plain(b, t, n + 3)) {
            const float *dk = at(p.dyk, b, t, 0), *dv = at(p.dyv, b, t, 0), *in = x(b, t - 3);
            float *dx = at(p.dx, b, t, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                for (int side = 0; side < 2; side++) {  // k, then v: the taps and sums of one side fit in registers
                    const float *d = side ? dv : dk;
                    i64 step = side ? p.dyv.t : p.dyk.t;
                    const float *w = side ? v(0) : k(0);
                    float *g = side ? gv : gk;
                    vf w0 = load_some(w + c, k_), w1 = load_some(w + p.C + c, k_), w2 = load_some(w + 2 * p.C + c, k_),
                       w3 = load_some(w + 3 * p.C + c, k_);
                    vf g0{}, g1{}, g2{}, g3{};
                    vf d0 = load_some(d + c, k_), d1 = load_some(d + step + c, k_), d2 = load_some(d + 2 * step + c, k_);
                    vf x3 = load_some(in + c, k_), x2 = load_some(in + p.x.t + c, k_), x1 = load_some(in + 2 * p.x.t + c, k_);
                    for (i64 r = 0; r < CONV_ROWS; r++) {
                        vf d3 = load_some(d + (r + 3) * step + c, k_), x0 = load_some(in + (3 + r) * p.x.t + c, k_);
                        vf s = w0 * d0 + w1 * d1 + w2 * d2 + w3 * d3;
                        float *to = dx + r * p.dx.t + c;
                        store_some(to, side ? load_some(to, k_) + s : s, k_);
                        g0 += d0 * x0, g1 += d0 * x1, g2 += d0 * x2, g3 += d0 * x3;
                        d0 = d1, d1 = d2, d2 = d3, x3 = x2, x2 = x1, x1 = x0;
                    }
                    store_some(g + c, load_some(g + c, k_) + g0, k_);
                    store_some(g + p.C + c, load_some(g + p.C + c, k_) + g1, k_);
                    store_some(g + 2 * p.C + c, load_some(g + 2 * p.C + c, k_) + g2, k_);
                    store_some(g + 3 * p.C + c, load_some(g + 3 * p.C + c, k_) + g3, k_);
                }
            });
            return;
        }
        for (i64 r = t; r < t + n; r++) {
            i64 taps_here = reach(b, r);
            const float *dk = at(p.dyk, b, r, 0), *dv = at(p.dyv, b, r, 0);
            float *dx = at(p.dx, b, r, 0);
            each_vector(p.C, [&](i64 c, i64 k_) {
                vf s{};
                for (i64 j = 0; j < p.W && r + j < p.T; j++)
                    if (reach(b, r + j) > j)
                        s += load_some(k(j) + c, k_) * load_some(at(p.dyk, b, r + j, 0) + c, k_) +
                             load_some(v(j) + c, k_) * load_some(at(p.dyv, b, r + j, 0) + c, k_);
                store_some(dx + c, s, k_);
                for (i64 j = 0; j < taps_here; j++) {
                    vf xv = load_some(x(b, r - j) + c, k_);
                    float *a = gk + j * p.C + c, *z = gv + j * p.C + c;
                    store_some(a, load_some(a, k_) + load_some(dk + c, k_) * xv, k_);
                    store_some(z, load_some(z, k_) + load_some(dv + c, k_) * xv, k_);
                }
            });
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------------
// Products of a few rows with many weights (decoding): the weights are read once, at the speed of memory

// Outputs o..o+OUT-1 of rows r..r+ROWS-1
template <int OUT, int ROWS> void dots(const hm_linear_entry &e, i64 o, i64 r) {
    vf sums[OUT][ROWS] = {};
    i64 c = 0;
    for (; c + VL <= e.in; c += VL) {
        vf x[ROWS];
        for (int j = 0; j < ROWS; j++) x[j] = load(e.x + (r + j) * e.x_row + c);
        for (int i = 0; i < OUT; i++) {
            vf w = load(e.w + (o + i) * e.in + c);
            for (int j = 0; j < ROWS; j++) sums[i][j] += w * x[j];
        }
    }
    for (int i = 0; i < OUT; i++)
        for (int j = 0; j < ROWS; j++) {
            float s = sum(sums[i][j]);
            for (i64 rest = c; rest < e.in; rest++) s += e.w[(o + i) * e.in + rest] * e.x[(r + j) * e.x_row + rest];
            e.y[(r + j) * e.out + o + i] = s + (e.bias ? e.bias[o + i] : 0.0f);
        }
}

template <int OUT> void dots_of_rows(const hm_linear_entry &e, i64 o, i64 rows) {
    i64 r = 0;
    for (; r + 2 <= rows; r += 2) dots<OUT, 2>(e, o, r);
    if (r < rows) dots<OUT, 1>(e, o, r);
}

// Outputs begin..end-1 of an entry. The grouping of outputs does not change a sum, so results do not depend on threads.
void few_rows(const hm_linear_entry &e, i64 begin, i64 end, i64 rows) {
    i64 o = begin;
    for (; o + 4 <= end; o += 4) dots_of_rows<4>(e, o, rows);
    for (; o < end; o++) dots_of_rows<1>(e, o, rows);
}

i64 conv_workers(const hm_conv_args &p, i64 blocks) {
    return std::max<i64>(1, std::min(std::max<i64>(p.nthreads, 1), blocks));
}

// ---------------------------------------------------------------------------------------------------------------------------
// Selective scan. Work is divided by batch entry and channels, VL2 at a time; time is walked through in order. Backward goes
// block by block from the end, makes the states of a block again from those before it, and walks back through them.

struct Scan {
    const hm_scan_args &p;
    i64 blocks, groups, cells;  // cells: floats of the states of VL2 channels

    explicit Scan(const hm_scan_args &args)
        : p(args), blocks((p.T + p.rows - 1) / p.rows), groups((p.E + p.group - 1) / p.group), cells(p.N * VL2) {}

    // Rows of (N,E) at channel e, n of them, from or into N x VL2 floats.
    void gather(const float *from, i64 e, i64 n, float *to) const {
        for (i64 s = 0; s < p.N; s++) store2(to + s * VL2, load2_some(from + s * p.E + e, n));
    }
    void scatter(const float *from, float *to, i64 e, i64 n) const {
        for (i64 s = 0; s < p.N; s++) store2_some(to + s * p.E + e, load2(from + s * VL2), n);
    }

    // One token: f gets every state's place, its decay and its new value.
    template <class F> HM_INLINE void token(i64 row, i64 e, i64 n, const float *A, const float *h, F f) const {
        pair delta = load2_some(p.delta + row * p.E + e, n), u = delta * load2_some(p.x + row * p.E + e, n);
        const float *in = p.in + row * p.N;
        bool begins = p.begins && p.begins[row];
        for (i64 s = 0; s < p.N; s++) {
            pair decay = begins ? both(0.0f) : exp_negative(delta * load2(A + s * VL2));
            f(s, decay, decay * load2(h + s * VL2) + u * in[s]);
        }
    }

    void forward(i64 b, i64 group) const {
        std::vector<float> memory(2 * cells);
        float *A = memory.data(), *h = A + cells;
        for (i64 e = group * p.group; e < std::min(p.E, (group + 1) * p.group); e += VL2) {
            i64 n = std::min<i64>(VL2, p.E - e);
            gather(p.A, e, n, A);
            gather(p.state + b * p.N * p.E, e, n, h);
            for (i64 t = 0; t < p.T; t++) {
                i64 row = b * p.T + t;
                if (p.marks && t % p.rows == 0) scatter(h, p.marks + (b * blocks + t / p.rows) * p.N * p.E, e, n);
                const float *out = p.out + row * p.N;
                pair y = both(0.0f);
                token(row, e, n, A, h, [&](i64 s, pair, pair value) {
                    store2(h + s * VL2, value);
                    y = y + value * out[s];
                });
                store2_some(p.y + row * p.E + e, y, n);
            }
            scatter(h, p.last + b * p.N * p.E, e, n);
        }
    }

    void backward(i64 b, i64 group) const {
        i64 first = group * p.group, end = std::min(p.E, first + p.group), parts = (end - first + VL2 - 1) / VL2;
        std::vector<float> memory((3 * parts + 4 * p.rows + 1) * cells, 0.0f);
        float *A = memory.data(), *dA = A + parts * cells, *dh = dA + parts * cells;  // of every part
        float *decay = dh + parts * cells, *din = decay + p.rows * cells, *dout = din + p.rows * cells;
        float *h = dout + p.rows * cells;  // before and after every token of a block
        for (i64 j = 0; j < parts; j++) {
            i64 e = first + j * VL2, n = std::min<i64>(VL2, p.E - e);
            gather(p.A, e, n, A + j * cells);
            gather(p.dlast + b * p.N * p.E, e, n, dh + j * cells);
        }
        for (i64 block = blocks - 1; block >= 0; block--) {
            i64 row = b * p.T + block * p.rows, rows = std::min(p.rows, p.T - block * p.rows);
            std::fill(din, din + 2 * p.rows * cells, 0.0f);
            for (i64 j = 0; j < parts; j++) {
                i64 e = first + j * VL2, n = std::min<i64>(VL2, p.E - e);
                gather(p.marks + (b * blocks + block) * p.N * p.E, e, n, h);
                for (i64 i = 0; i < rows; i++)
                    token(row + i, e, n, A + j * cells, h + i * cells, [&](i64 s, pair a, pair value) {
                        store2(decay + i * cells + s * VL2, a);
                        store2(h + (i + 1) * cells + s * VL2, value);
                    });
                for (i64 i = rows - 1; i >= 0; i--)
                    token_backward(row + i, e, n, A + j * cells, decay + i * cells, h + i * cells, dh + j * cells,
                                   dA + j * cells, din + i * cells, dout + i * cells);
            }
            for (i64 k = 0; k < rows * p.N; k++) {
                i64 at = (group * p.B * p.T + row) * p.N + k;
                p.din[at] = sum(load(din + k * VL2) + load(din + k * VL2 + VL));
                p.dout[at] = sum(load(dout + k * VL2) + load(dout + k * VL2 + VL));
            }
        }
        for (i64 j = 0; j < parts; j++) {
            i64 e = first + j * VL2, n = std::min<i64>(VL2, p.E - e);
            scatter(dA + j * cells, p.dA + b * p.N * p.E, e, n);
            scatter(dh + j * cells, p.dstate + b * p.N * p.E, e, n);
        }
    }

    // h holds the states before and, one row on, after the token; dh goes from the state after it to the one before.
    HM_INLINE void token_backward(i64 row, i64 e, i64 n, const float *A, const float *decay, const float *h, float *dh, float *dA,
                                  float *din, float *dout) const {
        pair delta = load2_some(p.delta + row * p.E + e, n), x = load2_some(p.x + row * p.E + e, n), u = delta * x;
        pair dy = load2_some(p.dy + row * p.E + e, n), du = both(0.0f), ddelta = both(0.0f);
        const float *in = p.in + row * p.N, *out = p.out + row * p.N;
        for (i64 s = 0; s < p.N; s++) {
            i64 k = s * VL2;
            pair d = load2(dh + k) + dy * out[s], back = d * load2(decay + k), dg = back * load2(h + k);
            store2(dout + k, load2(dout + k) + dy * load2(h + cells + k));
            store2(din + k, load2(din + k) + d * u);
            store2(dA + k, load2(dA + k) + dg * delta);
            store2(dh + k, back);
            du = du + d * in[s];
            ddelta = ddelta + dg * load2(A + k);
        }
        store2_some(p.dx + row * p.E + e, du * delta, n);
        store2_some(p.ddelta + row * p.E + e, ddelta + du * x, n);
    }

    template <class F> void run(F f) const {
        i64 items = p.B * groups, nw = std::max<i64>(1, std::min(std::max<i64>(p.nthreads, 1), items));
        run_workers(items ? nw : 0, p.parallel, [&](i64 w) {
            Share mine(items, w, nw);
            for (i64 k = mine.begin; k < mine.end; k++) f(k / groups, k % groups);
        });
    }
};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------------
// Entry points. Return 0, or 1 if memory could not be had, or 2 for arguments that contradict each other.

static bool arguments_agree(const hm_args &p) {
    if (p.B < 0 || p.T < 0 || p.S < 0 || p.H <= 0 || p.K <= 0 || p.V <= 0 || p.L <= 0) return false;
    if (p.G != (p.act == 0 ? 2 * p.H : p.H) || (p.A1 && p.R1 <= 0) || (p.A2 && p.R2 <= 0)) return false;
    for (i64 j = 0; j < p.n_spans; j++) {
        const i64 *s = p.spans + 5 * j;
        if (s[0] < 0 || s[0] >= p.B || s[1] < 0 || s[2] < s[1] || s[2] > p.T || s[3] < 0 || s[4] > p.S) return false;
        if (s[4] - s[3] < s[2] - s[1]) return false;  // every row has its own slot
    }
    return true;
}

HM_API int hm_sizes(i64 *sizes) {  // for the caller to check its mirror of the structures
    sizes[0] = sizeof(hm_args), sizes[1] = sizeof(hm_conv_args), sizes[2] = sizeof(hm_gate_args);
    sizes[3] = sizeof(hm_linear_args), sizes[4] = sizeof(hm_linear_entry), sizes[5] = sizeof(hm_step_args);
    sizes[6] = sizeof(hm_scan_args);
    return VL;
}

HM_API int hm_forward(const hm_args *p) {
    if (!arguments_agree(*p)) return 2;
    try {
        return run_forward(*p);
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

HM_API int hm_backward(const hm_args *p) {
    if (!arguments_agree(*p)) return 2;
    try {
        return run_backward(*p);
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

HM_API int hm_conv_forward(const hm_conv_args *p) {
    try {
        Conv conv(*p);
        i64 per_batch = conv.blocks(), blocks = p->B * per_batch, nw = conv_workers(*p, blocks);
        run_workers(blocks ? nw : 0, p->parallel, [&](i64 w) {
            Share mine(blocks, w, nw);
            for (i64 k = mine.begin; k < mine.end; k++) conv.forward_block(k / per_batch, k % per_batch * CONV_ROWS);
        });
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

HM_API int hm_conv_backward(const hm_conv_args *p) {
    try {
        Conv conv(*p);
        i64 per_batch = conv.blocks(), blocks = p->B * per_batch, nw = conv_workers(*p, blocks), n = p->W * p->C;
        std::vector<float> sums(nw * 2 * n, 0.0f);
        run_workers(blocks ? nw : 0, p->parallel, [&](i64 w) {
            Share mine(blocks, w, nw);
            float *gk = sums.data() + w * 2 * n;
            for (i64 k = mine.begin; k < mine.end; k++)
                conv.backward_block(k / per_batch, k % per_batch * CONV_ROWS, gk, gk + n);
        });
        for (i64 c = 0; c < p->C; c++)
            for (i64 j = 0; j < p->W; j++) {
                float k = 0.0f, v = 0.0f;
                for (i64 w = 0; w < nw; w++) {
                    k += sums[w * 2 * n + j * p->C + c];
                    v += sums[w * 2 * n + n + j * p->C + c];
                }
                p->dwk[c * p->W + p->W - 1 - j] = k;
                p->dwv[c * p->W + p->W - 1 - j] = v;
            }
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

HM_API int hm_gate_forward(const hm_gate_args *p) {
    i64 nw = std::max<i64>(1, std::min(std::max<i64>(p->nthreads, 1), p->N));
    run_workers(p->N ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(p->N, w, nw);
        for (i64 r = mine.begin; r < mine.end; r++) {
            const float *x = p->x ? p->x + r * p->x_row : nullptr, *g = p->g + r * p->g_row;
            float *y = p->y + r * p->y_row;
            each_pair(p->C, [&](i64 j, i64 n) {
                pair s = sigmoid(load2_some(g + j, n));
                store2_some(y + j, x ? load2_some(x + j, n) * s : s, n);
            });
        }
    });
    return 0;
}

HM_API int hm_gate_backward(const hm_gate_args *p) {
    i64 nw = std::max<i64>(1, std::min(std::max<i64>(p->nthreads, 1), p->N));
    run_workers(p->N ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(p->N, w, nw);
        for (i64 r = mine.begin; r < mine.end; r++) {
            const float *x = p->x ? p->x + r * p->x_row : nullptr, *g = p->g + r * p->g_row, *dy = p->dy + r * p->dy_row;
            float *dx = p->x ? p->dx + r * p->dx_row : nullptr, *dg = p->dg + r * p->dg_row;
            each_pair(p->C, [&](i64 j, i64 n) {
                pair gv = load2_some(g + j, n), d = load2_some(dy + j, n);
                pair e = exp_negative(minus_abs(gv)), s = sigmoid_from(gv, e);
                if (x) {
                    pair xv = load2_some(x + j, n);
                    store2_some(dx + j, d * s, n);
                    d = d * xv;
                }
                store2_some(dg + j, d * s * sigmoid_from(-1.0f * gv, e), n);  // σ' = σ(x) σ(-x), without cancellation
            });
        }
    });
    return 0;
}

HM_API int hm_linear(const hm_linear_args *p) {
    i64 work = 0;
    for (i64 k = 0; k < p->entries; k++) work += p->entry[k].in * p->entry[k].out;
    i64 nw = std::max<i64>(1, std::min(std::max<i64>(p->nthreads, 1), work * p->N / 65536));
    run_workers(work ? nw : 0, p->parallel, [&](i64 w) {
        Share mine(work, w, nw);
        i64 before = 0;
        for (i64 k = 0; k < p->entries; k++) {
            const hm_linear_entry &e = p->entry[k];
            i64 size = e.in * e.out;
            if (size > 0) {
                i64 begin = std::clamp<i64>((mine.begin - before + e.in - 1) / e.in, 0, e.out);
                i64 end = std::clamp<i64>((mine.end - before + e.in - 1) / e.in, 0, e.out);
                few_rows(e, begin, end, p->N);
            }
            before += size;
        }
    });
    return 0;
}

// The new token's k and v, all that depends on x alone, the operator, and the readout.
static int run_step(const hm_step_args &p) {
    hm_args mix = p.mix;
    const i64 B = mix.B, C = p.C, Q = mix.G * mix.K, O = mix.H * mix.V, n1 = mix.G * mix.R1, n2 = mix.H * mix.R2;
    std::vector<float> scratch(B * (2 * C + 3 * Q + 3 * O + n1 + n2 + mix.H));
    float *next = scratch.data();
    auto take = [&](i64 n) { return next += B * n, next - B * n; };
    float *xk = take(C), *xv = take(C), *q = take(Q), *gq = take(Q), *k = take(Q), *v = take(O), *go = take(O), *o = take(O),
          *s1 = take(n1), *s2 = take(n2);
    mix.rho = take(mix.H);

    hm_view x{const_cast<float *>(p.x), p.x_row, p.x_row, 0}, to_k{xk, C, C, 0}, to_v{xv, C, C, 0};
    if (p.conv_k) {
        hm_conv_args conv{};
        conv.B = B, conv.T = 1, conv.C = C, conv.W = p.W, conv.nthreads = 1;
        conv.x = x, conv.wk = p.conv_k, conv.wv = p.conv_v, conv.yk = to_k, conv.yv = to_v;
        std::vector<float> history(B * (p.W - 1) * C + 1);
        for (i64 b = 0; b < B && p.W > 1; b++)
            memcpy(history.data() + b * (p.W - 1) * C, p.history + b * p.history_b, (p.W - 1) * C * sizeof(float));
        conv.history = history.data();
        Conv twin(conv);
        for (i64 b = 0; b < B; b++) twin.forward_block(b, 0);
    }
    std::vector<hm_linear_entry> entries;
    auto linear = [&](const hm_weights &w, const float *from, i64 row, i64 in, float *to, i64 out) {
        if (w.w) entries.push_back({from, w.w, w.bias, to, row, in, out});
    };
    auto run = [&] {
        hm_linear_args all{B, (i64)entries.size(), mix.nthreads, mix.parallel, entries.data()};
        hm_linear(&all);
        entries.clear();
    };
    linear(p.q, p.x, p.x_row, C, q, Q), linear(p.gate_qk, p.x, p.x_row, C, gq, Q), linear(p.gate_vo, p.x, p.x_row, C, go, O);
    linear(p.control1, p.x, p.x_row, C, s1, n1), linear(p.control2, p.x, p.x_row, C, s2, n2);
    linear(p.k, p.conv_k ? xk : p.x, p.conv_k ? C : p.x_row, C, k, Q);
    linear(p.v, p.conv_k ? xv : p.x, p.conv_k ? C : p.x_row, C, v, O);
    run();

    auto gate = [&](const float *from, const float *g, float *to, i64 width) {
        hm_gate_args a{};
        a.N = B, a.C = width, a.nthreads = 1, a.x = from, a.g = g, a.y = to, a.x_row = a.g_row = a.y_row = width;
        hm_gate_forward(&a);
    };
    if (p.gate_qk.w) gate(q, gq, q, Q);
    if (p.control1.w) gate(nullptr, s1, s1, n1);
    if (p.control2.w) gate(nullptr, s2, s2, n2);
    for (i64 b = 0; b < B; b++) {
        i64 slot = mix.spans[5 * b + 4] - 1;
        for (i64 g = 0; g < mix.G; g++) memcpy(at(mix.k, b, slot, g), k + b * Q + g * mix.K, mix.K * sizeof(float));
        for (i64 h = 0; h < mix.H; h++) memcpy(at(mix.v, b, slot, h), v + b * O + h * mix.V, mix.V * sizeof(float));
    }
    mix.q = {q, Q, Q, mix.K}, mix.s1 = {s1, n1, n1, mix.R1}, mix.s2 = {s2, n2, n2, mix.R2}, mix.o = {o, O, O, mix.V};
    int status = run_forward(mix);
    if (status) return status;
    if (p.gate_vo.w) gate(o, go, o, O);
    linear(p.out, o, O, O, p.y, C);
    run();
    return 0;
}

HM_API int hm_step(const hm_step_args *p) {
    if (p->mix.T != 1 || p->mix.n_spans != p->mix.B || !arguments_agree(p->mix)) return 2;
    try {
        return p->mix.B ? run_step(*p) : 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// The elementary functions over an array, for tests. kind 0 exp of x <= 0, 1 softplus, 2 sigmoid.
HM_API int hm_math(i64 kind, i64 n, const float *x, float *y) {
    each_pair(n, [&](i64 j, i64 k) {
        pair v = load2_some(x + j, k);
        store2_some(y + j, kind == 0 ? exp_negative(v) : kind == 1 ? softplus(v) : sigmoid(v), k);
    });
    return 0;
}

HM_API int hm_scan_forward(const hm_scan_args *p) {
    try {
        if (p->rows <= 0 || p->group <= 0 || p->group % VL2) return 2;
        Scan scan(*p);
        scan.run([&](i64 b, i64 group) { scan.forward(b, group); });
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

HM_API int hm_scan_backward(const hm_scan_args *p) {
    try {
        if (p->rows <= 0 || p->group <= 0 || p->group % VL2) return 2;
        Scan scan(*p);
        scan.run([&](i64 b, i64 group) { scan.backward(b, group); });
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}
