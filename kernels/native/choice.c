/* The token of each sample: the largest logit, or the largest after noise. The next step reads it here too. */
#include "decoder.h"
#include "sampling.h"

static int first_id(const struct decoder *d, int piece) { return piece * d->tiles_a_piece * TILE_ROWS; }

static int end_id(const struct decoder *d, int piece) {
    int end = first_id(d, piece + 1);
    return end < d->m->vocab_size ? end : d->m->vocab_size;
}

/* What may be drawn for a sample; null: anything. */
static const uint32_t *mask_of(const struct decoder *d, int sample) {
    const struct step *s = d->step;
    int number = s->mask_of ? s->mask_of[sample] : -1;
    return number < 0 ? NULL : s->masks + (int64_t)number * mask_words(d->m->vocab_size);
}

INLINE uint32_t is_allowed(const uint32_t *mask, int id) { return !mask || mask[id / 32] >> id % 32 & 1; }

/* first: a multiple of TILE_ROWS, so that a tile's bits lie in one word. */
static float largest_allowed(const float *logits, const uint32_t *mask, int first, int end) {
    float most[TILE_ROWS], best = -INFINITY;
    for (int i = 0; i < TILE_ROWS; i++) most[i] = -INFINITY;
    for (int id = first; id + TILE_ROWS <= end; id += TILE_ROWS) {
        uint32_t bits = mask[id / 32] >> id % 32 & ((1u << TILE_ROWS) - 1);
        if (!bits) continue;
        for (int i = 0; i < TILE_ROWS; i++) {
            float x = bits >> i & 1 ? logits[id + i] : -INFINITY;
            most[i] = x > most[i] ? x : most[i];
        }
    }
    for (int i = 0; i < TILE_ROWS; i++) best = most[i] > best ? most[i] : best;
    for (int id = end - (end - first) % TILE_ROWS; id < end; id++)
        if (is_allowed(mask, id) && logits[id] > best) best = logits[id];
    return best;
}

/* The largest logit of a piece's tokens that may be drawn, for each sample; not a number if any is not finite. */
void best_of_piece(struct decoder *d, int piece) {
    int first = first_id(d, piece), end = end_id(d, piece);
    for (int i = 0; i < d->step->num_samples; i++) {
        const float *logits = d->step->logits + (int64_t)i * d->m->vocab_size;
        const uint32_t *mask = mask_of(d, i);
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
        if (mask) best = largest_allowed(logits, mask, first, end);
        d->best[(int64_t)piece * d->step->num_samples + i] = best + zero;
    }
}

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
        const uint32_t *mask = mask_of(d, i);
        int id = first_id(d, best);
        finite &= value != -INFINITY; /* of the model's tokens none may be drawn */
        while (finite && !(logits[id] == value && is_allowed(mask, id))) id++;
        d->step->drawn[i] = finite ? id : -1;
        if (finite && d->step->draws[i].temperature > 0.0f) d->noisy[d->num_noisy++] = i;
    }
    return d->num_noisy * num_chunks(d->m->vocab_size);
}

/* Where rows of the head stand for other tokens, noise is theirs; tokens far behind are left out, for this is a guess. */
#define FAR_BEHIND 12.0f
static struct candidate draw_named(const struct draw *draw, const struct drawing *all, const int32_t *token_ids,
                                   int first, int end) {
    struct candidate best = {-INFINITY, first};
    for (int id = first; id < end; id++) {
        float score = (all->logits[id] - all->largest) / all->temperature;
        if (score < -FAR_BEHIND) continue;
        score += noise_at(&draw->key, token_ids[id]);
        if (score > best.value) best = (struct candidate){score, id};
    }
    return best;
}

void draw_piece(struct decoder *d, int piece) {
    const struct step *s = d->step;
    int vocab_size = d->m->vocab_size, chunks = num_chunks(vocab_size), sample = d->noisy[piece / chunks];
    const float *logits = s->logits + (int64_t)sample * vocab_size;
    const struct draw *draw = s->draws + sample;
    struct drawing all = {logits, logits[s->drawn[sample]], draw->temperature, {-INFINITY, INT32_MAX},
                          mask_of(d, sample)};
    int chunk = piece % chunks, first = chunk * DRAW_CHUNK, end = first + DRAW_CHUNK;
    d->candidates[piece] = d->m->token_ids
        ? draw_named(draw, &all, d->m->token_ids, first, end < vocab_size ? end : vocab_size)
        : draw_chunk(&draw->key, &all, vocab_size, chunk);
}

void choose_drawn(struct decoder *d) {
    int chunks = num_chunks(d->m->vocab_size);
    for (int n = 0; n < d->num_noisy; n++)
        d->step->drawn[d->noisy[n]] = best_of(d->candidates + (int64_t)n * chunks, chunks).id;
    for (int i = 0; d->m->token_ids && i < d->step->num_samples; i++)
        if (d->step->drawn[i] >= 0) d->step->drawn[i] = d->m->token_ids[d->step->drawn[i]];
}

int32_t input_token(const struct step *s, int row) {
    int32_t id = s->token_ids[row];
    if (id < 0) id = s->drawn_before[-1 - id];
    return id < 0 ? 0 : id; /* nothing was drawn: the step before has failed, and nobody takes this one's results */
}
