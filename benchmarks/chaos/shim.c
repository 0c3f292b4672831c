// Preloaded into the server: a clock, a disk and a log that misbehave while a page shared with the soak says so.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t clock_offset;   // seconds, added to the time of day
    volatile int64_t open_delay_ms;  // of files below the directory
    volatile int64_t log_full;       // no space left for stdout and stderr
};

static struct control none;
static struct control *control = &none;
static const char *directory;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("CHAOS_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *page = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    directory = getenv("CHAOS_DIRECTORY");
    if (page != MAP_FAILED) control = page;
}

#define REAL(name)                                                    \
    static __typeof__(&name) real;                                    \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += control->clock_offset;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    now->tv_sec += control->clock_offset;
    return result;
}

time_t time(time_t *result) {
    REAL(time);
    time_t now = real(NULL) + control->clock_offset;
    if (result) *result = now;
    return now;
}

static void wait_for_disk(const char *path) {
    if (control->open_delay_ms && directory && !strncmp(path, directory, strlen(directory))) {
        struct timespec delay = {control->open_delay_ms / 1000, control->open_delay_ms % 1000 * 1000000};
        nanosleep(&delay, NULL);
    }
}

#define OPEN(name)                                    \
    int name(const char *path, int flags, ...) {      \
        REAL(name);                                   \
        va_list more;                                 \
        va_start(more, flags);                        \
        mode_t mode = va_arg(more, mode_t);           \
        va_end(more);                                 \
        wait_for_disk(path);                          \
        return real(path, flags, mode);               \
    }

OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (control->log_full && (fd == STDOUT_FILENO || fd == STDERR_FILENO)) {
        errno = ENOSPC;
        return -1;
    }
    return real(fd, data, size);
}
