/* Opening shared libraries whose names come from outside. */
#include "base/base.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

void *oh_library_open(const char *name, char *why_out, size_t size) {
    struct stat s;
    if (strchr(name, '/') && !stat(name, &s) && !S_ISREG(s.st_mode)) {
        snprintf(why_out, size, "%s is no regular file", name);
        return NULL;
    }
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) snprintf(why_out, size, "%s", dlerror());
    return library;
}
