/* Calls every op of a library of native ops on fixed numbers and writes what comes out: `every_op LIBRARY [THREADS]
   >results`.

   Two libraries that promise the same bits give the same output, whatever the machines. A result is a line with its
   name and number of bytes, and the bytes. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sampling.h"

#define COLUMNS 512
#define NUM_ROWS 31 /* as many as a product takes at once, then 8, 4, 2 and 1 */

static void *library;
static struct pool *pool;

static void *function(const char *name) {
    void *found = dlsym(library, name);
    if (found) return found;
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
}

static void put(const char *name, const void *values, size_t bytes) {
    printf("%s %zu\n", name, bytes);
    fwrite(values, 1, bytes, stdout);
}

/* --- fixed numbers ------------------------------------------------------------------------------------------------ */

static uint64_t state = 1;
static uint32_t next(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(state >> 32);
}
static float between(float low, float high) { return low + (high - low) * ((float)(next() >> 8) * 0x1p-24f); }

static void *room(size_t bytes) {
    void *p = calloc(1, bytes + 256);
    if (!p) exit(1);
    return p;
}
static float *floats(size_t count, float most) {
    float *p = room(count * 4);
    for (size_t i = 0; i < count; i++) p[i] = between(-most, most);
    return p;
}
static void *bytes_of(size_t count) {
    uint8_t *p = room(count);
    for (size_t i = 0; i < count; i++) p[i] = (uint8_t)next();
    return p;
}
static uint16_t *halves(size_t count) { /* of magnitudes from 2^-10 to 2^-2: exponents 5 to 12 */
    uint16_t *p = room(count * 2);
    for (size_t i = 0; i < count; i++) p[i] = (uint16_t)((next() & 0x83ff) | (5 + next() % 8) << 10);
    return p;
}

static struct rows rows_of(float *x, int num_rows, int columns) {
    return (struct rows){x, room((size_t)num_rows * columns), room((size_t)num_rows * columns / 8),
                         room((size_t)num_rows * columns / 8), room((size_t)num_rows * columns / 4), columns, columns};
}

/* Any bytes are codes; only floats must be ones. */
static struct matrix matrix_of(int format, int rows, int columns) {
    size_t padded = (size_t)up_to(rows, TILE_ROWS), count = padded * columns;
    struct matrix w = {format, rows, columns, 0, NULL, NULL, halves(count / 32), halves(count / 32), NULL, NULL};
    if (format == F32) w.codes = floats(count, 1.0f);
    else if (format == F16) w.codes = halves(count);
    else if (format == BF16) {
        uint16_t *p = room(count * 2);
        for (size_t i = 0; i < count; i++) p[i] = (uint16_t)((next() & 0x807f) | (120 + next() % 8) << 7);
        w.codes = p;
    } else w.codes = bytes_of(count);
    w.high = bytes_of(count / 4);
    w.sub = bytes_of(count / 16);
    w.sub_min = bytes_of(count / 16);
    return w;
}

static struct linear linear_of(int format, int rows, int columns) {
    struct linear l = {1, rows, {matrix_of(format, rows, columns)}, floats((size_t)rows, 1.0f)};
    return l;
}

/* --- ops -------------------------------------------------------------------------------------------------------- */

static void row_ops(void) {
    void (*quantize)(const struct rows *, int) = function("headrace_quantize");
    void (*norm)(const float *, const float *, float, int, int, int64_t, float *) = function("headrace_norm");
    void (*silu_mul)(const float *, const float *, float *, int, int) = function("headrace_silu_mul");
    float *x = floats(COLUMNS * NUM_ROWS, 4.0f), *weight = floats(COLUMNS, 2.0f), *y = room(COLUMNS * NUM_ROWS * 4);
    for (int i = 0; i < COLUMNS; i++) {
        x[i] = 0.0f;
        x[COLUMNS + i] *= 1e-37f;
        x[2 * COLUMNS + i] *= 1e34f;
    }
    struct rows rows = rows_of(x, NUM_ROWS, COLUMNS);
    quantize(&rows, NUM_ROWS);
    put("quantize.q", rows.q, NUM_ROWS * COLUMNS);
    put("quantize.d", rows.d, NUM_ROWS * COLUMNS / 8);
    put("quantize.s", rows.s, NUM_ROWS * COLUMNS / 8);
    put("quantize.sums", rows.sums, NUM_ROWS * COLUMNS / 4);
    norm(x + 3 * COLUMNS, weight, 1e-5f, 4, COLUMNS, COLUMNS, y);
    put("norm", y, 4 * COLUMNS * 4);
    silu_mul(x + 3 * COLUMNS, x + 7 * COLUMNS, y, 4, COLUMNS);
    put("silu_mul", y, 4 * COLUMNS * 4);
}

