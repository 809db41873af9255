/* Single ops for callers outside of a step: tests, benchmarks, and the tools that measure quality. */
#include "native.h"

struct product_call {
    const struct matrix *w;
    const struct rows *x;
    float *y;
    int64_t stride;
    int num_rows, tiles_a_piece;
};

static int product_pieces(void *context, int phase) {
    (void)phase;
    const struct product_call *call = context;
    int tiles = (call->w->rows + TILE_ROWS - 1) / TILE_ROWS;
    return (tiles + call->tiles_a_piece - 1) / call->tiles_a_piece;
}

static void product_piece(void *context, int phase, int piece, int thread) {
    (void)phase, (void)thread;
    const struct product_call *call = context;
    float out[MAX_BLOCK_ROWS][TILE_ROWS];
    int tiles = (call->w->rows + TILE_ROWS - 1) / TILE_ROWS, first = piece * call->tiles_a_piece;
    for (int row = 0; row < call->num_rows; row += MAX_BLOCK_ROWS) {
        int count = call->num_rows - row < MAX_BLOCK_ROWS ? call->num_rows - row : MAX_BLOCK_ROWS;
        for (int tile = first; tile < tiles && tile < first + call->tiles_a_piece; tile++) {
            product(call->w, tile, call->x, row, count, out);
            for (int i = 0; i < count; i++)
                for (int c = 0; c < TILE_ROWS && tile * TILE_ROWS + c < call->w->rows; c++)
                    call->y[(row + i) * call->stride + tile * TILE_ROWS + c] = out[i][c];
        }
    }
}

/* y [num_rows][stride] = x W^T */
EXPORT void headrace_product(struct pool *pool, const struct matrix *w, const struct rows *x, int num_rows, float *y,
                      int64_t stride) {
    struct product_call call = {w, x, y, stride, num_rows, 4};
    struct task task = {product_pieces, product_piece, &call, 1, NULL};
    pool_run(pool, &task);
}

EXPORT void headrace_quantize(const struct rows *x, int num_rows) {
    for (int i = 0; i < num_rows; i++) quantize_row(x->x + i * x->stride, x, i);
}

EXPORT void headrace_norm(const float *x, const float *weight, float eps, int num_rows, int columns, int64_t stride,
                   float *y) {
    for (int i = 0; i < num_rows; i++) norm_row(x + i * stride, weight, eps, columns, y + i * stride);
}

/* gate, up, y: [num_rows][count], count a multiple of 16. */
EXPORT void headrace_silu_mul(const float *gate, const float *up, float *y, int num_rows, int count) {
    for (int64_t i = 0; i < num_rows; i++) silu_mul_row(gate + i * count, up + i * count, y + i * count, count);
}

EXPORT void headrace_weight_rows(const struct matrix *w, const int32_t *rows, int num_rows, float *out) {
    for (int i = 0; i < num_rows; i++) weight_row(w, rows[i], out + (int64_t)i * w->columns);
}

/* Rotary embedding and cache write of the step's rows; qkv [rows][qkv_stride], q [rows][num_heads][padded dim]. */
EXPORT void headrace_rope(const struct model *m, const struct layer *l, const struct step *step, float *qkv,
                   int64_t qkv_stride, float *q) {
    for (int64_t i = 0; i < step->num_rows; i++)
        for (int head = 0; head < m->num_kv_heads; head++)
            rope_heads(m, l, qkv + i * qkv_stride, q + i * m->num_heads * up_to(m->head_dim, 16), step->positions[i],
                       step->row_slots[i], head);
}

/* out [rows][num_heads][head_dim], ATTENTION_ROWS of a span at a time; scratch: headrace_attend_scratch floats. */
EXPORT int64_t headrace_attend_scratch(const struct model *m) { return attend_scratch_floats(m); }
EXPORT void headrace_attend(const struct model *m, const struct layer *l, const struct step *step, const float *q, float *out,
                     float *scratch) {
    int64_t q_stride = m->num_heads * up_to(m->head_dim, 16), out_stride = (int64_t)m->num_heads * m->head_dim;
    for (int s = 0; s < step->num_spans; s++) {
        const struct span *span = step->spans + s;
        for (int first = 0; first < span->num_rows; first += ATTENTION_ROWS) {
            int left = span->num_rows - first, count = left < ATTENTION_ROWS ? left : ATTENTION_ROWS;
            int64_t row = span->first_row + first;
            for (int head = 0; head < m->num_kv_heads; head++)
                attend(m, l, step, span, first, count, head, q + row * q_stride, out + row * out_stride, out_stride,
                       scratch);
        }
    }
}
