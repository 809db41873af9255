/* What the native ops share: the layouts of weights, activations, cache and work, and who calls whom.

   Structures are mirrored field by field in kernels/native/structs.py. */
#ifndef HEADRACE_NATIVE_H
#define HEADRACE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#define TILE_ROWS 16      /* rows of a weight that lie interleaved */
#define GROUP 32          /* columns with one scale, in weights and activations */
#define SUPER_GROUP 256   /* columns whose scales have a scale */
#define MAX_BLOCK_ROWS 16 /* activation rows that a product takes at once */

enum format { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K };

/* A weight [rows, columns], in tiles of TILE_ROWS rows; the last tile is filled up with zeros.

   Dense: codes is [tile][column][16]. Else every plane is [tile][group] of vectors of 64 bytes, in which byte
   4 r + c belongs to row r and to column 4 v + c of the group, for v = 0 to 7:
     nibbles  4 vectors: vector v has v in its low nibbles, v + 4 in its high ones
     2 bits   2 vectors: vector v has 4 v + i in bits 2 i and 2 i + 1
     1 bit    1 vector: v in bit v
     bytes    8 vectors, of q + 128
   codes is nibbles (4, 5 and 6 bits), 2 bits (2 and 3) or bytes (8); high is the bits above it (5, 6 and 3 bits).
   Scales are [tile][group or half group or super group][16]. */
struct matrix {
    int32_t format, rows, columns, reserved;
    const void *codes;
    const void *high;
    const uint16_t *d;       /* float16, a group or super group */
    const uint16_t *m;       /* float16: added a group (types _1), or times sub_min subtracted (K types) */
    const uint8_t *sub;      /* K types: integer scale of a group or half group; Q2_K: with sub_min in the high half */
    const uint8_t *sub_min;
};

/* Rows of activations, as floats, as signed bytes with a scale a group, or as both. Row strides: stride floats,
   columns bytes, columns / GROUP scales. */
struct rows {
    float *x;
    int8_t *q;
    float *d;       /* value = d q */
    float *s;       /* d times the sum of the group's q */
    int32_t *sums;  /* of the q of each half group */
    int64_t stride, columns;
};

/* One projection: matrices with the same input whose outputs lie one after the other. */
struct linear {
    int32_t num_parts, rows;  /* rows: of all parts */
    struct matrix parts[3];
    const float *bias;        /* [rows] or null */
};

struct layer {
    const float *attn_norm, *ffn_norm;  /* padded to 16; attn_norm may be null: nothing is normed */
    const float *q_norm, *k_norm;       /* [head_dim] or null */
    struct linear qkv, out, gate, up, down;
    /* K and V as float16, or as signed bytes with a scale for each slot: see kernels/kv_cache.py. */
    void *k_cache;  /* [block][KV head][slot / width][head_dim][width], width = min(16, block_size) */
    void *v_cache;  /* [block][KV head][slot][head_dim padded to 16] */
    float *k_scale, *v_scale; /* [block][KV head][slot], or null: float16 */
};

struct model {
    int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size, block_size;
    float eps, query_scale;  /* query_scale: 1 / sqrt(head_dim), times log2 e */
    const float *cos, *sin;  /* [max positions][head_dim / 2] */
    const float *final_norm; /* padded to 16, or null: the output head reads what the last layer leaves */
    const float *embed_norm; /* or null. A head that drafts (EAGLE-3): the first layer's q, k and v read the normed
                                embedding and, behind it, the normed row that a step brings along */
    const int32_t *token_ids; /* [vocab_size] or null: what the output head's rows stand for */
    struct matrix embedding;
    struct linear head;
    struct layer *layers;
};

/* Consecutive rows of one sequence; its block table lies in the step's block_ids from first_block on. */
struct span {
    int32_t first_row, num_rows, first_position, first_block;
};

struct noise_key {
    uint32_t seed_low, seed_high, position, choice;
};

/* How a sample's token is drawn: temperature 0 takes the largest logit, else noise is added to all of them. */
struct draw {
    float temperature;
    struct noise_key key;
};

struct step {
    int32_t num_rows, num_spans, num_samples, num_taps;
    const int32_t *token_ids;   /* -1 - i: what sample i of the step before has drawn */
    const int32_t *positions, *row_slots;  /* row_slots: block * block_size + place, where a row's K and V go */
    const struct span *spans;
    const int32_t *block_ids;
    const int32_t *sample_rows;
    const struct draw *draws;   /* [num_samples] */
    const int32_t *drawn_before;
    float *logits;      /* [num_samples][vocab_size] */
    int32_t *drawn;     /* [num_samples]: token ids, -1 where a logit is not finite */
    const float *inputs;         /* [num_rows][hidden_size] in the embeddings' place, or null */
    const int32_t *tap_layers;   /* [num_taps]: whose input is wanted; num_layers: what the last leaves; one more: that,
                                    as the output head reads it */
    float *taps;                 /* [num_rows][num_taps][hidden_size] */
    /* Of a row that drafts in a tree: the slots of the last positions that it sees, up to its own, of which row i has
       path_slots[path_ends[i]] to path_slots[path_ends[i + 1]]. Positions before them, and those of rows that have none
       there, are in the slots of their numbers. Null where no row has any. */
    const int32_t *path_ends, *path_slots;
    const int32_t *mask_of;      /* [num_samples]: number of the mask of what may be drawn, -1: anything; or null */
    const uint32_t *masks;       /* [masks][mask_words]: bit i % 32 of word i / 32 allows token i */
    int32_t awaits_masks;        /* 1: mask_of and masks come while it runs, see headrace_runner_allow */
};

