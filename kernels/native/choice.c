/* The largest logit of each sample: greedy decoding needs no more. */
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

/* The first token with the largest logit of each sample, or -1. */
void choose_best(struct decoder *d, int pieces) {
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
        d->step->best[i] = finite ? id : -1;
    }
}
