/* Clocks that a test moves on, for whoever is started with this in LD_PRELOAD.

   LEAP=FILE   holds nanoseconds (int64) by which all clocks are ahead; a process that waits for a time looks again
               every few milliseconds, and goes on once the clock has got there */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define SLICE_MS 10

static const int64_t none;
static const volatile int64_t *ahead = &none;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("LEAP");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED)
        ahead = found;
    if (fd >= 0)
        close(fd);
}

static int moves(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC || clock == CLOCK_BOOTTIME;
}

static int64_t in_ns(const struct timespec *time) { return time->tv_sec * SECOND + time->tv_nsec; }

static struct timespec of_ns(int64_t ns) { return (struct timespec){ns / SECOND, ns % SECOND}; }

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static __typeof__(&clock_gettime) real;
    if (!real)
        real = REAL(clock_gettime);
    int result = real(clock, now);
    if (result == 0 && moves(clock))
        *now = of_ns(in_ns(now) + *ahead);
    return result;
}

time_t time(time_t *where)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}

static int64_t now_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return in_ns(&now);
}

/* How long to wait now, in ms, for something that is due at `end`: 0 where it is. */
static int slice(int64_t end)
{
    int64_t left = (end - now_ns(CLOCK_MONOTONIC) + 999999) / 1000000;
    return left <= 0 ? 0 : left < SLICE_MS ? (int)left : SLICE_MS;
}

int epoll_wait(int fd, struct epoll_event *events, int most, int timeout)
{
    __typeof__(&epoll_wait) real = REAL(epoll_wait);
    int64_t end = now_ns(CLOCK_MONOTONIC) + timeout * 1000000LL;
    int found, wait;
    if (timeout <= 0)
        return real(fd, events, most, timeout);
    do {
        wait = slice(end);
        found = real(fd, events, most, wait);
    } while (found == 0 && wait);
    return found;
}

int poll(struct pollfd *fds, nfds_t count, int timeout)
{
    __typeof__(&poll) real = REAL(poll);
    int64_t end = now_ns(CLOCK_MONOTONIC) + timeout * 1000000LL;
    int found, wait;
    if (timeout <= 0)
        return real(fds, count, timeout);
    do {
        wait = slice(end);
        found = real(fds, count, wait);
    } while (found == 0 && wait);
    return found;
}

int select(int count, fd_set *read, fd_set *write, fd_set *except, struct timeval *timeout)
{
    __typeof__(&select) real = REAL(select);
    if (!timeout || count)
        return real(count, read, write, except, timeout);
    struct timespec time = {timeout->tv_sec, timeout->tv_usec * 1000};
    return nanosleep(&time, NULL);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left)
{
    (void)left;
    int64_t end = in_ns(wanted) + (flags & TIMER_ABSTIME ? 0 : now_ns(clock));
    int64_t remaining;
    while ((remaining = end - now_ns(clock)) > 0) {
        struct timespec nap = of_ns(remaining < SLICE_MS * 1000000 ? remaining : SLICE_MS * 1000000);
        int error = REAL(clock_nanosleep)(CLOCK_MONOTONIC, 0, &nap, NULL);
        if (error)
            return error;
    }
    return 0;
}

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    int error = clock_nanosleep(CLOCK_MONOTONIC, 0, wanted, left);
    errno = error;
    return error ? -1 : 0;
}

int sem_clockwait(sem_t *sem, clockid_t clock, const struct timespec *end)
{
    struct timespec real_end = of_ns(in_ns(end) - *ahead);
    return REAL(sem_clockwait)(sem, clock, &real_end);
}
