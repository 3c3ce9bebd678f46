// Functions whose loops gain from wide registers: compiled several times, the best that the machine
// has is chosen when the module is loaded. All must give the same result: only whole numbers, or
// additions and comparisons of others (what is multiplied and added may be rounded once or twice).
#pragma once

// GCC names these levels since 12; Clang's own dispatch is left alone. The choice is made by the
// dynamic linker (ifunc), before a sanitizer's runtime is ready for instrumented code.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__)
#define REKINDLE_SIMD_CLONES \
    __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define REKINDLE_SIMD_CLONES
#endif
