/* Attention of a step, a KV head of a few query rows a piece: heads turned, keys and values stored, outputs
   quantised. */
#include "decoder.h"

static void rope_head(struct decoder *d, const struct layer *l, int row, int kv_head) {
    rope_heads(d->m, l, d->qkv + row * qkv_stride(d), d->q + row * q_stride(d), d->step->positions[row],
               d->step->row_slots[row], kv_head);
}

void turn_rows(struct decoder *d, const struct layer *l, int first, int end) {
    for (int i = first; i < end; i++)
        for (int head = 0; head < d->m->num_kv_heads; head++) rope_head(d, l, i, head);
}

int turns_in_attention(const struct decoder *d) {
    return d->num_items == d->step->num_spans && d->num_splits == 1;
}

/* The keys and values that a piece reads first. */
static void foresee(const struct decoder *d, const struct layer *l, int piece) {
    const struct item *item = d->items + piece / d->m->num_kv_heads;
    const struct span *span = d->step->spans + item->span;
    attend_soon(d->m, l, d->step, span, span->first_position + item->first + item->count, piece % d->m->num_kv_heads);
}

/* A KV head's outputs of rows, where they are whole groups. */
static void quantize_heads(const struct decoder *d, const struct layer *l, int row, int count, int kv_head) {
    int width = d->m->num_heads / d->m->num_kv_heads * d->m->head_dim;
    if (is_dense(&l->out.parts[0]) || width % GROUP) return;
    for (int i = row; i < row + count; i++)
        for (int g = kv_head * width / GROUP; g < (kv_head + 1) * width / GROUP; g++)
            quantize_group(d->mixed.x + i * d->mixed.stride + g * GROUP, &d->mixed, i, g);
}

static float *own_scratch(const struct decoder *d, int thread) {
    return d->attend_scratch + thread * up_to(attend_scratch_floats(d->m), 16);
}

void attend_piece(struct decoder *d, const struct layer *l, int piece, int thread) {
    const struct model *m = d->m;
    int whole = piece / d->num_splits, kv_head = whole % m->num_kv_heads;
    const struct item *item = d->items + whole / m->num_kv_heads;
    const struct span *span = d->step->spans + item->span;
    int row = span->first_row + item->first;
    const float *q = d->q + row * q_stride(d);
    if (d->num_splits > 1) {
        attend_part(m, l, d->step, span, item->first, item->count, kv_head, piece % d->num_splits, q,
                    d->parts + piece * d->part_floats, own_scratch(d, thread));
        return;
    }
    if (piece + 1 < d->num_items * m->num_kv_heads) foresee(d, l, piece + 1);
    for (int i = row; turns_in_attention(d) && i < row + item->count; i++) rope_head(d, l, i, kv_head);
    attend(m, l, d->step, span, item->first, item->count, kv_head, q, d->mixed.x + row * d->mixed.stride,
           d->mixed.stride, own_scratch(d, thread));
    quantize_heads(d, l, row, item->count, kv_head);
}

void merge_piece(struct decoder *d, const struct layer *l, int piece, int thread) {
    const struct item *item = d->items + piece / d->m->num_kv_heads;
    const struct span *span = d->step->spans + item->span;
    int row = span->first_row + item->first, kv_head = piece % d->m->num_kv_heads;
    const float *parts = d->parts + piece * d->num_splits * d->part_floats;
    attend_merge(d->m, d->step, span, item->first, item->count, kv_head, parts, d->part_floats,
                 d->mixed.x + row * d->mixed.stride, d->mixed.stride, own_scratch(d, thread));
    quantize_heads(d, l, row, item->count, kv_head);
}

void quantize_mixed(struct decoder *d, const struct layer *l) {
    if (is_dense(&l->out.parts[0]) || d->m->num_heads / d->m->num_kv_heads * d->m->head_dim % GROUP == 0) return;
    for (int i = 0; i < d->step->num_rows; i++) quantize_row(d->mixed.x + i * d->mixed.stride, &d->mixed, i);
}
