/* Products of one tile of a weight with a few rows of activations.

   A result is a sum over groups in ascending order, each step the same few float operations whatever the number of
   rows, so a row's bits do not depend on its company. Within a group of a quantised weight the sum is one of integers,
   exact in any order. */
#include "native.h"
#include "simd.h"

/* How a type's weights are made of its integers q, of `bits` bits. */
enum scaling {
    BY_GROUP,             /* d q + m */
    BY_GROUP_CENTRED,     /* d (q - centre) */
    BY_SUB_GROUP,         /* d sub q - m sub_min, sub a group */
    BY_HALF_GROUP,        /* d sub q - m sub_min, sub and sub_min a half group */
    BY_HALF_CENTRED,      /* d sub (q - centre), sub signed, a half group */
};

struct type {
    int bits, kind, centre;
};
static const struct type types[] = {
    [Q4_0] = {4, BY_GROUP_CENTRED, 8}, [Q4_1] = {4, BY_GROUP, 0},         [Q5_0] = {5, BY_GROUP_CENTRED, 16},
    [Q5_1] = {5, BY_GROUP, 0},         [Q8_0] = {8, BY_GROUP_CENTRED, BYTES_CENTRE}, [Q2_K] = {2, BY_HALF_GROUP, 0},
    [Q3_K] = {3, BY_HALF_CENTRED, 4},  [Q4_K] = {4, BY_SUB_GROUP, 0},     [Q5_K] = {5, BY_SUB_GROUP, 0},
    [Q6_K] = {6, BY_HALF_CENTRED, 32},
};

/* The eight vectors of a group, the part of them that belongs to rows from `lane` on. */
INLINE void load_group(const struct matrix *w, int64_t group, int lane, int bits, vi out[8]) {
    const uint8_t *codes = (const uint8_t *)w->codes + 4 * lane, *high = (const uint8_t *)w->high + 4 * lane;
    if (bits >= 4 && bits <= 6) {
        for (int v = 0; v < 4; v++) {
            vi packed = vb_load(codes + group * 256 + v * 64);
            out[v] = vb_low(packed, 15);
            out[v + 4] = vb_low(vb_shift(packed, 4), 15);
        }
    } else if (bits <= 3) {
        for (int v = 0; v < 8; v++) out[v] = vb_low(vb_shift(vb_load(codes + group * 128 + v / 4 * 64), v % 4 * 2), 3);
    } else {
        for (int v = 0; v < 8; v++) out[v] = vb_load(codes + group * 512 + v * 64);
#if BYTES_CENTRE == 0
        for (int v = 0; v < 8; v++) out[v] = vb_signed(out[v]);
#endif
    }
    if (bits == 3 || bits == 5) {
        int bit = bits - 1;
        vi plane = vb_load(high + group * 64);
        for (int v = 0; v < 8; v++) out[v] = vb_or(out[v], vb_low(vb_shift(plane, v - bit), 1 << bit));
    } else if (bits == 6) {
        for (int v = 0; v < 8; v++)
            out[v] = vb_or(out[v], vb_low(vb_shift(vb_load(high + group * 128 + v / 4 * 64), v % 4 * 2 - 4), 0x30));
    }
}

/* The integer products of vectors first to first + count - 1 with a row's bytes. */
INLINE vi dot(const vi *w, const int8_t *x, int first, int count, int bits) {
    vi total = vi_zero();
#if HAS_DOT4
    vi b = vi_zero(), c = vi_zero(), d = vi_zero();
    for (int v = first; v < first + count; v += 4) {
        total = dot4(total, w[v], x + 4 * v);
        b = dot4(b, w[v + 1], x + 4 * v + 4);
        c = dot4(c, w[v + 2], x + 4 * v + 8);
        d = dot4(d, w[v + 3], x + 4 * v + 12);
    }
    total = vi_add(vi_add(total, b), vi_add(c, d));
    (void)bits;
#else
    /* As many vectors as fit in 16 bits together: 8 x 2 x 15 x 127 = 30480. */
    int run = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    for (int v = first; v < first + count; v += run) {
        vi part = bits == 8 ? pairs_signed(w[v], x + 4 * v) : pairs(w[v], x + 4 * v);
        for (int i = 1; i < run && v + i < first + count; i++) part = add16(part, pairs(w[v + i], x + 4 * (v + i)));
        total = vi_add(total, widen16(part));
    }
#endif
    return total;
}

