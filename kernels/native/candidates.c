/* The tokens that top-k and top-p look at: gathered by value, cut off where their number or weight is reached.

   The end of what is kept is found by adding up tokens by the first bits of their keys, then those of one beginning by
   the next bits: no sorting, and time in proportion to their number whatever their values are. Weights are those of
   kernels/token_filter.py, to the bit, and their sums exact. */
#include "sampling.h"
#include "simd.h"

#define WEIGHT_BITS 40
#define MAX_DIGIT 2048
#define BLOCK 64

float largest_of(const float *x, int count) {
    vf most = vf_set(-INFINITY);
    int i = 0;
    for (; i + VL <= count; i += VL) most = vf_max(most, vf_load(x + i));
    float largest = vf_largest(most);
    for (; i < count; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* --- weights ------------------------------------------------------------------------------------------------------ */

/* Of a value up to 0; an integer once its fraction is cut off. */
INLINE float weight_of(float value) {
    static const float polynomial[] = {
        1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f,
    };
    const float to_whole = 12582912.0f; /* 1.5 2^23: adding it rounds */
    float y = value * 1.44269504f;
    y = y > -100.0f ? y : -100.0f;
    float n = (y + to_whole) - to_whole, f = y - n, p = polynomial[0], power;
    for (int j = 1; j < 7; j++) p = p * f + polynomial[j];
    int32_t bits = ((int32_t)n + WEIGHT_BITS + 127) * (1 << 23);
    memcpy(&power, &bits, 4);
    return p * power;
}

static void weights_of(const float *values, int count, float largest, float *weights) {
    for (int i = 0; i < count; i++) weights[i] = weight_of(values[i] - largest);
}

/* In two halves of 20 bits, a block at a time, so that sums stay integers of 32 bits. */
#define SUM_BLOCK 1024
int64_t total_weight(const float *values, int count, float largest) {
    int64_t total = 0;
    for (int first = 0; first < count; first += SUM_BLOCK) {
        float weights[SUM_BLOCK];
        int32_t high = 0, low = 0, size = count - first < SUM_BLOCK ? count - first : SUM_BLOCK;
        weights_of(values + first, size, largest, weights);
        for (int i = 0; i < size; i++) {
            int32_t upper = (int32_t)(weights[i] * 0x1p-20f);
            high += upper;
            low += (int32_t)(weights[i] - (float)upper * 0x1p20f);
        }
        total += ((int64_t)high << 20) + low;
    }
    return total;
}

int64_t wanted_weight(int64_t total, double top_p) {
    int64_t wanted = (int64_t)ceil(top_p * (double)total);
    return wanted > total ? total : wanted < 1 ? 1 : wanted;
}

void weigh_candidates(struct candidates *c) { weights_of(c->values, c->count, 0.0f, c->weights); }

int64_t candidates_weight(const struct candidates *c) {
    int64_t total = 0;
    for (int i = 0; i < c->count; i++) total += (int64_t)c->weights[i];
    return total;
}

/* --- the end of what is kept ---------------------------------------------------------------------------------------- */

/* Smaller for larger values. */
INLINE uint32_t key_of(float value) {
    uint32_t bits;
    value += 0.0f; /* there is one zero */
    memcpy(&bits, &value, 4);
    return bits >> 31 ? bits : bits ^ 0x7fffffff;
}

/* The key at which the sum of weights (null: the number) of the values of lower keys and it reaches what is wanted. */
static uint32_t key_reaching(const float *values, const float *weights, int count, int64_t wanted, int64_t *before) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    uint32_t beginning = 0;
    *before = 0; /* of lower keys */
    for (int level = 0; level < 3; level++) {
        int64_t sums[MAX_DIGIT] = {0};
        int digit = 0, last = (1 << widths[level]) - 1;
        for (int i = 0; i < count; i++) {
            uint32_t key = key_of(values[i]);
            if (level && key >> (shifts[level] + widths[level]) != beginning) continue;
            sums[key >> shifts[level] & (uint32_t)last] += weights ? (int64_t)weights[i] : 1;
        }
        while (digit < last && *before + sums[digit] < wanted) *before += sums[digit++];
        beginning = beginning << widths[level] | (uint32_t)digit;
    }
    return beginning;
}

static void keep(struct candidates *c, const float *weights, int64_t wanted) {
    int64_t sum;
    uint32_t end = key_reaching(c->values, weights, c->count, wanted, &sum);
    int left = 0;
    for (int i = 0; i < c->count; i++) {
        uint32_t key = key_of(c->values[i]);
        if (key > end || (key == end && sum >= wanted)) continue;
        if (key == end) sum += weights ? (int64_t)weights[i] : 1;
        c->values[left] = c->values[i];
        c->weights[left] = c->weights[i];
        c->ids[left++] = c->ids[i];
    }
    c->count = left;
}

void keep_weight(struct candidates *c, int64_t wanted) { keep(c, c->weights, wanted); }

struct cut last_of(const struct candidates *c) {
    struct cut cut = {INFINITY, -1};
    for (int i = 0; i < c->count; i++) /* of equal values the last comes last */
        if (c->values[i] <= cut.least) cut = (struct cut){c->values[i], c->ids[i]};
    return cut;
}

/* --- gathering ------------------------------------------------------------------------------------------------------ */

void gather(const float *values, int count, float least, struct candidates *c) {
    float *to = c->values;
    int32_t *ids = c->ids;
    int found = 0;
    for (int first = 0; first < count; first += BLOCK) {
        int size = count - first < BLOCK ? count - first : BLOCK;
        if (largest_of(values + first, size) < least) continue;
        for (int i = first; i < first + size; i++) { /* no branches: which of them are large is not foreseeable */
            float value = values[i];
            to[found] = value;
            ids[found] = i;
            found += value >= least;
        }
    }
    c->count = found;
}

/* If so many blocks have a value that large, so many values are. */
void gather_best(const float *values, int count, int wanted, struct candidates *c) {
    float least = -INFINITY;
    int blocks = (count + BLOCK - 1) / BLOCK;
    if (wanted <= blocks) {
        for (int i = 0; i < blocks; i++) {
            int size = count - i * BLOCK < BLOCK ? count - i * BLOCK : BLOCK;
            c->values[i] = largest_of(values + i * BLOCK, size);
            c->ids[i] = i;
        }
        c->count = blocks;
        keep(c, NULL, wanted);
        least = last_of(c).least;
    }
    gather(values, count, least, c);
    keep(c, NULL, wanted);
}
