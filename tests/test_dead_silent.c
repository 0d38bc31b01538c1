/* Property: calls that are still queued when a communicator dies send nothing: no data, no
 * signature, no progress. A peer that got any of these could finish its next call on them. */
/* labels: quick */
#include "harness.h"

#include "context/context.h"

enum {
    COUNT = 1000
};

/* The words of rank `r` that say "I have made a call". */
static uint64_t said(const onehop_context *c, int r) {
    const oh_control *control =
        (const oh_control *)((const char *)c->buffers[r].ptr + c->regions.control);
    return control->lines[0][r].signature | control->lines[1][r].signature |
           control->lines[0][r].progress | control->lines[1][r].progress;
}

static bool all_armed(const onehop_context *c, int r) {
    const unsigned char *slots = (const unsigned char *)c->buffers[r].ptr + c->regions.push;
    for (size_t i = 0; i < 2 * 2 * c->regions.slot_bytes; i++)
        if (slots[i] != 0xFF) return false;
    return true;
}

/* A region of rank `r`'s memory that only calls of this test would write. */
static bool all_zero(const onehop_context *c, int r, uint64_t offset, size_t bytes) {
    const unsigned char *p = (const unsigned char *)c->buffers[r].ptr + offset;
    for (size_t i = 0; i < bytes; i++)
        if (p[i]) return false;
    return true;
}

static void dead_call(onehop_algorithm algorithm) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_context *c[2];
    onehop_stream stream;
    float in[COUNT], out[COUNT];
    for (int i = 0; i < COUNT; i++) in[i] = (float)i;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.push_bytes = 8192;
    call.algorithm = algorithm;
    CHECK_OK(onehop_create_all(&config, 2, NULL, c));
    CHECK_OK(onehop_host_stream_create(&stream));
    /* As oh_conclude leaves it. */
    const uint64_t local = c[0]->comm->args.local;
    CHECK_OK(oh_comm_store_u32(c[0]->comm, OH_MEMBER(local, oh_local, stop), 1));
    for (uint32_t b = 0; b < c[0]->regions.max_blocks; b++)
        CHECK_OK(oh_comm_store_u32(c[0]->comm, local + OH_LOCAL_SEQUENCES + 8 * b + 4, 1));
    for (int i = 0; i < 3; i++)
        CHECK_OK(
            onehop_all_reduce(c[0], in, out, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, &call, stream));
    CHECK_OK(onehop_host_stream_synchronize(stream));
    CHECK(all_armed(c[1], 1));
    CHECK(said(c[1], 0) == 0);
    CHECK(
        all_zero(c[1], 1, c[1]->regions.signals, c[1]->regions.max_blocks * OH_SIGNAL_BLOCK_BYTES));
    CHECK(all_zero(c[1], 0, c[1]->regions.pull, 2 * c[1]->regions.pull_bytes));
    onehop_host_stream_destroy(stream);
    for (int r = 0; r < 2; r++) onehop_destroy(c[r]);
}

int main(void) {
    watchdog(30);
    dead_call(ONEHOP_1SHOT_PUSH);
    dead_call(ONEHOP_2SHOT_PUSH);
    dead_call(ONEHOP_HOST_1SHOT);
    dead_call(ONEHOP_HOST_2SHOT);
    dead_call(ONEHOP_1SHOT_PULL);
    dead_call(ONEHOP_2SHOT_PULL);
    return 0;
}