/* The hardware's own prefetching starts anew with every tile, and a product of several rows stays long on each line. */
#define PREFETCH_BYTES 4096
INLINE void prefetch_group(const struct matrix *w, int64_t group, int bits, int kind) {
    int bytes = bits <= 3 ? 128 : bits == 8 ? 512 : 256;
    const char *codes = (const char *)w->codes + group * bytes + PREFETCH_BYTES;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(codes + i);
    int64_t ahead = group + PREFETCH_BYTES / bytes, scales = ahead * TILE_ROWS;
    if (bits == 3 || bits == 5) __builtin_prefetch((const char *)w->high + ahead * 64);
    for (int i = 0; bits == 6 && i < 128; i += 64) __builtin_prefetch((const char *)w->high + ahead * 128 + i);
    if (kind == BY_GROUP || kind == BY_GROUP_CENTRED) __builtin_prefetch(w->d + scales);
    else __builtin_prefetch(w->sub + scales * (kind == BY_SUB_GROUP ? 1 : 2));
    if (kind == BY_GROUP) __builtin_prefetch(w->m + scales);
    if (kind == BY_SUB_GROUP) __builtin_prefetch(w->sub_min + scales);
}

/* With 16 registers, loops unrolled over rows keep their sums there and weights in memory: the wrong way round. */
#if VL == 8
#define ONE_AT_A_TIME _Pragma("GCC unroll 1")
#else
#define ONE_AT_A_TIME
#endif

struct scales {
    vf d[2], m[2]; /* of the two half groups; m is added */
};

INLINE struct scales load_scales(const struct matrix *w, int64_t group, int64_t super, int lane, int kind, int centre) {
    struct scales s;
    int64_t at = group * 16 + lane;
    if (kind == BY_GROUP || kind == BY_GROUP_CENTRED) {
        s.d[0] = s.d[1] = vf_load_half(w->d + at);
        s.m[0] = kind == BY_GROUP ? vf_load_half(w->m + at) : vf_mul(s.d[0], vf_set((float)-centre));
        s.m[1] = s.m[0];
        return s;
    }
    vf d = vf_load_half(w->d + super * 16 + lane);
    if (kind == BY_SUB_GROUP) {
        vf m = vf_sub(vf_set(0.0f), vf_load_half(w->m + super * 16 + lane));
        s.d[0] = s.d[1] = vf_mul(d, vf_load_u8(w->sub + at));
        s.m[0] = s.m[1] = vf_mul(m, vf_load_u8(w->sub_min + at));
        return s;
    }
    for (int half = 0; half < 2; half++) {
        int64_t half_at = (2 * group + half) * 16 + lane;
        if (kind == BY_HALF_GROUP) {
            vf m = vf_sub(vf_set(0.0f), vf_load_half(w->m + super * 16 + lane));
            s.d[half] = vf_mul(d, vf_load_u4(w->sub + half_at, 0));
            s.m[half] = vf_mul(m, vf_load_u4(w->sub + half_at, 1));
        } else {
            s.d[half] = vf_mul(d, vf_load_s8((const int8_t *)w->sub + half_at));
            s.m[half] = vf_mul(s.d[half], vf_set((float)-centre));
        }
    }
    return s;
}

