/* Reading the table: which rule serves a call, and what of it the group can do. */
#include "plan/dispatch.h"

#include "kernels/kernels.h"
#include "plan/chunks.h"
#include "plan/rules.h"

#include <string.h>

#define K ((size_t)1 << 10)
#define M ((size_t)1 << 20)

/* GPU-shaped bodies on the host device, forced by name: few blocks, one thread each. */
#define HOST_GPU_SHAPED_BLOCKS 3

/* Of the push slot that takes a message whole: all of it, or twice a shard in two shots. */
static size_t slot_for(const oh_dispatch *d, const oh_tuning_rule *rule, size_t bytes) {
    if (rule->algorithm != ONEHOP_2SHOT_PUSH) return bytes;
    return 2 * oh_round_up((bytes + (size_t)d->world - 1) / (size_t)d->world, OH_UNIT_BYTES);
}

/* The largest slot and the longest message by pull, up to `most` bytes. The choice changes only at
 * the bounds of rules, which belong to the piece below them. */
static void find_longest(const oh_dispatch *d, size_t max, size_t *push_out, size_t *pull_out) {
    *push_out = *pull_out = 0;
    for (size_t i = 0; i < 4 * d->rule_count; i++) {
        const oh_tuning_rule *bound = &d->rules[i / 4];
        oh_question q = {i & 1 ? bound->above : bound->up_to,
                         ONEHOP_FLOAT32,
                         i & 2 ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER,
                         false,
                         NULL,
                         ONEHOP_ALL_REDUCE,
                         NULL};
        if (q.bytes > max) q.bytes = max;
        const oh_tuning_rule *rule = q.bytes ? oh_rule_for(d, &q, ONEHOP_ALGORITHM_AUTO) : NULL;
        if (!rule) continue;
        const size_t slot = slot_for(d, rule, q.bytes);
        if (oh_is_push(rule->algorithm) && slot > *push_out) *push_out = slot;
        if (oh_is_pull(rule->algorithm) && q.bytes > *pull_out) *pull_out = q.bytes;
    }
}

void oh_dispatch_sizes(const oh_dispatch *d, size_t max_bytes, bool uncap,
                       const onehop_layout *usual, size_t *push_out, size_t *pull_out) {
    const size_t cap = max_bytes ? max_bytes : uncap ? OH_DISPATCH_MAX_BYTES : 16 * M;
    /* For calls that name an algorithm that the table does not use; and for gather_push, whose
     * chunks are a quarter of a rank's part of a half: 4 MiB of 32 between two ranks, which fills a
     * link while a flag is on its way and the chunk before is copied. */
    const size_t min_push = 64 * K;
    size_t min_pull = 2 * cap < usual->pull_bytes ? 2 * cap : usual->pull_bytes, push, pull;
    if (min_pull < 1 * M) min_pull = 1 * M;
    find_longest(d, cap, &push, &pull);
    if (!max_bytes && !uncap && push > usual->push_bytes) push = usual->push_bytes;
    *push_out = oh_round_up(push > min_push ? push : min_push, 4096);
    *pull_out = oh_round_up(pull > min_pull ? pull : min_pull, 4096);
}

/* ---- choices --------------------------------------------------------------------------------- */

