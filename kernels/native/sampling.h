/* What the parts of sampling share: which tokens of a row are left, and the draw among them. */
#ifndef HEADRACE_SAMPLING_H
#define HEADRACE_SAMPLING_H

#include "native.h"

#define MAX_TOP 32
/* Mirrored in kernels/native/structs.py. */
struct sampling_row {
    struct noise_key key;
    const float *logits; /* to draw from */
    const float *raw;    /* for log-probabilities */
    double top_p;
    float temperature; /* 0: the first of the largest logits */
    float least;       /* of the scaled logits, for min-p */
    int32_t top_k;     /* 0: all */
    int32_t num_top;   /* best tokens to tell of; -1: no log-probabilities */
};

struct sampled {
    int32_t id;
    float logit, largest; /* raw: of the token, and of all */
    int32_t num_top;
    int64_t total; /* of the weights of raw */
    int32_t top_ids[MAX_TOP];
    float top_logits[MAX_TOP];
};

/* Tokens in order of value, equal ones by id, down to this one: value > least, or value = least and id <= last_id. */
struct cut {
    float least;
    int32_t last_id;
};

/* The row's scaled logits are (logits - largest) / temperature. */
struct drawing {
    const float *logits;
    float largest, temperature;
    struct cut cut;
    const uint32_t *mask; /* of the tokens that may be drawn, see native.h; or null: all */
};

/* gumbel.c: the best of the tokens by scaled logit plus noise, chunk by chunk; ties go to the lowest id. */
#define DRAW_CHUNK 4096 /* tokens */
struct candidate {
    float value;
    int32_t id;
};
static inline int num_chunks(int vocab_size) { return (vocab_size + DRAW_CHUNK - 1) / DRAW_CHUNK; }
struct candidate draw_chunk(const struct noise_key *key, const struct drawing *d, int vocab_size, int chunk);
float noise_at(const struct noise_key *key, int32_t token_id);
struct candidate best_of(const struct candidate *found, int count);

/* candidates.c: tokens that a filter still looks at, ids ascending; weights are whole once cut off. */
struct candidates {
    float *values, *weights;
    int32_t *ids;
    int count;
};
float largest_of(const float *x, int count);
/* Of the values less `largest`, which is the largest. */
int64_t total_weight(const float *values, int count, float largest);
int64_t wanted_weight(int64_t total, double top_p);
void gather(const float *values, int count, float least, struct candidates *c);
/* The `wanted` largest, equal ones by id. */
void gather_best(const float *values, int count, int wanted, struct candidates *c);
void weigh_candidates(struct candidates *c); /* whose values are scaled: up to 0 */
int64_t candidates_weight(const struct candidates *c);
/* Leaves the fewest, from the best on, that weigh what is wanted together. */
void keep_weight(struct candidates *c, int64_t wanted);
/* The cut that leaves just these: they are the beginning of the order. */
struct cut last_of(const struct candidates *c);

#endif
