/* Causal attention of a few query rows over the paged cache of one sequence and KV head, float32 inside.

   Keys come in tiles of TILE at absolute positions, tiles in splits of SPLIT keys. Within a split the softmax runs
   online from tile to tile; splits are merged in order. So a row's bits depend on its query and its keys alone: what
   other rows share the loops, a key that is masked adds exact zeros. Scores are in base 2: queries carry log2 e. */
#include "native.h"
#include "simd.h"

#define TILE 64
#define SPLIT 512
#define KEY_PARTS (TILE / VL)
#define MAX_ROWS_TOGETHER 4
#define ROWS_TOGETHER (VL == 16 ? 4 : 2) /* what the registers hold */

/* What a query row has gathered: the largest score, the sum of 2^(score - largest), and the same weighing V. */
struct gathered {
    float largest, sum;
};

/* The K of a tile as rows of dim: base[j] + i * stride is dimension i of keys 16 j to 16 j + 15. */
struct tile_keys {
    const uint16_t *base[TILE / 16];
    int64_t stride;
};

INLINE void scores_of(const struct tile_keys *keys, const float *q, int64_t q_stride, int dim, int rows, float *to) {
    for (int part = 0; part < KEY_PARTS; part += 4) { /* four vectors of keys and the rows' queries in registers */
        vf acc[MAX_ROWS_TOGETHER][4];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 4; j++) acc[r][j] = vf_set(0.0f);
        for (int i = 0; i < dim; i++) {
            vf k[4];
            for (int j = 0; j < 4; j++)
                k[j] = vf_load_half(keys->base[(part + j) * VL / 16] + i * keys->stride + (part + j) * VL % 16);
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < 4; j++) acc[r][j] = vf_fma(k[j], vf_set(q[r * q_stride + i]), acc[r][j]);
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 4; j++) vf_store(to + r * TILE + (part + j) * VL, acc[r][j]);
    }
}

/* Scores to weights in place, keys from `visible` on to zero; what is gathered so far shrinks to the new largest. */
static void weigh(float *scores, int visible, struct gathered *g, float *out, int padded) {
    for (int i = visible; i < TILE; i++) scores[i] = -INFINITY;
    vf most[PARTS], sums[PARTS];
    for (int i = 0; i < PARTS; i++) most[i] = vf_load(scores + i * VL);
    for (int i = PARTS; i < KEY_PARTS; i++) most[i % PARTS] = vf_max(most[i % PARTS], vf_load(scores + i * VL));
    float largest = max16(most);
    if (!(largest > g->largest)) largest = g->largest;
    float shrink[16] = {g->largest - largest};
    vf_store(shrink, vf_exp2(vf_load(shrink)));
    vf offset = vf_set(largest);
    for (int i = 0; i < PARTS; i++) sums[i] = vf_set(0.0f);
    for (int i = 0; i < KEY_PARTS; i++) {
        vf weight = vf_exp2(vf_sub(vf_load(scores + i * VL), offset));
        vf_store(scores + i * VL, weight);
        sums[i % PARTS] = vf_add(sums[i % PARTS], weight);
    }
    g->largest = largest;
    g->sum = g->sum * shrink[0] + sum16(sums);
    if (shrink[0] != 1.0f)
        for (int i = 0; i < padded; i += VL) vf_store(out + i, vf_mul(vf_load(out + i), vf_set(shrink[0])));
}

/* out[row] += weights V, over the first `count` keys of the tile. */
INLINE void weighted_values(const uint16_t *const *values, int count, const float *weights, int padded, int rows,
                            float *out) {
    int i = 0;
#define STRIP(width) \
    for (; i + (width) * VL <= padded; i += (width) * VL) { \
        vf acc[MAX_ROWS_TOGETHER][width]; \
        for (int r = 0; r < rows; r++) \
            for (int j = 0; j < (width); j++) acc[r][j] = vf_load(out + r * padded + i + j * VL); \
        for (int key = 0; key < count; key++) { \
            vf v[width]; \
            for (int j = 0; j < (width); j++) v[j] = vf_load_half(values[key] + i + j * VL); \
            for (int r = 0; r < rows; r++) \
                for (int j = 0; j < (width); j++) \
                    acc[r][j] = vf_fma(v[j], vf_set(weights[r * TILE + key]), acc[r][j]); \
        } \
        for (int r = 0; r < rows; r++) \
            for (int j = 0; j < (width); j++) vf_store(out + r * padded + i + j * VL, acc[r][j]); \
    }
    STRIP(4)
    STRIP(1)
#undef STRIP
}

