/* Multicast, emulated: the address of a table of all ranks' symmetric buffers. So what is built on
 * it is tested where no switch is. Off as on GPUs unless it is asked for. */
#include "device/host/host_device.h"

#include <stdlib.h>
#include <string.h>

static onehop_result refuse(void) {
    const char *why = oh_multicast_refusal();
    return why ? oh_error(ONEHOP_ERR_UNSUPPORTED, "multicast is off: %s", why) : ONEHOP_OK;
}

onehop_result oh_host_multicast_create(oh_device *device, size_t bytes, int ranks, uint32_t kind,
                                       oh_multicast *out, oh_mem_handle *handle_out, int *fd_out) {
    (void)device;
    (void)bytes;
    (void)ranks;
    (void)kind;
    (void)out;
    memset(handle_out, 0, sizeof *handle_out);
    *fd_out = -1;
    return refuse();
}

onehop_result oh_host_multicast_join(oh_device *device, const oh_mem_handle *handle, int fd,
                                     oh_multicast *multicast) {
    (void)device;
    (void)handle;
    (void)fd;
    (void)multicast;
    return refuse();
}

onehop_result oh_host_multicast_bind(oh_device *device, const oh_mem *own,
                                     oh_multicast *multicast) {
    (void)device;
    (void)own;
    (void)multicast;
    return refuse();
}

onehop_result oh_host_multicast_map(oh_device *device, const oh_mem *buffers, int ranks,
                                    oh_multicast *multicast) {
    (void)device;
    onehop_result result = refuse();
    if (result != ONEHOP_OK) return result;
    oh_multicast_buffers *all = calloc(1, sizeof *all);
    if (all == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    all->count = (uint32_t)ranks;
    for (int r = 0; r < ranks; r++) all->buffers[r] = (uintptr_t)buffers[r].ptr;
    multicast->owner = all;
    multicast->address = (uintptr_t)all;
    return ONEHOP_OK;
}

void oh_host_multicast_release(oh_device *device, oh_multicast *multicast) {
    (void)device;
    free(multicast->owner);
    memset(multicast, 0, sizeof *multicast);
}
