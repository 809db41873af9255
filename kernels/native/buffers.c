/* Memory of a decoder: rows of activations, query items of attention, candidates of the choice. */
#include <stdlib.h>

#include "decoder.h"
#include "sampling.h"

void *take(char **at, int64_t bytes) {
    void *p = *at;
    *at += up_to(bytes, 64);
    return p;
}

struct rows take_rows(char **at, int64_t rows, int64_t columns) {
    struct rows r = {.stride = up_to(columns, GROUP), .columns = columns};
    int64_t groups = columns / GROUP;
    r.x = take(at, rows * r.stride * 4);
    r.q = take(at, rows * columns);
    r.d = take(at, rows * groups * 4);
    r.s = take(at, rows * groups * 4);
    r.sums = take(at, rows * groups * 8);
    return r;
}

/* Lays the buffers of `rows` rows out from `at`; where they end. */
static char *lay_out(struct decoder *d, char *at, int64_t rows) {
    const struct model *m = d->m;
    d->x = take(&at, rows * hidden_stride(d) * 4);
    d->qkv = take(&at, rows * qkv_stride(d) * 4);
    d->q = take(&at, rows * q_stride(d) * 4);
    d->normed = take_rows(&at, rows, m->hidden_size);
    d->fused = take_rows(&at, m->embed_norm ? rows : 0, 2 * (int64_t)m->hidden_size);
    d->mixed = take_rows(&at, rows, (int64_t)m->num_heads * m->head_dim);
    d->gated = take_rows(&at, rows, m->intermediate_size);
    d->attend_scratch = take(&at, pool_num_threads(d->pool) * up_to(attend_scratch_floats(m), 16) * 4);
    return at;
}

int reserve_buffers(struct decoder *d, const struct step *s) {
    if (s->num_rows > d->capacity) {
        int64_t rows = up_to(s->num_rows, 64);
        int64_t bytes = up_to((int64_t)(lay_out(d, NULL, rows) - (char *)NULL), 64);
        free(d->memory);
        d->capacity = 0;
        d->memory = aligned_alloc(64, (size_t)bytes);
        if (!d->memory) return 0;
        memset(d->memory, 0, (size_t)bytes);
        lay_out(d, d->memory, rows);
        d->capacity = (int32_t)rows;
    }
    int64_t best = (int64_t)s->num_samples * (linear_tiles(&d->m->head) + 1);
    if (best > d->best_capacity) {
        free(d->best);
        d->best_capacity = 0;
        d->best = malloc((size_t)best * sizeof *d->best);
        if (!d->best) return 0;
        d->best_capacity = best;
    }
    if (s->num_samples > d->noise_capacity) {
        free(d->candidates);
        free(d->noisy);
        d->noise_capacity = 0;
        d->candidates = malloc((size_t)s->num_samples * (size_t)num_chunks(d->m->vocab_size) * sizeof *d->candidates);
        d->noisy = malloc((size_t)s->num_samples * sizeof *d->noisy);
        if (!d->candidates || !d->noisy) return 0;
        d->noise_capacity = s->num_samples;
    }
    if (s->num_rows > d->item_capacity) {
        free(d->items);
        d->item_capacity = 0;
        d->items = malloc((size_t)s->num_rows * sizeof *d->items);
        if (!d->items) return 0;
        d->item_capacity = s->num_rows;
    }
    return 1;
}

void free_buffers(struct decoder *d) {
    free(d->memory);
    free(d->best);
    free(d->candidates);
    free(d->noisy);
    free(d->items);
    free(d->made);
}

/* Rows together read keys and values once; where there are few, threads would lack pieces. */
#define MANY_ROWS 64
static int item_rows(int num_rows) { return num_rows < MANY_ROWS ? ATTENTION_ROWS / 2 : ATTENTION_ROWS; }

void cut_spans(struct decoder *d) {
    const struct step *s = d->step;
    d->num_items = 0;
    for (int span = 0; span < s->num_spans; span++) {
        int rows = s->spans[span].num_rows, most = item_rows(rows);
        for (int first = 0; first < rows; first += most)
            d->items[d->num_items++] = (struct item){span, first, rows - first < most ? rows - first : most};
    }
}

#define PIECES_A_THREAD 4
void cut_keys(struct decoder *d) {
    int pieces = d->num_items * d->m->num_kv_heads, threads = pool_num_threads(d->pool), num_splits = 1, most_rows = 1;
    d->num_splits = 1;
    if (threads == 1 || pieces >= threads * PIECES_A_THREAD) return;
    for (int i = 0; i < d->num_items; i++) {
        const struct item *item = d->items + i;
        int splits = attend_splits(d->step->spans[item->span].first_position + item->first + item->count);
        num_splits = splits > num_splits ? splits : num_splits;
        most_rows = item->count > most_rows ? item->count : most_rows;
    }
    d->part_floats = attend_part_floats(d->m, most_rows);
    int64_t floats = num_splits > 1 ? pieces * num_splits * d->part_floats : 0;
    if (floats > d->parts_capacity) {
        free(d->parts);
        d->parts_capacity = 0;
        d->parts = malloc((size_t)floats * 2 * sizeof *d->parts); /* contexts grow */
        if (!d->parts) return;
        d->parts_capacity = floats * 2;
    }
    d->num_splits = num_splits;
}