/* Where the tile's keys and values lie; a cache whose blocks are narrower than 16 is copied to `copy` first. */
static void find_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int count,
                      int kv_head, uint16_t *copy, struct tile_keys *keys, const uint16_t **values) {
    int size = m->block_size, width = size < 16 ? size : 16, dim = m->head_dim;
    int64_t padded = up_to(dim, 16);
    for (int i = 0; i < count; i++) {
        int64_t head = (int64_t)blocks[(first + i) / size] * m->num_kv_heads + kv_head;
        values[i] = l->v_cache + (head * size + (first + i) % size) * padded;
    }
    keys->stride = 16;
    for (int j = 0; j < TILE / 16; j++) {
        int position = first + (16 * j < count ? 16 * j : 0); /* a part past the end repeats the first */
        int64_t head = (int64_t)blocks[position / size] * m->num_kv_heads + kv_head;
        keys->base[j] = l->k_cache + (head * size + position % size / width * width) * dim;
        if (width == 16) continue;
        uint16_t *to = copy + (int64_t)j * 16 * dim;
        for (int key = 0; key < 16 && 16 * j + key < count; key++) {
            position = first + 16 * j + key;
            head = (int64_t)blocks[position / size] * m->num_kv_heads + kv_head;
            const uint16_t *from = l->k_cache + head * size * dim + position % size;
            for (int i = 0; i < dim; i++) to[i * 16 + key] = from[(int64_t)i * width];
        }
        keys->base[j] = to;
    }
}

/* Blocks lie scattered, so the hardware does not foresee them: the values of this tile and the keys of the next. */
static void prefetch(const void *start, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)start + i);
}

static void prefetch_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int end,
                          int kv_head) {
    int size = m->block_size, dim = m->head_dim, values_end = first + TILE < end ? first + TILE : end;
    int keys_end = first + 2 * TILE < end ? first + 2 * TILE : end;
    int64_t padded = up_to(dim, 16);
    for (int start = first; start < values_end; start += size - start % size) {
        int64_t head = (int64_t)blocks[start / size] * m->num_kv_heads + kv_head;
        int slot = start % size, count = values_end - start < size - slot ? values_end - start : size - slot;
        prefetch(l->v_cache + (head * size + slot) * padded, count * padded * 2);
    }
    for (int start = first % SPLIT ? first + TILE : first; start < keys_end; start += size - start % size) {
        int64_t head = (int64_t)blocks[start / size] * m->num_kv_heads + kv_head;
        int slot = start % size, count = size - slot < 2 * TILE ? size - slot : 2 * TILE;
        prefetch(l->k_cache + (head * size + slot) * dim, (int64_t)count * dim * 2);
    }
}

/* The same for up to MAX_ROWS_TOGETHER query rows; visible[r] keys of the tile count for row r. */
INLINE void tile_rows(const struct tile_keys *keys, const uint16_t *const *values, int count, const float *q,
                      const int *visible, int dim, int rows, struct gathered *g, float *out) {
    float scores[MAX_ROWS_TOGETHER * TILE];
    int padded = (int)up_to(dim, 16);
    scores_of(keys, q, padded, dim, rows, scores);
    for (int r = 0; r < rows; r++) weigh(scores + r * TILE, visible[r], g + r, out + r * padded, padded);
    weighted_values(values, count, scores, padded, rows, out);
}

static void tile_some(const struct tile_keys *keys, const uint16_t *const *values, int count, const float *q,
                      const int *visible, int dim, int rows, struct gathered *g, float *out) {
#define CASE(n) case n: tile_rows(keys, values, count, q, visible, dim, n, g, out); break
    if (dim == 64) dim = 64; /* known to the compiler from here on */
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
    }
}

