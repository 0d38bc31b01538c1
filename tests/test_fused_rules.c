/* Property: fused operations are chosen by rules of the tables. Over a sweep of shapes the rules
 * choose the algorithm, pieces and grid of the formula that they were made from. A file's rules
 * come first, and what it says wrongly of fused operations is refused. */
/* labels: quick */
#include "harness.h"

#include "plan/dispatch.h"
#include "kernels/kernels.h"
#include "protocol/layout.h"

#include <string.h>

#define K        ((size_t)1 << 10)
#define CUDA     "onehop-tuning 1\ndevice cuda\n"
#define HOST     "onehop-tuning 1\ndevice host\n"
#define NORM     "operation all_reduce_norm\n"
#define ALL_CUDA CUDA NORM "2-16 any any 1shot_push - max -\noperation tp_qknorm\n"

static void set_up(oh_dispatch *d, onehop_device_kind kind, int world, size_t slot,
                   const oh_tuning *tuning) {
    const oh_dispatch_group group = {kind, kind == ONEHOP_DEVICE_CUDA ? 90 : 0, world, false,
                                     false};
    onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_layout layout;
    config.device_kind = kind;
    config.world_size = world;
    config.push_bytes = slot;
    config.pull_bytes = kind == ONEHOP_DEVICE_HOST ? slot : 0;
    if (kind == ONEHOP_DEVICE_CUDA) config.max_blocks = 132;
    CHECK_OK(oh_dispatch_init(d, &group, tuning));
    CHECK_OK(oh_layout_plan(&config, &layout, &d->regions));
}

/* ---- the formula ----------------------------------------------------------------------------- */

typedef struct wanted {
    onehop_algorithm algorithm;
    size_t chunk_rows;
    uint32_t blocks, threads;
} wanted;

static size_t pieces_of(size_t rows, size_t max, size_t grain) {
    const size_t pieces = (rows + max - 1) / max;
    return oh_round_up((rows + pieces - 1) / pieces, grain);
}

/* One shot sends (W-1) S, two shots 2 S (W-1)/W and 400 KB's worth of time for a hop more. */
static bool prefers_2shot(const oh_dispatch *d, size_t bytes) {
    const size_t world = (size_t)d->world;
    return bytes * (world - 1) * (world - 2) > 400 * K * world;
}

static bool fits_2shot(const oh_dispatch *d, const oh_rows *r) {
    const size_t slot = d->regions.slot_bytes, world = (size_t)d->world;
    const size_t shard = (r->count + world - 1) / world;
    return r->count >= world && (shard * r->bytes <= slot / 2 || r->bytes <= slot / 4);
}

static wanted formula(const oh_dispatch *d, const oh_rows *r, onehop_algorithm named) {
    const bool host = d->kind == ONEHOP_DEVICE_HOST;
    const size_t slot = d->regions.slot_bytes, world = (size_t)d->world,
                 shard = (r->count + world - 1) / world;
    const size_t box = OH_BOX_BYTES(d->regions.pull_bytes, world), total = r->count * r->bytes;
    const bool norm = r->operation == OH_NORM;
    wanted w = {named, r->count, 0, host ? 1 : r->threads};
    if (!named)
        w.algorithm = host && norm && r->bytes <= box / 2             ? ONEHOP_HOST_1SHOT
                      : norm && prefers_2shot(d, r->count * r->bytes) ? ONEHOP_2SHOT_PUSH
                                                                      : ONEHOP_1SHOT_PUSH;
    if (w.algorithm == ONEHOP_2SHOT_PUSH && !fits_2shot(d, r)) w.algorithm = ONEHOP_1SHOT_PUSH;
    size_t at_once = 0;
    if (w.algorithm == ONEHOP_HOST_1SHOT) {
        const size_t whole = box < 64 * K ? box : 64 * K,
                     half = box / 2 < 64 * K ? box / 2 : 64 * K;
        w.chunk_rows = pieces_of(r->count, total <= whole ? r->count : half / r->bytes, 1);
        w.blocks = 1;
        return w;
    }
    if (w.algorithm == ONEHOP_2SHOT_PUSH) {
        w.chunk_rows = pieces_of(
            r->count, shard * r->bytes <= slot / 2 ? shard * world : slot / 4 / r->bytes * world,
            world);
        at_once = (w.chunk_rows + world - 1) / world;
    } else {
        at_once = w.chunk_rows =
            pieces_of(r->count, total <= slot ? r->count : slot / 2 / r->bytes, 1);
    }
    const uint32_t widest = host && d->regions.max_blocks > 3 ? 3 : d->regions.max_blocks;
    w.blocks = at_once + 1 < widest ? (uint32_t)at_once + 1 : widest;
    return w;
}

