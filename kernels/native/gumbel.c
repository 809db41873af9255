/* The token of each row with the largest score plus Gumbel noise, to the bits that kernels/gumbel.py states.

   Every float operation is rounded on its own and in the order written there; the compiler vectorises over tokens. */
#include "native.h"
#include "simd.h"

#define LANES 16   /* Philox calls side by side; each gives four tokens */
#define LN2_HIGH 0.693359375f
#define LN2_LOW -2.12194440e-4f
#define SQRT_HALF_BITS 0x3F3504F3
#define LOG1P_REACH 0.29289323f

struct draw_call {
    const float *scores;
    const struct noise_key *keys;
    struct candidate *found; /* [row][chunk] */
    int num_rows, vocab_size, num_chunks;
};

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

struct candidate draw_from(const float *logits, float largest, float temperature, const struct noise_key *key,
                           int first, int end) {
    struct candidate best = {-INFINITY, first};
    for (int id = first; id < end; id += 4 * LANES) {
        uint32_t x[4 * LANES];
        float total[4 * LANES];
        int count = end - id < 4 * LANES ? end - id : 4 * LANES;
        philox(key, (uint32_t)id / 4, x);
        for (int i = 0; i < 4 * LANES; i++) total[i] = noise_of(x[i]);
        for (int i = 0; i < count; i++) total[i] += (logits[id + i] - largest) / temperature;
        for (int i = count; i < 4 * LANES; i++) total[i] = -INFINITY;
        vf most_of_all = vf_load(total);
        for (int i = VL; i < 4 * LANES; i += VL) most_of_all = vf_max(most_of_all, vf_load(total + i));
        float most = vf_largest(most_of_all);
        for (int i = 0; most > best.value && i < count; i++)
            if (total[i] > best.value) best = (struct candidate){total[i], id + i};
    }
    return best;
}

static void draw_piece(void *context, int phase, int piece, int thread) {
    (void)phase, (void)thread;
    const struct draw_call *call = context;
    int row = piece / call->num_chunks, first = piece % call->num_chunks * DRAW_CHUNK;
    int end = first + DRAW_CHUNK < call->vocab_size ? first + DRAW_CHUNK : call->vocab_size;
    const float *scores = call->scores + (int64_t)row * call->vocab_size;
    call->found[piece] = draw_from(scores, 0.0f, 1.0f, call->keys + row, first, end);
}

static int draw_pieces(void *context, int phase) {
    (void)phase;
    const struct draw_call *call = context;
    return call->num_rows * call->num_chunks;
}

EXPORT int headrace_draw_chunks(int vocab_size) { return (vocab_size + DRAW_CHUNK - 1) / DRAW_CHUNK; }

/* scores [num_rows][vocab_size]; ties go to the lowest id. found: room for num_rows * headrace_draw_chunks. */
EXPORT void headrace_draw(struct pool *pool, const float *scores, const struct noise_key *keys, int num_rows,
                          int vocab_size, struct candidate *found, int32_t *ids) {
    int chunks = headrace_draw_chunks(vocab_size), at_once = 32768 / chunks;
    for (int first = 0; first < num_rows; first += at_once) {
        int rows = num_rows - first < at_once ? num_rows - first : at_once;
        struct draw_call call = {
            scores + (int64_t)first * vocab_size, keys + first, found + (int64_t)first * chunks, rows, vocab_size, chunks,
        };
        struct task task = {draw_pieces, draw_piece, &call, 1};
        pool_run(pool, &task);
    }
    for (int row = 0; row < num_rows; row++) {
        struct candidate best = found[(int64_t)row * chunks];
        for (int i = 1; i < chunks; i++) {
            struct candidate other = found[(int64_t)row * chunks + i];
            if (other.value > best.value) best = other;
        }
        ids[row] = best.id;
    }
}
