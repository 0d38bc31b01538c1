/* Property: the hand-over to NCCL is refused, on all ranks and with a sentence that says why, where
 * it cannot work: on the host device, for ranks in one thread, for one rank, without the library or
 * with one that is no NCCL. (What needs a GPU is in gpu/.) */
/* labels: quick */
#include "tuning_kit.h"

#include "device/nccl/nccl.h"

/* Rank 1 alone switches it on: all hear of it. */
static void nccl_on_the_host(int rank, int world_size, void *argument) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *ctx = NULL;
    const kit_name own = kit_own_name("nccl");
    (void)argument;
    config.rank = rank;
    config.world_size = world_size;
    config.name = own.text;
    if (rank == 1) setenv("ONEHOP_NCCL", "1", 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create(&config, &ctx));
    CHECK_CONTAINS("NCCL needs GPUs", onehop_last_error());
}

static void nccl(void) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *contexts[2];
    run_ranks(W, nccl_on_the_host, NULL);
    config.flags = ONEHOP_FLAG_NCCL;
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create_all(&config, 2, NULL, contexts));
    CHECK_CONTAINS("a thread or a process for each rank", onehop_last_error());
    config.world_size = 1;
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create(&config, contexts));
    setenv("ONEHOP_NCCL", "yes", 1);
    config.flags = 0;
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, onehop_create(&config, contexts));
    CHECK_CONTAINS("ONEHOP_NCCL", onehop_last_error());
    unsetenv("ONEHOP_NCCL");
    /* The library: none, one that is no NCCL. */
    setenv("ONEHOP_NCCL_LIB", "/nonexistent/libnccl.so", 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open(NULL));
    CHECK_CONTAINS("/nonexistent/libnccl.so", onehop_last_error());
    CHECK_CONTAINS("ONEHOP_NCCL_LIB", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open("libc.so.6"));
    CHECK_CONTAINS("libc.so.6 has no nccl", onehop_last_error());
}

int main(void) {
    watchdog(110);
    unsetenv("ONEHOP_TUNING");
    nccl();
    return 0;
}
