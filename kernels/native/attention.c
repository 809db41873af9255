/* Causal attention of a few query rows over the paged cache of one sequence and KV head, float32 inside.

   Keys come in tiles of TILE at absolute positions, tiles in splits of SPLIT keys. Within a split the softmax runs
   online from tile to tile; splits are merged in order. So a row's bits depend on its query and its keys alone: what
   other rows share the loops, a key that is masked adds exact zeros. Scores are in base 2: queries carry log2 e.

   Rows of a tree of drafts read the keys of their own path in the place of those beside it, in the order of positions:
   so each has the bits that it would have alone behind that path. */
#include "attention.h"

#define MAX_ROWS_TOGETHER 4
#define ROWS_TOGETHER (VL == 8 ? 3 : 4) /* what the registers hold */

/* What a query row has gathered: the largest score, the sum of 2^(score - largest), and the same weighing V. */
struct gathered {
    float largest, sum;
};

INLINE vf load_keys(const struct tile *t, int part, int i, enum kind kind) {
    int key = part * VL;
    if (kind == FLOATS) return vf_load(t->wide_keys + i * TILE + key);
    const void *keys = t->keys[key / SIDE];
    int64_t at = i * t->stride + key % SIDE;
    return kind == BYTES ? vf_load_s8((const int8_t *)keys + at) : vf_load_half((const uint16_t *)keys + at);
}

INLINE vf load_values(const struct tile *t, int key, int i, int padded, enum kind kind) {
    if (kind == FLOATS) return vf_load(t->wide_values + key * padded + i);
    const void *values = t->values[key];
    return kind == BYTES ? vf_load_s8((const int8_t *)values + i) : vf_load_half((const uint16_t *)values + i);
}

INLINE void widen_kind(struct tile *t, int count, int dim, int padded, enum kind kind) {
    for (int part = 0; part < t->parts; part++)
        for (int i = 0; i < dim; i++) vf_store(t->wide_keys + i * TILE + part * VL, load_keys(t, part, i, kind));
    for (int key = 0; key < count; key++)
        for (int i = 0; i < padded; i += VL)
            vf_store(t->wide_values + key * padded + i, load_values(t, key, i, padded, kind));
}

static void widen(struct tile *t, int count, int dim, int padded) {
    if (t->stored == BYTES) widen_kind(t, count, dim, padded, BYTES);
    else widen_kind(t, count, dim, padded, HALVES);
}

INLINE void scores_of(const struct tile *t, const float *q, int64_t q_stride, int dim, int rows, enum kind kind,
                      float *to) {
    int part = 0;
#define STRIP(width) /* so many vectors of keys for the rows in registers */ \
    for (; part + (width) <= t->parts; part += (width)) { \
        vf acc[MAX_ROWS_TOGETHER][width]; \
        for (int r = 0; r < rows; r++) \
            for (int j = 0; j < (width); j++) acc[r][j] = vf_set(0.0f); \
        for (int i = 0; i < dim; i++) { \
            vf query[MAX_ROWS_TOGETHER]; \
            for (int r = 0; r < rows; r++) query[r] = vf_set(q[r * q_stride + i]); \
            for (int j = 0; j < (width); j++) { \
                vf k = load_keys(t, part + j, i, kind); \
                for (int r = 0; r < rows; r++) acc[r][j] = vf_fma(k, query[r], acc[r][j]); \
            } \
        } \
        for (int r = 0; r < rows; r++) \
            for (int j = 0; j < (width); j++) vf_store(to + r * TILE + (part + j) * VL, acc[r][j]); \
    }
    STRIP(4)
    STRIP(2)
    STRIP(1)
#undef STRIP
}

INLINE void scale_by(float *values, const float *scales, int count) {
    for (int i = 0; i < count; i += VL) vf_store(values + i, vf_mul(vf_load(values + i), vf_load(scales + i)));
}

