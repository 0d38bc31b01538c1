/* Running a kernel in the calling thread, under the default floating-point environment: sums must
 * have the same bits whatever rounding or flushing of subnormals the caller has switched on. */
#include "device/host/host_device.h"

#if defined(__x86_64__)
#include <xmmintrin.h>

/* Rounds to nearest, masks all exceptions, keeps subnormals; the lowest six bits are flags that the
 * arithmetic sets and nobody is promised. */
#define FLOAT_DEFAULT 0x1f80u
#define FLOAT_FLAGS   0x3fu

static inline uint32_t float_mode(void) {
    return _mm_getcsr();
}

static inline void set_float_mode(uint32_t mode) {
    _mm_setcsr(mode);
}
#elif defined(__aarch64__)
#define FLOAT_DEFAULT 0u
#define FLOAT_FLAGS   0u

static inline uint32_t float_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (uint32_t)mode;
}

static inline void set_float_mode(uint32_t mode) {
    uint64_t wide = mode;
    __asm__ volatile("msr fpcr, %0" : : "r"(wide));
}
#else
#error "the host device knows the floating-point control of x86-64 and AArch64"
#endif

/* Reading the mode takes a few cycles, writing it stalls: it is written only if it differs. */
void oh_host_run_worker(oh_host_kernel kernel, const void *args, uint32_t blocks, uint32_t worker,
                        uint32_t workers) {
    if (worker >= blocks) return;
    uint32_t mode = float_mode();
    bool usual = (mode & ~FLOAT_FLAGS) == FLOAT_DEFAULT;
    if (!usual) set_float_mode(FLOAT_DEFAULT);
    uint32_t rounds = (blocks - 1 - worker) / workers;
    for (uint32_t round = rounds + 1; round-- > 0;) {
        oh_grid grid = {worker + round * workers, blocks, 0, 1};
        kernel(args, grid);
    }
    if (!usual) set_float_mode(mode);
}