static size_t compared, two_shots;

static void same(const oh_dispatch *d, const oh_rows *r, onehop_algorithm named) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = named;
    const oh_question q = {.bytes = r->count * r->bytes,
                           .dtype = (onehop_dtype)(1 + r->count % 3),
                           .mode = (onehop_mode)(r->count % 2),
                           .in_place = true,
                           .call = &call,
                           .rows = r};
    const wanted w = formula(d, r, named);
    oh_plan plan;
    CHECK_OK(oh_dispatch_choose(d, &q, &plan));
    const onehop_choice *c = &plan.choice;
    if (c->algorithm != w.algorithm || plan.chunk_rows != w.chunk_rows || c->blocks != w.blocks ||
        c->threads != w.threads)
        FAIL("%s, %zu rows of %zu bytes, %d ranks, kind %d, %s named: %s, %u rows, %u x %u; "
             "expected %s, %zu, %u x %u",
             oh_operation_name(r->operation), r->count, r->bytes, d->world, (int)d->kind,
             onehop_algorithm_name(named), onehop_algorithm_name(c->algorithm), plan.chunk_rows,
             c->blocks, c->threads, onehop_algorithm_name(w.algorithm), w.chunk_rows, w.blocks,
             w.threads);
    CHECK_INT(oh_kernel_find(d->kind, r->operation, c->algorithm, q.dtype, d->world), plan.kernel);
    CHECK(plan.chunk_bytes == plan.chunk_rows * r->bytes);
    CHECK_INT((r->count + plan.chunk_rows - 1) / plan.chunk_rows, c->chunks);
    CHECK_INT(ONEHOP_SOURCE_NONE, c->source);
    compared++;
    two_shots += c->algorithm == ONEHOP_2SHOT_PUSH;
}

/* Around powers of two and around the two shots' threshold. */
static void shapes(const oh_dispatch *d, size_t row) {
    const size_t world = (size_t)d->world;
    const size_t edge = d->world > 2 ? 400 * K * world / ((world - 1) * (world - 2)) / row : 77;
    for (size_t power = 0; power < 17; power++)
        for (size_t i = 0; i < 6; i++) {
            const size_t count = i < 3 ? ((size_t)1 << power) + i - 1 : edge + power + i - 12;
            if (!count || count > (size_t)1 << 30) continue;
            oh_rows rows = {OH_NORM, count, row, 96};
            same(d, &rows, ONEHOP_ALGORITHM_AUTO);
            same(d, &rows, ONEHOP_1SHOT_PUSH);
            same(d, &rows, ONEHOP_2SHOT_PUSH);
            rows.operation = OH_QKNORM;
            rows.bytes = 8;
            same(d, &rows, ONEHOP_ALGORITHM_AUTO);
            same(d, &rows, ONEHOP_1SHOT_PUSH);
        }
}

static void as_the_formula(void) {
    static const size_t rows[] = {16, 48, 1024, 4112, 8192, 16384, 32768},
                        slots[] = {64 * K, 8 * K * K, 100 * K};
    oh_tuning tuning;
    oh_dispatch d;
    CHECK_OK(oh_tuning_load(&tuning));
    for (int world = 2; world <= ONEHOP_MAX_RANKS; world++)
        for (int i = 0; i < 6; i++) {
            set_up(&d, i < 3 ? ONEHOP_DEVICE_HOST : ONEHOP_DEVICE_CUDA, world, slots[i % 3],
                   &tuning);
            for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) shapes(&d, rows[k]);
        }
    oh_tuning_free(&tuning);
    CHECK(two_shots > compared / 20);
    printf("%zu choices as the formula's, %zu of two shots\n", compared, two_shots);
}

