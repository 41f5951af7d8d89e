/* The clock on the wall, moved by as many nanoseconds as the first eight bytes of the file $JUMPING_CLOCK say.

   A library for LD_PRELOAD. Reads of CLOCK_REALTIME are moved, and deadlines on it are moved back, so that a wait lasts
   as long as it was asked to. The monotonic clocks, and the times of files, stay. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef struct timespec Time;

static const long long none = 0;
static const volatile long long *moved = &none;

__attribute__((constructor)) static void find(void) {
  const char *path = getenv("JUMPING_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *at = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  if (at != MAP_FAILED) moved = at;
}

static Time plus(Time time, long long by) {
  const long long second = 1000000000;
  time.tv_sec += by / second;
  time.tv_nsec += by % second;
  if (time.tv_nsec >= second) time.tv_sec += 1, time.tv_nsec -= second;
  if (time.tv_nsec < 0) time.tv_sec -= 1, time.tv_nsec += second;
  return time;
}

static int on_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

/* A deadline of the moved clock, on the true one. */
static const Time *true_deadline(const Time *deadline, Time *held) {
  if (deadline == NULL) return NULL;
  *held = plus(*deadline, -*moved);
  if (held->tv_sec < 0) *held = (Time){0, 0};
  return held;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, Time *now) {
  static __typeof__(&clock_gettime) next;
  if (next == NULL) next = NEXT(clock_gettime);
  int code = next(clock, now);
  if (code == 0 && on_wall(clock)) *now = plus(*now, *moved);
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  Time exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now != NULL) *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
  return 0;
}

time_t time(time_t *now) {
  Time exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (now != NULL) *now = exact.tv_sec;
  return exact.tv_sec;
}

int timespec_get(Time *now, int base) {
  if (base != TIME_UTC) return 0;
  clock_gettime(CLOCK_REALTIME, now);
  return base;
}

int clock_nanosleep(clockid_t clock, int flags, const Time *until, Time *left) {
  Time held;
  if (on_wall(clock) && (flags & TIMER_ABSTIME)) until = true_deadline(until, &held);
  return NEXT(clock_nanosleep)(clock, flags, until, left);
}

/* Which clock a condition waits on stands in its attributes: glibc keeps it in the second bit of __wrefs. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const Time *deadline) {
  static __typeof__(&pthread_cond_timedwait) next;
  if (next == NULL) next = (__typeof__(next))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (next == NULL) next = NEXT(pthread_cond_timedwait);
  Time held;
  if (!(condition->__data.__wrefs & 2)) deadline = true_deadline(deadline, &held);
  return next(condition, mutex, deadline);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const Time *deadline) {
  Time held;
  if (on_wall(clock)) deadline = true_deadline(deadline, &held);
  return NEXT(pthread_cond_clockwait)(condition, mutex, clock, deadline);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const Time *restrict deadline) {
  Time held;
  return NEXT(pthread_mutex_timedlock)(mutex, true_deadline(deadline, &held));
}

int sem_timedwait(sem_t *restrict semaphore, const Time *restrict deadline) {
  Time held;
  return NEXT(sem_timedwait)(semaphore, true_deadline(deadline, &held));
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const Time *restrict deadline) {
  Time held;
  if (on_wall(clock)) deadline = true_deadline(deadline, &held);
  return NEXT(sem_clockwait)(semaphore, clock, deadline);
}

/* Abseil's mutexes wait on a futex by themselves. */
long syscall(long number, ...) {
  static __typeof__(&syscall) next;
  if (next == NULL) next = NEXT(syscall);
  __builtin_va_list more;
  __builtin_va_start(more, number);
  long a[6];
  for (int i = 0; i < 6; i++) a[i] = __builtin_va_arg(more, long);
  __builtin_va_end(more);
  Time held;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] != 0) a[3] = (long)true_deadline((void *)a[3], &held);
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