static void products(void) {
    static const char *names[] = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
                                  "Q5_K", "Q6_K"};
    void (*quantize)(const struct rows *, int) = function("headrace_quantize");
    void (*product)(struct pool *, const struct matrix *, const struct rows *, int, float *, int64_t) =
        function("headrace_product");
    void (*weight_rows)(const struct matrix *, const int32_t *, int, float *) = function("headrace_weight_rows");
    enum { ROWS = 40 };
    int32_t wanted[] = {0, 17, 39};
    struct rows x = rows_of(floats(COLUMNS * NUM_ROWS, 3.0f), NUM_ROWS, COLUMNS);
    quantize(&x, NUM_ROWS);
    for (int format = F32; format <= Q6_K; format++) {
        struct matrix w = matrix_of(format, ROWS, COLUMNS);
        float *y = room(NUM_ROWS * ROWS * 4), *rows = room(3 * COLUMNS * 4);
        char name[64];
        product(pool, &w, &x, NUM_ROWS, y, ROWS);
        snprintf(name, sizeof name, "product.%s", names[format]);
        put(name, y, NUM_ROWS * ROWS * 4);
        weight_rows(&w, wanted, 3, rows);
        snprintf(name, sizeof name, "weight_rows.%s", names[format]);
        put(name, rows, 3 * COLUMNS * 4);
    }
}

static void samples(void) {
    int64_t (*room_for)(const struct pool *, int, int) = function("headrace_sample_scratch");
    void (*sample)(struct pool *, const struct sampling_row *, int, int, void *, struct sampled *) =
        function("headrace_sample");
    enum { VOCAB = 9001, ROWS = 6 };
    float *logits = floats(VOCAB * ROWS, 8.0f);
    for (int i = 0; i < VOCAB; i += 3) logits[VOCAB + i] = -INFINITY;
    void (*forbid)(float *, int, const uint8_t *, int) = function("headrace_forbid");
    uint8_t mask[VOCAB / 8];
    for (int i = 0; i < VOCAB / 8; i++) mask[i] = (uint8_t)next();
    float *held = floats(VOCAB, 8.0f);
    forbid(held, VOCAB, mask, VOCAB / 8);
    for (int i = 0; i < VOCAB; i++) held[i] = held[i] < -1e9f ? -1e9f : held[i];
    put("forbid", held, VOCAB * 4);
    struct sampling_row rows[ROWS];
    struct sampled *sampled = room(sizeof *sampled * ROWS);
    for (int i = 0; i < ROWS; i++) {
        const float *raw = logits + (int64_t)(i == 1 ? 0 : i) * VOCAB;
        rows[i] = (struct sampling_row){{next(), next(), next(), next()}, logits + i * VOCAB, raw,
                                        i % 2 ? 0.9 : 1.0, 0.5f + (float)i, -6.0f, i % 3 * 40, 4 * i - 1};
    }
    sample(pool, rows, ROWS, VOCAB, room((size_t)room_for(pool, ROWS, VOCAB) * 4), sampled);
    put("sample.draw", sampled, sizeof *sampled * ROWS);
}

/* --- a whole step ------------------------------------------------------------------------------------------------- */

enum { HIDDEN = 64, FFN = 96, VOCAB = 100, POSITIONS = 530, BLOCKS = 72 };

static struct model model_of(int heads, int kv_heads, int dim, int block_size, int format, int in_bytes) {
    struct model m = {HIDDEN, FFN, 2, heads, kv_heads, dim, VOCAB, block_size, .eps = 1e-5f};
    m.query_scale = 1.4426950408889634f / sqrtf((float)dim);
    m.cos = floats((size_t)POSITIONS * dim, 1.0f);
    m.sin = floats((size_t)POSITIONS * dim, 1.0f);
    m.final_norm = floats(HIDDEN, 1.0f);
    m.embedding = matrix_of(Q8_0, VOCAB, HIDDEN);
    m.head = linear_of(Q5_1, VOCAB, HIDDEN);
    m.layers = room(2 * sizeof *m.layers);
    size_t slots = (size_t)BLOCKS * kv_heads * block_size;
    for (int i = 0; i < m.num_layers; i++) {
        struct layer *l = &m.layers[i];
        l->attn_norm = floats(HIDDEN, 0.5f), l->ffn_norm = floats(HIDDEN, 0.5f);
        l->q_norm = i ? floats((size_t)dim, 1.0f) : NULL, l->k_norm = i ? floats((size_t)dim, 1.0f) : NULL;
        l->qkv = linear_of(format, (heads + 2 * kv_heads) * dim, HIDDEN);
        l->out = linear_of(format, HIDDEN, heads * dim);
        l->gate = linear_of(format, FFN, HIDDEN), l->up = linear_of(format, FFN, HIDDEN);
        l->down = linear_of(format, HIDDEN, FFN);
        l->k_cache = room(slots * dim * 2), l->v_cache = room(slots * up_to(dim, 16) * 2);
        if (in_bytes) l->k_scale = room(slots * 4), l->v_scale = room(slots * 4);
    }
    return m;
}

