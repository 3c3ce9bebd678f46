// Functions whose loops gain from wide registers: compiled several times, the best that the machine
// has is chosen when the module is loaded. Whole numbers only, so that all give the same result.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define REKINDLE_WIDE \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define REKINDLE_WIDE
#endif
