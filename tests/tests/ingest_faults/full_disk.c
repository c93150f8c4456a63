/* A disk that is full while a file exists: preloaded into a server, it lets writes below the paths that the file names fail
   as a full file system does. A write may still take a part of its bytes first, so that torn tails are met too.
   FULL_DISK_FLAG names the file; what it holds must occur in a path for the path to be full. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* What a full path has in it; 0 when there is room everywhere. */
static int wanted(char *part, size_t size) {
    const char *flag = getenv("FULL_DISK_FLAG");
    if (!flag) return 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, flag, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) return 0;
    long n = syscall(SYS_read, fd, part, size - 1);
    syscall(SYS_close, fd);
    if (n <= 0) return 0;
    part[n] = 0;
    return 1;
}

static int full_path(const char *path) {
    int saved = errno;
    char part[256];
    int full = wanted(part, sizeof part) && strstr(path, part) != NULL;
    errno = saved;
    return full;
}

static int full(int fd) {
    int saved = errno, is = 0;
    char part[256], link[64], path[4096];
    if (wanted(part, sizeof part)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, path, sizeof path - 1);
        if (n > 0) {
            path[n] = 0;
            is = strstr(path, part) != NULL;
        }
    }
    errno = saved;
    return is;
}

/* Every second failure takes half of the bytes first. */
static size_t room(size_t n) {
    static unsigned calls;
    return __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED) % 2 ? 0 : n / 2;
}

#define NO_SPACE(value) do { errno = ENOSPC; return (value); } while (0)

ssize_t write(int fd, const void *data, size_t n) {
    if (full(fd) && (n = room(n)) == 0) NO_SPACE(-1);
    return REAL(write)(fd, data, n);
}

ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    if (full(fd) && (n = room(n)) == 0) NO_SPACE(-1);
    return REAL(pwrite)(fd, data, n, at);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    if (full(fd) && (n = room(n)) == 0) NO_SPACE(-1);
    return REAL(pwrite64)(fd, data, n, at);
}

ssize_t writev(int fd, const struct iovec *parts, int n) {
    if (full(fd)) NO_SPACE(-1);
    return REAL(writev)(fd, parts, n);
}

int fsync(int fd) {
    if (full(fd)) NO_SPACE(-1);
    return REAL(fsync)(fd);
}

int fdatasync(int fd) {
    if (full(fd)) NO_SPACE(-1);
    return REAL(fdatasync)(fd);
}

int fallocate(int fd, int mode, off_t at, off_t n) {
    if (full(fd)) NO_SPACE(-1);
    return REAL(fallocate)(fd, mode, at, n);
}

int posix_fallocate(int fd, off_t at, off_t n) {
    if (full(fd)) return ENOSPC;
    return REAL(posix_fallocate)(fd, at, n);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    if (full_path(to)) NO_SPACE(-1);
    return REAL(linkat)(from_folder, from, to_folder, to, flags);
}

int mkdir(const char *path, mode_t mode) {
    if (full_path(path)) NO_SPACE(-1);
    return REAL(mkdir)(path, mode);
}

/* A new file needs room too; one that is there is opened. */
#define OPEN(name, path, flags, call)                                                  \
    mode_t mode = 0;                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                             \
        va_list rest;                                                                  \
        va_start(rest, flags);                                                         \
        mode = va_arg(rest, mode_t);                                                   \
        va_end(rest);                                                                  \
    }                                                                                  \
    if (((flags) & O_CREAT) && access(path, F_OK) != 0 && full_path(path)) NO_SPACE(-1); \
    return call

int open(const char *path, int flags, ...) { OPEN(open, path, flags, REAL(open)(path, flags, mode)); }
int open64(const char *path, int flags, ...) { OPEN(open64, path, flags, REAL(open64)(path, flags, mode)); }