/* Scores to weights in place, keys from `visible` on to zero; what is gathered so far shrinks to the new largest. */
INLINE void weigh_parts(const struct tile *t, float *scores, int visible, struct gathered *g, float *out, int padded,
                        int parts) {
    if (t->stored == BYTES) scale_by(scores, t->key_scales, parts * VL);
    for (int i = visible; i < parts * VL; i++) scores[i] = -INFINITY;
    vf most[PARTS], sums[PARTS];
    for (int i = 0; i < PARTS; i++) most[i] = vf_set(-INFINITY);
    for (int i = 0; i < parts; i++) most[i % PARTS] = vf_max(most[i % PARTS], vf_load(scores + i * VL));
    float largest = max16(most), shrink = 1.0f;
    if (largest > g->largest) {
        float factors[16] = {g->largest - largest};
        vf_store(factors, vf_exp2(vf_load(factors)));
        shrink = factors[0];
    } else {
        largest = g->largest; /* 2^0 is 1 */
    }
    vf offset = vf_set(largest);
    for (int i = 0; i < PARTS; i++) sums[i] = vf_set(0.0f);
    for (int i = 0; i < parts; i++) {
        vf weight = vf_exp2(vf_sub(vf_load(scores + i * VL), offset));
        vf_store(scores + i * VL, weight);
        sums[i % PARTS] = vf_add(sums[i % PARTS], weight);
    }
    if (t->stored == BYTES) scale_by(scores, t->value_scales, parts * VL);
    g->largest = largest;
    g->sum = g->sum * shrink + sum16(sums);
    if (shrink != 1.0f)
        for (int i = 0; i < padded; i += VL) vf_store(out + i, vf_mul(vf_load(out + i), vf_set(shrink)));
}

static void weigh(const struct tile *t, float *scores, int visible, struct gathered *g, float *out, int padded) {
    if (t->parts == KEY_PARTS) weigh_parts(t, scores, visible, g, out, padded, KEY_PARTS);
    else weigh_parts(t, scores, visible, g, out, padded, t->parts);
}

/* out[row] += weights V, over the first `count` keys of the tile. */
INLINE void weighted_values(const struct tile *t, int count, const float *weights, int padded, int rows,
                            enum kind kind, float *out) {
    int i = 0;
#define STRIP(width) \
    for (; i + (width) * VL <= padded; i += (width) * VL) { \
        vf acc[MAX_ROWS_TOGETHER][width]; \
        for (int r = 0; r < rows; r++) \
            for (int j = 0; j < (width); j++) acc[r][j] = vf_load(out + r * padded + i + j * VL); \
        for (int key = 0; key < count; key++) { \
            vf weight[MAX_ROWS_TOGETHER]; \
            for (int r = 0; r < rows; r++) weight[r] = vf_set(weights[r * TILE + key]); \
            for (int j = 0; j < (width); j++) { \
                vf v = load_values(t, key, i + j * VL, padded, kind); \
                for (int r = 0; r < rows; r++) acc[r][j] = vf_fma(v, weight[r], acc[r][j]); \
            } \
        } \
        for (int r = 0; r < rows; r++) \
            for (int j = 0; j < (width); j++) vf_store(out + r * padded + i + j * VL, acc[r][j]); \
    }
    STRIP(4)
    STRIP(1)
#undef STRIP
}

/* A tile for up to MAX_ROWS_TOGETHER query rows; visible[r] keys of it count for row r. */
INLINE void tile_rows(const struct tile *t, int count, const float *q, const int *visible, int dim, int rows,
                      enum kind kind, struct gathered *g, float *out) {
    float scores[MAX_ROWS_TOGETHER * TILE];
    int padded = (int)up_to(dim, 16);
    scores_of(t, q, padded, dim, rows, kind, scores);
    for (int r = 0; r < rows; r++) weigh(t, scores + r * TILE, visible[r], g + r, out + r * padded, padded);
    weighted_values(t, count, scores, padded, rows, kind, out);
}

INLINE void tile_kind(const struct tile *t, int count, const float *q, const int *visible, int dim, int rows,
                      enum kind kind, struct gathered *g, float *out) {
#define CASE(n) case n: tile_rows(t, count, q, visible, dim, n, kind, g, out); break
    switch (rows) { CASE(1); CASE(2); CASE(3); CASE(4); }
#undef CASE
}

static void tile_some(const struct tile *t, int count, const float *q, const int *visible, int dim, int rows, int wide,
                      struct gathered *g, float *out) {
    if (dim == 64) dim = 64; /* known to the compiler from here on */
    if (wide && rows == ROWS_TOGETHER) tile_rows(t, count, q, visible, dim, ROWS_TOGETHER, FLOATS, g, out);
    else if (t->stored == BYTES) tile_kind(t, count, q, visible, dim, rows, BYTES, g, out);
    else tile_kind(t, count, q, visible, dim, rows, HALVES, g, out);
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
    return MAX_QUERIES(m) * (3 * padded + 5) + 3 * TILE * padded + 64;
}

static int num_on_path(const struct step *step, int row) {
    return step->path_ends ? step->path_ends[row + 1] - step->path_ends[row] : 0;
}