INLINE void quantised(const struct matrix *w, int tile, const struct rows *x, int row, int count, int bits, int kind,
                      int centre, float (*out)[TILE_ROWS]) {
    int64_t groups = w->columns / GROUP, supers = groups / (SUPER_GROUP / GROUP);
    int by_half = kind == BY_HALF_GROUP || kind == BY_HALF_CENTRED;
    const int8_t *q = x->q + row * x->columns;
    const float *d = x->d + row * groups, *s = x->s + row * groups;
    const int32_t *sums = x->sums + row * groups * 2;
    for (int lane = 0; lane < TILE_ROWS; lane += VL) {
        vf acc[MAX_BLOCK_ROWS];
        for (int t = 0; t < count; t++) acc[t] = vf_set(0.0f);
        for (int64_t g = 0; g < groups; g++) {
            vi group[8];
            if (lane == 0) prefetch_group(w, tile * groups + g, bits, kind);
            load_group(w, tile * groups + g, lane, bits, group);
            struct scales scale = load_scales(w, tile * groups + g, tile * supers + g / 8, lane, kind, centre);
            ONE_AT_A_TIME
            for (int t = 0; t < count; t++) {
                const int8_t *row_q = q + t * x->columns + g * GROUP;
                int64_t at = t * groups + g;
                vf x_d = vf_set(d[at]);
                if (!by_half) {
                    vi n = dot(group, row_q, 0, 8, bits);
                    acc[t] = vf_fma(vf_mul(vf_from_int(n), scale.d[0]), x_d, acc[t]);
                    if (kind != BY_GROUP_CENTRED || centre) acc[t] = vf_fma(scale.m[0], vf_set(s[at]), acc[t]);
                } else {
                    for (int half = 0; half < 2; half++) {
                        vf n = vf_from_int(dot(group, row_q, 4 * half, 4, bits));
                        vf sum = vf_set((float)sums[2 * at + half]);
                        acc[t] = vf_fma(vf_fma(scale.m[half], sum, vf_mul(n, scale.d[half])), x_d, acc[t]);
                    }
                }
            }
        }
        for (int t = 0; t < count; t++) vf_store(out[t] + lane, acc[t]);
    }
}

#if VL == 8 && !HAS_DOT4
/* The same for 4 bits and several rows. All of the tile's rows share a broadcast of activations, since loads are what
   the loops are short of; half a group at a time, so that its weights stay in registers. */
INLINE void nibbles(const struct matrix *w, int tile, const struct rows *x, int row, int count, int kind, int centre,
                    float (*out)[TILE_ROWS]) {
    int64_t groups = w->columns / GROUP, supers = groups / (SUPER_GROUP / GROUP);
    vf acc[MAX_BLOCK_ROWS][2];
    for (int t = 0; t < count; t++) acc[t][0] = acc[t][1] = vf_set(0.0f);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *codes = (const uint8_t *)w->codes + (tile * groups + g) * 256;
        const int8_t *q = x->q + row * x->columns + g * GROUP;
        struct scales scale[2];
        vi part[MAX_BLOCK_ROWS][2];
        prefetch_group(w, tile * groups + g, 4, kind);
        for (int i = 0; i < 2; i++)
            scale[i] = load_scales(w, tile * groups + g, tile * supers + g / 8, i * VL, kind, centre);
        for (int half = 0; half < 2; half++) {
            vi low[4], high[4]; /* the tile's rows 0 to 7 and 8 to 15 */
            for (int v = 0; v < 4; v++) {
                low[v] = vb_low(vb_shift(vb_load(codes + 64 * v), 4 * half), 15);
                high[v] = vb_low(vb_shift(vb_load(codes + 64 * v + 32), 4 * half), 15);
            }
            ONE_AT_A_TIME
            for (int t = 0; t < count; t++) {
                const int8_t *from = q + t * x->columns + 16 * half;
                vi a = pairs(low[0], from), b = pairs(high[0], from);
                for (int v = 1; v < 4; v++) {
                    a = add16(a, pairs(low[v], from + 4 * v));
                    b = add16(b, pairs(high[v], from + 4 * v));
                }
                if (half == 0) {
                    part[t][0] = a, part[t][1] = b;
                    continue;
                }
                int64_t at = (row + t) * groups + g;
                vf x_d = vf_set(x->d[at]), x_s = vf_set(x->s[at]);
                vf n[2] = {vf_from_int(widen16(add16(part[t][0], a))), vf_from_int(widen16(add16(part[t][1], b)))};
                for (int i = 0; i < 2; i++)
                    acc[t][i] = vf_fma(scale[i].m[0], x_s, vf_fma(vf_mul(n[i], scale[i].d[0]), x_d, acc[t][i]));
            }
        }
    }
    for (int t = 0; t < count; t++)
        for (int i = 0; i < 2; i++) vf_store(out[t] + i * VL, acc[t][i]);
}
#else
#define nibbles(...) ((void)0)
#endif

