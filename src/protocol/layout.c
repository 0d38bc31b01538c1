/* The layout is a pure function of its config, so that all ranks compute the same one. */
#include "protocol/layout.h"

#include <string.h>

#define PAGE 4096
#define MIB  ((size_t)1 << 20)
#define GIB  ((size_t)1 << 30)

/* Sizes that differ between the devices. Slot: all slots of both parities take at most push_total.
 * LL words take all-gathers of up to half of a source's place: on GPUs about what a link moves
 * while a flag behind plain stores would be on its way (measured, docs/notes/tuning-log.md). */
typedef struct defaults {
    size_t slot_max, push_total, ll_max, ll_total, pull_bytes;
    uint32_t max_blocks, max_registrations;
} defaults;

/* 64 blocks fit on any GPU this runs on; a context asks the GPUs and takes more. */
static const defaults cuda_defaults = {16 * MIB, 64 * MIB, 1 * MIB, 4 * MIB, 32 * MIB, 64, 4096};
static const defaults host_defaults = {1 * MIB, 4 * MIB, 4 * PAGE, 64 * 4 * PAGE, 1 * MIB, 16, 256};

static size_t share_of(size_t total, size_t max, int world_size) {
    const size_t share = total / (2 * (size_t)world_size);
    return oh_round_down(share < max ? share : max, PAGE);
}

static onehop_result check(const onehop_layout_config *c) {
    if (c->device_kind != ONEHOP_DEVICE_CUDA && c->device_kind != ONEHOP_DEVICE_HOST)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "layout: device_kind is %d, expected CUDA (1) or HOST (2)",
                        (int)c->device_kind);
    if (c->world_size < 1 || c->world_size > ONEHOP_MAX_RANKS)
        return oh_error(ONEHOP_ERR_WORLD_SIZE, "layout: world size is %d, expected 1..%d",
                        c->world_size, ONEHOP_MAX_RANKS);
    const size_t max = 4 * GIB / (2 * (size_t)c->world_size);
    if (c->push_bytes % PAGE || c->push_bytes > max)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "layout: push_bytes is %zu, expected a multiple of %d up to %zu",
                        c->push_bytes, PAGE, max);
    if (c->pull_bytes % PAGE || c->pull_bytes > 4 * GIB)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "layout: pull_bytes is %zu, expected a multiple of %d up to 4 GiB",
                        c->pull_bytes, PAGE);
    if (c->max_blocks == 1 || c->max_blocks > 1024)
        return oh_error(ONEHOP_ERR_ARGUMENT, "layout: max_blocks is %u, expected 2..1024",
                        c->max_blocks);
    if (c->max_registrations > 1u << 20)
        return oh_error(ONEHOP_ERR_ARGUMENT, "layout: max_registrations is %u, expected at most %u",
                        c->max_registrations, 1u << 20);
    return ONEHOP_OK;
}

static uint64_t take(uint64_t *offset, uint64_t bytes) {
    const uint64_t here = *offset;
    *offset = oh_round_up(here + bytes, PAGE);
    return here;
}

onehop_result oh_layout_plan(const onehop_layout_config *config, onehop_layout *layout_out,
                             oh_regions *regions_out) {
    onehop_result result = check(config);
    if (result) return result;
    const defaults *d = config->device_kind == ONEHOP_DEVICE_CUDA ? &cuda_defaults : &host_defaults;
    const uint64_t world = (uint64_t)config->world_size;
    oh_regions p;
    memset(&p, 0, sizeof p);
    p.slot_bytes = config->push_bytes ? config->push_bytes
                                      : share_of(d->push_total, d->slot_max, config->world_size);
    p.ll_bytes = share_of(d->ll_total, d->ll_max, config->world_size);
    p.pull_bytes = config->pull_bytes ? config->pull_bytes : d->pull_bytes;
    p.max_blocks = config->max_blocks ? config->max_blocks : d->max_blocks;
    p.max_registrations =
        config->max_registrations ? config->max_registrations : d->max_registrations;

    uint64_t buffer = 0;
    p.push = take(&buffer, 2 * world * p.slot_bytes);
    p.ll = take(&buffer, 2 * world * p.ll_bytes);
    p.pull = take(&buffer, 2 * p.pull_bytes);
    p.signals = take(&buffer, (uint64_t)p.max_blocks * OH_SIGNAL_BLOCK_BYTES);
    p.control = take(&buffer, sizeof(oh_control));
    p.registrations = oh_round_up(OH_LOCAL_SEQUENCES + 8ull * p.max_blocks, 256);

    memset(layout_out, 0, sizeof *layout_out);
    layout_out->symmetric_bytes = buffer;
    layout_out->local_bytes =
        oh_round_up(p.registrations + p.max_registrations * sizeof(oh_registration), 256);
    layout_out->host_bytes = oh_round_up(sizeof(oh_host_page), 256);
    layout_out->push_bytes = p.slot_bytes;
    layout_out->pull_bytes = p.pull_bytes;
    layout_out->max_blocks = p.max_blocks;
    layout_out->max_registrations = p.max_registrations;
    *regions_out = p;
    return ONEHOP_OK;
}

onehop_result onehop_layout_get(const onehop_layout_config *config, onehop_layout *layout_out) {
    if (!config || !layout_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_layout_get: %s is NULL",
                        config ? "layout_out" : "config");
    onehop_layout_config known;
    oh_regions regions;
    onehop_result result = oh_config_copy(&known, sizeof known, config, "onehop_layout_config");
    return result ? result : oh_layout_plan(&known, layout_out, &regions);
}

onehop_result oh_storage_arm(oh_device *device, const oh_regions *regions, int world_size,
                             void *symmetric, void *local, void *host) {
    char *buffer = symmetric;
    const size_t push_bytes = 2 * (size_t)world_size * regions->slot_bytes;
    onehop_result result = device->ops->fill(device, buffer + regions->push, 0xFF, push_bytes);
    if (!result)
        result = device->ops->fill(device, buffer + regions->ll, 0,
                                   2 * (size_t)world_size * regions->ll_bytes);
    if (!result)
        result = device->ops->fill(device, buffer + regions->signals, 0,
                                   regions->control + sizeof(oh_control) - regions->signals);
    if (!result)
        result = device->ops->fill(device, local, 0,
                                   regions->registrations +
                                       regions->max_registrations * sizeof(oh_registration));
    if (!result) memset(host, 0, sizeof(oh_host_page));
    return result;
}
