/* Stands between a program and the C library, and lets a disk refuse or be slow for the files whose paths hold one of some words:
   LD_PRELOAD. What it does now stands in the file that $DISK_FAULT names, which is mapped: a byte for the fault ('f' full, 'i' no
   inodes, 'r' read-only, 's' slow, 0 none), at 4 how many calls it met (a 32-bit number), at 8 the words, each ended by 0, the last
   one by two. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define SIZE 4096
static volatile char *plan;
static char met(char fault) { __atomic_fetch_add((int *)(plan + 4), 1, __ATOMIC_RELAXED); return fault; }

__attribute__((constructor)) static void map_plan(void) {
    const char *path = getenv("DISK_FAULT");
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int file = path ? real(path, O_RDWR) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) plan = mapped;
}

static char fault_of(const char *path) {
    char fault = plan ? plan[0] : 0;
    if (!fault || !path) return 0;
    for (const char *word = (const char *)plan + 8; *word; word += strlen(word) + 1)
        if (strstr(path, word)) return fault;
    return 0;
}

static char fault_at(int folder, const char *path) {
    char link[64], place[4096];
    if (!plan || !plan[0] || !path) return 0;
    if (path[0] == '/' || folder == AT_FDCWD) return fault_of(path);
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, place, sizeof place - 1);
    if (size < 0) return fault_of(path);
    snprintf(place + size, sizeof place - size, "/%s", path);
    return fault_of(place);
}

static char fault_in(int file) {
    char link[64], place[4096];
    if (!plan || !plan[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, place, sizeof place - 1);
    if (size < 0) return 0;
    place[size] = 0;
    return fault_of(place);
}

#define REFUSED(code) (errno = (code), -1)
#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static int refused_open(int folder, const char *path, int flags) {
    char fault = fault_at(folder, path);
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
    if (fault == 'r' && writes) return met(EROFS);
    if (fault == 'i' && flags & O_CREAT && faccessat(folder, path, F_OK, 0) != 0) return met(ENOSPC);
    return 0;
}

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        int code = refused_open(AT_FDCWD, path, flags);                                     \
        return code ? REFUSED(code) : REAL(name)(path, flags, mode);                        \
    }
#define OPENAT(name)                                                                        \
    int name(int folder, const char *path, int flags, ...) {                                \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        int code = refused_open(folder, path, flags);                                       \
        return code ? REFUSED(code) : REAL(name)(folder, path, flags, mode);                \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

static int refused_write(int file) {
    char fault = fault_in(file);
    return fault == 'f' ? met(ENOSPC) : fault == 'r' ? met(EROFS) : 0;
}

#define WRITE(type, name, parameters, arguments, file)                  \
    type name parameters {                                              \
        int code = refused_write(file);                                 \
        return code ? REFUSED(code) : REAL(name) arguments;             \
    }
WRITE(ssize_t, write, (int file, const void *bytes, size_t size), (file, bytes, size), file)
WRITE(ssize_t, pwrite, (int file, const void *bytes, size_t size, off_t at), (file, bytes, size, at), file)
WRITE(ssize_t, pwrite64, (int file, const void *bytes, size_t size, off64_t at), (file, bytes, size, at), file)
WRITE(ssize_t, writev, (int file, const struct iovec *parts, int number), (file, parts, number), file)
WRITE(ssize_t, copy_file_range, (int from, off64_t *at, int file, off64_t *to, size_t size, unsigned flags),
      (from, at, file, to, size, flags), file)
ssize_t sendfile(int, int, off_t *, size_t);
WRITE(ssize_t, sendfile, (int file, int from, off_t *at, size_t size), (file, from, at, size), file)
ssize_t sendfile64(int, int, off64_t *, size_t);
WRITE(ssize_t, sendfile64, (int file, int from, off64_t *at, size_t size), (file, from, at, size), file)

#define FLUSH(name)                                 \
    int name(int file) {                            \
        char fault = fault_in(file);                \
        if (fault == 's') sleep(12 + 0 * met(0));   \
        return fault == 'r' ? REFUSED(met(EROFS)) : REAL(name)(file); \
    }
FLUSH(fsync) FLUSH(fdatasync)

#define MAKE(name, parameters, arguments, path)                                     \
    int name parameters {                                                           \
        char fault = fault_of(path);                                                \
        if (fault == 'r') return REFUSED(met(EROFS));                               \
        if (fault == 'i' && access(path, F_OK) != 0) return REFUSED(met(ENOSPC));   \
        return REAL(name) arguments;                                                \
    }
MAKE(mkdir, (const char *path, mode_t mode), (path, mode), path)
MAKE(symlink, (const char *to, const char *path), (to, path), path)

#define MOVE(name, parameters, arguments, path) \
    int name parameters { return fault_of(path) == 'r' ? REFUSED(met(EROFS)) : REAL(name) arguments; }
MOVE(rename, (const char *from, const char *path), (from, path), path)
MOVE(unlink, (const char *path), (path), path)
MOVE(rmdir, (const char *path), (path), path)