INLINE void dense(const struct matrix *w, int tile, const struct rows *x, int row, int count, int format,
                  float (*out)[TILE_ROWS]) {
    int64_t first = (int64_t)tile * w->columns * TILE_ROWS;
    for (int lane = 0; lane < TILE_ROWS; lane += VL) {
        vf acc[MAX_BLOCK_ROWS];
        for (int t = 0; t < count; t++) acc[t] = vf_set(0.0f);
        for (int c = 0; c < w->columns; c++) {
            int64_t at = first + (int64_t)c * TILE_ROWS + lane;
            if (lane == 0) __builtin_prefetch((const char *)w->codes + at * (format == F32 ? 4 : 2) + PREFETCH_BYTES);
            vf column = format == F32   ? vf_load((const float *)w->codes + at)
                        : format == F16 ? vf_load_half((const uint16_t *)w->codes + at)
                                        : vf_load_bf16((const uint16_t *)w->codes + at);
            for (int t = 0; t < count; t++) acc[t] = vf_fma(column, vf_set(x->x[(row + t) * x->stride + c]), acc[t]);
        }
        for (int t = 0; t < count; t++) vf_store(out[t] + lane, acc[t]);
    }
}

INLINE void block(const struct matrix *w, int tile, const struct rows *x, int row, int count,
                  float (*out)[TILE_ROWS]) {
    switch (w->format) {
#define DENSE(name) case name: dense(w, tile, x, row, count, name, out); break
#define FOUR_BITS(t) \
    case t: \
        if (VL == 8 && !HAS_DOT4 && count > 2) nibbles(w, tile, x, row, count, types[t].kind, types[t].centre, out); \
        else quantised(w, tile, x, row, count, 4, types[t].kind, types[t].centre, out); \
        break
#define TYPE(t) case t: quantised(w, tile, x, row, count, types[t].bits, types[t].kind, types[t].centre, out); break
        DENSE(F32);
        DENSE(F16);
        DENSE(BF16);
        FOUR_BITS(Q4_0);
        FOUR_BITS(Q4_1);
        TYPE(Q5_0);
        TYPE(Q5_1);
        TYPE(Q8_0);
        TYPE(Q2_K);
        TYPE(Q3_K);
        FOUR_BITS(Q4_K);
        TYPE(Q5_K);
        TYPE(Q6_K);
    }
}

/* out[i] = the 16 outputs of a tile for activation row `row + i`; count is at most MAX_BLOCK_ROWS. */
void product(const struct matrix *w, int tile, const struct rows *x, int row, int count, float (*out)[TILE_ROWS]) {
    while (count > 0) {
        int taken = VL == 16 && count >= 16 ? 16 : count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1;
        switch (taken) { /* a copy of the loops for each count, with its sums in registers */
            case 16: block(w, tile, x, row, VL == 16 ? 16 : 8, out); break;
            case 8: block(w, tile, x, row, 8, out); break;
            case 4: block(w, tile, x, row, 4, out); break;
            case 2: block(w, tile, x, row, 2, out); break;
            default: block(w, tile, x, row, 1, out);
        }
        row += taken, out += taken, count -= taken;
    }
}

