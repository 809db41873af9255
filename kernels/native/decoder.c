/* A step of the whole decoder as one task: embedding, layers, final norm and output head, in phases. */
#include <stdlib.h>

#include "decoder.h"

enum phase { NORM_ATTN, QKV, ROPE, ATTEND, MERGE, OUT, NORM_FFN, GATE_UP, DOWN, PHASES_A_LAYER };
#define FEW_ROWS 2      /* so little row-wise work is done between phases, not shared */
#define ROWS_A_PIECE 4
#define MAX_TILES_A_PIECE 4
#define MAX_PIECES 16384
#define TILES_AHEAD 8 /* as much as is read in the time that others still need for a phase */
#define LATE 3 /* quarters of the layers, after which the next step should be made ready */

/* How many tiles make a piece: such that there are as many pieces for each thread, if possible. */
static int piece_tiles(const struct decoder *d, int tiles) {
    int threads = pool_num_threads(d->pool), size = tiles / (threads * 4);
    size = size < 1 ? 1 : size > MAX_TILES_A_PIECE ? MAX_TILES_A_PIECE : size;
    while (size > 1 && (tiles + size - 1) / size % threads) size--;
    return tiles / size >= MAX_PIECES ? tiles / MAX_PIECES + 1 : size;
}

int cut_tiles(struct decoder *d, int tiles) {
    d->tiles_a_piece = piece_tiles(d, tiles);
    return (tiles + d->tiles_a_piece - 1) / d->tiles_a_piece;
}

/* Rows [first, end) of work that is done row by row. */
struct range {
    int first, end;
};
static struct range piece_rows(int piece, int rows) {
    int end = (piece + 1) * ROWS_A_PIECE;
    return (struct range){piece * ROWS_A_PIECE, end < rows ? end : rows};
}

/* --- what the phases do ----------------------------------------------------------------------------------------- */

static void embed(struct decoder *d, struct range r) {
    int64_t size = d->m->hidden_size;
    for (int i = r.first; i < r.end; i++) {
        float *x = d->x + i * hidden_stride(d);
        for (int64_t c = size; c < hidden_stride(d); c++) x[c] = 0.0f;
        if (d->step->inputs) memcpy(x, d->step->inputs + i * size, (size_t)size * sizeof *x);
        else weight_row(&d->m->embedding, input_token(d->step, i), x);
    }
}

/* quantises: where a weight that these rows go to is quantised. */
static void norm(struct decoder *d, const float *weight, int quantises, const int32_t *from, struct range r) {
    for (int i = r.first; i < r.end; i++) {
        float *y = d->normed.x + i * d->normed.stride;
        norm_or_copy(d, d->x + (from ? from[i] : i) * hidden_stride(d), weight, y);
        if (quantises) quantize_row(y, &d->normed, i);
    }
}

INLINE void put_tile(const float *out, const float *bias, float *to, int width, int add) {
    if (width < TILE_ROWS) {
        for (int c = 0; c < width; c++) to[c] = (add ? to[c] : 0.0f) + (bias ? out[c] + bias[c] : out[c]);
        return;
    }
    for (int c = 0; c < TILE_ROWS; c += VL) {
        vf value = vf_load(out + c);
        if (bias) value = vf_add(value, vf_load(bias + c));
        vf_store(to + c, add ? vf_add(vf_load(to + c), value) : value);
    }
}

/* One tile of a linear's outputs for all rows: stored, or added to what is there. */
static void linear_tile(const struct linear *l, int tile, const struct rows *x, int first, int count, float *y,
                        int64_t stride, int add) {
    float out[MAX_BLOCK_ROWS][TILE_ROWS];
    int offset = 0, part = 0;
    while (tile >= num_tiles(&l->parts[part])) {
        tile -= num_tiles(&l->parts[part]);
        offset += l->parts[part++].rows;
    }
    const struct matrix *w = &l->parts[part];
    int left = w->rows - tile * TILE_ROWS, width = left < TILE_ROWS ? left : TILE_ROWS;
    product(w, tile, x, first, count, out);
    offset += tile * TILE_ROWS;
    const float *bias = l->bias ? l->bias + offset : NULL;
    for (int i = 0; i < count; i++) put_tile(out[i], bias, y + (first + i) * stride + offset, width, add);
}

void linear_piece(const struct decoder *d, const struct linear *l, int piece, const struct rows *x, int rows, float *y,
                  int64_t stride, int add) {
    int first = piece * d->tiles_a_piece, end = first + d->tiles_a_piece, tiles = linear_tiles(l);
    if (end > tiles) end = tiles;
    for (int row = 0; row < rows; row += MAX_BLOCK_ROWS) {
        int count = rows - row < MAX_BLOCK_ROWS ? rows - row : MAX_BLOCK_ROWS;
        for (int tile = first; tile < end; tile++) linear_tile(l, tile, x, row, count, y, stride, add);
    }
}

