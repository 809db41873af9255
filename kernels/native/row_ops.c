/* Ops on one row of activations: RMS norm, quantisation to signed bytes, SiLU-mul. */
#include "native.h"
#include "simd.h"

/* x, weight and y are padded with zeros to a multiple of 16. */
void norm_row(const float *x, const float *weight, float eps, int columns, float *y) {
    int padded = (int)up_to(columns, 16);
    vf squares[PARTS];
    for (int i = 0; i < PARTS; i++) squares[i] = vf_set(0.0f);
    for (int c = 0; c < padded; c += 16)
        for (int i = 0; i < PARTS; i++) {
            vf a = vf_load(x + c + i * VL);
            squares[i] = vf_fma(a, a, squares[i]);
        }
    vf inverse = vf_set(1.0f / sqrtf(sum16(squares) / (float)columns + eps));
    for (int c = 0; c < padded; c += VL)
        vf_store(y + c, vf_mul(vf_mul(vf_load(x + c), inverse), vf_load(weight + c)));
}

/* A group's scale is its largest magnitude / 127; not a number if any of its values is none. */
void quantize_group(const float *x, const struct rows *to, int64_t row, int64_t group) {
    vf values[2 * PARTS], largest[PARTS];
    int nan = 0;
    for (int i = 0; i < 2 * PARTS; i++) {
        values[i] = vf_load(x + i * VL);
        nan |= vf_any_nan(values[i]);
    }
    for (int i = 0; i < PARTS; i++) largest[i] = vf_max(vf_abs(values[i]), vf_abs(values[PARTS + i]));
    float most = max16(largest), d = most / 127.0f;
    vf inverse = vf_set(most > 0.0f ? 127.0f / most : 0.0f);
    int8_t *q = to->q + row * to->columns + group * GROUP;
    int64_t at = row * (to->columns / GROUP) + group;
    for (int half = 0; half < 2; half++) {
        vi codes[PARTS];
        for (int i = 0; i < PARTS; i++) {
            codes[i] = vi_from_float(vf_mul(values[half * PARTS + i], inverse)); /* to nearest, ties to even */
            vi_store_s8(q + (half * PARTS + i) * VL, codes[i]);
        }
        to->sums[2 * at + half] = int_sum16(codes);
    }
    to->d[at] = nan ? NAN : d;
    to->s[at] = to->d[at] * (float)(to->sums[2 * at] + to->sums[2 * at + 1]);
}

/* x: to->columns floats, a multiple of GROUP. */
void quantize_row(const float *x, const struct rows *to, int64_t row) {
    for (int64_t group = 0; group < to->columns / GROUP; group++) quantize_group(x + group * GROUP, to, row, group);
}

/* y = gate / (1 + exp(-gate)) * up; count is a multiple of 16. */
void silu_mul_row(const float *gate, const float *up, float *y, int count) {
    vf one = vf_set(1.0f), minus_log2_e = vf_set(-LOG2_E);
    for (int c = 0; c < count; c += VL) {
        vf g = vf_load(gate + c);
        vf denominator = vf_add(one, vf_exp2(vf_mul(g, minus_log2_e)));
        vf_store(y + c, vf_mul(vf_div(g, denominator), vf_load(up + c)));
    }
}
