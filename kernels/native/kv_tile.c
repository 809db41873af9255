/* Tiles of keys and values in the paged cache of a sequence: found for the loops of attention, and fetched before. */
#include "attention.h"

/* Runs of so many bytes, to SIDE keys of as many bytes each. */
INLINE void copy_runs(char *to, const char *from, int dim, int run, int64_t side) {
    for (int64_t i = 0; i < dim; i++) memcpy(to + i * side, from + i * run, (size_t)run);
}

static void copy_keys(char *to, const char *from, int dim, int run, int64_t side) {
#define RUN(n) case n: copy_runs(to, from, dim, n, side); break
    switch (run) { RUN(1); RUN(2); RUN(4); RUN(8); RUN(16); } /* sizes that the compiler knows */
#undef RUN
}

void find_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int count, int kv_head,
               char *copy, struct tile *t) {
    int size = m->block_size, width = key_width(m), dim = m->head_dim, bytes = t->stored == BYTES ? 1 : 2;
    int64_t padded = up_to(dim, 16);
    for (int i = 0; i < count;) {
        int slot = (first + i) % size, left = size - slot, end = left < count - i ? i + left : count;
        int64_t at = ((int64_t)blocks[(first + i) / size] * m->num_kv_heads + kv_head) * size + slot;
        for (; i < end; i++, at++) {
            t->values[i] = (const char *)l->v_cache + at * padded * bytes;
            if (t->stored == BYTES) {
                t->key_scales[i] = l->k_scale[at];
                t->value_scales[i] = l->v_scale[at];
            }
        }
    }
    t->parts = (count + VL - 1) / VL;
    if (t->parts % 4 == 3) t->parts++;
    t->stride = width < SIDE ? SIDE : width;
    for (int j = 0; j * SIDE < t->parts * VL; j++) {
        char *to = copy + (int64_t)j * SIDE * dim * bytes;
        int start = SIDE * j;
        t->keys[j] = start >= count ? t->keys[0] : to; /* a group past the end repeats the first */
        for (int key = start; key < start + SIDE && key < count; key += width) {
            int position = first + key, slot = position % size;
            int64_t head = (int64_t)blocks[position / size] * m->num_kv_heads + kv_head;
            const char *from = (const char *)l->k_cache + key_at(m, head, slot) * bytes;
            if (width >= SIDE) {
                t->keys[j] = from;
                break;
            }
            copy_keys(to + (key - start) * bytes, from, dim, width * bytes, SIDE * bytes);
        }
    }
}

void redirect_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int count,
                   int kv_head, int from, const int32_t *slots, char *copy, struct tile *t) {
    int size = m->block_size, width = key_width(m), dim = m->head_dim, bytes = t->stored == BYTES ? 1 : 2;
    for (int key = from / SIDE * SIDE; key < count; key++) {
        int32_t own = key < from ? blocks[(first + key) / size] * size + (first + key) % size : slots[key - from];
        int64_t head = (int64_t)(own / size) * m->num_kv_heads + kv_head;
        int place = own % size;
        if (key >= from) {
            int64_t slot = head * size + place;
            t->values[key] = (const char *)l->v_cache + slot * up_to(dim, 16) * bytes;
            if (t->stored == BYTES) {
                t->key_scales[key] = l->k_scale[slot];
                t->value_scales[key] = l->v_scale[slot];
            }
        }
        const char *source = (const char *)l->k_cache + key_at(m, head, place) * bytes;
        char *to = copy + key / SIDE * dim * t->stride * bytes;
        t->keys[key / SIDE] = to;
        for (int i = 0; i < dim; i++)
            memcpy(to + (i * t->stride + key % SIDE) * bytes, source + (int64_t)i * width * bytes, (size_t)bytes);
    }
}

static void prefetch(const void *start, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)start + i);
}

void prefetch_tile(const struct model *m, const struct layer *l, const int32_t *blocks, int first, int end, int kv_head,
                   int bytes) {
    int size = m->block_size, dim = m->head_dim, values_end = first + TILE < end ? first + TILE : end;
    int keys_end = first + 2 * TILE < end ? first + 2 * TILE : end;
    int64_t padded = up_to(dim, 16);
    for (int start = first; start < values_end; start += size - start % size) {
        int64_t head = (int64_t)blocks[start / size] * m->num_kv_heads + kv_head;
        int slot = start % size, count = values_end - start < size - slot ? values_end - start : size - slot;
        prefetch((const char *)l->v_cache + (head * size + slot) * padded * bytes, count * padded * bytes);
    }
    for (int start = first % SPLIT ? first + TILE : first; start < keys_end; start += size - start % size) {
        int64_t head = (int64_t)blocks[start / size] * m->num_kv_heads + kv_head;
        int slot = start % size, count = size - slot < 2 * TILE ? size - slot : 2 * TILE;
        prefetch((const char *)l->k_cache + (head * size + slot) * dim * bytes, (int64_t)count * dim * bytes);
    }
}

/* The first keys and values that `attend` will read. */
void attend_soon(const struct model *m, const struct layer *l, const struct step *step, const struct span *span,
                 int end, int kv_head) {
    prefetch_tile(m, l, step->block_ids + span->first_block, 0, end < TILE ? end : TILE, kv_head, l->k_scale ? 1 : 2);
}
