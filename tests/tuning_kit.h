/* What the tests of tuning tables share: tables from text, choices by them, and files of tables,
 * one for each rank. */
#ifndef OH_TUNING_KIT_H
#define OH_TUNING_KIT_H

#include "fault_kit.h"

#include "comm/context.h"
#include "kernels/kernels.h"
#include "storage/layout.h"

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

static inline void init_text(oh_dispatch *d, const char *text, uint32_t capability, int world,
                             bool nccl) {
    oh_tuning tuning;
    CHECK_OK(parse(text, strlen(text), &tuning));
    init(d, ONEHOP_DEVICE_CUDA, capability, world, nccl, &tuning);
    oh_tuning_free(&tuning);
}

static inline oh_plan choose(const oh_dispatch *d, size_t bytes, onehop_mode mode, bool in_place,
                             const onehop_call *call) {
    const oh_question q = {bytes, ONEHOP_BFLOAT16, mode, in_place, call, ONEHOP_ALL_REDUCE, NULL};
    oh_plan plan;
    CHECK_OK(oh_dispatch_choose(d, &q, &plan));
    return plan;
}

/* ---- files ----------------------------------------------------------------------------------- */

#define W 3

typedef struct tables {
    char folder[64];
    char path[W][96]; /* one for each rank */
} tables;

/* For three ranks: an algorithm for each stretch of sizes to 8 KiB. */
static const char host_table[] = HOST "3 any 1K 1shot_push - 5 1\n"
                                      "3 eager 1K-2K 2shot_pull workspace 4 1\n"
                                      "3 graph 4K 1shot_pull graph 4 1\n"
                                      "3 any 8K host_2shot - 1 1\n";

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

#endif
