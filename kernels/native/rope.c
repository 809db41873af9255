/* Rotary embedding of a row's query and key heads, and its K and V into the cache, as float16 or in eight bits. */
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

#define LIMIT 127.0f
#define SMALLEST 0x1p-100f

/* A head as `kv_store_reference` has it; the scale, NaN where a value is not finite. */
static float to_bytes(const float *x, int8_t *out, int dim) {
    float largest = SMALLEST;
    for (int i = 0; i < dim; i++) {
        float magnitude = fabsf(x[i]);
        if (!(magnitude <= largest)) largest = magnitude; /* NaN stays */
        if (magnitude != magnitude) break;
    }
    int finite = largest - largest == 0.0f;
    float inverse = finite ? LIMIT / largest : 0.0f;
    for (int i = 0; i < dim; i++) out[i] = finite ? (int8_t)rintf(x[i] * inverse) : 0;
    return finite ? largest / LIMIT : NAN;
}

/* K and V of a token and KV head into their slot; key and value are the head's numbers. */
static void store_head(const struct model *m, const struct layer *l, int64_t head, int slot, const float *key,
                       const float *value) {
    int dim = m->head_dim, padded = (int)up_to(dim, 16), width = key_width(m);
    int64_t k_at = key_at(m, head, slot), v_at = (head * m->block_size + slot) * padded;
    if (l->k_scale) {
        int8_t bytes[MAX_HEAD_DIM], *k = (int8_t *)l->k_cache + k_at, *v = (int8_t *)l->v_cache + v_at;
        l->k_scale[head * m->block_size + slot] = to_bytes(key, bytes, dim);
        for (int i = 0; i < dim; i++) k[(int64_t)i * width] = bytes[i];
        l->v_scale[head * m->block_size + slot] = to_bytes(value, v, dim);
        memset(v + dim, 0, (size_t)(padded - dim));
    } else {
        uint16_t halves[MAX_HEAD_DIM], *k = (uint16_t *)l->k_cache + k_at, *v = (uint16_t *)l->v_cache + v_at;
        to_half(key, halves, dim);
        for (int i = 0; i < dim; i++) k[(int64_t)i * width] = halves[i];
        to_half(value, v, dim);
        memset(v + dim, 0, sizeof(*v) * (size_t)(padded - dim));
    }
}

/* A KV head of a row and the query heads that read it. qkv: the row's query, key and value heads, changed here;
   q: [num_heads][head_dim padded to 16] for `attend`. */
void rope_heads(const struct model *m, const struct layer *l, float *qkv, float *q, int position, int slot,
                int kv_head) {
    int dim = m->head_dim, half = dim / 2, padded = (int)up_to(dim, 16), shared = m->num_heads / m->num_kv_heads;
    const float *cos = m->cos + (int64_t)position * half, *sin = m->sin + (int64_t)position * half;
    for (int h = kv_head * shared; h < (kv_head + 1) * shared; h++) {
        float *x = qkv + (int64_t)h * dim, *to = q + (int64_t)h * padded;
        if (l->q_norm) norm_head(x, l->q_norm, m->eps, dim);
        turn(x, cos, sin, half);
        for (int i = 0; i < dim; i++) to[i] = x[i] * m->query_scale;
        for (int i = dim; i < padded; i++) to[i] = 0.0f;
    }
    float *key = qkv + (int64_t)(m->num_heads + kv_head) * dim, *value = key + (int64_t)m->num_kv_heads * dim;
    if (l->k_norm) norm_head(key, l->k_norm, m->eps, dim);
    turn(key, cos, sin, half);
    int64_t head = (int64_t)(slot / m->block_size) * m->num_kv_heads + kv_head;
    store_head(m, l, head, slot % m->block_size, key, value);
}
