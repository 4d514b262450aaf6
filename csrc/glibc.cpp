// libstdc++'s headers read this flag, which glibc has since 2.32, and leave out locks if a program has one
// thread. We define the flag ourselves, as a program with threads has it. The library then also loads with
// older releases of glibc (manylinux_2_28, as torch's wheels).
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
