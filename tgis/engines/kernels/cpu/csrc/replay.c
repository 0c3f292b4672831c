/* Replays recorded calls of the other kernels. */

#include "simd.h"

#define MAX_ARGUMENTS 14 /* as in replay.py */

typedef struct {
    void *function;
    int64_t returns_status; /* 0 is success */
    int64_t arguments[MAX_ARGUMENTS];
} recorded_call;

/* Any kernel: all take nothing but pointers and int64_t, which the calling conventions of x86-64 and AArch64 pass alike,
   and ignore what they are given beyond their own parameters. */
typedef int (*kernel)(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t
);

/* Returns 0, or the number of the call that failed, from 1 on; those after it are not made. */
int64_t EXPORT(replay)(const recorded_call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t *a = calls[i].arguments;
        const int status = ((kernel)calls[i].function)(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]
        );
        if (calls[i].returns_status && status) return i + 1;
    }
    return 0;
}