static uint32_t min(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* The grid of the algorithm's rule; one that is named and has none takes that of another's. */
static const oh_tuning_rule *grid_from_table(const oh_dispatch *d, const oh_question *q,
                                             const oh_tuning_rule *rule, uint32_t bound,
                                             onehop_choice *choice) {
    uint32_t blocks = HOST_GPU_SHAPED_BLOCKS, threads = 1;
    if (!rule) rule = oh_rule_for(d, q, choice->algorithm);
    for (size_t i = 0; !rule && i < d->rule_count && d->kind == ONEHOP_DEVICE_CUDA; i++)
        if (d->rules[i].blocks && !oh_rule_misses(&d->rules[i], q)) rule = &d->rules[i];
    if (rule) {
        blocks = rule->blocks;
        threads = rule->threads;
    }
    choice->blocks = oh_is_host_path(choice->algorithm) ? 1 : min(blocks, d->regions.max_blocks);
    choice->threads = d->kind == ONEHOP_DEVICE_HOST ? 1 : min(threads, bound);
    return rule;
}

/* Of a fused call: a block for each row that is there at once, as far as the rule goes, and the
 * signature's; threads follow from the width of a row. */
static void narrow_to_rows(const oh_dispatch *d, const oh_question *q, uint32_t chunk_rows,
                           onehop_choice *choice) {
    const uint32_t ranks = choice->algorithm == ONEHOP_2SHOT_PUSH ? (uint32_t)d->world : 1;
    if (!oh_is_host_path(choice->algorithm))
        choice->blocks = min(choice->blocks, (chunk_rows + ranks - 1) / ranks + 1);
    if (d->kind == ONEHOP_DEVICE_CUDA) choice->threads = q->rows->threads;
}

static onehop_result choose_grid(const oh_dispatch *d, const oh_question *q,
                                 const oh_tuning_rule *rule, oh_plan *plan) {
    const onehop_call *call = q->call;
    onehop_choice *choice = &plan->choice;
    const uint32_t bound = d->bounds[choice->algorithm][q->dtype];
    plan->rule = grid_from_table(d, q, rule, bound, choice);
    if (q->rows) narrow_to_rows(d, q, plan->chunk_rows, choice);
    if (!call || (!call->blocks && !call->threads)) return ONEHOP_OK;
    const char *name = onehop_algorithm_name(choice->algorithm);
    const uint32_t low = oh_algorithm_of(choice->algorithm)->min_blocks;
    const uint32_t high = oh_is_host_path(choice->algorithm) ? 1 : d->regions.max_blocks;
    if (call->blocks && (call->blocks < low || call->blocks > high))
        return oh_error(ONEHOP_ERR_ALGORITHM, "%s takes %u..%u blocks here, found %u", name, low,
                        high, call->blocks);
    const bool host = d->kind == ONEHOP_DEVICE_HOST;
    const uint32_t fewest = host ? 1 : q->rows ? choice->threads : 32;
    const uint32_t max = host ? 1 : q->rows ? choice->threads : bound;
    if (call->threads && (call->threads < fewest || call->threads > max || call->threads % fewest))
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "%s takes %u..%u threads a block here, in multiples of %u, found %u", name,
                        fewest, max, fewest, call->threads);
    if (call->blocks) choice->blocks = call->blocks;
    if (call->threads) choice->threads = call->threads;
    return ONEHOP_OK;
}

/* Where `rule`, if there is one, says. Else captured pull calls read the captured memory, all
 * others the workspace; in place, 1shot_pull would overwrite what a peer still reads. A caller may
 * name the source. */
static onehop_result choose_source(const oh_dispatch *d, const oh_question *q,
                                   const oh_tuning_rule *rule, onehop_choice *choice) {
    const onehop_source named = q->call ? q->call->source : ONEHOP_SOURCE_NONE;
    const bool pull = oh_is_pull(choice->algorithm);
    const bool registers = q->mode == ONEHOP_MODE_GRAPH;
    const bool safe = choice->algorithm != ONEHOP_1SHOT_PULL || !q->in_place;
    if (!pull) {
        choice->source = ONEHOP_SOURCE_NONE;
        if (named == ONEHOP_SOURCE_NONE) return ONEHOP_OK;
        return oh_error(ONEHOP_ERR_ALGORITHM, "source %s belongs to pull algorithms; %s has none",
                        onehop_source_name(named), onehop_algorithm_name(choice->algorithm));
    }
    choice->source = named               ? named
                     : rule              ? (onehop_source)rule->source
                     : registers && safe ? ONEHOP_SOURCE_GRAPH
                                         : ONEHOP_SOURCE_WORKSPACE;
    if (choice->source == ONEHOP_SOURCE_GRAPH && !registers)
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "source graph needs a call that is captured between onehop_capture_begin "
                        "and _end, or a rule; this call is eager");
    if (choice->source == ONEHOP_SOURCE_GRAPH && !safe)
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "1shot_pull over source graph is out of place only; in place takes "
                        "2shot_pull, or source workspace");
    if (choice->source == ONEHOP_SOURCE_MULTICAST && d->multicast[choice->algorithm][q->dtype] < 0)
        return oh_error(
            ONEHOP_ERR_ALGORITHM,
            "source multicast is off: %s. It needs %s=1 on all ranks of a context, a "
            "GPU with multicast for each (the host emulates it), neither %s=0 nor %s=1; "
            "it has not been validated on hardware",
            oh_multicast_refusal() ? oh_multicast_refusal() : "not available here",
            oh_env_describe(OH_ENV_MULTICAST)->name, oh_env_describe(OH_ENV_NVLS)->name,
            oh_env_describe(OH_ENV_NO_MULTICAST)->name);
    if (choice->source > ONEHOP_SOURCE_MULTICAST)
        return oh_error(ONEHOP_ERR_ALGORITHM, "source %d is unknown", (int)choice->source);
    return ONEHOP_OK;
}