static void add_bias(float (*out)[TILE_ROWS], const float *bias, int count, int columns) {
    for (int i = 0; i < count; i++)
        for (int c = 0; c < TILE_ROWS && c < columns; c++) out[i][c] += bias[c];
}

/* GROUP columns of the gate and of up, multiplied and quantised. */
static void gate_up_unit(const struct decoder *d, const struct layer *l, int unit, int row, int count) {
    float gate[2][MAX_BLOCK_ROWS][TILE_ROWS], up[2][MAX_BLOCK_ROWS][TILE_ROWS]; /* of each half */
    int left = d->m->intermediate_size - unit * GROUP, width = left < GROUP ? left : GROUP;
    for (int half = 0; half < 2; half++) {
        int columns = width - half * TILE_ROWS; /* of this half */
        if (columns <= 0) {
            memset(gate[half], 0, sizeof gate[half]);
            memset(up[half], 0, sizeof up[half]);
            continue;
        }
        int first = unit * GROUP + half * TILE_ROWS;
        product(&l->gate.parts[0], 2 * unit + half, &d->normed, row, count, gate[half]);
        product(&l->up.parts[0], 2 * unit + half, &d->normed, row, count, up[half]);
        if (l->gate.bias) add_bias(gate[half], l->gate.bias + first, count, columns);
        if (l->up.bias) add_bias(up[half], l->up.bias + first, count, columns);
    }
    int quantises = !is_dense(&l->down.parts[0]);
    for (int i = 0; i < count; i++) {
        float own[GROUP], *to = quantises ? own : d->gated.x + (row + i) * d->gated.stride + unit * GROUP;
        for (int half = 0; half < 2; half++)
            silu_mul_row(gate[half][i], up[half][i], to + half * TILE_ROWS, TILE_ROWS);
        if (quantises) quantize_group(to, &d->gated, row + i, unit);
    }
}

/* A piece is one unit for all rows: four tiles, which stay in the nearest cache. */
static int num_units(const struct decoder *d) { return (d->m->intermediate_size + GROUP - 1) / GROUP; }

static void gate_up_piece(const struct decoder *d, const struct layer *l, int unit) {
    int rows = d->step->num_rows;
    for (int row = 0; row < rows; row += MAX_BLOCK_ROWS) {
        int count = rows - row < MAX_BLOCK_ROWS ? rows - row : MAX_BLOCK_ROWS;
        gate_up_unit(d, l, unit, row, count);
    }
}

/* --- the phases ------------------------------------------------------------------------------------------------- */

/* Phase 0 embeds; then the layers'; then the final norm, the output head and the choice. */
static void row_phase(struct decoder *d, int phase, struct range r) {
    const struct model *m = d->m;
    if (phase == 0) {
        embed(d, r);
        return;
    }
    int layer = (phase - 1) / PHASES_A_LAYER;
    const struct layer *l = m->layers + layer;
    if (layer == m->num_layers) {
        norm(d, m->final_norm, is_quantised(&m->head), d->step->sample_rows, r);
        return;
    }
    switch ((phase - 1) % PHASES_A_LAYER) {
        case NORM_ATTN:
            if (m->embed_norm && !layer) fuse(d, l, r.first, r.end);
            else norm(d, l->attn_norm, is_quantised(&l->qkv), NULL, r);
            break;
        case NORM_FFN: norm(d, l->ffn_norm, is_quantised(&l->gate) || is_quantised(&l->up), NULL, r); break;
        default: turn_rows(d, l, r.first, r.end);
    }
}

