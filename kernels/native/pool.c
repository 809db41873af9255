/* Threads that share the work of a step: phases one after the other, each cut into pieces.

   Each thread has a share of a phase, pieces that lie side by side, so that it reads on where it has read; when that
   is done it takes from the others' shares. A phase is over when its pieces are done, not when all threads have
   arrived: a thread that the system has taken off its core delays the one piece it holds, and nothing if it holds
   none. Whoever finishes a phase's last piece opens the next one. Threads with nothing to do spin for SPIN_NS and then
   sleep. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "native.h"

#define SPIN_NS 50000
#define MAX_HANDED_OUT 32768 /* in a phase: 16 bits, with room for every thread to ask once in vain */
#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

#define PARTS_AHEAD 32 /* small enough that a processor does not drop what it cannot fetch at once */

#define OVER 0xffffu /* where a share ends once the task has no more phases */

/* Sequence number of the phase (32 bits), the end of the share (16), its next run of pieces to hand out (16). In one
   word, since a thread must not judge a run of one phase by the share of another. */
struct share {
    _Alignas(64) _Atomic uint64_t ticket;
};

/* What a thread will read next, and how many parts of all that it has fetched. */
struct reader {
    struct reading readings[MAX_READINGS];
    int num_readings, num_parts;
};

struct pool {
    _Alignas(64) _Atomic uint32_t num_done;
    _Alignas(64) _Atomic uint32_t num_sleeping;
    _Atomic int stopping;
    uint32_t first_phase;  /* sequence number of the task's phase 0 */
    uint32_t num_runs;     /* of the phase */
    int num_pieces, run;   /* of the phase; so many pieces are handed out together: one, if there are not very many */
    const struct task *task;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int num_threads;
    pthread_t *threads;
    struct share shares[];
};

static uint32_t phase_of(uint64_t ticket) { return (uint32_t)(ticket >> 32); }
static uint32_t end_of(uint64_t ticket) { return ticket >> 16 & 0xffff; }
static uint32_t next_of(uint64_t ticket) { return ticket & 0xffff; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Opens the first phase from this one on that has pieces, or the state after the last one. */
static void open_phase(struct pool *p, uint32_t phase) {
    int pieces = 0;
    while ((int)(phase - p->first_phase) < p->task->num_phases) {
        pieces = p->task->prepare(p->task->context, (int)(phase - p->first_phase));
        if (pieces > 0) break;
        phase++;
    }
    p->num_pieces = pieces;
    p->run = (pieces + MAX_HANDED_OUT - 1) / MAX_HANDED_OUT;
    p->num_runs = pieces ? (uint32_t)((pieces + p->run - 1) / p->run) : 0;
    atomic_store_explicit(&p->num_done, 0, memory_order_release);
    /* The last share is never empty, so the phase is not over before it is there; and the task is over for its caller
       only when that is known to all others. */
    for (int i = 0; pieces && i < p->num_threads; i++) {
        uint64_t first = (uint64_t)p->num_runs * i / p->num_threads;
        uint64_t end = (uint64_t)p->num_runs * (i + 1) / p->num_threads;
        atomic_store_explicit(&p->shares[i].ticket, (uint64_t)phase << 32 | end << 16 | first, memory_order_release);
    }
    for (int i = p->num_threads - 1; !pieces && i >= 0; i--)
        atomic_store_explicit(&p->shares[i].ticket, (uint64_t)phase << 32 | OVER << 16, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst); /* whoever sleeps has seen the ticket, or is seen here */
    if (atomic_load(&p->num_sleeping)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->changed);
        pthread_mutex_unlock(&p->lock);
    }
}

/* Another part of what will be read. Where that lay may be gone by now, which a prefetch does not mind. */
static void fetch_some(struct reader *r) {
    if (r->num_parts == PARTS_AHEAD) return;
    for (int i = 0; i < r->num_readings; i++) {
        int64_t bytes = r->readings[i].num_bytes / PARTS_AHEAD;
        const char *start = (const char *)r->readings[i].start + r->num_parts * bytes;
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(start + at);
    }
    r->num_parts++;
}

static void wait_for_other_than(struct pool *p, uint32_t phase, int thread, struct reader *reader) {
    _Atomic uint64_t *ticket = &p->shares[thread].ticket;
    int64_t until = 0;
    for (int i = 1; phase_of(atomic_load_explicit(ticket, memory_order_acquire)) == phase; i++) {
        fetch_some(reader);
        RELAX();
        if (i % 64) continue;
        int64_t now = now_ns();
        if (until == 0) until = now + SPIN_NS;
        if (now < until) continue;
        pthread_mutex_lock(&p->lock);
        atomic_fetch_add(&p->num_sleeping, 1);
        while (phase_of(atomic_load(ticket)) == phase && !atomic_load(&p->stopping))
            pthread_cond_wait(&p->changed, &p->lock);
        atomic_fetch_sub(&p->num_sleeping, 1);
        pthread_mutex_unlock(&p->lock);
        return;
    }
}

