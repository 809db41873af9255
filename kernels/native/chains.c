/* Guesses of a head that drafts, chains of all places in one call: what is drawn at a place is read at the next. */
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "decoder.h"
#include "sampling.h"

#define ROWS_A_PIECE 16

/* --- rows that the layer reads, made of what the head is given --------------------------------------------------- */

enum making_phase { GIVE, FUSE, NORM, NUM_PHASES };

struct making {
    struct decoder *d;
    const struct head *h;
    const struct step *step;
    const float *const *taps; /* [span]: of its rows; null: what lies in d->made */
};

static void give_row(const struct making *a, const float *taps, int row) {
    const struct head *h = a->h;
    float *to = a->d->given.x + row * a->d->given.stride;
    if (h->reads_embedding) weight_row(&a->d->m->embedding, a->step->token_ids[row], to);
    int64_t size = h->columns - (h->reads_embedding ? a->d->m->hidden_size : 0);
    memcpy(to + h->columns - size, taps, (size_t)size * sizeof *to);
    if (is_quantised(&h->fc)) quantize_row(to, &a->d->given, row);
}

static void give_span(const struct making *a, int number) {
    const struct span *span = a->step->spans + number;
    int64_t size = a->h->columns - (a->h->reads_embedding ? a->d->m->hidden_size : 0);
    const float *from = a->taps ? a->taps[number] : a->d->made + span->first_row * (int64_t)a->d->m->hidden_size;
    for (int i = 0; i < span->num_rows; i++) give_row(a, from + i * size, span->first_row + i);
}

static void finish_rows(const struct making *a, int first, int end) {
    int64_t size = a->d->m->hidden_size;
    for (int i = first; i < end && a->h->first_norm; i++) {
        float *row = a->d->made + i * size;
        norm_row(row, a->h->first_norm, a->d->m->eps, (int)size, row);
    }
}

