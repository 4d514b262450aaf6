// libstdc++'s headers read this flag of glibc 2.32 to leave out locks in programs of one thread. One of our
// own, which says that there may be more, lets the library load with older ones too (manylinux_2_28, as
// torch's).
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
