/* A machine with little memory, for a program that valgrind runs: a session's file of results takes address space for twice the memory of
 * the machine, and valgrind has 128 GiB to give in all. Preloaded by tests/analysis.py; nothing else uses it. */
#include <dlfcn.h>
#include <unistd.h>

#define PAGES (1l << 18) /* 1 GiB */

long sysconf(int name) {
    static long (*real)(int);
    if (name == _SC_PHYS_PAGES) return PAGES;
    if (!real) real = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return real(name);
}
