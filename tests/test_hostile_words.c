/* Property: what a peer writes into this rank's control page is checked before it is used. Whatever
 * words lie there, a call ends with a failure that names a rank there is, or none, and never with
 * OK. So does one over memory that is smaller than a peer says. */
/* labels: quick */
#include "harness.h"

#include "context/context.h"

#define COUNT 1000

static const onehop_algorithm algorithms[] = {ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT,
                                              ONEHOP_1SHOT_PUSH, ONEHOP_2SHOT_PUSH,
                                              ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL};

static onehop_stream stream; /* outlives the contexts */

static void open_all(int world, onehop_context **contexts) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.push_bytes = 8192;
    config.timeout_ms = 30;
    CHECK_OK(onehop_create_all(&config, world, NULL, contexts));
}

static void close_all(int world, onehop_context **contexts) {
    for (int r = 0; r < world; r++) onehop_destroy(contexts[r]);
}

static oh_control *control_of(const onehop_context *c) {
    return (oh_control *)((char *)c->buffers[c->rank].ptr + c->regions.control);
}

/* A call of rank 0 that no peer takes part in. */
static onehop_result call_alone(onehop_context *context, onehop_algorithm algorithm) {
    static float in[COUNT], out[COUNT];
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    CHECK_OK(onehop_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, &call, stream));
    return onehop_synchronize(context, stream);
}

static onehop_failure expect_failure(onehop_context *context, onehop_result found) {
    onehop_failure failure;
    CHECK(found != ONEHOP_OK);
    CHECK_RESULT(found, onehop_status(context, &failure));
    CHECK_INT(found, failure.result);
    if (failure.peer < -1 || failure.peer >= onehop_world_size(context))
        FAIL("%s: names rank %d", failure.text, failure.peer);
    return failure;
}

/* Failure rows lead from rank to rank. */
static void rows(void) {
    static const uint32_t words[] = {0x7fffffff, 0x80000000, 0xffffffff, 4, 17, 32, 33, 1u << 20};
    for (size_t w = 0; w < sizeof words / sizeof *words; w++) {
        onehop_context *c[3];
        open_all(3, c);
        control_of(c[0])->waits[1] = 2ull << 32 | 3; /* waits for rank 2 */
        control_of(c[0])->waits[2] = 2ull << 32 | words[w];
        const onehop_failure f = expect_failure(c[0], call_alone(c[0], algorithms[w % 6]));
        CHECK(f.result == ONEHOP_ERR_TIMEOUT || f.result == ONEHOP_ERR_INTERNAL);
        close_all(3, c);
    }
}

/* Verdicts: no known kind, or no rank. `inside`: met by a call, else by status. */
static void verdicts(bool inside) {
    static const uint64_t words[] = {2ull << 32,          OH_VERDICT(99, 0, 2),
                                     OH_VERDICT(8, 1, 2), OH_VERDICT(OH_FAIL_TIMEOUT, -1, 2),
                                     1ull << 63,          OH_VERDICT(OH_FAIL_MISMATCH, 200, 2),
                                     2ull << 32 | 2 << 8, OH_VERDICT(OH_FAIL_LOST, 3, 2)};
    for (size_t w = 0; w < sizeof words / sizeof *words; w++) {
        onehop_context *c[3];
        open_all(3, c);
        control_of(c[0])->verdicts[1] = words[w];
        const onehop_result found =
            inside ? call_alone(c[0], algorithms[w % 6]) : onehop_status(c[0], NULL);
        const onehop_failure f = expect_failure(c[0], found);
        CHECK_INT(ONEHOP_ERR_INTERNAL, f.result);
        CHECK_INT(-1, f.peer);
        CHECK_CONTAINS("a peer wrote what no rank writes", f.text);
        /* Its own verdict is one that the others understand. */
        if (inside) {
            CHECK_RESULT(ONEHOP_ERR_INTERNAL, onehop_status(c[2], NULL));
            CHECK_CONTAINS("a peer wrote what no rank writes", onehop_last_error());
        }
        close_all(3, c);
    }
}

/* The whole page but for the own words. Not signatures of the next calls with the right hash:
 * whoever knows that much has made the call. */
static void noise(int rounds) {
    uint64_t random = 21;
    for (int i = 0; i < rounds; i++) {
        const int world = 2 + i % 3;
        onehop_context *c[4];
        open_all(world, c);
        for (int peer = 1; peer < world; peer++) {
            oh_control *page = control_of(c[0]);
            for (int p = 0; p < 2; p++) {
                page->lines[p][peer].signature = random_next(&random) | 1ull << 40;
                page->lines[p][peer].progress = random_next(&random);
            }
            if (random_next(&random) % 2) page->waits[peer] = random_next(&random);
            if (random_next(&random) % 3 == 0) page->verdicts[peer] = random_next(&random);
            if (random_next(&random) % 3 == 0) page->left[peer] = (uint32_t)random_next(&random);
        }
        expect_failure(c[0], call_alone(c[0], algorithms[i % 6]));
        close_all(world, c);
    }
}

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct offer { /* as of symmetric.c */
    uint64_t bytes;
    uint32_t kinds;
    oh_mem_handle handle;
} offer;

/* Rank 1 says 64 KiB and gives a page. */
static void give_less(onehop_group *group) {
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    oh_device *device;
    oh_mem memory;
    offer mine, all[2];
    int fd, fds[2];
    memset(&mine, 0, sizeof mine);
    mine.bytes = 65536;
    mine.kinds = OH_HANDLE_FD;
    CHECK_OK(oh_device_open(host, 1, &device));
    CHECK_OK(device->ops->mem_create(device, 4096, OH_HANDLE_FD, &memory));
    CHECK_OK(oh_rendezvous_agree(group, ONEHOP_OK));
    CHECK_OK(oh_rendezvous_allgather(group, &mine, all, sizeof mine));
    CHECK_OK(device->ops->mem_export(device, &memory, &mine.handle, &fd));
    CHECK_OK(oh_rendezvous_agree(group, ONEHOP_OK));
    CHECK_OK(oh_rendezvous_allgather(group, &mine, all, sizeof mine));
    CHECK_OK(oh_rendezvous_pass_fds(group, &fd, 1, fds));
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, oh_rendezvous_agree(group, ONEHOP_OK));
    close(fd);
    if (fds[0] >= 0) close(fds[0]);
    device->ops->mem_release(device, &memory);
    device->ops->close(device);
}

static void memory_main(int rank, int world_size, void *argument) {
    onehop_group **groups = argument;
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    onehop_symmetric *symmetric;
    (void)world_size;
    if (rank == 1) {
        give_less(groups[1]);
        return;
    }
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT,
                 onehop_symmetric_alloc(groups[0], host, 65536, &symmetric));
    CHECK_CONTAINS("rank 1 offers 4096 bytes, expected 65536", onehop_last_error());
}

int main(void) {
    onehop_group *groups[2];
    watchdog(60);
    CHECK_OK(onehop_host_stream_create(&stream));
    rows();
    verdicts(true);
    verdicts(false);
    noise(60);
    onehop_host_stream_destroy(stream);
    CHECK_OK(onehop_group_open_local(2, groups));
    run_threads(2, memory_main, groups);
    for (int r = 0; r < 2; r++) onehop_group_close(groups[r]);
    printf("words that cannot be true are not believed\n");
    return 0;
}
