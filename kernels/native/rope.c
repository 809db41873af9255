/* Rotary embedding of a row's query and key heads, and its K and V into the cache as float16. */
#include "native.h"
#include "simd.h"

#define MAX_HEAD_DIM 1024

/* Pair (x[i], x[i + dim / 2]) turns by the angle of the position. */
static void turn(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

static void norm_head(float *x, const float *weight, float eps, int dim) {
    float sum = 0.0f;
    for (int i = 0; i < dim; i++) sum += x[i] * x[i];
    float inverse = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int i = 0; i < dim; i++) x[i] = x[i] * inverse * weight[i];
}

static void to_half(const float *x, uint16_t *out, int dim) {
    int i = 0;
    for (; i + VL <= dim; i += VL) vf_store_half(out + i, vf_load(x + i));
    for (; i < dim; i++) out[i] = float_to_half(x[i]);
}

/* qkv: the row's query, key and value heads, changed here; q: [num_heads][head_dim padded to 16] for `attend`. */
void rope_row(const struct model *m, const struct layer *l, float *qkv, float *q, int position, int block) {
    int dim = m->head_dim, half = dim / 2, padded = (int)up_to(dim, 16), slot = position % m->block_size;
    int width = m->block_size < 16 ? m->block_size : 16;
    const float *cos = m->cos + (int64_t)position * half, *sin = m->sin + (int64_t)position * half;
    uint16_t halves[MAX_HEAD_DIM];
    for (int h = 0; h < m->num_heads; h++) {
        float *x = qkv + (int64_t)h * dim, *to = q + (int64_t)h * padded;
        if (l->q_norm) norm_head(x, l->q_norm, m->eps, dim);
        turn(x, cos, sin, half);
        for (int i = 0; i < dim; i++) to[i] = x[i] * m->query_scale;
        for (int i = dim; i < padded; i++) to[i] = 0.0f;
    }
    float *key = qkv + (int64_t)m->num_heads * dim, *value = key + (int64_t)m->num_kv_heads * dim;
    for (int h = 0; h < m->num_kv_heads; h++, key += dim, value += dim) {
        int64_t head = (int64_t)block * m->num_kv_heads + h;
        if (l->k_norm) norm_head(key, l->k_norm, m->eps, dim);
        turn(key, cos, sin, half);
        to_half(key, halves, dim);
        uint16_t *k = l->k_cache + (head * m->block_size + slot / width * width) * dim + slot % width;
        for (int i = 0; i < dim; i++) k[(int64_t)i * width] = halves[i];
        uint16_t *v = l->v_cache + (head * m->block_size + slot) * padded;
        to_half(value, v, dim);
        for (int i = dim; i < padded; i++) v[i] = 0;
    }
}