static int share_rows(struct decoder *d, int phase, int rows) {
    if (rows > FEW_ROWS) return (rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE;
    row_phase(d, phase, (struct range){0, rows});
    return 0;
}

static int prepare(void *context, int phase) {
    struct decoder *d = context;
    const struct model *m = d->m;
    int last = 1 + m->num_layers * PHASES_A_LAYER, rows = d->step->num_rows, samples = d->step->num_samples;
    if (phase == 0) return share_rows(d, phase, rows);
    if (phase == last) {
        tap(d, m->num_layers);
        tap(d, m->num_layers + 1);
        return share_rows(d, phase, samples);
    }
    if (phase == last + 1) {
        if (d->runner && d->step->mask_of) wait_for_masks(d->runner, d->step);
        return samples ? cut_tiles(d, linear_tiles(&m->head)) : 0;
    }
    if (phase == last + 2) return samples ? choose_best(d, cut_tiles(d, linear_tiles(&m->head))) : 0;
    if (phase == last + 3) {
        if (samples) choose_drawn(d);
        return 0;
    }
    if (d->runner && phase == 1 + m->num_layers * LATE / 4 * PHASES_A_LAYER) step_is_late(d->runner);
    const struct layer *l = m->layers + (phase - 1) / PHASES_A_LAYER;
    switch ((phase - 1) % PHASES_A_LAYER) {
        case NORM_ATTN: tap(d, (phase - 1) / PHASES_A_LAYER); return share_rows(d, phase, rows);
        case QKV: return cut_tiles(d, linear_tiles(&l->qkv));
        case ROPE: return turns_in_attention(d) ? 0 : share_rows(d, phase, rows);
        case ATTEND: return d->num_items * m->num_kv_heads * d->num_splits;
        case MERGE: return d->num_splits > 1 ? d->num_items * m->num_kv_heads : 0;
        case OUT: quantize_mixed(d, l); return cut_tiles(d, linear_tiles(&l->out));
        case GATE_UP: return num_units(d);
        case DOWN: return cut_tiles(d, linear_tiles(&l->down));
        default: return share_rows(d, phase, rows);
    }
}

static void run(void *context, int phase, int piece, int thread) {
    struct decoder *d = context;
    const struct model *m = d->m;
    int last = 1 + m->num_layers * PHASES_A_LAYER, rows = d->step->num_rows, samples = d->step->num_samples;
    int64_t hidden = hidden_stride(d);
    if (phase == last + 1) {
        linear_piece(d, &m->head, piece, &d->normed, samples, d->step->logits, m->vocab_size, 0);
        best_of_piece(d, piece);
        return;
    }
    if (phase == last + 2) {
        draw_piece(d, piece);
        return;
    }
    const struct layer *l = m->layers + (phase - 1) / PHASES_A_LAYER;
    if (phase == 0 || phase == last) {
        row_phase(d, phase, piece_rows(piece, phase == last ? samples : rows));
        return;
    }
    switch ((phase - 1) % PHASES_A_LAYER) {
        case QKV:
            linear_piece(d, &l->qkv, piece, m->embed_norm && l == m->layers ? &d->fused : &d->normed, rows, d->qkv,
                         qkv_stride(d), 0);
            break;
        case ATTEND: attend_piece(d, l, piece, thread); break;
        case MERGE: merge_piece(d, l, piece, thread); break;
        case OUT: linear_piece(d, &l->out, piece, &d->mixed, rows, d->x, hidden, 1); break;
        case GATE_UP: gate_up_piece(d, l, piece); break;
        case DOWN: linear_piece(d, &l->down, piece, &d->gated, rows, d->x, hidden, 1); break;
        default: row_phase(d, phase, piece_rows(piece, rows));
    }
}

/* The first tiles of a thread's share. */
static int linear_ahead(const struct decoder *d, const struct linear *l, int thread, struct reading *readings) {
    int tiles = linear_tiles(l), size = piece_tiles(d, tiles), pieces = (tiles + size - 1) / size, part = 0;
    int tile = (int)((int64_t)pieces * thread / pool_num_threads(d->pool)) * size;
    while (tile >= num_tiles(&l->parts[part])) tile -= num_tiles(&l->parts[part++]);
    int left = num_tiles(&l->parts[part]) - tile;
    return tile_readings(&l->parts[part], tile, left < TILES_AHEAD ? left : TILES_AHEAD, readings);
}

static int gate_up_ahead(const struct decoder *d, const struct layer *l, int thread, struct reading *readings) {
    int tile = (int)((int64_t)num_units(d) * thread / pool_num_threads(d->pool)) * (GROUP / TILE_ROWS);
    int num_readings = tile_readings(&l->up.parts[0], tile, TILES_AHEAD / 2, readings);
    return num_readings + tile_readings(&l->gate.parts[0], tile, TILES_AHEAD / 2, readings + num_readings);
}

/* Of the next phase with a product. */
static int ahead(void *context, int phase, int thread, struct reading *readings) {
    const struct decoder *d = context;
    const struct model *m = d->m;
    if (phase == 0) return 0;
    int layer = (phase - 1) / PHASES_A_LAYER, kind = (phase - 1) % PHASES_A_LAYER;
    if (layer == m->num_layers) return 0;
    const struct layer *l = m->layers + layer;
    switch (kind) {
        case NORM_ATTN: return linear_ahead(d, &l->qkv, thread, readings);
        case OUT:
        case NORM_FFN: return gate_up_ahead(d, l, thread, readings);
        case GATE_UP: return linear_ahead(d, &l->down, thread, readings);
        case DOWN: return linear_ahead(d, layer + 1 < m->num_layers ? &l[1].qkv : &m->head, thread, readings);
        default: return linear_ahead(d, &l->out, thread, readings);
    }
}

/* --- calls --------------------------------------------------------------------------------------------- */

/* Null if there is no memory. model and pool must outlive the decoder. */
struct decoder *decoder_new(const struct model *m, struct pool *pool) {
    struct decoder *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->m = m;
    d->pool = pool;
    return d;
}

void decoder_free(struct decoder *d) {
    free_buffers(d);
    free(d);
}

/* 0, or -1 where there is no memory. */
int decoder_step(struct decoder *d, const struct step *step) {
    if (!reserve_buffers(d, step)) return -1;
    d->step = step;
    cut_spans(d);
    cut_keys(d);
    struct task task = {prepare, run, d, 1 + d->m->num_layers * PHASES_A_LAYER + 4, ahead};
    pool_run(d->pool, &task);
    return 0;
}