/* ---- files ----------------------------------------------------------------------------------- */

static oh_tuning read_text(const char *text) {
    oh_tuning tuning;
    memset(&tuning, 0, sizeof tuning);
    CHECK_OK(oh_tuning_parse(&tuning, "some.table", text, strlen(text)));
    return tuning;
}

static void refused(const char *text, const char *expected) {
    oh_tuning tuning;
    memset(&tuning, 0, sizeof tuning);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT,
                 oh_tuning_parse(&tuning, "some.table", text, strlen(text)));
    CHECK_CONTAINS(expected, onehop_last_error());
    oh_tuning_free(&tuning);
}

static void sentences(void) {
    refused(CUDA "operation\n", "one operation, found \"nothing\"");
    refused(CUDA "operation norm\n", "plain, all_reduce_norm or tp_qknorm, found \"norm\"");
    refused(CUDA "operation plain tp_qknorm\n", "one operation, found \"tp_qknorm\"");
    refused(CUDA NORM "2 any any 2shot_pull workspace 3 -\n",
            "of all_reduce_norm: 1shot_push, 2shot_push, found");
    refused(CUDA NORM "2 any any host_1shot - 1 -\n",
            "of all_reduce_norm: 1shot_push, 2shot_push, found");
    refused(HOST NORM "2 any any nccl - - -\n", "1shot_push, 2shot_push, host_1shot, found");
    refused(CUDA NORM "2 any any 1shot_push - 3 64\n",
            "- for nccl and fused operations, found \"64\"");
    refused(ALL_CUDA "2 any any 2shot_push - 3 -\n", "of tp_qknorm: 1shot_push, found");
    refused(ALL_CUDA "device cuda\n2 any any 1shot_push - 3 -\n", "threads"); /* plain again */
    refused(ALL_CUDA "operation plain\n2 any any 1shot_push - 3 -\n", "threads");
}

static onehop_result choose(const oh_dispatch *d, const oh_rows *rows, oh_plan *plan) {
    const oh_question q = {
        .bytes = rows->count * rows->bytes, .dtype = ONEHOP_BFLOAT16, .rows = rows};
    return oh_dispatch_choose(d, &q, plan);
}

static void by_file(void) {
    oh_tuning tuning = read_text(CUDA "2-16 any any 2shot_pull workspace 3 64\n" NORM
                                      "4 eager 64K-1M 2shot_push - 9 -\n"
                                      "4 any any 1shot_push - 5 -\n");
    const oh_rows few = {OH_NORM, 8, 8192, 96}, many = {OH_NORM, 65, 8192, 96},
                  long_row = {OH_NORM, 1, 32768, 96}, tokens = {OH_QKNORM, 5, 8, 64};
    oh_dispatch d;
    oh_plan plan;
    set_up(&d, ONEHOP_DEVICE_CUDA, 4, 64 * K, &tuning);
    CHECK_OK(choose(&d, &few, &plan));
    CHECK_INT(ONEHOP_1SHOT_PUSH, plan.choice.algorithm);
    CHECK_INT(5, plan.choice.blocks);
    CHECK_OK(choose(&d, &many, &plan));
    CHECK_INT(ONEHOP_2SHOT_PUSH, plan.choice.algorithm);
    CHECK_INT(3, plan.choice.blocks); /* of each rank two rows at once, and the signature */
    CHECK_INT(96, plan.choice.threads);
    CHECK_OK(choose(&d, &long_row, &plan));
    CHECK_RESULT(ONEHOP_ERR_INTERNAL, choose(&d, &tokens, &plan));
    CHECK_CONTAINS("serves tp_qknorm of 40 bytes", onehop_last_error());
    oh_rows longer = long_row;
    longer.bytes = 32784;
    CHECK_RESULT(ONEHOP_ERR_TOO_LARGE, choose(&d, &longer, &plan));
    CHECK_CONTAINS("half a push slot: 32784 bytes, slots have 65536", onehop_last_error());
    oh_tuning_free(&tuning);
}

int main(void) {
    watchdog(60);
    as_the_formula();
    sentences();
    by_file();
    return 0;
}
