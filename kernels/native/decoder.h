/* A decoder: a model with a pool of threads, and the buffers of a step. */
#ifndef HEADRACE_DECODER_H
#define HEADRACE_DECODER_H

#include "native.h"
#include "simd.h"

struct item { /* query rows of one span that one piece of attention takes */
    int32_t span, first, count;
};

struct decoder {
    const struct model *m;
    struct pool *pool;
    const struct step *step;
    struct runner *runner; /* or null: nobody waits for a step that is nearly over */
    int32_t capacity, num_items, item_capacity, tiles_a_piece;
    float *x, *qkv, *q, *attend_scratch;
    struct rows normed, mixed, gated;
    struct rows fused; /* of embedding and row, where the model has an embed_norm */
    struct item *items;
    int32_t num_splits;  /* 1: a piece attends to all keys */
    int64_t part_floats, parts_capacity;
    float *parts;        /* [item][KV head][split][part_floats] */
    float *best;     /* [piece of the head][sample] */
    int64_t best_capacity;
    struct candidate *candidates; /* [noisy sample][chunk of the vocabulary] */
    int32_t *noisy;               /* the samples to whose logits noise is added */
    int32_t num_noisy, noise_capacity;
    void *memory;
    float *made; /* [row][hidden_size]: what the layer of a head reads */
    struct rows given; /* what they are made of */
    int32_t made_capacity;
};

INLINE int64_t hidden_stride(const struct decoder *d) { return up_to(d->m->hidden_size, 16); }
INLINE int64_t q_stride(const struct decoder *d) { return d->m->num_heads * up_to(d->m->head_dim, 16); }
INLINE int64_t qkv_stride(const struct decoder *d) {
    return up_to((int64_t)(d->m->num_heads + 2 * d->m->num_kv_heads) * d->m->head_dim, 16);
}

INLINE int num_tiles(const struct matrix *w) { return (w->rows + TILE_ROWS - 1) / TILE_ROWS; }
INLINE int linear_tiles(const struct linear *l) {
    int n = 0;
    for (int i = 0; i < l->num_parts; i++) n += num_tiles(&l->parts[i]);
    return n;
}

static inline int is_quantised(const struct linear *l) {
    for (int i = 0; i < l->num_parts; i++)
        if (!is_dense(&l->parts[i])) return 1;
    return 0;
}

static inline void norm_or_copy(const struct decoder *d, const float *x, const float *weight, float *y) {
    if (weight) norm_row(x, weight, d->m->eps, d->m->hidden_size, y);
    else memcpy(y, x, (size_t)d->m->hidden_size * sizeof *y);
}

/* taps.c */
/* What the first layer of a head reads: embedding and row side by side, each normed. Rows first to end. */
void fuse(struct decoder *d, const struct layer *l, int first, int end);
/* Copies of all rows before this layer, where they are wanted. */
void tap(struct decoder *d, int layer);

/* chains.c: 0, or -1 where there is no memory. */
int decoder_chains(struct decoder *d, struct chains *c);

/* buffers.c: so many bytes, or rows, from `at` on, which moves behind them. */
void *take(char **at, int64_t bytes);
struct rows take_rows(char **at, int64_t rows, int64_t columns);
/* 0 if there is no memory. Steps no larger than an earlier one allocate nothing. */
int reserve_buffers(struct decoder *d, const struct step *step);
void free_buffers(struct decoder *d);
/* Cuts the step's spans into items. */
void cut_spans(struct decoder *d);
/* Cuts keys too, where items are too few for the threads. */
void cut_keys(struct decoder *d);

/* attend_pieces.c */
/* Where a span is one item, its pieces turn their own heads: nobody else reads what they write. */
int turns_in_attention(const struct decoder *d);
void turn_rows(struct decoder *d, const struct layer *l, int first, int end);
/* All keys, or one split of them; then there are pieces to merge, one for each item and KV head. */
void attend_piece(struct decoder *d, const struct layer *l, int piece, int thread);
void merge_piece(struct decoder *d, const struct layer *l, int piece, int thread);
/* Where a KV head's outputs are no whole groups, rows are quantised once all heads are there. */
void quantize_mixed(struct decoder *d, const struct layer *l);

/* decoder.c */
struct decoder *decoder_new(const struct model *m, struct pool *pool);
void decoder_free(struct decoder *d);
int decoder_step(struct decoder *d, const struct step *step);
/* Sets how many tiles make a piece; the number of pieces, if possible as many for each thread. */
int cut_tiles(struct decoder *d, int tiles);
void linear_piece(const struct decoder *d, const struct linear *l, int piece, const struct rows *x, int rows, float *y,
                  int64_t stride, int add);

/* choice.c */
void best_of_piece(struct decoder *d, int piece);
/* From the pieces of the head: tokens with the largest logit, and how many pieces the draws with noise have. */
int choose_best(struct decoder *d, int pieces);
void draw_piece(struct decoder *d, int piece);
void choose_drawn(struct decoder *d);
/* What an input token is, which the step before may have drawn. */
int32_t input_token(const struct step *s, int row);

/* runner.c: called once a step, when most of its layers are computed. */
struct runner;
void step_is_late(struct runner *r);
/* Returns once the step has its masks, or nobody wants it any more. */
void wait_for_masks(struct runner *r, const struct step *step);

#endif
