/* Property: the bodies of the fused operations give right bits under adverse scheduling
 * (support/lanes.h), with two and three lanes per rank and blocks spread over them: the one-shot
 * and the two-shot norm and tp_qknorm after one another, any grid after any grid, counters about to
 * wrap, many chunks with one lane held back, words that look like the sentinel. Also a program that
 * tests/mutants builds from altered sources.
 *
 * test_fused_lanes [deadline in ms [calls in percent]] */
/* labels: quick timeout=120 */
#include "lanes.h"

#include "kernels/kernels.h"
#include "kernels/fused/norm_1shot.h"
#include "kernels/fused/norm_2shot.h"
#include "kernels/fused/qknorm.h"
#include "norm_reference.h"

#define BODY(operation, arguments, world)                                                          \
    OH_KERNEL_OF(arguments, fused_##operation##_w##world, 0,                                       \
                 oh_##operation(a, g, OH_BF16, world##u))
BODY(norm_1shot, oh_norm_args, 0)
BODY(norm_1shot, oh_norm_args, 2)
BODY(norm_1shot, oh_norm_args, 4)
BODY(norm_2shot, oh_norm_args, 0)
BODY(norm_2shot, oh_norm_args, 2)
BODY(norm_2shot, oh_norm_args, 4)
BODY(qknorm, oh_qknorm_args, 0)

typedef enum operation {
    NORM_1SHOT,
    NORM_2SHOT,
    QKNORM
} operation;

/* [operation][any, 2, 4 ranks] */
static const oh_host_kernel bodies[3][3] = {
    {fused_norm_1shot_w0, fused_norm_1shot_w2, fused_norm_1shot_w4},
    {fused_norm_2shot_w0, fused_norm_2shot_w2, fused_norm_2shot_w4},
    {fused_qknorm_w0, fused_qknorm_w0, fused_qknorm_w0}};

#define MAX 16384 /* elements */

typedef struct call {
    operation operation;
    size_t rows, width; /* of q and k: width and 3 */
    uint32_t blocks;
    input_kind kind;
    bool in_place;   /* residual_out in residual_in */
    bool two_a_lane; /* 64 lanes; of integers, whose squares add up exactly in any order */
    int held_rank, held_lane;
    /* Made before the ranks start. */
    uint16_t *x[ONEHOP_MAX_RANKS], *residual, *weight, *r, *y;
} call;

typedef union arguments {
    oh_args call;
    oh_norm_args norm;
    oh_qknorm_args qknorm;
} arguments;

static struct {
    lanes_group group;
    call *calls;
    size_t count;
    arguments args[ONEHOP_MAX_RANKS];
    uint16_t *x[ONEHOP_MAX_RANKS], *residual[ONEHOP_MAX_RANKS];
    uint16_t *y[ONEHOP_MAX_RANKS], *r[ONEHOP_MAX_RANKS];
} run;

static unsigned deadline_ms = 60000, percent = 100;

#define K_WIDTH 3

static size_t elements_of(const call *c) {
    return c->rows * (c->width + (c->operation == QKNORM ? K_WIDTH : 0));
}

static float float_of(uint16_t bits) {
    return oh_f32_of_bits((oh_u32)bits << 16);
}

/* Of integers, whose squares add up exactly in any order. */
static void expect_qknorm(call *c, int world) {
    const size_t width = c->width + K_WIDTH;
    for (size_t t = 0; t < c->rows; t++) {
        float q = 0, k = 0;
        for (int r = 0; r < world; r++)
            for (size_t i = 0; i < width; i++) {
                const float x = float_of(c->x[r][t * width + i]);
                *(i < c->width ? &q : &k) += x * x;
            }
        q = 1.0f / oh_sqrt_f32(q * (1.0f / (float)(c->width * (size_t)world)) + 1e-5f);
        k = 1.0f / oh_sqrt_f32(k * (1.0f / (float)(K_WIDTH * (size_t)world)) + 1e-5f);
        /* Of every rank, one after the other. */
        for (int r = 0; r < world; r++)
            for (size_t i = 0; i < width; i++)
                c->y[(size_t)r * c->rows * width + t * width + i] =
                    (uint16_t)oh_bf16_of_f32(float_of(c->x[r][t * width + i]) *
                                             (i < c->width ? q : k) * float_of(c->weight[i]));
    }
}

static uint16_t *elements(size_t count) {
    uint16_t *p = calloc(count + 8, sizeof *p);
    if (!p) FAIL("no memory");
    return p;
}

static void make(call *c, size_t index, int world) {
    const size_t count = elements_of(c), width = count / c->rows;
    const input_kind kind = c->operation == QKNORM ? INPUT_INTEGERS : c->kind;
    uint8_t *quantised = malloc(count);
    float *scales = malloc(c->rows * sizeof *scales);
    if (count > MAX) FAIL("a call of %zu elements", count);
    for (int r = 0; r < world; r++) {
        c->x[r] = elements(count);
        input_fill(c->x[r], kind, index + 1, r, 0, count, ONEHOP_BFLOAT16);
    }
    c->residual = elements(count);
    c->weight = elements(width);
    c->r = elements(count);
    c->y = elements(count * (size_t)world);
    input_fill(c->residual, kind, index + 1, 20, 0, count, ONEHOP_BFLOAT16);
    input_fill(c->weight, INPUT_REAL, index + 1, 21, 0, width, ONEHOP_BFLOAT16);
    if (c->operation == QKNORM) {
        expect_qknorm(c, world);
    } else {
        norm_data d = {ONEHOP_BFLOAT16, c->rows, c->width, world, {0},  c->residual, c->weight,
                       1e-5f,           false,   1.0f,     c->r,  c->y, quantised,   scales};
        for (int r = 0; r < world; r++) d.x[r] = c->x[r];
        norm_reference(&d, "lanes");
    }
    free(quantised);
    free(scales);
}

static void forget(call *c, int world) {
    for (int r = 0; r < world; r++) free(c->x[r]);
    free(c->residual);
    free(c->weight);
    free(c->r);
    free(c->y);
}

/* Whole rows; as src/call does. */
static uint32_t pieces(const call *c, size_t row_room, uint32_t *chunk_rows) {
    const size_t slot = run.group.regions.slot_bytes, world = (size_t)run.group.world;
    const size_t shard = (c->rows + world - 1) / world;
    size_t max = c->rows * row_room <= slot ? c->rows : slot / 2 / row_room;
    if (c->operation == NORM_2SHOT)
        max = shard * row_room <= slot / 2 ? shard * world : slot / 4 / row_room * world;
    *chunk_rows = (uint32_t)max;
    return (uint32_t)((c->rows + max - 1) / max);
}

static void prepare(lanes_rank *own, size_t index) {
    const call *c = &run.calls[index];
    const int rank = own->rank;
    const size_t bytes = 2 * elements_of(c), units = (c->width + 7) / 8;
    arguments *a = &run.args[rank];
    memset(a, 0, sizeof *a);
    memset(&own->args, 0, sizeof own->args);
    lanes_addresses(own);
    a->call = own->args;
    a->call.hash =
        (uint32_t)(c->rows * 2654435761u + c->width * 97u + c->blocks + (uint32_t)c->operation + 1);
    memcpy(run.x[rank], c->x[rank], bytes);
    memcpy(run.residual[rank], c->residual, bytes);
    memset(run.y[rank], 0xA5, bytes);
    memset(run.r[rank], 0xA5, bytes);
    a->call.in = (uintptr_t)run.x[rank];
    if (c->operation == QKNORM) {
        oh_qknorm_args *n = &a->qknorm;
        a->call.out = a->call.in + 2 * c->width;
        a->call.units = (uint32_t)units + 1;
        n->q_weight = (uintptr_t)c->weight;
        n->k_weight = (uintptr_t)(c->weight + c->width);
        n->q_stride = n->k_stride = 2 * (c->width + K_WIDTH);
        n->tokens = (uint32_t)c->rows;
        n->q_units = (uint32_t)units;
        n->q_bytes = (uint32_t)c->width * 2;
        n->k_bytes = K_WIDTH * 2;
        n->lanes = oh_lanes_of(a->call.units);
        n->eps = 1e-5f;
        n->inverse_q = 1.0f / (float)(c->width * (size_t)run.group.world);
        n->inverse_k = 1.0f / (float)(K_WIDTH * (size_t)run.group.world);
        a->call.chunks = pieces(c, 8, &n->chunk_tokens);
        a->call.chunk_bytes = 8ull * n->chunk_tokens;
    } else {
        oh_norm_args *n = &a->norm;
        a->call.out = (uintptr_t)run.y[rank];
        a->call.units = (uint32_t)units;
        a->call.whole = c->width % 8 ? 0 : (uint32_t)units;
        n->residual_in = (uintptr_t)run.residual[rank];
        n->weight = (uintptr_t)c->weight;
        n->residual_out = c->in_place ? n->residual_in : (uintptr_t)run.r[rank];
        n->in_stride = n->residual_in_stride = n->out_stride = n->residual_out_stride =
            2 * c->width;
        n->rows = (uint32_t)c->rows;
        n->row_bytes = (uint32_t)c->width * 2;
        n->lanes = c->two_a_lane ? 64 : oh_lanes_of(a->call.units);
        n->eps = 1e-5f;
        n->inverse_hidden = 1.0f / (float)c->width;
        a->call.chunks = pieces(c, units * 16, &n->chunk_rows);
        a->call.chunk_bytes = n->chunk_rows * units * 16;
    }
}

static void verify(lanes_rank *own, size_t index) {
    const call *c = &run.calls[index];
    const int rank = own->rank;
    const size_t count = elements_of(c);
    const oh_u64 word = *(oh_u64 *)((char *)own->local + OH_LOCAL_SEQUENCES);
    char what[160];
    snprintf(what, sizeof what, "%s: call %zu (operation %d, %zu x %zu), rank %d, %u blocks",
             run.group.what, index, (int)c->operation, c->rows, c->width, rank, c->blocks);
    if (own->page.record.kind || word >> 32)
        FAIL("%s: the call failed: kind %u, site %u, peer %d", what, own->page.record.kind,
             own->page.record.site, own->page.record.peer);
    if (c->operation == QKNORM) {
        expect_equal(c->y + (size_t)rank * count, run.x[rank], count, ONEHOP_BFLOAT16, what);
    } else {
        expect_equal(c->r, c->in_place ? run.residual[rank] : run.r[rank], count, ONEHOP_BFLOAT16,
                     what);
        expect_equal(c->y, run.y[rank], count, ONEHOP_BFLOAT16, what);
    }
    lanes_expect_armed(own, (oh_u32)word & 1u, index);
}

static void *lane_main(void *argument) {
    const lanes_thread t = *(lanes_thread *)argument;
    lanes_rank *own = t.rank;
    const lanes_group *g = &run.group;
    const int at = g->world == 2 ? 1 : g->world == 4 ? 2 : 0;
    chaos_here.state = (uint64_t)(own->rank * 16 + t.lane + 1) * 0x2545f4914f6cdd1dull;
    for (size_t i = 0; i < run.count; i++) {
        const call *c = &run.calls[i];
        const lanes_call like = {.count = c->operation == QKNORM ? 4 * c->rows : elements_of(c),
                                 .dtype = ONEHOP_BFLOAT16};
        if (t.lane == 0) prepare(own, i);
        pthread_barrier_wait(&own->boundary);
        lanes_kernel_here = bodies[c->operation][at];
        lanes_set_chaos(g, &like, c->held_rank == own->rank && c->held_lane == t.lane);
        oh_host_run_worker(lanes_body, &run.args[own->rank], c->blocks, (uint32_t)t.lane,
                           (uint32_t)g->lanes);
        chaos_here.left = chaos_here.long_us = 0;
        pthread_barrier_wait(&own->boundary);
        if (t.lane == 0) verify(own, i);
    }
    return NULL;
}

static void run_calls(const char *what, int world, int lanes, uint32_t first_sequence, call *calls,
                      size_t count) {
    lanes_thread starts[ONEHOP_MAX_RANKS][LANES_MAX_LANES];
    lanes_group *g = &run.group;
    lanes_open(g, world, lanes, deadline_ms);
    if (first_sequence) lanes_preset(g, first_sequence);
    g->what = what;
    run.calls = calls;
    run.count = count;
    for (size_t i = 0; i < count; i++) make(&calls[i], i, world);
    for (int r = 0; r < world; r++) {
        run.x[r] = elements(MAX);
        run.y[r] = elements(MAX);
        run.r[r] = elements(MAX);
        run.residual[r] = elements(MAX);
    }
    for (int r = 0; r < world; r++)
        for (int lane = 0; lane < lanes; lane++) {
            starts[r][lane] = (lanes_thread){&g->ranks[r], lane};
            if (pthread_create(&g->ranks[r].threads[lane], NULL, lane_main, &starts[r][lane]))
                FAIL("pthread_create failed");
        }
    for (int r = 0; r < world; r++)
        for (int lane = 0; lane < lanes; lane++) pthread_join(g->ranks[r].threads[lane], NULL);
    for (int r = 0; r < world; r++) {
        for (uint32_t parity = 0; parity < 2; parity++)
            lanes_expect_armed(&g->ranks[r], parity, count);
        free(run.x[r]);
        free(run.y[r]);
        free(run.r[r]);
        free(run.residual[r]);
    }
    for (size_t i = 0; i < count; i++) forget(&calls[i], world);
    lanes_close(g);
}

static const uint32_t grids[] = {2, 3, 7, 16};

/* Operations in turn, each call another shape; `many`: several chunks, one lane held back. */
static void in_turn(const char *what, int world, int lanes, uint32_t first_sequence, size_t count,
                    bool many) {
    call *calls = calloc(count, sizeof *calls);
    uint64_t random = 31 + (uint64_t)world;
    for (size_t i = 0; i < count; i++) {
        call *c = &calls[i];
        const uint64_t bits = random_next(&random);
        c->operation = (operation)(i % 3);
        c->blocks = grids[bits % 4];
        c->width = many ? 96 : 1 + bits / 4 % 120;
        c->rows = many ? 30 + bits / 512 % 60 : 1 + bits / 512 % 24;
        if (c->operation == QKNORM) {
            c->width = 1 + bits / 4 % 9;
            c->rows = many ? 520 + bits / 512 % 700 : 1 + bits / 512 % 60;
        }
        c->kind = bits >> 40 & 1 ? INPUT_REAL : INPUT_SPECIAL;
        c->in_place = bits >> 41 & 1;
        c->held_rank = many ? (int)(bits >> 42) % world : -1;
        if (c->held_rank < 0) c->held_rank = -1;
        c->held_lane = (int)(bits >> 60) % lanes;
    }
    run_calls(what, world, lanes, first_sequence, calls, count);
    free(calls);
}

/* One-shot norms of whole rows in one chunk, which have a path of their own: a unit a lane and two,
 * lanes with fewer, more rows than blocks, one lane held back. */
static void whole_rows(const char *what, int world, size_t count) {
    static const size_t widths[] = {8, 520, 96, 776, 1000, 1024};
    call *calls = calloc(count, sizeof *calls);
    uint64_t random = 77 + (uint64_t)world;
    for (size_t i = 0; i < count; i++) {
        call *c = &calls[i];
        const uint64_t bits = random_next(&random);
        c->two_a_lane = i % 2;
        c->width = widths[i % 6];
        c->rows = 1 + bits / 512 % (run.group.regions.slot_bytes / 2 / c->width);
        c->blocks = grids[bits % 4];
        c->kind = c->two_a_lane ? INPUT_INTEGERS : bits >> 40 & 1 ? INPUT_REAL : INPUT_SPECIAL;
        c->in_place = bits >> 41 & 1;
        c->held_rank = (int)(bits >> 42 & 0xff) % world;
        c->held_lane = (int)(bits >> 60) % 2;
    }
    run_calls(what, world, 2, 0, calls, count);
    free(calls);
}

static size_t scaled(size_t calls) {
    const size_t n = calls * percent / 100 / (HARNESS_SANITIZED ? 4 : 1);
    return n < 12 ? 12 : n;
}

int main(int argc, char **argv) {
    if (argc > 1) deadline_ms = (unsigned)atoi(argv[1]);
    if (argc > 2) percent = (unsigned)atoi(argv[2]);
    watchdog(110);
    in_turn("any grid after any grid", 2, 2, 0, scaled(60), false);
    lanes_push_whole_chunk = 0;
    in_turn("many chunks, one lane held back", 2, 2, 0, scaled(24), true);
    in_turn("counters about to wrap", 3, 2, 0xfffffffbu, 12, false);
    in_turn("many chunks, one lane held back", 3, 2, 0, scaled(24), true);
    in_turn("any grid after any grid", 4, 2, 0, scaled(60), false);
    whole_rows("whole rows", 2, scaled(36));
    whole_rows("whole rows", 4, scaled(24));
    lanes_push_whole_chunk = 1;
    in_turn("any grid after any grid", 3, 3, 0x7ffffffbu, scaled(60), false);
    if (percent == 100) in_turn("many chunks, one lane held back", 4, 2, 0, scaled(24), true);
    return 0;
}
