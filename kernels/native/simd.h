/* Vectors of the instruction set this file is compiled for: VL lanes of 32 bits, used for floats, integers and bytes.

   Every operation acts lane by lane, so that a result does not depend on VL; sums across lanes always run over 16
   partial sums in one order (sum16: of lanes 8 apart, then 4, 2 and 1 apart). Multiply-adds are fused wherever the
   hardware has them, by name: the compiler is told not to contract anything else. */
#ifndef HEADRACE_SIMD_H
#define HEADRACE_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
    float f;
    if (exponent == 0) {
        f = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    }
    memcpy(&f, &bits, 4);
    return f;
}

/* To nearest, ties to even; what is too large becomes the largest, so that no later product is 0 times infinity. */
INLINE uint16_t float_to_half(float f) {
    uint32_t bits;
    f = f > 65504.0f ? 65504.0f : f < -65504.0f ? -65504.0f : f;
    memcpy(&bits, &f, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude < 0x38800000) { /* below 2^-14: adding 1/2 leaves the rounded count of 2^-24 in the low bits */
        float m;
        memcpy(&m, &magnitude, 4);
        m += 0.5f;
        memcpy(&magnitude, &m, 4);
        return sign | (uint16_t)(magnitude & 0x7ff);
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return sign | (uint16_t)((magnitude - 0x38000000) >> 13);
}

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define VL 16
typedef __m512 vf;
typedef __m512i vi;
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_set(float a) { return _mm512_set1_ps(a); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE int vf_any_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
INLINE vf vf_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void vf_store_half(uint16_t *p, vf a) { /* as float_to_half */
    a = _mm512_max_ps(_mm512_set1_ps(-65504.0f), _mm512_min_ps(_mm512_set1_ps(65504.0f), a));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf vf_load_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf vf_load_u4(const uint8_t *p, int high) { /* the low or high halves of bytes */
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    bytes = _mm_and_si128(high ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
}
INLINE vf vf_load_s8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf vf_from_int(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi vi_from_float(vf a) { return _mm512_cvtps_epi32(a); }
INLINE void vi_store_s8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(a)); }
INLINE vf vf_scale_by_power(vf a, vi n) { /* a * 2^n for -127 <= n <= 127, where 2^-127 counts as 0 */
    return _mm512_mul_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)));
}
INLINE vi vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE vi vb_low(vi a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8((char)mask)); }
INLINE vi vb_shift(vi a, int right) { return right >= 0 ? _mm512_srli_epi16(a, right) : _mm512_slli_epi16(a, -right); }
INLINE vi vb_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }
INLINE float vf_largest(vf a) { return _mm512_reduce_max_ps(a); }
INLINE vi dot4(vi acc, vi w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
INLINE float sum16(const vf *parts) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(parts[0]), _mm512_extractf32x8_ps(parts[0], 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
#define HAS_DOT4 1
#define BYTES_CENTRE 128 /* what to take from a byte of 8 bits, since dot4 wants it unsigned */

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define VL 8
typedef __m256 vf;
typedef __m256i vi;
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf vf_set(float a) { return _mm256_set1_ps(a); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE int vf_any_nan(vf a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
INLINE vf vf_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void vf_store_half(uint16_t *p, vf a) {
    a = _mm256_max_ps(_mm256_set1_ps(-65504.0f), _mm256_min_ps(_mm256_set1_ps(65504.0f), a));
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vf vf_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vf_load_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf vf_load_u4(const uint8_t *p, int high) {
    __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    bytes = _mm_and_si128(high ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
}
INLINE vf vf_load_s8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf vf_from_int(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi vi_from_float(vf a) { return _mm256_cvtps_epi32(a); }
INLINE void vi_store_s8(int8_t *p, vi a) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
INLINE vf vf_scale_by_power(vf a, vi n) {
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)));
}
INLINE vi vb_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi vb_low(vi a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }
INLINE vi vb_shift(vi a, int right) { return right >= 0 ? _mm256_srli_epi16(a, right) : _mm256_slli_epi16(a, -right); }
INLINE vi vb_or(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi vi_zero(void) { return _mm256_setzero_si256(); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE int32_t vi_sum(vi a) {
    __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
INLINE float vf_largest(vf a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE float sum16(const vf *parts) {
    __m256 a = _mm256_add_ps(parts[0], parts[1]);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}
INLINE vi broadcast4(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
#ifdef __AVXVNNI__
INLINE vi dot4(vi acc, vi w, const int8_t *x) { return _mm256_dpbusd_avx_epi32(acc, w, broadcast4(x)); }
#define HAS_DOT4 1
#define BYTES_CENTRE 128
#else
/* Pairs of unsigned times signed bytes, summed in 16 bits without saturation as long as the sum fits. */
INLINE vi pairs(vi w, const int8_t *x) { return _mm256_maddubs_epi16(w, broadcast4(x)); }
INLINE vi pairs_signed(vi w, const int8_t *x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(broadcast4(x), w));
}
INLINE vi add16(vi a, vi b) { return _mm256_add_epi16(a, b); }
INLINE vi widen16(vi a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
INLINE vi vb_signed(vi a) { return _mm256_xor_si256(a, _mm256_set1_epi8((char)0x80)); }
#define HAS_DOT4 0
#define BYTES_CENTRE 0
#endif

#else
#include "simd_portable.h"
#endif

/* The maximum, and the sum of integers, of 16 lanes held in 16 / VL vectors: exact in any order. */
#define PARTS (16 / VL)
INLINE float max16(const vf *parts) {
    vf a = parts[0];
    for (int i = 1; i < PARTS; i++) a = vf_max(a, parts[i]);
    return vf_largest(a);
}
INLINE int32_t int_sum16(const vi *parts) {
    vi a = parts[0];
    for (int i = 1; i < PARTS; i++) a = vi_add(a, parts[i]);
    return vi_sum(a);
}

/* 2^x, to about 2 units in the last place; 0 below -126.5, and x above 126 counts as 126. */
INLINE vf vf_exp2(vf x) {
    x = vf_max(vf_min(x, vf_set(126.0f)), vf_set(-127.0f));
    vf n = vf_round(x), f = vf_sub(x, n);
    vf p = vf_set(1.5403530e-4f);
    p = vf_fma(p, f, vf_set(1.3333558e-3f));
    p = vf_fma(p, f, vf_set(9.6181291e-3f));
    p = vf_fma(p, f, vf_set(5.5504109e-2f));
    p = vf_fma(p, f, vf_set(2.4022651e-1f));
    p = vf_fma(p, f, vf_set(6.9314718e-1f));
    p = vf_fma(p, f, vf_set(1.0f));
    return vf_scale_by_power(p, vi_from_float(n));
}
#define LOG2_E 1.44269504088896340736f

#endif
