/* What the driver says of the GPUs and the links between them, as text for `onehop info`. Needs no
 * context, so it costs no GPU memory. */
#include "device/cuda/cuda_device.h"

#include <stdarg.h>
#include <stdio.h>

/* Text that grows up to a limit; what does not fit is cut. */
struct page {
    char *text;
    size_t size, used;
};

static void add(struct page *page, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(struct page *page, const char *format, ...) {
    va_list arguments;
    size_t left = page->size - page->used;
    va_start(arguments, format);
    int length = vsnprintf(page->text + page->used, left, format, arguments);
    va_end(arguments);
    if (length > 0) page->used += (size_t)length < left ? (size_t)length : left - 1;
}

static int attribute(oh_cu_device device, oh_cu_device_attribute which) {
    int value = 0;
    return oh_cu.cuDeviceGetAttribute(&value, which, device) == OH_CU_SUCCESS ? value : 0;
}

static void add_device(struct page *page, int ordinal, oh_cu_device device) {
    char name[96] = "unknown", bus[32] = "unknown";
    size_t bytes = 0;
    oh_cu.cuDeviceGetName(name, (int)sizeof name, device);
    oh_cu.cuDeviceGetPCIBusId(bus, (int)sizeof bus, device);
    oh_cu.cuDeviceTotalMem_v2(&bytes, device);
    add(page, "GPU %d: %s, %s, sm_%d%d, %d SMs, %zu MiB, claims handles:%s%s\n", ordinal, name, bus,
        attribute(device, OH_CU_DEVICE_MAJOR), attribute(device, OH_CU_DEVICE_MINOR),
        attribute(device, OH_CU_DEVICE_MULTIPROCESSORS), bytes >> 20,
        attribute(device, OH_CU_DEVICE_FD) ? " descriptor" : "",
        attribute(device, OH_CU_DEVICE_FABRIC) ? " fabric" : "");
}

static const char *yes_or_no(oh_cu_result result, int value) {
    return result != OH_CU_SUCCESS ? "unknown" : value != 0 ? "yes" : "no";
}

static void add_link(struct page *page, oh_cu_device from, oh_cu_device to) {
    int can = 0, supported = 0, atomics = 0, rank = 0;
    oh_cu_result r_can = oh_cu.cuDeviceCanAccessPeer(&can, from, to);
    oh_cu_result r_supported =
        oh_cu.cuDeviceGetP2PAttribute(&supported, OH_CU_P2P_ACCESS, from, to);
    oh_cu_result r_atomics = oh_cu.cuDeviceGetP2PAttribute(&atomics, OH_CU_P2P_ATOMICS, from, to);
    oh_cu_result r_rank = oh_cu.cuDeviceGetP2PAttribute(&rank, OH_CU_P2P_RANK, from, to);
    add(page, "can access %s, peer-to-peer %s, native atomics %s, performance rank ",
        yes_or_no(r_can, can), yes_or_no(r_supported, supported), yes_or_no(r_atomics, atomics));
    if (r_rank == OH_CU_SUCCESS)
        add(page, "%d\n", rank);
    else
        add(page, "unknown\n");
}

onehop_result oh_cuda_describe(char *text, size_t size) {
    struct page page = {text, size, 0};
    oh_cu_device from, to;
    int count = 0, version = 0;
    if (text == NULL || size == 0)
        return oh_error(ONEHOP_ERR_NULL, "a description needs a buffer to go into");
    onehop_result error = oh_cuda_driver();
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cu.cuDeviceGetCount(&count);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuDeviceGetCount", "describing the GPUs");
    text[0] = '\0';
    oh_cu.cuDriverGetVersion(&version);
    add(&page, "driver: CUDA %d.%d, %d GPU%s\n", version / 1000, version % 1000 / 10, count,
        count == 1 ? "" : "s");
    for (int i = 0; i < count; i++)
        if (oh_cu.cuDeviceGet(&from, i) == OH_CU_SUCCESS) add_device(&page, i, from);
    for (int i = 0; i < count; i++)
        for (int j = 0; j < count; j++) {
            if (i == j || oh_cu.cuDeviceGet(&from, i) != OH_CU_SUCCESS ||
                oh_cu.cuDeviceGet(&to, j) != OH_CU_SUCCESS)
                continue;
            add(&page, "GPU %d to %d: ", i, j);
            add_link(&page, from, to);
        }
    return ONEHOP_OK;
}
