/* The allocations made by onehop_mem_alloc, for the layers that are handed a pointer and want to
 * know what lies behind it. */
#ifndef OH_MEM_REGISTRY_H
#define OH_MEM_REGISTRY_H

#include "device/device.h"

/* The allocation that contains all of ptr .. ptr + bytes, or NULL; *device_out (may be NULL) is the
 * device that made it. Both are valid until the allocation is freed. Any thread. */
const oh_mem *oh_mem_find(const void *ptr, size_t bytes, oh_device **device_out);

#endif
