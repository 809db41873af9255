/* A token for each row of logits: filters, draw and sums for log-probabilities, to the bits of kernels/token_filter.py.

   A row is filtered by one thread, then drawn from in chunks. What top-k and top-p keep is the beginning of one order.
   Tokens that may be its end are gathered first (candidates.c), so that little of it is ever sorted out. */
#include "sampling.h"
#include "simd.h"


#define SCRATCH_ROWS 4 /* scaled logits, and candidates' values, weights and ids */
struct call {
    const struct sampling_row *rows;
    struct sampled *sampled;
    struct drawing *drawings; /* [row] */
    struct candidate *drawn;  /* [row][chunk] */
    float *scratch;           /* [thread][SCRATCH_ROWS][vocab_size] */
    int num_rows, vocab_size, num_chunks;
};

static struct candidates candidates_in(float *scratch, int vocab_size) {
    return (struct candidates){scratch, scratch + vocab_size, (int32_t *)(scratch + 2 * (int64_t)vocab_size), 0};
}

static struct cut filter(const struct sampling_row *row, const float *scaled, int count, struct candidates *c) {
    static const float likely[] = {-5.0f, -10.0f, -INFINITY}; /* scaled logits that top-p looks at, until that does */
    if (row->top_k > 0 && row->top_k < count) {
        gather_best(scaled, count, row->top_k, c);
        if (row->top_p < 1.0) {
            weigh_candidates(c);
            keep_weight(c, wanted_weight(candidates_weight(c), row->top_p));
        }
    } else {
        int64_t wanted = wanted_weight(total_weight(scaled, count, 0.0f), row->top_p);
        for (int i = 0; i < 3; i++) {
            gather(scaled, count, likely[i], c);
            weigh_candidates(c);
            if (candidates_weight(c) >= wanted) break;
        }
        keep_weight(c, wanted);
    }
    struct cut cut = last_of(c);
    return row->least > cut.least ? (struct cut){row->least, INT32_MAX} : cut;
}

/* The sum of weights of the raw logits, and the best of them. largest: of those to draw from. */
static void sum_up(const struct sampling_row *row, int count, float largest, struct candidates *c, struct sampled *to) {
    to->largest = row->raw == row->logits ? largest : largest_of(row->raw, count);
    to->total = total_weight(row->raw, count, to->largest);
    if (row->num_top == 0) return;
    gather_best(row->raw, count, row->num_top, c);
    for (int i = 0; i < c->count; i++) {
        int at = to->num_top++;
        for (; at && to->top_logits[at - 1] < c->values[i]; at--) {
            to->top_logits[at] = to->top_logits[at - 1];
            to->top_ids[at] = to->top_ids[at - 1];
        }
        to->top_logits[at] = c->values[i];
        to->top_ids[at] = c->ids[i];
    }
}

static void filter_piece(struct call *call, int number, int thread) {
    const struct sampling_row *row = call->rows + number;
    struct sampled *to = call->sampled + number;
    int count = call->vocab_size;
    float *scaled = call->scratch + SCRATCH_ROWS * (int64_t)thread * count, largest = largest_of(row->logits, count);
    struct candidates c = candidates_in(scaled + count, count);
    *to = (struct sampled){.id = 0};
    if (row->temperature == 0.0f)
        while (row->logits[to->id] != largest && to->id < count - 1) to->id++;
    if (row->num_top >= 0) sum_up(row, count, largest, &c, to);
    struct drawing *d = call->drawings + number;
    *d = (struct drawing){row->logits, largest, row->temperature, {row->least, INT32_MAX}, NULL};
    if (row->temperature == 0.0f || (row->top_p >= 1.0 && !(row->top_k > 0 && row->top_k < count))) return;
    for (int i = 0; i < count; i++) scaled[i] = (row->logits[i] - largest) / row->temperature;
    d->cut = filter(row, scaled, count, &c);
}

static void run(void *context, int phase, int piece, int thread) {
    struct call *call = context;
    if (phase == 0) {
        filter_piece(call, piece, thread);
        return;
    }
    int row = piece / call->num_chunks;
    const struct drawing *d = call->drawings + row;
    if (d->temperature != 0.0f)
        call->drawn[piece] = draw_chunk(&call->rows[row].key, d, call->vocab_size, piece % call->num_chunks);
}

static int prepare(void *context, int phase) {
    const struct call *call = context;
    return phase == 0 ? call->num_rows : call->num_rows * call->num_chunks;
}

/* Logits of tokens without a bit become minus infinity: bit i % 8 of byte i / 8 is token i's, behind them there is none. */
EXPORT void headrace_forbid(float *logits, int count, const uint8_t *mask, int num_bytes) {
    for (int first = 0; first < count; first += 8) {
        uint8_t bits = first / 8 < num_bytes ? mask[first / 8] : 0;
        float *eight = logits + first;
        int left = count - first < 8 ? count - first : 8;
        if (bits == 0xff) continue;
        for (int i = 0; i < left; i++) eight[i] = bits >> i & 1 ? eight[i] : -INFINITY;
    }
}

/* Floats that `headrace_sample` needs beside. */
EXPORT int64_t headrace_sample_scratch(const struct pool *pool, int num_rows, int vocab_size) {
    int64_t a_row = (int64_t)sizeof(struct drawing) / 4 + num_chunks(vocab_size) * (int64_t)sizeof(struct candidate) / 4;
    return num_rows * a_row + SCRATCH_ROWS * (int64_t)pool_num_threads(pool) * vocab_size;
}

EXPORT void headrace_sample(struct pool *pool, const struct sampling_row *rows, int num_rows, int vocab_size, void *scratch,
                            struct sampled *sampled) {
    struct call call = {rows, sampled, scratch, NULL, NULL, num_rows, vocab_size, num_chunks(vocab_size)};
    call.drawn = (struct candidate *)(call.drawings + num_rows);
    call.scratch = (float *)(call.drawn + (int64_t)num_rows * call.num_chunks);
    struct task task = {prepare, run, &call, 2, NULL};
    pool_run(pool, &task);
    for (int i = 0; i < num_rows; i++) {
        if (rows[i].temperature != 0.0f)
            sampled[i].id = best_of(call.drawn + (int64_t)i * call.num_chunks, call.num_chunks).id;
        sampled[i].logit = rows[i].raw[sampled[i].id];
    }
}
