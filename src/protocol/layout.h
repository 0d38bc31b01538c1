/* Offsets and sizes of a communicator's memory, from a layout config. See regions.h for the
 * map. */
#ifndef OH_LAYOUT_H
#define OH_LAYOUT_H

#include "base/base.h"
#include "device/device.h"
#include "protocol/regions.h"

/* Validates the config, resolves its defaults and computes both descriptions. */
onehop_result oh_layout_plan(const onehop_layout_config *config, onehop_layout *layout_out,
                             oh_regions *regions_out);

/* Writes one rank's memory: push slots 0xFF, control page, signals, local and host memory zero. The
 * rest of a symmetric buffer is expected to be zero, or to hold what any earlier use left: nothing
 * reads it before it is written. On the host device this is also the first touch, which places the
 * pages near this rank. */
onehop_result oh_storage_arm(oh_device *device, const oh_regions *regions, int world_size,
                             void *symmetric, void *local, void *host);

#endif
