/* What the tests of tuning tables share: tables as texts and as files, and choices by them. */
#ifndef OH_TEST_TUNING_KIT_H
#define OH_TEST_TUNING_KIT_H

#include "fault_kit.h"
#include "rank_contexts.h"

#include "context/context.h"
#include "protocol/layout.h"

#define HEAD "onehop-tuning 1\n"
#define CUDA HEAD "device cuda\n"
#define HOST HEAD "device host\n"

static inline onehop_result parse(const char *text, size_t bytes, oh_tuning *tuning) {
    memset(tuning, 0, sizeof *tuning);
    onehop_result result = oh_tuning_parse(tuning, "some.table", text, bytes);
    if (result) oh_tuning_free(tuning);
    return result;
}

static bool multicast; /* of the groups to come */

static inline void init(oh_dispatch *d, onehop_device_kind kind, uint32_t capability, int world,
                        bool nccl, const oh_tuning *tuning) {
    const oh_dispatch_group group = {kind, capability, world, nccl, multicast};
    onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_layout layout;
    config.device_kind = kind;
    config.world_size = world;
    if (kind == ONEHOP_DEVICE_CUDA) config.max_blocks = 132;
    CHECK_OK(oh_dispatch_init(d, &group, tuning));
    CHECK_OK(oh_layout_plan(&config, &layout, &d->regions));
}

static inline oh_plan choose(const oh_dispatch *d, size_t bytes, onehop_mode mode, bool in_place,
                             const onehop_call *call) {
    const oh_question q = {bytes, ONEHOP_BFLOAT16, mode, in_place, call, ONEHOP_ALL_REDUCE, NULL};
    oh_plan plan;
    CHECK_OK(oh_dispatch_choose(d, &q, &plan));
    return plan;
}

#define EXPECT(want, bytes, mode, in_place)                                                        \
    CHECK_TEXT(want, onehop_algorithm_name(                                                        \
                         choose(&d, bytes, ONEHOP_MODE_##mode, in_place, NULL).choice.algorithm))

static inline void init_text(oh_dispatch *d, const char *text, uint32_t capability, int world,
                             bool nccl) {
    oh_tuning tuning;
    CHECK_OK(parse(text, strlen(text), &tuning));
    init(d, ONEHOP_DEVICE_CUDA, capability, world, nccl, &tuning);
    oh_tuning_free(&tuning);
}

#define W 3

typedef struct tables {
    char folder[64];
    char path[W][96]; /* one for each rank */
} tables;

static inline void write_table(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

/* Every rank reads a file of its own; rank 1 may read `other`. */
static inline void make_tables(tables *t, const char *text, const char *other) {
    char folder[] = "/tmp/onehop-tuning-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    memcpy(t->folder, folder, sizeof folder);
    for (int r = 0; r < W; r++) {
        snprintf(t->path[r], sizeof t->path[r], "%s/rank%d.table", folder, r);
        write_table(t->path[r], r == 1 && other ? other : text);
    }
}

static inline void remove_tables(tables *t) {
    for (int r = 0; r < W; r++) unlink(t->path[r]);
    rmdir(t->folder);
}

static inline onehop_result load_from(const char *path) {
    oh_tuning tuning;
    setenv("ONEHOP_TUNING", path, 1);
    onehop_result result = oh_tuning_load(&tuning);
    oh_tuning_free(&tuning);
    unsetenv("ONEHOP_TUNING");
    return result;
}

#endif
