/* AMX for CPUs without it: emulates, where they raise SIGILL, the instructions of amx.h as Intel's manual describes them
   (Software Developer's Manual, volume 2). What a CPU would answer with a fault ends the process. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define FLUSH_DENORMALS 0x8040 /* FTZ and DAZ of MXCSR */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[8], reserved_row_bytes[8];
    uint8_t rows[8], reserved_rows[8];
} tile_config;

static _Thread_local tile_config config;
static _Thread_local uint8_t tiles[8][16][64];

static void require(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "amx_emulator: %s\n", what);
    abort();
}

static void load_config(const tile_config *from) {
    static const uint8_t zeros[16];
    config = *from;
    require(config.palette == 1, "palette");
    require(!memcmp(config.reserved, zeros, 14) && !memcmp(config.reserved_row_bytes, zeros, 16), "reserved bytes");
    require(!memcmp(config.reserved_rows, zeros, 8), "reserved rows");
    for (int i = 0; i < 8; i++) {
        require(config.rows[i] <= 16 && config.row_bytes[i] <= 64, "size of a tile");
        require(!config.rows[i] == !config.row_bytes[i], "rows without columns, or columns without rows");
    }
    memset(tiles, 0, sizeof tiles);
}

static void require_tile(int tile) { require(config.palette == 1 && config.rows[tile], "a tile that is not configured"); }

static void load_tile(int tile, const char *from, int64_t stride) {
    require_tile(tile);
    memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int row = 0; row < config.rows[tile]; row++) memcpy(tiles[tile][row], from + row * stride, config.row_bytes[tile]);
}

static void store_tile(int tile, char *to, int64_t stride) {
    require_tile(tile);
    for (int row = 0; row < config.rows[tile]; row++) memcpy(to + row * stride, tiles[tile][row], config.row_bytes[tile]);
}

static float from_bf16(const uint8_t *bytes) {
    uint32_t bits = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[1] << 24;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void require_product(int sums, int a, int b) {
    require_tile(sums), require_tile(a), require_tile(b);
    require(sums != a && sums != b && a != b, "the same tile twice");
    require(config.rows[sums] == config.rows[a] && config.row_bytes[sums] == config.row_bytes[b], "sizes of tiles differ");
    require(config.row_bytes[a] == 4 * config.rows[b], "inner sizes of tiles differ");
}

/* TDPBF16PS: of each pair, the first elements are summed up apart from the second. */
static void multiply_add(int sums, int a, int b) {
    require_product(sums, a, b);
    for (int row = 0; row < config.rows[sums]; row++)
        for (int column = 0; column < config.row_bytes[sums] / 4; column++) {
            float parts[2] = {0, 0}, sum;
            for (int k = 0; k < config.rows[b]; k++)
                for (int i = 0; i < 2; i++)
                    parts[i] = fmaf(
                        from_bf16(tiles[a][row] + 4 * k + 2 * i), from_bf16(tiles[b][k] + 4 * column + 2 * i), parts[i]
                    );
            memcpy(&sum, tiles[sums][row] + 4 * column, sizeof sum);
            sum += parts[0] + parts[1];
            memcpy(tiles[sums][row] + 4 * column, &sum, sizeof sum);
        }
    memset(tiles[sums][config.rows[sums]], 0, (16 - config.rows[sums]) * 64);
}

/* TDPBSUD: signed bytes of a, unsigned ones of b. */
static void multiply_add_bytes(int sums, int a, int b) {
    require_product(sums, a, b);
    for (int row = 0; row < config.rows[sums]; row++)
        for (int column = 0; column < config.row_bytes[sums] / 4; column++) {
            uint32_t sum; /* wraps around */
            memcpy(&sum, tiles[sums][row] + 4 * column, sizeof sum);
            for (int byte = 0; byte < config.row_bytes[a]; byte++)
                sum += (int8_t)tiles[a][row][byte] * tiles[b][byte / 4][4 * column + byte % 4];
            memcpy(tiles[sums][row] + 4 * column, &sum, sizeof sum);
        }
    memset(tiles[sums][config.rows[sums]], 0, (16 - config.rows[sums]) * 64);
}

/* The registers that ModRM and SIB number, in their order there. */
static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* A memory operand. */
typedef struct {
    char *address; /* without the index */
    int64_t index; /* scaled; the stride of a tile */
    int length;    /* bytes of ModRM, SIB and displacement */
} operand;

static operand memory_operand(const uint8_t *modrm, const uint8_t *vex, const greg_t *registers) {
    const int mod = modrm[0] >> 6, has_sib = (modrm[0] & 7) == 4, base = (has_sib ? modrm[1] : modrm[0]) & 7;
    require(mod != 3 && !(mod == 0 && base == 5), "an address of another form");
    operand found = {(char *)registers[REGISTERS[base | (vex[1] & 0x20 ? 0 : 8)]], 0, 1 + has_sib};
    if (has_sib) {
        const int index = (modrm[1] >> 3 & 7) | (vex[1] & 0x40 ? 0 : 8);
        if (index != 4) found.index = registers[REGISTERS[index]] << (modrm[1] >> 6);
    }
    int32_t displacement = 0;
    if (mod == 1) displacement = (int8_t)modrm[found.length], found.length += 1;
    if (mod == 2) memcpy(&displacement, modrm + found.length, 4), found.length += 4;
    found.address += displacement;
    return found;
}

static void on_illegal_instruction(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *vex = (const uint8_t *)registers[REG_RIP], *modrm = vex + 4;
    const int prefix = vex[2] & 3, opcode = vex[3], reg = modrm[0] >> 3 & 7, is_memory = modrm[0] >> 6 != 3;
    (void)info;
    if (vex[0] != 0xc4 || (vex[1] & 0x1f) != 2 || (vex[2] & 0x84)) { /* VEX.128.0F38.W0 */
        signal(signal_number, SIG_DFL);
        return;
    }
    _mm_setcsr(_mm_getcsr() | FLUSH_DENORMALS); /* until the signal handler returns */
    operand memory = {0, 0, 1};
    if (is_memory) memory = memory_operand(modrm, vex, registers);
    if (opcode == 0x49 && prefix == 0 && is_memory) load_config((const tile_config *)(memory.address + memory.index));
    else if (opcode == 0x49 && prefix == 0 && modrm[0] == 0xc0) memset(&config, 0, sizeof config); /* TILERELEASE */
    else if (opcode == 0x4b && prefix == 3 && is_memory) load_tile(reg, memory.address, memory.index);
    else if (opcode == 0x4b && prefix == 2 && is_memory) store_tile(reg, memory.address, memory.index);
    else if (opcode == 0x5c && prefix == 2 && !is_memory) multiply_add(reg, modrm[0] & 7, ~vex[2] >> 3 & 15);
    else if (opcode == 0x5e && prefix == 2 && !is_memory) multiply_add_bytes(reg, modrm[0] & 7, ~vex[2] >> 3 & 15);
    else require(0, "an instruction that is not emulated");
    registers[REG_RIP] += 4 + memory.length;
}

void emulate_amx(void) {
    struct sigaction action = {.sa_sigaction = on_illegal_instruction, .sa_flags = SA_SIGINFO};
    sigaction(SIGILL, &action, NULL);
}