/* A prompt, then single rows and short chunks of two sequences: one is drawn with noise, one ends with a tree. */
static void decoder(const char *name, int prompt, struct model m) {
    void *(*new)(const struct model *, struct pool *) = function("headrace_runner_new");
    int64_t (*submit)(void *, const struct step *) = function("headrace_runner_submit");
    int (*wait)(void *, int64_t) = function("headrace_runner_wait");
    void (*allow)(void *, struct step *) = function("headrace_runner_allow");
    void (*end)(void *) = function("headrace_runner_free");
    void *d = new(&m, pool);
    int size = m.block_size, num_blocks = (prompt + 6) / size + 1;
    struct span steps[3][2] = {{{0, prompt, 0, 0}, {prompt, 3, 0, num_blocks}},
                               {{0, 1, prompt, 0}, {1, 1, 3, num_blocks}},
                               {{0, 5, prompt + 1, 0}, {5, 2, 4, num_blocks}}};
    int32_t tables[BLOCKS], tokens[POSITIONS + 8], positions[POSITIONS + 8], slots[POSITIONS + 8];
    int32_t parents[] = {-1, -1, 1, -1, 3}, ends[8] = {0}, path_slots[8]; /* of the rows of the last step's tree */
    for (int i = 0; i < 2 * num_blocks; i++) tables[i] = i % 2 ? 2 * num_blocks - i : i;
    for (int i = 0; i < 3; i++) {
        float *logits = room(2 * VOCAB * 4);
        struct step step = {0, 2, 2, 0, tokens, positions, slots, steps[i], tables, .logits = logits};
        for (int s = 0; s < 2; s++)
            for (int j = 0; j < steps[i][s].num_rows; j++, step.num_rows++) {
                int position = positions[step.num_rows] = steps[i][s].first_position + j;
                tokens[step.num_rows] = (int32_t)(next() % VOCAB);
                slots[step.num_rows] = tables[steps[i][s].first_block + position / size] * size + position % size;
            }
        for (int row = 0, end = 0; i == 2 && row < step.num_rows; ends[++row] = end) {
            if (row > 4 || !row) continue;
            positions[row] = positions[0] + 1;
            if (parents[row] >= 0) path_slots[end++] = slots[parents[row]], positions[row]++;
            path_slots[end++] = slots[row];
        }
        if (i == 2) step.path_ends = ends, step.path_slots = path_slots;
        int32_t samples[2] = {steps[i][1].first_row - 1, step.num_rows - 1}, drawn[2];
        struct draw how[2] = {{0}, {0.8f, {7, 9, (uint32_t)i, 0}}};
        step.sample_rows = samples, step.draws = how, step.drawn = drawn;
        int32_t mask_of[2] = {i % 2 - 1, 1}; /* from the second step on, of one sample or of both */
        uint32_t masks[2][(VOCAB + 31) / 32] = {{next(), next() & next(), next() & next(), next()}, {0, 1u << i, 0, 9}};
        if (i) step.mask_of = mask_of, step.masks = masks[0], step.awaits_masks = 1;
        int64_t number = submit(d, &step);
        allow(d, &step);
        if (wait(d, number)) exit(1);
        char label[64];
        snprintf(label, sizeof label, "%s.step%d.logits", name, i);
        put(label, logits, 2 * VOCAB * 4);
        snprintf(label, sizeof label, "%s.step%d.drawn", name, i);
        put(label, drawn, sizeof drawn);
    }
    end(d);
}

int main(int argc, char **argv) {
    library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", argc > 1 ? dlerror() : "usage: every_op LIBRARY [THREADS]");
        return 1;
    }
    struct pool *(*pool_of)(int) = function("headrace_pool_new");
    void (*end)(struct pool *) = function("headrace_pool_free");
    pool = pool_of(argc > 2 ? atoi(argv[2]) : 2);
    row_ops();
    products();
    samples();
    decoder("decoder.several_splits", 520, model_of(2, 1, 16, 16, Q8_0, 0));
    decoder("decoder.64", 70, model_of(6, 2, 64, 16, Q4_1, 0));
    decoder("decoder.40", 20, model_of(4, 1, 40, 8, Q5_0, 0));
    decoder("decoder.128", 20, model_of(2, 2, 128, 32, BF16, 0));
    decoder("decoder.bytes", 70, model_of(6, 2, 64, 8, Q4_1, 1));
    decoder("decoder.bytes40", 20, model_of(4, 1, 40, 16, F16, 1));
    end(pool);
    return 0;
}
