/* What attention's loops and its reader of the cache share. */
#ifndef HEADRACE_ATTENTION_H
#define HEADRACE_ATTENTION_H

#include "native.h"
#include "simd.h"

#define TILE 64
#define SPLIT 512
#define KEY_PARTS (TILE / VL)
#define SIDE (VL < 8 ? 8 : VL) /* keys that must lie side by side */

/* A tile as the loops read it: dimension i of key k is keys[k / SIDE][i * stride + k % SIDE], as the cache has them.
   Where more rows share it than the registers hold, it is made floats once: [dim][TILE] and [TILE][padded]. Scales of
   bytes come after the sums over dimensions, and into the weights before those over keys. Vectors of keys behind the
   first `parts` are left out: they would add zeros. */
enum kind { HALVES, BYTES, FLOATS };
struct tile {
    enum kind stored; /* HALVES or BYTES */
    int parts;        /* four at a time, or two or one at the end */
    const void *keys[TILE / SIDE], *values[TILE];
    int64_t stride;
    float *wide_keys, *wide_values;
    float key_scales[TILE], value_scales[TILE];
};

/* kv_tile.c */
/* Where the tile's keys and values lie; of a cache whose blocks are narrower than SIDE the keys are copied first. */
void find_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int count, int kv_head,
               char *copy, struct tile *t);
/* The keys of the tile from `from` on lie in these slots; those that lay beside them are copied with them. */
void redirect_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int count,
                   int kv_head, int from, const int32_t *slots, char *copy, struct tile *t);
/* Blocks lie scattered, so the hardware does not foresee them: the values of this tile and the keys of the next. */
void prefetch_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int end,
                   int kv_head, int bytes);

#endif
