/* Which device: the one place that decides between CUDA and the host. */
#include "device/device.h"

enum device_word {
    WORD_AUTO,
    WORD_CUDA,
    WORD_HOST
};

static onehop_result open_gpu_of_rank(int count, int rank, oh_device **out) {
    int64_t local_rank;
    onehop_result result = oh_launcher_local_rank(rank, &local_rank);
    return result != ONEHOP_OK ? result : oh_cuda_device_open((int)(local_rank % count), out);
}

static onehop_result open_auto(int rank, oh_device **out) {
    static const char *const words[] = {"auto", "cuda", "host", NULL};
    int word = WORD_AUTO;
    onehop_result result = oh_env_word(OH_ENV_DEVICE, words, WORD_AUTO, &word);
    if (result != ONEHOP_OK) return result;
    if (word == WORD_HOST) return oh_host_device_open(out);

    int count = oh_cuda_device_count();
    if (count > 0) return open_gpu_of_rank(count, rank, out);
    if (word == WORD_AUTO) return oh_host_device_open(out);
    const char *reason = oh_cuda_absent_reason();
    return oh_error(ONEHOP_ERR_NO_DEVICE, "ONEHOP_DEVICE is cuda, but no GPU can be used: %s",
                    reason != NULL ? reason : "the driver shows none");
}

onehop_result oh_device_open(onehop_device which, int rank, oh_device **out) {
    switch (which.kind) {
    case ONEHOP_DEVICE_AUTO:
        return open_auto(rank, out);
    case ONEHOP_DEVICE_CUDA:
        return oh_cuda_device_open(which.ordinal, out);
    case ONEHOP_DEVICE_HOST:
        return oh_host_device_open(out);
    }
    return oh_error(ONEHOP_ERR_ARGUMENT,
                    "device kind is %d, expected 0 (auto), 1 (cuda) or 2 (host)", (int)which.kind);
}
