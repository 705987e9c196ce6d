/* Preloaded into every process: refuses and records each address that is not loopback or local. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void record(const char *what, const char *name) {
  char line[512];
  const char *path = getenv("ONLY_LOOPBACK_LOG");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  if (file < 0) return;
  int length = snprintf(line, sizeof line, "%d %s %s %s\n", (int)getpid(), program_invocation_name, what, name);
  if (write(file, line, length) < 0) {}
  close(file);
}

static int allowed(const struct sockaddr *address, const char *what) {
  char text[64] = "";
  if (address == NULL || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return 1;
  if (address->sa_family == AF_INET) {
    const struct in_addr *four = &((const struct sockaddr_in *)address)->sin_addr;
    if ((ntohl(four->s_addr) >> 24) == 127 || four->s_addr == 0) return 1;
    inet_ntop(AF_INET, four, text, sizeof text);
  } else {
    const struct in6_addr *six = &((const struct sockaddr_in6 *)address)->sin6_addr;
    if (IN6_IS_ADDR_LOOPBACK(six) || IN6_IS_ADDR_UNSPECIFIED(six)) return 1;
    if (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == 127) return 1;
    inet_ntop(AF_INET6, six, text, sizeof text);
  }
  record(what, text);
  errno = EACCES;
  return 0;
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
  return allowed(address, "connect") ? real(fd, address, length) : -1;
}

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *address, socklen_t length) {
  ssize_t (*real)(int, const void *, size_t, int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "sendto");
  return allowed(address, "sendto") ? real(fd, data, size, flags, address, length) : -1;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
  char own[256] = "";
  gethostname(own, sizeof own - 1);
  int numeric = node != NULL && (strchr(node, ':') != NULL || strspn(node, "0123456789.") == strlen(node));
  if (node == NULL || numeric || strcmp(node, "localhost") == 0 || strcmp(node, own) == 0) return real(node, service, hints, found);
  record("getaddrinfo", node);
  return EAI_FAIL;
}
