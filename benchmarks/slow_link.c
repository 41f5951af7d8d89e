/* A slow network between processes of one machine: what gloo writes takes as long as on a link of $SLOW_LINK bytes a
   second, given as "BYTES_A_SECOND SECONDS_OF_A_MESSAGE".

   A library for LD_PRELOAD. gloo sends by writev, and nothing else here does to another machine. The writer sleeps, so
   the link takes no processor time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

static double rate = 0.0, latency = 0.0;

__attribute__((constructor)) static void find(void) {
  const char *given = getenv("SLOW_LINK");
  if (given != NULL && sscanf(given, "%lf %lf", &rate, &latency) != 2) rate = 0.0;
}

static int is_network(int file) {
  int domain = 0;
  socklen_t size = sizeof domain;
  return getsockopt(file, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
  static __typeof__(&writev) next;
  if (next == NULL) next = (__typeof__(&writev))dlsym(RTLD_NEXT, "writev");
  ssize_t sent = next(file, parts, count);
  if (sent > 0 && rate > 0.0 && is_network(file)) {
    double seconds = latency + sent / rate;
    struct timespec left = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
    while (nanosleep(&left, &left) != 0) continue;
  }
  return sent;
}
