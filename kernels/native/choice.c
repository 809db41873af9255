/* The token of each sample: the largest logit, or the largest after noise. The next step reads it here too. */
#include "decoder.h"

static int first_id(const struct decoder *d, int piece) { return piece * d->tiles_a_piece * TILE_ROWS; }

static int end_id(const struct decoder *d, int piece) {
    int end = first_id(d, piece + 1);
    return end < d->m->vocab_size ? end : d->m->vocab_size;
}

/* The largest logit of a piece's tokens, for each sample; not a number if one of them is not finite. */
void best_of_piece(struct decoder *d, int piece) {
    int first = first_id(d, piece), end = end_id(d, piece);
    for (int i = 0; i < d->step->num_samples; i++) {
        const float *logits = d->step->logits + (int64_t)i * d->m->vocab_size;
        vf largest = vf_set(-INFINITY), zeros = vf_set(0.0f); /* x - x is not a number where x is not finite */
        int id = first;
        for (; id + VL <= end; id += VL) {
            vf x = vf_load(logits + id);
            largest = vf_max(largest, x);
            zeros = vf_add(zeros, vf_sub(x, x));
        }
        float best = vf_largest(largest), zero = vf_any_nan(zeros) ? NAN : 0.0f;
        for (; id < end; id++) {
            best = logits[id] > best ? logits[id] : best;
            zero += logits[id] - logits[id];
        }
        d->best[(int64_t)piece * d->step->num_samples + i] = best + zero;
    }
}

static int num_chunks(const struct decoder *d) { return (d->m->vocab_size + DRAW_CHUNK - 1) / DRAW_CHUNK; }

int choose_best(struct decoder *d, int pieces) {
    d->num_noisy = 0;
    for (int i = 0; i < d->step->num_samples; i++) {
        int best = 0, finite = 1;
        for (int piece = 0; piece < pieces; piece++) {
            float value = d->best[(int64_t)piece * d->step->num_samples + i];
            finite &= value == value;
            if (value > d->best[(int64_t)best * d->step->num_samples + i]) best = piece;
        }
        const float *logits = d->step->logits + (int64_t)i * d->m->vocab_size;
        float value = d->best[(int64_t)best * d->step->num_samples + i];
        int id = first_id(d, best);
        while (finite && logits[id] != value) id++;
        d->step->drawn[i] = finite ? id : -1;
        if (finite && d->step->draws[i].temperature > 0.0f) d->noisy[d->num_noisy++] = i;
    }
    return d->num_noisy * num_chunks(d);
}

void draw_piece(struct decoder *d, int piece) {
    const struct step *s = d->step;
    int sample = d->noisy[piece / num_chunks(d)], vocab_size = d->m->vocab_size;
    int first = piece % num_chunks(d) * DRAW_CHUNK;
    int end = first + DRAW_CHUNK < vocab_size ? first + DRAW_CHUNK : vocab_size;
    const float *logits = s->logits + (int64_t)sample * vocab_size;
    const struct draw *draw = s->draws + sample;
    d->candidates[piece] = draw_from(logits, logits[s->drawn[sample]], draw->temperature, &draw->key, first, end);
}

void choose_drawn(struct decoder *d) {
    for (int n = 0; n < d->num_noisy; n++) {
        const struct candidate *found = d->candidates + (int64_t)n * num_chunks(d);
        int best = 0;
        for (int i = 1; i < num_chunks(d); i++)
            if (found[i].value > found[best].value) best = i;
        d->step->drawn[d->noisy[n]] = found[best].id;
    }
}

int32_t input_token(const struct step *s, int row) {
    int32_t id = s->token_ids[row];
    if (id < 0) id = s->drawn_before[-1 - id];
    return id < 0 ? 0 : id; /* nothing was drawn: the step before has failed, and nobody takes this one's results */
}
