/* The vectors of simd.h on any machine, with NEON and its dot product where those are there: four lanes. */
#ifdef __aarch64__
#include <arm_neon.h>
#endif
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
INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); } /* as on x86: b if either is not a number */
INLINE vf vf_min(vf a, vf b) { return vf_select(a < b, a, b); }
INLINE vf vf_abs(vf a) { return (vf)((vi)a & 0x7fffffff); }
INLINE vf vf_from_int(vi a) { return __builtin_convertvector(a, vf); }
INLINE int vf_any_nan(vf a) { return a[0] != a[0] || a[1] != a[1] || a[2] != a[2] || a[3] != a[3]; }
INLINE vf vf_load_bf16(const uint16_t *p) {
    typedef uint32_t words __attribute__((vector_size(16)));
    return (vf)((words){p[0], p[1], p[2], p[3]} << 16);
}
#ifdef __aarch64__
INLINE vf vf_round(vf a) { return (vf)vrndnq_f32((float32x4_t)a); }
INLINE vi vi_from_float(vf a) { return (vi)vcvtnq_s32_f32((float32x4_t)a); }
INLINE vf vf_load_half(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void vf_store_half(uint16_t *p, vf a) { /* as float_to_half */
    a = vf_max(vf_set(-65504.0f), vf_min(vf_set(65504.0f), a));
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a)));
}
#else
INLINE vf vf_round(vf a) { return (vf){rintf(a[0]), rintf(a[1]), rintf(a[2]), rintf(a[3])}; }
INLINE vi vi_from_float(vf a) {
    return (vi){(int32_t)lrintf(a[0]), (int32_t)lrintf(a[1]), (int32_t)lrintf(a[2]), (int32_t)lrintf(a[3])};
}
INLINE vf vf_load_half(const uint16_t *p) {
    return (vf){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
INLINE void vf_store_half(uint16_t *p, vf a) {
    for (int i = 0; i < 4; i++) p[i] = float_to_half(a[i]);
}
#endif
INLINE vf vf_load_u8(const uint8_t *p) { return vf_from_int((vi){p[0], p[1], p[2], p[3]}); }
INLINE vf vf_load_s8(const int8_t *p) { return vf_from_int((vi){p[0], p[1], p[2], p[3]}); }
INLINE vf vf_load_u4(const uint8_t *p, int high) {
    vi bytes = {p[0], p[1], p[2], p[3]};
    return vf_from_int(high ? bytes >> 4 : bytes & 15);
}
INLINE void vi_store_s8(int8_t *p, vi a) {
    for (int i = 0; i < 4; i++) p[i] = (int8_t)(a[i] > 127 ? 127 : a[i] < -128 ? -128 : a[i]);
}
INLINE vf vf_scale_by_power(vf a, vi n) { return a * (vf)((n + 127) << 23); }
INLINE float sum16(const vf *parts) {
    vf a = (parts[0] + parts[2]) + (parts[1] + parts[3]);
    return (a[0] + a[2]) + (a[1] + a[3]);
}
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
