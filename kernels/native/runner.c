/* Steps one after the other on a thread of their own, so that the next can be handed over while one runs.

   The thread goes from a step to the next without waiting for anybody, in the order in which they came. Whoever hands
   them over keeps each, and all that it points to, until it has ended. */
#include <pthread.h>
#include <stdlib.h>

#include "decoder.h"

#define MAX_WAITING 2

struct runner {
    struct decoder *decoder;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t submitted, progress;
    const struct step *steps[MAX_WAITING]; /* step number n is at n modulo MAX_WAITING */
    int results[MAX_WAITING];
    int64_t num_submitted, num_late, num_ended; /* steps; late: nearly over, or ended */
    int stopping;
};

void step_is_late(struct runner *r) {
    pthread_mutex_lock(&r->lock);
    r->num_late = r->num_ended + 1;
    pthread_cond_broadcast(&r->progress);
    pthread_mutex_unlock(&r->lock);
}

void wait_for_masks(struct runner *r, const struct step *step) {
    pthread_mutex_lock(&r->lock);
    while (step->awaits_masks && !r->stopping) pthread_cond_wait(&r->progress, &r->lock);
    pthread_mutex_unlock(&r->lock);
}

static void *run_steps(void *context) {
    struct runner *r = context;
    pthread_mutex_lock(&r->lock);
    while (!r->stopping) {
        if (r->num_ended == r->num_submitted) {
            pthread_cond_wait(&r->submitted, &r->lock);
            continue;
        }
        int at = (int)(r->num_ended % MAX_WAITING);
        pthread_mutex_unlock(&r->lock);
        int result = decoder_step(r->decoder, r->steps[at]);
        pthread_mutex_lock(&r->lock);
        r->results[at] = result;
        r->num_late = ++r->num_ended;
        pthread_cond_broadcast(&r->progress);
    }
    pthread_mutex_unlock(&r->lock);
    return NULL;
}

/* Null if there is no memory, or no thread. model and pool must outlive the runner, and nobody else runs the pool
   while a step is under way. */
EXPORT struct runner *headrace_runner_new(const struct model *m, struct pool *pool) {
    struct runner *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->submitted, NULL);
    pthread_cond_init(&r->progress, NULL);
    r->decoder = decoder_new(m, pool);
    if (r->decoder) {
        r->decoder->runner = r;
        if (!pthread_create(&r->thread, NULL, run_steps, r)) return r;
        decoder_free(r->decoder);
    }
    free(r);
    return NULL;
}

/* After the step under way; those that wait are forgotten. */
EXPORT void headrace_runner_free(struct runner *r) {
    pthread_mutex_lock(&r->lock);
    r->stopping = 1;
    pthread_cond_broadcast(&r->submitted);
    pthread_cond_broadcast(&r->progress);
    pthread_mutex_unlock(&r->lock);
    pthread_join(r->thread, NULL);
    decoder_free(r->decoder);
    free(r);
}

/* A step in the caller's thread, while none is under way: 0, or -1 where there is no memory. */
EXPORT int headrace_runner_run(struct runner *r, const struct step *step) {
    r->decoder->runner = NULL; /* nobody waits for its being late */
    int result = decoder_step(r->decoder, step);
    r->decoder->runner = r;
    return result;
}

/* The same of all places of a head's chains. */
EXPORT int headrace_runner_chains(struct runner *r, struct chains *c) {
    r->decoder->runner = NULL;
    int result = decoder_chains(r->decoder, c);
    r->decoder->runner = r;
    return result;
}

/* The step's number, from 0 on; -1 if MAX_WAITING have not ended yet. Does not block. */
EXPORT int64_t headrace_runner_submit(struct runner *r, const struct step *step) {
    pthread_mutex_lock(&r->lock);
    int64_t number = -1;
    if (r->num_submitted - r->num_ended < MAX_WAITING) {
        number = r->num_submitted++;
        r->steps[number % MAX_WAITING] = step;
        pthread_cond_signal(&r->submitted);
    }
    pthread_mutex_unlock(&r->lock);
    return number;
}

/* The step has its masks now. Does not block. */
EXPORT void headrace_runner_allow(struct runner *r, struct step *step) {
    pthread_mutex_lock(&r->lock);
    step->awaits_masks = 0;
    pthread_cond_broadcast(&r->progress);
    pthread_mutex_unlock(&r->lock);
}

/* Has step `number`? Does not block. */
EXPORT int headrace_runner_has_ended(struct runner *r, int64_t number) {
    pthread_mutex_lock(&r->lock);
    int ended = r->num_ended > number;
    pthread_mutex_unlock(&r->lock);
    return ended;
}

/* Returns when step `number` is nearly over. */
EXPORT void headrace_runner_wait_until_late(struct runner *r, int64_t number) {
    pthread_mutex_lock(&r->lock);
    while (r->num_late <= number) pthread_cond_wait(&r->progress, &r->lock);
    pthread_mutex_unlock(&r->lock);
}

/* Returns when step `number` has ended: 0, or -1 where there was no memory. Of the last MAX_WAITING steps. */
EXPORT int headrace_runner_wait(struct runner *r, int64_t number) {
    pthread_mutex_lock(&r->lock);
    while (r->num_ended <= number) pthread_cond_wait(&r->progress, &r->lock);
    int result = r->results[number % MAX_WAITING];
    pthread_mutex_unlock(&r->lock);
    return result;
}
