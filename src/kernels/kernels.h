/* The list of all kernels for the layers above: which there are, under what name, with what
 * bound. */
#ifndef OH_KERNELS_H
#define OH_KERNELS_H

#include "protocol/algorithms.h"
#include "device/device.h"
#include "protocol/fused_args.h"

/* All kernels, GPU-shaped ones first; each index below names one of these. A kernel without a name
 * exists on the host device only. */
const oh_kernel *oh_kernel_list(size_t *count_out);

/* Index of the kernel for (operation, algorithm, type, world size), or -1 if there is none on
 * `kind`. */
int oh_kernel_find(onehop_device_kind kind, oh_operation operation, onehop_algorithm algorithm,
                   onehop_dtype dtype, int world);

/* The same over multicast, which serves pull algorithms with any number of ranks. */
int oh_kernel_find_multicast(onehop_algorithm algorithm, onehop_dtype dtype);

/* The line that stamps a kernel out, of fused.def if it begins with OH_FUSED_LINE, else of
 * instances.def; "" for one of the host device only. */
#define OH_FUSED_LINE "OH_FUSED_INSTANCE"
const char *oh_kernel_line(int index);

/* The images for GPUs, embedded at build time (cmake/kernels.cmake) and ended by NULL; a build
 * without nvcc has none. */
extern const void *const oh_kernel_images[];

/* Lanes of a row: as few units each as 512 lanes allow, then as few lanes; two warps at least,
 * since the signature block, which is as wide, has use for the second. */
static inline uint32_t oh_lanes_of(uint32_t units) {
    const uint32_t each = (units + OH_MAX_LANES - 1) / OH_MAX_LANES;
    const uint32_t lanes = ((units + each - 1) / each + 31) / 32 * 32;
    return lanes < 64 ? 64 : lanes;
}

void oh_host_1shot(const void *args, oh_grid grid);
void oh_host_2shot(const void *args, oh_grid grid);
void oh_host_scatter(const void *args, oh_grid grid);
void oh_host_gather(const void *args, oh_grid grid);
void oh_host_norm(const void *args, oh_grid grid);

#endif
