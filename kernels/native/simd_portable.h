/* The vectors of simd.h on any machine, and with NEON's dot product where that is there: four lanes. */
#define VL 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));

INLINE vf vf_load(const float *p) { vf a; memcpy(&a, p, 16); return a; }
INLINE void vf_store(float *p, vf a) { memcpy(p, &a, 16); }
INLINE vf vf_set(float a) { return (vf){a, a, a, a}; }
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
#define EACH_LANE(expression) \
    vf y; \
    for (int i = 0; i < 4; i++) y[i] = (expression); \
    return y
INLINE vf vf_max(vf a, vf b) { EACH_LANE(a[i] > b[i] ? a[i] : b[i]); }
INLINE vf vf_min(vf a, vf b) { EACH_LANE(a[i] < b[i] ? a[i] : b[i]); }
INLINE vf vf_abs(vf a) { EACH_LANE(fabsf(a[i])); }
INLINE vf vf_round(vf a) { EACH_LANE(rintf(a[i])); }
INLINE int vf_any_nan(vf a) { return a[0] != a[0] || a[1] != a[1] || a[2] != a[2] || a[3] != a[3]; }
INLINE vf vf_load_half(const uint16_t *p) { EACH_LANE(half_to_float(p[i])); }
INLINE void vf_store_half(uint16_t *p, vf a) {
    for (int i = 0; i < 4; i++) p[i] = float_to_half(a[i]);
}
INLINE vf vf_load_bf16(const uint16_t *p) {
    typedef uint32_t words __attribute__((vector_size(16)));
    return (vf)((words){p[0], p[1], p[2], p[3]} << 16);
}
INLINE vf vf_load_u8(const uint8_t *p) { EACH_LANE((float)p[i]); }
INLINE vf vf_load_u4(const uint8_t *p, int high) { EACH_LANE((float)(high ? p[i] >> 4 : p[i] & 15)); }
INLINE vf vf_load_s8(const int8_t *p) { EACH_LANE((float)p[i]); }
INLINE vf vf_from_int(vi a) { EACH_LANE((float)a[i]); }
INLINE vi vi_from_float(vf a) {
    vi y;
    for (int i = 0; i < 4; i++) y[i] = (int32_t)lrintf(a[i]);
    return y;
}
INLINE void vi_store_s8(int8_t *p, vi a) {
    for (int i = 0; i < 4; i++) p[i] = (int8_t)(a[i] > 127 ? 127 : a[i] < -128 ? -128 : a[i]);
}
INLINE vf vf_scale_by_power(vf a, vi n) { return a * (vf)((n + 127) << 23); }
INLINE vi vb_load(const uint8_t *p) { vi a; memcpy(&a, p, 16); return a; }
INLINE vi vb_low(vi a, int mask) { return (vi)((bytes16)a & (uint8_t)mask); }
INLINE vi vb_shift(vi a, int right) { return (vi)(right >= 0 ? (bytes16)a >> right : (bytes16)a << -right); }
INLINE vi vb_or(vi a, vi b) { return a | b; }
INLINE vi vi_zero(void) { return (vi){0, 0, 0, 0}; }

INLINE vi vi_add(vi a, vi b) { return a + b; }
INLINE int32_t vi_sum(vi a) { return a[0] + a[1] + a[2] + a[3]; }
INLINE float vf_largest(vf a) {
    float b = a[0] > a[1] ? a[0] : a[1], c = a[2] > a[3] ? a[2] : a[3];
    return b > c ? b : c;
}

/* Signed times signed: bytes of weights stay below 128 but for those of 8 bits, which are signed here. */
INLINE vi vb_signed(vi a) { return (vi)((bytes16)a ^ 0x80); }
#define BYTES_CENTRE 0
#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vi dot4(vi acc, vi w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
#else
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vi dot4(vi acc, vi w, const int8_t *x) {
    int8_t bytes[16];
    memcpy(bytes, &w, 16);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) acc[i] += bytes[4 * i + j] * x[j];
    return acc;
}
#endif
#define HAS_DOT4 1