/* A head that drafts (EAGLE) beside the model that is its layer: what makes the rows that this reads. */
struct head {
    int32_t columns, reads_embedding; /* of fc, whether the first of them are the embedding: then also of later places */
    struct linear fc;
    const float *first_norm; /* padded to 16, or null: of what fc makes, and of rows that the layer leaves */
};

/* Guesses of several sequences. first: a step of known tokens, a span and a sample for each, whose blocks have room for
   the guesses too. */
struct chains {
    const struct head *head;
    const struct step *first;
    const float *const *taps; /* [num_spans]: what fc reads, but for the embedding, for each row of a span */
    const int32_t *counts;    /* [num_spans]: how many tokens are to be guessed */
    int32_t *token_ids;       /* [num_spans][num_places]: left as they are behind the last guess */
    float *logprobs;          /* [num_spans][num_places]: what the head gave each */
    int32_t num_places, reserved;
    double later_s;           /* told: what all places but the first took, which reads the rows of all known tokens */
};

/* Memory that somebody will read soon. */
struct reading {
    const void *start;
    int64_t num_bytes;
};
#define MAX_READINGS 6

struct pool;
struct task {
    /* Called by one thread between two phases: how many pieces the phase has; it may do small work itself. */
    int (*prepare)(void *context, int phase);
    void (*run)(void *context, int phase, int piece, int thread);
    void *context;
    int num_phases;
    /* Or null. What a thread whose share of this phase is done will read first in the next ones, for the time in which
       it has nothing to do; how many of MAX_READINGS. */
    int (*ahead)(void *context, int phase, int thread, struct reading *readings);
};
void pool_run(struct pool *pool, const struct task *task);
int pool_num_threads(const struct pool *pool);

void quantize_group(const float *x, const struct rows *to, int64_t row, int64_t group);
void quantize_row(const float *x, const struct rows *to, int64_t row);
void norm_row(const float *x, const float *weight, float eps, int columns, float *y);
void silu_mul_row(const float *gate, const float *up, float *y, int count);
void product(const struct matrix *w, int tile, const struct rows *x, int row, int count, float (*out)[TILE_ROWS]);
/* What products of some tiles read: at most MAX_READINGS / 2. */
int tile_readings(const struct matrix *w, int tile, int count, struct reading *readings);
void weight_row(const struct matrix *w, int row, float *out);
void rope_heads(const struct model *m, const struct layer *l, float *qkv, float *q, int position, int slot,
                int kv_head);

/* Query rows first_row to first_row + count of a span and one KV head; q and out are [rows][num_heads][padded dim]. */
void attend(const struct model *m, const struct layer *l, const struct step *step, const struct span *span,
            int first_row, int count, int kv_head, const float *q, float *out, int64_t out_stride, float *scratch);
void attend_soon(const struct model *m, const struct layer *l, const struct step *step, const struct span *span,
                 int end, int kv_head);
int64_t attend_scratch_floats(const struct model *m);
/* The same in parts, where there are few to share it among: one for each of the splits of so many keys, then merged
   as `attend` merges them. parts: attend_part_floats of count rows, stride floats from split to split. */
int attend_splits(int num_keys);
int64_t attend_part_floats(const struct model *m, int count);
void attend_part(const struct model *m, const struct layer *l, const struct step *step, const struct span *span,
                 int first_row, int count, int kv_head, int split, const float *q, float *part, float *scratch);
void attend_merge(const struct model *m, const struct step *step, const struct span *span, int first_row, int count,
                  int kv_head, const float *parts, int64_t stride, float *out, int64_t out_stride, float *scratch);

#define ATTENTION_ROWS 16 /* query rows that attention takes at most at once */

static inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
/* Where a slot's key begins in the cache, in numbers: see `struct layer`; dimensions are key_width apart. */
static inline int key_width(const struct model *m) { return m->block_size < 16 ? m->block_size : 16; }
static inline int64_t key_at(const struct model *m, int64_t head, int slot) {
    int width = key_width(m);
    return (head * m->block_size + slot / width * width) * m->head_dim + slot % width;
}
static inline int mask_words(int vocab_size) { return (vocab_size + 31) / 32; }
static inline int is_dense(const struct matrix *w) { return w->format <= BF16; }

#endif
