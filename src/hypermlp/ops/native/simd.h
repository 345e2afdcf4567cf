// Vectors of the machine, the elementary functions on them, and the sizes that fit its registers and caches.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "arguments.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

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
constexpr i64 M_NARROW = 48, NARROW = 128;   // rows of a strip where values are at most so wide: higher ones would gain little,
                                             // and their matrices outweigh the tensors of a call
constexpr i64 FEW_LAGS = 1024;               // lags up to which this holds: the parameters of more outgrow the second cache, and
                                             // each strip reads all of them
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

// bfloat16 is the upper half of a float. It is read and written so; sums are in float.
struct bf16 {
    uint16_t bits;
};
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint16_t vh_mem __attribute__((vector_size(VL * 2), aligned(2), may_alias));

// What compilers make of __builtin_convertvector here is many instructions, where these processors have one.
#if defined(__AVX512F__)
HM_INLINE vu widen(const vh_mem *p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
#elif defined(__AVX2__)
HM_INLINE vu widen(const vh_mem *p) { return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
#else
HM_INLINE vu widen(const vh_mem *p) { return __builtin_convertvector(*p, vu); }
#endif
HM_INLINE vf load(const bf16 *p) { return (vf)(widen((const vh_mem *)p) << 16); }
HM_INLINE vh to_half(vf x) {  // to the nearest, ties to even; a NaN stays one
    vu bits = (vu)x, nan = (vu)(x != x);
    vu rounded = bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_convertvector((((bits | 0x400000) & nan) | (rounded & ~nan)) >> 16, vh);
}
HM_INLINE void store(bf16 *p, vf x) { *(vh_mem *)p = to_half(x); }

HM_INLINE float value(float x) { return x; }
HM_INLINE float value(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

// Codes of 8 bits, read as whole numbers.
#if defined(__AVX512F__)
HM_INLINE vi widen(const int8_t *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
#elif defined(__AVX2__)
HM_INLINE vi widen(const int8_t *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
typedef int8_t vc_mem __attribute__((vector_size(VL), aligned(1), may_alias));
HM_INLINE vi widen(const int8_t *p) { return __builtin_convertvector(*(const vc_mem *)p, vi); }
#endif
HM_INLINE vf load(const int8_t *p) { return __builtin_convertvector(widen(p), vf); }
HM_INLINE float value(int8_t x) { return x; }

// Operands of large products are packed in words as wide as a float: one number, or two of bfloat16 where the machine multiplies
// those. A word of two is moved as a float and never computed with as one.
template <class E> constexpr i64 PER_WORD = 1;
#if defined(__AVX512BF16__)
template <> constexpr i64 PER_WORD<bf16> = 2;
#endif
template <class E> HM_INLINE i64 words(i64 n) { return (n + PER_WORD<E> - 1) / PER_WORD<E>; }
template <class E> using packed = std::conditional_t<PER_WORD<E> == 2, bf16, float>;  // a number in such an operand

// c += a b, by words: a is one word, b and c have one in each column
template <i64 PER> HM_INLINE vf add_product(vf c, float a, vf b) {
#if defined(__AVX512BF16__)
    if constexpr (PER == 2) return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)b, (__m512bh)_mm512_set1_ps(a));
#endif
    return c + a * b;
}

// Word p of a row of `depth` numbers
template <class E> HM_INLINE float word(const E *row, i64 p, i64 depth) {
    if constexpr (PER_WORD<E> == 1) return value(row[p]);
    E both[2] = {row[2 * p], 2 * p + 1 < depth ? row[2 * p + 1] : E{}};
    float x;
    memcpy(&x, both, sizeof x);
    return x;
}
template <class E> HM_INLINE v4 four_words(const E *p) {  // of complete ones
    if constexpr (sizeof(E) * PER_WORD<E> < sizeof(float)) return v4{value(p[0]), value(p[1]), value(p[2]), value(p[3])};
    v4 x;
    memcpy(&x, p, sizeof x);
    return x;
}

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

// The sums of four vectors.
HM_INLINE v4 sums(vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__)
    __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, w = (__m512)d;
    __m512d xy = (__m512d)(_mm512_unpacklo_ps(x, y) + _mm512_unpackhi_ps(x, y));
    __m512d zw = (__m512d)(_mm512_unpacklo_ps(z, w) + _mm512_unpackhi_ps(z, w));
    __m512 all = (__m512)_mm512_unpacklo_pd(xy, zw) + (__m512)_mm512_unpackhi_pd(xy, zw);  // in each lane a part of the four
    __m256 half = _mm512_castps512_ps256(all) + (__m256)_mm512_extractf64x4_pd((__m512d)all, 1);
    return (v4)(_mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
    v4 s[4][VL / 4];
    memcpy(s[0], &a, sizeof a), memcpy(s[1], &b, sizeof b), memcpy(s[2], &c, sizeof c), memcpy(s[3], &d, sizeof d);
    for (int i = 0; i < 4; i++)
        for (int j = 1; j < VL / 4; j++) s[i][0] += s[i][j];
    transpose4(s[0][0], s[1][0], s[2][0], s[3][0]);
    return (s[0][0] + s[1][0]) + (s[2][0] + s[3][0]);
#endif
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
template <class E> HM_INLINE pair load2(const E *p) { return {load(p), load(p + VL)}; }
template <class E> HM_INLINE void store2(E *p, pair a) { store(p, a.x), store(p + VL, a.y); }
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

// f over n elements in vectors, or pairs of them; the last incomplete one goes through a zero-filled copy.
template <int STEP, class F> HM_INLINE void in_steps(i64 n, F f) {
    i64 j = 0;
    for (; j + STEP <= n; j += STEP) f(j, STEP);
    if (j < n) f(j, n - j);
}
template <class F> HM_INLINE void each_vector(i64 n, F f) { in_steps<VL>(n, f); }
template <class F> HM_INLINE void each_pair(i64 n, F f) { in_steps<VL2>(n, f); }
#if defined(__AVX512F__)
HM_INLINE vf load_some(const float *p, i64 n) {
    return n == VL ? load(p) : (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
HM_INLINE vf load_some(const bf16 *p, i64 n) {
    if (n == VL) return load(p);
    return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p)) << 16);
}
#endif
template <class E> HM_INLINE vf load_some(const E *p, i64 n) {
    if (n == VL) return load(p);
    E part[VL] = {};
    memcpy(part, p, n * sizeof(E));
    return load(part);
}
template <class E> HM_INLINE void store_some(E *p, vf x, i64 n) {
    if (n == VL) return store(p, x);
    E part[VL];
    store(part, x);
    memcpy(p, part, n * sizeof(E));
}
template <class E> HM_INLINE pair load2_some(const E *p, i64 n) {
    if (n == VL2) return load2(p);
    return {load_some(p, std::min<i64>(n, VL)), n > VL ? load_some(p + VL, n - VL) : vf{}};
}
template <class E> HM_INLINE void store2_some(E *p, pair x, i64 n) {
    if (n == VL2) return store2(p, x);
    store_some(p, x.x, std::min<i64>(n, VL));
    if (n > VL) store_some(p + VL, x.y, n - VL);
}

i64 round_up(i64 n, i64 unit) { return (n + unit - 1) / unit * unit; }
i64 round_down(i64 n, i64 unit) { return n / unit * unit; }

}  // namespace