static bool group_can_use(const oh_dispatch *d, const oh_dispatch_group *group,
                          const oh_tuning_rule *rule) {
    return oh_rule_is_for_group(rule, group) && !oh_rule_group_lacks(d, group, rule);
}

onehop_result oh_dispatch_init(oh_dispatch *d, const oh_dispatch_group *group,
                               const oh_tuning *tuning) {
    size_t count;
    const oh_kernel *list = oh_kernel_list(&count);
    memset(d, 0, sizeof *d);
    d->kind = group->kind;
    d->world = group->world;
    d->nccl = group->nccl;
    for (int a = 0; a < OH_ALGORITHMS; a++)
        for (int t = 0; t <= ONEHOP_BFLOAT16; t++) {
            for (int o = 0; o < OH_OPERATIONS; o++)
                d->kernels[o][a][t] = (int16_t)oh_kernel_find(
                    d->kind, (oh_operation)o, (onehop_algorithm)a, (onehop_dtype)t, d->world);
            const int k = d->kernels[OH_PLAIN][a][t];
            d->bounds[a][t] = k < 0 ? 0 : list[k].max_threads;
            d->multicast[a][t] = -1;
            if (group->multicast)
                d->multicast[a][t] =
                    (int16_t)oh_kernel_find_multicast((onehop_algorithm)a, (onehop_dtype)t);
        }
    for (size_t i = 0; i < tuning->count; i++) {
        if (!group_can_use(d, group, &tuning->rules[i])) continue;
        if (d->rule_count == OH_DISPATCH_RULES)
            return oh_error(ONEHOP_ERR_ENVIRONMENT,
                            "%s: the tables have more than %d rules for this device and %d ranks",
                            oh_env_describe(OH_ENV_TUNING)->name, OH_DISPATCH_RULES, d->world);
        d->rules[d->rule_count++] = tuning->rules[i];
    }
    return ONEHOP_OK;
}

bool oh_dispatch_uses(const oh_dispatch *d, int kernel) {
    bool uses = false;
    for (int a = 1; a < OH_ALGORITHMS; a++)
        for (int t = ONEHOP_FLOAT32; t <= ONEHOP_BFLOAT16; t++) {
            uses |= d->multicast[a][t] == kernel;
            for (int o = 0; o < OH_OPERATIONS; o++) uses |= d->kernels[o][a][t] == kernel;
        }
    return uses;
}

static onehop_result choose_alone(const oh_dispatch *d, const oh_question *q, oh_plan *plan) {
    const onehop_algorithm forced = q->call ? q->call->algorithm : ONEHOP_ALGORITHM_AUTO;
    if (forced != ONEHOP_ALGORITHM_AUTO && forced != ONEHOP_LOCAL_COPY)
        return oh_error(ONEHOP_ERR_ALGORITHM, "a group of one rank copies; %s was asked for",
                        onehop_algorithm_name(forced));
    return choose_source(d, q, NULL, &plan->choice);
}

static onehop_result choose_nccl(const oh_dispatch *d, const oh_question *q, oh_plan *plan) {
    if (q->call && (q->call->blocks || q->call->threads))
        return oh_error(ONEHOP_ERR_ALGORITHM, "nccl chooses its grid itself");
    return choose_source(d, q, NULL, &plan->choice);
}

/* No kernel for an algorithm that the caller named. */
static onehop_result refuse_kernel(const oh_dispatch *d, const oh_question *q,
                                   onehop_algorithm forced) {
    char list[128];
    uint32_t there = 0;
    if (oh_operation_of(q) == OH_PLAIN)
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "%s (%d) is not available on the %s device for %s, world size %d",
                        onehop_algorithm_name(forced), (int)forced,
                        d->kind == ONEHOP_DEVICE_CUDA ? "cuda" : "host",
                        q->dtype ? onehop_dtype_name(q->dtype) : "bytes", d->world);
    for (int a = 1; a < OH_ALGORITHMS; a++)
        if (d->kernels[oh_operation_of(q)][a][q->dtype] >= 0) there |= 1u << a;
    return oh_error(ONEHOP_ERR_ALGORITHM, "%s: there is no %s (%d); expected %s",
                    oh_operation_name(oh_operation_of(q)), onehop_algorithm_name(forced),
                    (int)forced, oh_algorithm_list(there, list, sizeof list));
}