int tile_readings(const struct matrix *w, int tile, int count, struct reading *readings) {
    int64_t elements = (int64_t)TILE_ROWS * w->columns, groups = elements / GROUP, first = tile * groups;
    const char *codes = w->codes;
    if (is_dense(w)) {
        int64_t bytes = elements * (w->format == F32 ? 4 : 2);
        readings[0] = (struct reading){codes + tile * bytes, count * bytes};
        return 1;
    }
    int kind = types[w->format].kind, bits = types[w->format].bits, n = 0;
    int64_t bytes = elements * (bits == 8 ? 8 : bits <= 3 ? 2 : 4) / 8;
    readings[n++] = (struct reading){codes + tile * bytes, count * bytes};
    if (kind == BY_GROUP || kind == BY_GROUP_CENTRED) {
        readings[n++] = (struct reading){w->d + first, count * groups * 2};
        if (kind == BY_GROUP) readings[n++] = (struct reading){w->m + first, count * groups * 2};
    }
    return n;
}

/* The integer of a weight in a group of its tile. */
static int code_at(const struct matrix *w, int64_t group, int lane, int column) {
    const uint8_t *codes = w->codes, *high = w->high;
    int bits = types[w->format].bits, v = column / 4, byte = 4 * lane + column % 4;
    if (bits == 8) return codes[group * 512 + v * 64 + byte] - 128 + BYTES_CENTRE;
    int q = bits <= 3 ? codes[group * 128 + v / 4 * 64 + byte] >> v % 4 * 2 & 3
                      : codes[group * 256 + v % 4 * 64 + byte] >> v / 4 * 4 & 15;
    if (bits == 3 || bits == 5) q |= (high[group * 64 + byte] >> v & 1) << (bits - 1);
    if (bits == 6) q |= (high[group * 128 + v / 4 * 64 + byte] >> v % 4 * 2 & 3) << 4;
    return q;
}

/* d (q - centre) + m of the half group's weights. */
struct affine {
    float d, m;
};

static struct affine affine_at(const struct matrix *w, int64_t group, int64_t super, int lane, int half) {
    int64_t half_at = (2 * group + half) * 16 + lane, at = group * 16 + lane, super_at = super * 16 + lane;
    int kind = types[w->format].kind;
    if (kind == BY_GROUP) return (struct affine){half_to_float(w->d[at]), half_to_float(w->m[at])};
    if (kind == BY_GROUP_CENTRED) return (struct affine){half_to_float(w->d[at]), 0.0f};
    float d = half_to_float(w->d[super_at]);
    if (kind == BY_HALF_CENTRED) return (struct affine){d * ((const int8_t *)w->sub)[half_at], 0.0f};
    float m = half_to_float(w->m[super_at]);
    if (kind == BY_HALF_GROUP) return (struct affine){d * (w->sub[half_at] & 15), -(m * (w->sub[half_at] >> 4))};
    return (struct affine){d * w->sub[at], -(m * w->sub_min[at])};
}

static void quantised_row(const struct matrix *w, int tile, int lane, float *out) {
    int64_t groups = w->columns / GROUP, supers = groups / (SUPER_GROUP / GROUP);
    int centre = types[w->format].centre;
    for (int64_t g = 0; g < groups; g++) {
        for (int half = 0; half < 2; half++) {
            struct affine scale = affine_at(w, tile * groups + g, tile * supers + g / 8, lane, half);
            for (int c = half * GROUP / 2; c < (half + 1) * GROUP / 2; c++) {
                int q = code_at(w, tile * groups + g, lane, c);
                out[g * GROUP + c] = scale.d * (float)(q - centre) + scale.m;
            }
        }
    }
}

/* One row of a weight as floats. */
void weight_row(const struct matrix *w, int row, float *out) {
    int tile = row / TILE_ROWS, lane = row % TILE_ROWS;
    if (!is_dense(w)) {
        quantised_row(w, tile, lane, out);
        return;
    }
    for (int c = 0; c < w->columns; c++) {
        int64_t at = ((int64_t)tile * w->columns + c) * TILE_ROWS + lane;
        uint32_t bits;
        switch (w->format) {
            case F32: out[c] = ((const float *)w->codes)[at]; break;
            case F16: out[c] = half_to_float(((const uint16_t *)w->codes)[at]); break;
            default:
                bits = (uint32_t)((const uint16_t *)w->codes)[at] << 16;
                memcpy(out + c, &bits, 4);
        }
    }
}
