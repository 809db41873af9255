/* What heads that draft need of a decoder: rows of a model's layers kept, and embeddings read beside them. */
#include "decoder.h"

void fuse(struct decoder *d, const struct layer *l, int first, int end) {
    for (int i = first; i < end; i++) {
        float *y = d->fused.x + i * d->fused.stride;
        weight_row(&d->m->embedding, input_token(d->step, i), y);
        norm_row(y, d->m->embed_norm, d->m->eps, d->m->hidden_size, y);
        norm_or_copy(d, d->x + i * hidden_stride(d), l->attn_norm, y + d->m->hidden_size);
        if (is_quantised(&l->qkv)) quantize_row(y, &d->fused, i);
    }
}

void tap(struct decoder *d, int layer) {
    const struct step *s = d->step;
    int64_t size = d->m->hidden_size;
    for (int t = 0; t < s->num_taps; t++)
        for (int i = 0; s->tap_layers[t] == layer && i < s->num_rows; i++)
            norm_or_copy(d, d->x + i * hidden_stride(d), layer > d->m->num_layers ? d->m->final_norm : NULL,
                         s->taps + ((int64_t)i * s->num_taps + t) * size);
}
