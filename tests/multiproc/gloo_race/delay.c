/* Preloaded by test_gloo_race.py: makes a race of ProcessGroupGloo happen in a second that otherwise takes hours.
 *
 * A worker of ProcessGroupGloo copies the name of the work that it has completed to where a std::string keeps its
 * characters, and another worker may replace these meanwhile. Here the one that has read the address sleeps before it
 * copies. That is what a scheduler may do to it at any time, so a program that is right stays right.
 *
 * The place is known by the function that calls memcpy, whose symbol is looked up when the delays are armed, and by the
 * length: names of less than 16 characters are copied, longer ones change hands. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { kInline = 16 };

static _Atomic uintptr_t place_begin, place_end;
static _Atomic unsigned naps;
static _Atomic long max_nap_us;

/* Delays of 1 to `longest_us` from now on. 0, or what is missing: 1 the library is not loaded, 2 it has no such symbol,
 * 3 the symbol has no size. */
int gloo_delay_arm(const char* library, const char* symbol, long longest_us) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (!handle) return 1;
  void* found = dlsym(handle, symbol);
  Dl_info about;
  ElfW(Sym)* entry = NULL;
  if (!found) return 2;
  if (!dladdr1(found, &about, (void**)&entry, RTLD_DL_SYMENT) || !entry || entry->st_size == 0) return 3;
  max_nap_us = longest_us;
  place_end = (uintptr_t)found + entry->st_size;
  place_begin = (uintptr_t)found;
  return 0;
}

unsigned gloo_delay_naps(void) { return naps; }

static void nap(void) {
  const int kept = errno;
  /* Lengths that follow each other without a pattern, so that the workers do not fall into step. */
  const unsigned turn = atomic_fetch_add(&naps, 1) * 2654435761u;
  const struct timespec length = {0, (1 + (long)(turn % (unsigned)max_nap_us)) * 1000};
  nanosleep(&length, NULL);
  errno = kept;
}

void* memcpy(void* to, const void* from, size_t size) {
  const uintptr_t caller = (uintptr_t)__builtin_return_address(0);
  const uintptr_t begin = place_begin;
  if (size < kInline && begin && caller - begin < place_end - begin) nap();
  return memmove(to, from, size);
}
