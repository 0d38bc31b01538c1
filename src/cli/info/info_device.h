/* A device as `onehop info` asks it, for text and JSON. */
#ifndef OH_CLI_INFO_DEVICE_H
#define OH_CLI_INFO_DEVICE_H

#include "device/device.h"

typedef struct info_handle_name {
    uint32_t kind; /* oh_handle_kind */
    const char *name;
} info_handle_name;
extern const info_handle_name info_handle_names[]; /* ended by a name that is NULL */

/* Opens a device, asks it and closes it. */
onehop_result info_ask(onehop_device which, oh_device_info *info_out);

#endif