/* Keys that any of the rows sees. */
static int seen_by(const struct step *step, int row, int count) {
    int seen = 0;
    for (int i = row; i < row + count; i++)
        if (step->positions[i] + 1 > seen) seen = step->positions[i] + 1;
    return seen;
}

/* Keys that are in the same slots for all of the rows. */
static int trunk_of(const struct step *step, int row, int count) {
    int trunk = INT32_MAX;
    for (int i = row; i < row + count; i++) {
        int own = num_on_path(step, i), begin = step->positions[i] + 1 - own;
        if (own && begin < trunk) trunk = begin;
    }
    return trunk;
}

/* The rows of a tree in one tile: what slots they see is each one's own. row: of the first query. */
static void attend_paths(const struct model *m, const struct layer *l, const struct step *step, const int32_t *blocks,
                         int row, int start, int kv_head, int num_queries, const float *q, const int *positions,
                         char *copy, struct tile *t, struct gathered *g, float *out) {
    int shared = m->num_heads / m->num_kv_heads, padded = (int)up_to(m->head_dim, 16);
    for (int i = 0; i < num_queries; i += shared, row++) {
        int seen = positions[i] - start + 1, count = seen < TILE ? seen : TILE;
        if (seen < 1) continue;
        int from = seen - num_on_path(step, row), skipped = from < 0 ? -from : 0; /* those in tiles before */
        find_tile(m, l, blocks, start, count, kv_head, copy, t);
        if (from < count)
            redirect_tile(m, l, blocks, start, count, kv_head, from + skipped,
                          step->path_slots + step->path_ends[row] + skipped, copy, t);
        int visible[MAX_ROWS_TOGETHER] = {count, count, count, count};
        for (int j = i; j < i + shared; j += ROWS_TOGETHER) {
            int rows = i + shared - j < ROWS_TOGETHER ? i + shared - j : ROWS_TOGETHER;
            tile_some(t, count, q + j * padded, visible, m->head_dim, rows, 0, g + j, out + j * padded);
        }
    }
}

/* One split for all queries, of which the first is of this row: out and g afresh. */
static void attend_split(const struct model *m, const struct layer *l, const struct step *step, const int32_t *blocks,
                         int row, int first, int end, int kv_head, int num_queries, const float *q,
                         const int *positions, float *room, struct gathered *g, float *out) {
    int trunk = step->path_ends ? trunk_of(step, row, num_queries / (m->num_heads / m->num_kv_heads)) : INT32_MAX;
    int padded = (int)up_to(m->head_dim, 16), wide = num_queries > ROWS_TOGETHER;
    struct tile t = {.stored = l->k_scale ? BYTES : HALVES, .wide_keys = room, .wide_values = room + TILE * padded};
    char *copy = (char *)(room + 2 * TILE * padded);
    memset(out, 0, sizeof(float) * (size_t)num_queries * (size_t)padded);
    for (int i = 0; i < num_queries; i++) g[i] = (struct gathered){-INFINITY, 0.0f};
    for (int start = first; start < end; start += TILE) {
        int count = end - start < TILE ? end - start : TILE, visible[MAX_ROWS_TOGETHER];
        prefetch_tile(m, l, blocks, start, end, kv_head, t.stored == BYTES ? 1 : 2);
        if (start + count > trunk) {
            attend_paths(m, l, step, blocks, row, start, kv_head, num_queries, q, positions, copy, &t, g, out);
            continue;
        }
        find_tile(m, l, blocks, start, count, kv_head, copy, &t);
        if (wide) widen(&t, count, m->head_dim, padded);
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
            tile_some(&t, count, q + i * padded, visible, m->head_dim, rows, wide, g + i, out + i * padded);
            i += rows;
        }
    }
}

/* Query row i / shared, head i % shared of the group that reads a KV head. */
static void take_queries(const struct model *m, const struct step *step, const float *q, int kv_head, int row,
                         int count, float *queries, int *positions) {
    int shared = m->num_heads / m->num_kv_heads, padded = (int)up_to(m->head_dim, 16);
    for (int i = 0; i < count * shared; i++) {
        const float *from = q + ((int64_t)(i / shared) * m->num_heads + kv_head * shared + i % shared) * padded;
        memcpy(queries + i * padded, from, sizeof(float) * (size_t)padded);
        positions[i] = step->positions[row + i / shared];
    }
}

/* All that queries have seen. */
struct totals {
    struct gathered *g;
    float *out;
};

