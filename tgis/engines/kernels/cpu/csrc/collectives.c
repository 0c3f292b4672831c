/* Sums and concatenations over the ranks of one machine, through memory that they share. */

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "simd.h"

#define PARALLEL_ELEMENTS 16384 /* fewer are not worth waking the other threads */
#define SPINS 256               /* before the CPU is given to others, which may be other ranks */
#define YIELDS 16384            /* before sleeping: a rank may be loading, or be stopped */

/* A rank's view of the memory: a counter for each rank, a cache line apart, then two slots for each rank. */
typedef struct {
    uint8_t *memory;
    int64_t rank, num_ranks, slot_bytes; /* slot_bytes: a multiple of CACHE_LINE */
    int64_t num_rounds;                  /* that this rank has taken part in */
} rank_group;

static _Atomic uint64_t *counter(const rank_group *group, int64_t rank) {
    return (_Atomic uint64_t *)(group->memory + rank * CACHE_LINE);
}

/* What a rank gives in a round lies there until the round after the next: a rank that writes it has seen all others in the
   round between, so that they have read it. */
static scalar_t *slot(const rank_group *group, int64_t rank) {
    const int64_t index = 2 * rank + group->num_rounds % 2;
    return (scalar_t *)(group->memory + group->num_ranks * CACHE_LINE + index * group->slot_bytes);
}

static void wait_for(const _Atomic uint64_t *arrived, uint64_t round) {
    for (int64_t tries = 0; atomic_load_explicit(arrived, memory_order_acquire) < round; tries++) {
        if (tries >= SPINS + YIELDS)
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        else if (tries >= SPINS)
            sched_yield();
#if defined(__x86_64__)
        else
            __builtin_ia32_pause();
#endif
    }
}

/* Give `count` numbers to the others, and wait for theirs. */
static void exchange(rank_group *group, const scalar_t *x, int64_t count, int64_t threads) {
    group->num_rounds++;
    scalar_t *mine = slot(group, group->rank);
#pragma omp parallel for schedule(static) num_threads(threads) if (count >= PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) memcpy(mine + i, x + i, min_i64(LANES, count - i) * sizeof *x);
    atomic_store_explicit(counter(group, group->rank), group->num_rounds, memory_order_release);
    for (int64_t rank = 0; rank < group->num_ranks; rank++) wait_for(counter(group, rank), group->num_rounds);
}

/* x [size] becomes the sum over all ranks, which is added in their order and rounded once. */
void EXPORT(all_reduce)(rank_group *group, scalar_t *x, int64_t size, int64_t threads) {
    const int64_t most = group->slot_bytes / sizeof *x;
    for (int64_t start = 0; start < size; start += most) {
        const int64_t count = min_i64(most, size - start);
        exchange(group, x + start, count, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (count >= PARALLEL_ELEMENTS)
        for (int64_t i = 0; i < count; i += LANES) {
            f32_vec sum = {0};
            for (int64_t rank = 0; rank < group->num_ranks; rank++) sum += load_partial(slot(group, rank) + i, count - i);
            store_partial(x + start + i, sum, count - i);
        }
    }
}

/* y [rows, ranks, size] from x [rows, size] of each rank, in their order. */
void EXPORT(all_gather)(rank_group *group, const scalar_t *x, scalar_t *y, int64_t rows, int64_t size, int64_t threads) {
    const int64_t most = max_i64(group->slot_bytes / sizeof *x / size, 1); /* rows; a row fits into a slot */
    for (int64_t start = 0; start < rows; start += most) {
        const int64_t count = min_i64(most, rows - start);
        exchange(group, x + start * size, count * size, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (count * size >= PARALLEL_ELEMENTS)
        for (int64_t row = 0; row < count; row++)
            for (int64_t rank = 0; rank < group->num_ranks; rank++)
                memcpy(y + ((start + row) * group->num_ranks + rank) * size, slot(group, rank) + row * size, size * sizeof *y);
    }
}