static void merge(struct gathered *total, float *total_out, const struct gathered *g, const float *out, int padded) {
    float largest = total->largest > g->largest ? total->largest : g->largest;
    float factors[16] = {total->largest - largest, g->largest - largest};
    vf_store(factors, vf_exp2(vf_load(factors)));
    total->sum = total->sum * factors[0] + g->sum * factors[1];
    total->largest = largest;
    for (int i = 0; i < padded; i += VL) {
        vf added = vf_mul(vf_load(out + i), vf_set(factors[1]));
        vf_store(total_out + i, vf_fma(vf_load(total_out + i), vf_set(factors[0]), added));
    }
}

#define MAX_QUERIES(m) (ATTENTION_ROWS * ((m)->num_heads / (m)->num_kv_heads))

int64_t attend_scratch_floats(const struct model *m) {
    int64_t padded = up_to(m->head_dim, 16);
    return MAX_QUERIES(m) * (3 * padded + 5) + TILE * padded + 64;
}

/* One split for all queries: out and g afresh. */
static void attend_split(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int end,
                         int kv_head, int num_queries, const float *q, const int *positions, uint16_t *copy,
                         struct gathered *g, float *out) {
    int padded = (int)up_to(m->head_dim, 16);
    memset(out, 0, sizeof(float) * (size_t)num_queries * (size_t)padded);
    for (int i = 0; i < num_queries; i++) g[i] = (struct gathered){-INFINITY, 0.0f};
    for (int start = first; start < end; start += TILE) {
        int count = end - start < TILE ? end - start : TILE, visible[MAX_ROWS_TOGETHER];
        struct tile_keys keys;
        const uint16_t *values[TILE];
        prefetch_tile(m, l, blocks, start, end, kv_head);
        find_tile(m, l, blocks, start, count, kv_head, copy, &keys, values);
        for (int i = 0; i < num_queries;) {
            if (positions[i] < start) { /* nothing to see: such a row would not even have started the split */
                i++;
                continue;
            }
            int rows = num_queries - i < ROWS_TOGETHER ? num_queries - i : ROWS_TOGETHER;
            for (int r = 0; r < rows; r++) {
                int seen = positions[i + r] - start + 1;
                visible[r] = seen < TILE ? seen : TILE;
            }
            tile_some(&keys, values, count, q + i * padded, visible, m->head_dim, rows, g + i, out + i * padded);
            i += rows;
        }
    }
}

void attend(const struct model *m, const struct layer *l, const struct step *step, const struct span *span,
            int first_row, int count, int kv_head, const float *q, float *out, int64_t out_stride, float *scratch) {
    int shared = m->num_heads / m->num_kv_heads, dim = m->head_dim, padded = (int)up_to(dim, 16);
    int num_queries = count * shared, position = span->first_position + first_row;
    const int32_t *blocks = step->block_ids + span->first_block;
    float *queries = scratch, *part = queries + num_queries * padded, *total = part + num_queries * padded;
    struct gathered *part_g = (struct gathered *)(total + num_queries * padded), *total_g = part_g + num_queries;
    int *positions = (int *)(total_g + num_queries);
    uint16_t *copy = (uint16_t *)(positions + num_queries);
    for (int i = 0; i < num_queries; i++) { /* query row i / shared, head i % shared of the group */
        const float *from = q + ((int64_t)(i / shared) * m->num_heads + kv_head * shared + i % shared) * padded;
        memcpy(queries + i * padded, from, sizeof(float) * (size_t)padded);
        positions[i] = position + i / shared;
        total_g[i] = (struct gathered){-INFINITY, 0.0f};
    }
    memset(total, 0, sizeof(float) * (size_t)num_queries * (size_t)padded);
    for (int first = 0; first < position + count; first += SPLIT) {
        int end = first + SPLIT < position + count ? first + SPLIT : position + count;
        attend_split(m, l, blocks, first, end, kv_head, num_queries, queries, positions, copy, part_g, part);
        for (int i = 0; i < num_queries; i++)
            if (positions[i] >= first) merge(total_g + i, total + i * padded, part_g + i, part + i * padded, padded);
    }
    for (int i = 0; i < num_queries; i++) {
        float *to = out + (i / shared) * out_stride + (int64_t)(kv_head * shared + i % shared) * dim;
        for (int j = 0; j < dim; j++) to[j] = total[i * padded + j] / total_g[i].sum;
    }
}