/* A shape that the algorithm cannot serve. */
static onehop_result refuse_shape(const oh_dispatch *d, const oh_question *q, onehop_algorithm a,
                                  const char *why) {
    if (!q->rows)
        return oh_error(ONEHOP_ERR_ALGORITHM, "%s takes up to %zu bytes a rank here, found %zu",
                        onehop_algorithm_name(a), (size_t)d->regions.ll_bytes / 2, q->bytes);
    return oh_error(oh_is_host_path(a) ? ONEHOP_ERR_ALGORITHM : ONEHOP_ERR_TOO_LARGE,
                    "%s by %s: %s: %zu bytes, slots have %zu; see push_bytes and pull_bytes",
                    oh_operation_name(q->rows->operation), onehop_algorithm_name(a), why,
                    q->rows->bytes, (size_t)d->regions.slot_bytes);
}

/* The algorithm that the caller names, or that of the first rule that serves. */
static onehop_result choose_algorithm(const oh_dispatch *d, const oh_question *q,
                                      const oh_tuning_rule **rule_out, onehop_algorithm *out) {
    const onehop_algorithm forced = q->call ? q->call->algorithm : ONEHOP_ALGORITHM_AUTO;
    *rule_out = NULL;
    *out = forced;
    if (forced != ONEHOP_ALGORITHM_AUTO) {
        if (oh_collective_of(forced) == q->collective) return ONEHOP_OK;
        return oh_error(ONEHOP_ERR_ALGORITHM, "%s (%d) does not serve %s",
                        onehop_algorithm_name(forced), (int)forced,
                        onehop_collective_name(q->collective));
    }
    *rule_out = oh_rule_for(d, q, ONEHOP_ALGORITHM_AUTO);
    if (*rule_out) {
        *out = (*rule_out)->algorithm;
        return ONEHOP_OK;
    }
    const char *why = q->rows ? oh_shape_lacks(d, ONEHOP_1SHOT_PUSH, q) : NULL;
    if (why) return refuse_shape(d, q, ONEHOP_1SHOT_PUSH, why);
    return oh_error(ONEHOP_ERR_INTERNAL, "no rule of the tables serves %s of %zu bytes",
                    q->rows ? oh_operation_name(q->rows->operation)
                            : onehop_collective_name(q->collective),
                    q->bytes);
}

static void cut(const oh_dispatch *d, const oh_question *q, oh_plan *plan) {
    if (q->rows) {
        plan->chunk_rows = oh_chunk_rows(d, plan->choice.algorithm, q->rows);
        plan->chunk_bytes = plan->chunk_rows * q->rows->bytes;
    } else {
        plan->chunk_bytes = oh_chunk_bytes(d, plan->choice.algorithm, q->bytes);
    }
    plan->choice.chunks = (uint32_t)((q->bytes + plan->chunk_bytes - 1) / plan->chunk_bytes);
}

/* Kernel, source, pieces and grid of an algorithm. */
static onehop_result choose_rest(const oh_dispatch *d, const oh_question *q,
                                 const oh_tuning_rule *rule, oh_plan *plan) {
    onehop_choice *c = &plan->choice;
    const oh_operation o = oh_operation_of(q);
    if ((unsigned)c->algorithm >= OH_ALGORITHMS || d->kernels[o][c->algorithm][q->dtype] < 0)
        return refuse_kernel(d, q, c->algorithm);
    const char *lack = oh_shape_lacks(d, c->algorithm, q);
    if (lack && c->algorithm == ONEHOP_2SHOT_PUSH) {
        c->instead_of = c->algorithm;
        c->algorithm = ONEHOP_1SHOT_PUSH;
        lack = oh_shape_lacks(d, c->algorithm, q);
    }
    if (lack) return refuse_shape(d, q, c->algorithm, lack);
    onehop_result result = choose_source(d, q, rule, c);
    if (result) return result;
    plan->kernel = oh_kernel_for(d, o, (unsigned)c->algorithm, (unsigned)c->source, q->dtype);
    cut(d, q, plan);
    return choose_grid(d, q, rule, plan);
}

onehop_result oh_dispatch_choose(const oh_dispatch *d, const oh_question *q, oh_plan *plan) {
    const oh_tuning_rule *rule = NULL;
    *plan = (oh_plan){.choice = {.algorithm = ONEHOP_LOCAL_COPY, .chunks = 1},
                      .kernel = -1,
                      .chunk_bytes = q->bytes};
    if (d->world == 1) return choose_alone(d, q, plan);
    onehop_result result = choose_algorithm(d, q, &rule, &plan->choice.algorithm);
    if (result) return result;
    plan->rule = rule;
    if (plan->choice.algorithm == ONEHOP_NCCL && d->nccl) return choose_nccl(d, q, plan);
    return choose_rest(d, q, rule, plan);
}

onehop_choice oh_plan_choice(const oh_plan *plan) {
    onehop_choice choice = plan->choice;
    if (plan->rule) choice.table = oh_tuning_where(plan->rule, &choice.line);
    return choice;
}