static void run_pieces(struct pool *p, int phase, int run, int thread) {
    const struct task *task = p->task;
    int first = run * p->run, left = p->num_pieces - first, end = first + (left < p->run ? left : p->run);
    for (int piece = first; piece < end; piece++) task->run(task->context, phase, piece, thread);
}

/* Takes a run of a share; 0 if all are handed out. */
static int take_run(struct share *share, uint64_t *ticket) {
    uint64_t seen = atomic_load(&share->ticket);
    if (next_of(seen) >= end_of(seen) || end_of(seen) == OVER) return 0;
    *ticket = atomic_fetch_add(&share->ticket, 1);
    return next_of(*ticket) < end_of(*ticket) && end_of(*ticket) != OVER;
}

/* Runs what is left of a share, but of another's one run only, since its owner is quicker with what follows; 0 if
   nothing is. What is done is told at the end: before that the phase is not over, whoever holds a run of it. */
static int run_share(struct pool *p, int owner, int thread, struct reader *reader) {
    uint64_t ticket, last = 0;
    uint32_t done = 0;
    while ((done == 0 || owner == thread) && take_run(&p->shares[owner], &ticket)) {
        run_pieces(p, (int)(phase_of(ticket) - p->first_phase), (int)next_of(ticket), thread);
        last = ticket;
        done++;
    }
    if (!done) return 0; /* and nothing of the pool's may be read: somebody may be opening a phase */
    if (owner == thread && p->task->ahead) {
        reader->num_readings =
            p->task->ahead(p->task->context, (int)(phase_of(last) - p->first_phase), thread, reader->readings);
        reader->num_parts = 0;
        fetch_some(reader);
    }
    uint32_t runs = p->num_runs; /* of this phase, which is not over before the next line */
    if (atomic_fetch_add(&p->num_done, done) + done == runs) open_phase(p, phase_of(last) + 1);
    return 1;
}

static int run_some(struct pool *p, int thread, struct reader *reader) {
    for (int i = 0; i < p->num_threads; i++)
        if (run_share(p, (thread + i) % p->num_threads, thread, reader)) return 1;
    return 0;
}

/* Takes pieces until the present task is over; the number of the phase after its last one. */
static uint32_t work(struct pool *p, int thread, struct reader *reader) {
    for (;;) {
        uint64_t own = atomic_load(&p->shares[thread].ticket);
        if (end_of(own) == OVER) return phase_of(own);
        if (!run_some(p, thread, reader)) wait_for_other_than(p, phase_of(own), thread, reader);
    }
}

struct start {
    struct pool *pool;
    int thread;
};

static void *run_thread(void *argument) {
    struct start start = *(struct start *)argument;
    free(argument);
    struct reader reader = {.num_parts = PARTS_AHEAD};
    while (!atomic_load(&start.pool->stopping)) {
        uint32_t over = work(start.pool, start.thread, &reader);
        wait_for_other_than(start.pool, over, start.thread, &reader);
    }
    return NULL;
}

/* Runs a task on the caller's thread and the pool's; one task at a time. */
void pool_run(struct pool *p, const struct task *task) {
    uint32_t phase = phase_of(atomic_load(&p->shares[0].ticket)) + 1;
    p->task = task;
    p->first_phase = phase;
    open_phase(p, phase);
    struct reader reader = {.num_parts = PARTS_AHEAD};
    work(p, 0, &reader);
}

int pool_num_threads(const struct pool *p) { return p->num_threads; }

/* num_threads counts the caller's; fewer if the system gives no more. Null if there is no memory. */
EXPORT struct pool *headrace_pool_new(int num_threads) {
    struct pool *p = aligned_alloc(64, sizeof(struct pool) + sizeof(struct share) * (size_t)num_threads);
    if (!p) return NULL;
    p->threads = malloc(sizeof(pthread_t) * (size_t)num_threads);
    if (!p->threads) {
        free(p);
        return NULL;
    }
    for (int i = 0; i < num_threads; i++) atomic_init(&p->shares[i].ticket, (uint64_t)OVER << 16);
    atomic_init(&p->num_done, 0);
    atomic_init(&p->num_sleeping, 0);
    atomic_init(&p->stopping, 0);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    p->num_threads = 1;
    for (int i = 1; i < num_threads; i++) {
        struct start *start = malloc(sizeof *start);
        if (!start) break;
        *start = (struct start){p, i};
        if (pthread_create(&p->threads[i], NULL, run_thread, start)) {
            free(start);
            break;
        }
        p->num_threads++;
    }
    return p;
}

EXPORT void headrace_pool_free(struct pool *p) {
    atomic_store(&p->stopping, 1);
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    for (int i = 1; i < p->num_threads; i++) pthread_join(p->threads[i], NULL);
    free(p->threads);
    free(p);
}
