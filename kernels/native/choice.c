/* The largest logit of each sample: greedy decoding needs no more. */
#include "decoder.h"

/* The largest logit of a piece's tokens, for each sample. */
void best_of_piece(struct decoder *d, int piece) {
    int first = piece * d->tiles_a_piece * TILE_ROWS, end = first + d->tiles_a_piece * TILE_ROWS;
    if (end > d->m->vocab_size) end = d->m->vocab_size;
    for (int i = 0; i < d->step->num_samples; i++) {
        const float *logits = d->step->logits + (int64_t)i * d->m->vocab_size;
        struct best best = {-INFINITY, first};
        int finite = 1;
        for (int id = first; id < end; id++) {
            finite &= isfinite(logits[id]) != 0;
            if (logits[id] > best.value) best = (struct best){logits[id], id};
        }
        if (!finite) best.id = -1;
        d->best[(int64_t)piece * d->step->num_samples + i] = best;
    }
}

void choose_best(struct decoder *d, int pieces) {
    for (int i = 0; i < d->step->num_samples; i++) {
        struct best best = d->best[i];
        for (int piece = 1; piece < pieces && best.id >= 0; piece++) {
            struct best other = d->best[(int64_t)piece * d->step->num_samples + i];
            if (other.id < 0 || other.value > best.value) best = other;
        }
        d->step->best[i] = best.id;
    }
}
