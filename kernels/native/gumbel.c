/* The token of a row with the largest score plus Gumbel noise, to the bits that kernels/gumbel.py states.

   Every float operation is rounded on its own and in the order written there; the compiler vectorises over tokens. */
#include "sampling.h"
#include "simd.h"

#define LANES 16 /* Philox calls side by side; each gives four tokens */
#define BATCH (4 * LANES)
#define MOST_NOISE 24.0f      /* it is 22.9 where x is 0 */
#define BOUND_MARGIN 0.001f   /* a thousand times the error of a noise */
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define SQRT_HALF_BITS 0x3F3504F3
#define LOG1P_REACH 0.29289323f

/* x[4 i + word] for the groups first + i. */
static void philox(const struct noise_key *key, uint32_t first, uint32_t *x) {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES], k0 = key->seed_low, k1 = key->seed_high;
    for (int i = 0; i < LANES; i++) c0[i] = first + (uint32_t)i, c1[i] = key->position, c2[i] = key->choice, c3[i] = 0;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < LANES; i++) {
            uint64_t a = (uint64_t)c0[i] * 0xD2511F53u, b = (uint64_t)c2[i] * 0xCD9E8D57u;
            uint32_t b_high = (uint32_t)(b >> 32), a_high = (uint32_t)(a >> 32);
            c0[i] = b_high ^ c1[i] ^ k0;
            c2[i] = a_high ^ c3[i] ^ k1;
            c1[i] = (uint32_t)b;
            c3[i] = (uint32_t)a;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < LANES; i++) x[4 * i] = c0[i], x[4 * i + 1] = c1[i], x[4 * i + 2] = c2[i], x[4 * i + 3] = c3[i];
}

INLINE float as_float(int32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE int32_t as_bits(float f) {
    int32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

INLINE float log_reduced(float k, float f) {
    static const float polynomial[] = {
        0.06746914237737656f, -0.11674577742815018f, 0.11887409538030624f, -0.12405715137720108f, 0.14219678938388824f,
        -0.16667993366718292f, 0.20002111792564392f, -0.25000008940696716f, 0.3333331346511841f,
    };
    float square = f * f, p = f * polynomial[0] + polynomial[1];
    for (int i = 2; i < 9; i++) p = p * f + polynomial[i];
    float y = p * f * square + k * LN2_LOW;
    y = f + (y - square * 0.5f);
    return y + k * LN2_HIGH;
}

INLINE int32_t exponent_of(float u) { return (as_bits(u) - SQRT_HALF_BITS) >> 23; }
INLINE float fraction_of(float u, int32_t exponent) { return as_float(as_bits(u) - exponent * (1 << 23)) - 1.0f; }

INLINE float noise_of(uint32_t x) {
    int low = x < 0x80000000u;
    float t = ((float)(int32_t)(low ? x : ~x) + 0.5f) * 0x1p-32f, u = low ? 1.0f - t : t;
    int32_t e = exponent_of(u);
    int near = low & (t <= LOG1P_REACH);
    float exponential = -log_reduced(near ? 0.0f : (float)e, near ? -t : fraction_of(u, e));
    e = exponent_of(exponential);
    return -log_reduced((float)e, fraction_of(exponential, e));
}

/* 64 bits of the mask from id on, a multiple of BATCH. */
INLINE uint64_t allowed_of(const uint32_t *mask, int id, int count) {
    return mask[id / 32] | (count > 32 ? (uint64_t)mask[id / 32 + 1] << 32 : 0);
}

/* The scaled logits of count tokens from id on, minus infinity for those that are cut off; the largest. */
INLINE float scores_of(const struct drawing *d, int id, int count, float *scores) {
    for (int i = 0; i < count; i++) scores[i] = (d->logits[id + i] - d->largest) / d->temperature;
    for (int i = 0; i < count; i++) {
        int kept = (scores[i] > d->cut.least) | ((scores[i] == d->cut.least) & (id + i <= d->cut.last_id));
        scores[i] = kept ? scores[i] : -INFINITY;
    }
    for (int half = 0; d->mask && half < count; half += 32) {
        uint32_t bits = d->mask[(id + half) / 32];
        int end = count - half < 32 ? count - half : 32;
        for (int i = 0; i < end; i++) scores[half + i] = bits >> i & 1 ? scores[half + i] : -INFINITY;
    }
    for (int i = count; i < BATCH; i++) scores[i] = -INFINITY;
    vf largest = vf_load(scores);
    for (int i = VL; i < BATCH; i += VL) largest = vf_max(largest, vf_load(scores + i));
    return vf_largest(largest);
}

/* Noise falls as x grows, so the least x of a batch bounds it: most batches end there. */
struct candidate draw_chunk(const struct noise_key *key, const struct drawing *d, int vocab_size, int chunk) {
    int first = chunk * DRAW_CHUNK, end = first + DRAW_CHUNK < vocab_size ? first + DRAW_CHUNK : vocab_size;
    struct candidate best = {-INFINITY, first};
    for (int id = first; id < end; id += BATCH) {
        uint32_t x[BATCH], least = UINT32_MAX;
        float scores[BATCH];
        int count = end - id < BATCH ? end - id : BATCH;
        if (d->mask && !allowed_of(d->mask, id, count)) continue;
        float largest = scores_of(d, id, count, scores);
        if (largest + MOST_NOISE <= best.value) continue;
        philox(key, (uint32_t)id / 4, x);
        for (int i = 0; i < BATCH; i++) least = x[i] < least ? x[i] : least;
        if (largest + (noise_of(least) + BOUND_MARGIN) <= best.value) continue;
        for (int i = 0; i < BATCH; i++) scores[i] += noise_of(x[i]);
        for (int i = 0; i < count; i++)
            if (scores[i] > best.value) best = (struct candidate){scores[i], id + i};
    }
    return best;
}

float noise_at(const struct noise_key *key, int32_t token_id) {
    uint32_t x[BATCH];
    philox(key, (uint32_t)token_id / 4, x);
    return noise_of(x[token_id % 4]);
}

struct candidate best_of(const struct candidate *found, int count) {
    struct candidate best = found[0];
    for (int i = 1; i < count; i++)
        if (found[i].value > best.value) best = found[i];
    return best;
}