static int prepare(void *context, int phase) {
    struct making *a = context;
    int rows = a->step->num_rows;
    switch (phase) {
        case GIVE: return a->step->num_spans;
        case FUSE: return cut_tiles(a->d, linear_tiles(&a->h->fc));
        default: return a->h->first_norm ? (rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE : 0;
    }
}

static void run(void *context, int phase, int piece, int thread) {
    (void)thread;
    struct making *a = context;
    int rows = a->step->num_rows, end = (piece + 1) * ROWS_A_PIECE;
    switch (phase) {
        case GIVE: give_span(a, piece); break;
        case FUSE:
            linear_piece(a->d, &a->h->fc, piece, &a->d->given, rows, a->d->made, a->d->m->hidden_size, 0);
            break;
        default: finish_rows(a, piece * ROWS_A_PIECE, end < rows ? end : rows);
    }
}

static int reserve_made(struct decoder *d, const struct head *h, int64_t rows) {
    if (rows <= d->made_capacity) return 1;
    free(d->made);
    d->made_capacity = 0;
    rows = up_to(rows, 16);
    char *at = NULL;
    take(&at, rows * d->m->hidden_size * 4);
    take_rows(&at, rows, h->columns);
    d->made = aligned_alloc(64, (size_t)(at - (char *)NULL));
    if (!d->made) return 0;
    at = (char *)d->made;
    take(&at, rows * d->m->hidden_size * 4);
    d->given = take_rows(&at, rows, h->columns);
    d->made_capacity = (int32_t)rows;
    return 1;
}

static void make_rows(struct decoder *d, const struct head *h, const struct step *step, const float *const *taps) {
    struct making a = {d, h, step, taps};
    struct task task = {prepare, run, &a, NUM_PHASES, NULL};
    pool_run(d->pool, &task);
}

/* --- chains ------------------------------------------------------------------------------------------------------ */

/* Of the logits' distribution, what token_id has. */
static float logprob_of(const struct model *m, const float *logits, int32_t token_id) {
    int at = token_id, n = m->vocab_size;
    for (at = m->token_ids ? 0 : token_id; m->token_ids && m->token_ids[at] != token_id;) at++;
    float largest = largest_of(logits, n), total = 0.0f, lanes[VL];
    vf sum = vf_set(0.0f), most = vf_set(largest), scale = vf_set(LOG2_E);
    int i = 0;
    for (; i + VL <= n; i += VL) sum = vf_add(sum, vf_exp2(vf_mul(vf_sub(vf_load(logits + i), most), scale)));
    vf_store(lanes, sum);
    for (int lane = 0; lane < VL; lane++) total += lanes[lane];
    for (; i < n; i++) total += expf(logits[i] - largest);
    return logits[at] - largest - logf(total);
}

/* The step of a place, a row for each chain that goes on, and which chain that is. */
struct place {
    struct step step;
    int32_t *chains, *token_ids, *positions, *row_slots, *sample_rows;
    struct span *spans;
    struct draw *draws;
    int32_t *drawn;
};

static int new_place(struct place *p, const struct step *first) {
    size_t n = (size_t)first->num_spans;
    char *memory = calloc(n, 6 * sizeof(int32_t) + sizeof *p->spans + sizeof *p->draws);
    if (!memory) return 0;
    p->chains = (int32_t *)memory;
    p->token_ids = p->chains + n;
    p->positions = p->token_ids + n;
    p->row_slots = p->positions + n;
    p->sample_rows = p->row_slots + n;
    p->drawn = p->sample_rows + n;
    p->spans = (struct span *)(p->drawn + n);
    p->draws = (struct draw *)(p->spans + n);
    for (int i = 0; i < first->num_spans; i++) p->chains[i] = i;
    p->step = *first;
    return 1;
}

/* What was drawn, and the rows that the layer left, become the next place's; 0 if no chain goes on. */
static int next_place(struct decoder *d, const struct chains *c, struct place *p, int place) {
    const struct step *done = &p->step;
    int going = 0, block_size = d->m->block_size;
    int64_t size = d->m->hidden_size;
    for (int n = 0; n < done->num_samples; n++) {
        int chain = p->chains[n], token_id = done->drawn[n];
        if (c->counts[chain] > place && token_id >= 0) {
            c->token_ids[chain * c->num_places + place] = token_id;
            c->logprobs[chain * c->num_places + place] =
                logprob_of(d->m, done->logits + (int64_t)n * d->m->vocab_size, token_id);
        }
        if (c->counts[chain] <= place + 1 || token_id < 0) continue;
        const struct span *span = done->spans + n;
        int position = span->first_position + span->num_rows, first_block = span->first_block;
        memmove(d->made + going * size, d->x + done->sample_rows[n] * hidden_stride(d), (size_t)size * sizeof *d->made);
        p->chains[going] = chain;
        p->token_ids[going] = token_id;
        p->positions[going] = position;
        int block = done->block_ids[first_block + position / block_size];
        p->row_slots[going] = block * block_size + position % block_size;
        p->draws[going] = done->draws[n];
        p->draws[going].key.position++;
        p->sample_rows[going] = going;
        p->spans[going] = (struct span){going, 1, position, first_block};
        going++;
    }
    p->step = (struct step){
        .num_rows = going, .num_spans = going, .num_samples = going, .token_ids = p->token_ids,
        .positions = p->positions, .row_slots = p->row_slots, .spans = p->spans, .block_ids = done->block_ids,
        .sample_rows = p->sample_rows, .draws = p->draws, .drawn_before = p->drawn, .logits = done->logits,
        .drawn = p->drawn, .inputs = d->made,
    };
    return going;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int decoder_chains(struct decoder *d, struct chains *c) {
    const struct head *h = c->head;
    struct place p;
    if (!reserve_made(d, h, c->first->num_rows) || !new_place(&p, c->first)) return -1;
    p.step.inputs = d->made;
    int result = 0;
    double first_s = 0.0;
    for (int place = 0; !result; place++) {
        if (place == 0) make_rows(d, h, &p.step, c->taps);
        else if (h->reads_embedding) make_rows(d, h, &p.step, NULL);
        else finish_rows(&(struct making){.d = d, .h = h}, 0, p.step.num_rows);
        result = decoder_step(d, &p.step);
        if (place == 0) first_s = now_s();
        if (result || !next_place(d, c, &p, place)) break;
    }
    c->later_s = now_s() - first_s;
    free(p.chains);
    return result;
}
