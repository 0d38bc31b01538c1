/* See info_device.h. */
#include "cli/info/info_device.h"

const info_handle_name info_handle_names[] = {
    {OH_HANDLE_FD, "descriptor"},
    {OH_HANDLE_FABRIC, "fabric"},
    {OH_HANDLE_IPC, "classic IPC"},
    {0, NULL},
};

onehop_result info_ask(onehop_device which, oh_device_info *info_out) {
    oh_device *device;
    onehop_result result = oh_device_open(which, which.ordinal, &device);
    if (result != ONEHOP_OK) return result;
    result = device->ops->info(device, info_out);
    device->ops->close(device);
    return result;
}
