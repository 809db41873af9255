/* K and V from slot to slot: what is right in a tree of drafts moves to where it would stand without the rest. */
#include <string.h>

#include "native.h"

static void move_head(const struct model *m, const struct layer *l, int64_t head_from, int from, int64_t head_to,
                      int to) {
    int size = m->block_size, width = key_width(m), bytes = l->k_scale ? 1 : 2;
    int64_t dim = m->head_dim, padded = up_to(dim, 16);
    const char *k_from = (const char *)l->k_cache + key_at(m, head_from, from) * bytes;
    char *k_to = (char *)l->k_cache + key_at(m, head_to, to) * bytes;
    for (int64_t i = 0; i < dim; i++) memcpy(k_to + i * width * bytes, k_from + i * width * bytes, (size_t)bytes);
    memcpy((char *)l->v_cache + (head_to * size + to) * padded * bytes,
           (const char *)l->v_cache + (head_from * size + from) * padded * bytes, (size_t)(padded * bytes));
    if (l->k_scale) {
        l->k_scale[head_to * size + to] = l->k_scale[head_from * size + from];
        l->v_scale[head_to * size + to] = l->v_scale[head_from * size + from];
    }
}

/* One after the other, in all layers. Not while a step runs. */
EXPORT void headrace_move_slots(const struct model *m, const int32_t *from, const int32_t *to, int count) {
    int size = m->block_size;
    for (int i = 0; i < count; i++)
        for (int layer = 0; layer < m->num_layers; layer++)
            for (int64_t head = 0; head < m->num_kv_heads; head++)
                move_head(m, m->layers + layer, (int64_t)(from[i] / size) * m->num_kv_heads + head, from[i] % size,
                          (int64_t)(to[i] / size) * m->num_kv_heads + head, to[i] % size);
}