static void start(const struct totals *t, int num_queries, int padded) {
    for (int i = 0; i < num_queries; i++) t->g[i] = (struct gathered){-INFINITY, 0.0f};
    memset(t->out, 0, sizeof(float) * (size_t)num_queries * (size_t)padded);
}

/* first: of the split's keys; nothing comes of one that begins behind a query. */
static void merge_split(const struct totals *t, const struct step *step, const struct gathered *g, const float *out,
                        int first, int row, int num_queries, int shared, int padded) {
    for (int i = 0; i < num_queries; i++)
        if (step->positions[row + i / shared] >= first)
            merge(t->g + i, t->out + i * padded, g + i, out + i * padded, padded);
}

static void finish(const struct model *m, const struct totals *t, int count, int kv_head, float *out,
                   int64_t out_stride) {
    int shared = m->num_heads / m->num_kv_heads, dim = m->head_dim, padded = (int)up_to(dim, 16);
    for (int i = 0; i < count * shared; i++) {
        float *to = out + (i / shared) * out_stride + (int64_t)(kv_head * shared + i % shared) * dim;
        for (int j = 0; j < dim; j++) to[j] = t->out[i * padded + j] / t->g[i].sum;
    }
}

void attend(const struct model *m, const struct layer *l, const struct step *step, const struct span *span,
            int first_row, int count, int kv_head, const float *q, float *out, int64_t out_stride, float *scratch) {
    int shared = m->num_heads / m->num_kv_heads, padded = (int)up_to(m->head_dim, 16), num_queries = count * shared;
    int row = span->first_row + first_row, num_keys = seen_by(step, row, count);
    float *queries = scratch, *part = queries + num_queries * padded, *total = part + num_queries * padded;
    struct gathered *part_g = (struct gathered *)(total + num_queries * padded), *total_g = part_g + num_queries;
    struct totals totals = {total_g, total};
    int *positions = (int *)(total_g + num_queries);
    float *room = (float *)(positions + num_queries);
    take_queries(m, step, q, kv_head, row, count, queries, positions);
    start(&totals, num_queries, padded);
    for (int first = 0; first < num_keys; first += SPLIT) {
        int end = first + SPLIT < num_keys ? first + SPLIT : num_keys;
        attend_split(m, l, step, step->block_ids + span->first_block, row, first, end, kv_head, num_queries, queries,
                     positions, room, part_g, part);
        merge_split(&totals, step, part_g, part, first, row, num_queries, shared, padded);
    }
    finish(m, &totals, count, kv_head, out, out_stride);
}

int attend_splits(int num_keys) { return (num_keys + SPLIT - 1) / SPLIT; }

int64_t attend_part_floats(const struct model *m, int count) {
    return up_to(count * (m->num_heads / m->num_kv_heads) * (up_to(m->head_dim, 16) + 2), 16);
}

void attend_part(const struct model *m, const struct layer *l, const struct step *step, const struct span *span,
                 int first_row, int count, int kv_head, int split, const float *q, float *part, float *scratch) {
    int num_queries = count * (m->num_heads / m->num_kv_heads), padded = (int)up_to(m->head_dim, 16);
    int row = span->first_row + first_row, num_keys = seen_by(step, row, count), first = split * SPLIT;
    int *positions = (int *)(scratch + num_queries * padded);
    if (first >= num_keys) return;
    take_queries(m, step, q, kv_head, row, count, scratch, positions);
    attend_split(m, l, step, step->block_ids + span->first_block, row, first,
                 first + SPLIT < num_keys ? first + SPLIT : num_keys, kv_head, num_queries, scratch, positions,
                 (float *)(positions + num_queries), (struct gathered *)(part + num_queries * padded), part);
}

void attend_merge(const struct model *m, const struct step *step, const struct span *span, int first_row, int count,
                  int kv_head, const float *parts, int64_t stride, float *out, int64_t out_stride, float *scratch) {
    int shared = m->num_heads / m->num_kv_heads, padded = (int)up_to(m->head_dim, 16), num_queries = count * shared;
    int row = span->first_row + first_row, num_keys = seen_by(step, row, count);
    struct totals totals = {(struct gathered *)(scratch + num_queries * padded), scratch};
    start(&totals, num_queries, padded);
    for (int first = 0; first < num_keys; first += SPLIT, parts += stride)
        merge_split(&totals, step, (const struct gathered *)(parts + num_queries * padded), parts, first, row,
                    num_queries, shared, padded);
    finish(m, &totals, count, kv_head, out, out_stride);
}
