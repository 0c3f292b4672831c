/* The tile registers of AMX, each up to 16 rows of 64 bytes. The libraries without HAS_AMX never call what is here. */

#ifndef AMX_H
#define AMX_H

#include <stdint.h>

#if defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

/* What LDTILECFG reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* `stride` is in elements. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((stride) * sizeof *(from)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((stride) * sizeof *(to)) : "memory")
/* sums += x * weights: in bfloat16 by tdpbf16ps; by tdpbsud for signed bytes of x and unsigned bytes of weights. */
#define TILE_MULTIPLY_ADD(instruction, sums, x, weights) \
    __asm__ volatile(instruction " %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums ::)

/* Tiles without rows stay unused. */
static inline void configure_tiles(const uint8_t rows[8], const uint8_t row_bytes[8]) {
    tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.rows[tile] = rows[tile], config.row_bytes[tile] = row_bytes[tile];
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

static inline void release_tiles(void) { __asm__ volatile("tilerelease" ::); }

#endif
