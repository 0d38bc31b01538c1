/* Reading the table: which rule serves a call, and what of it the group can do. */
#include "comm/dispatch.h"

#include "kernels/kernels.h"

#include <string.h>

#define K ((size_t)1 << 10)
#define M ((size_t)1 << 20)

/* GPU-shaped bodies on the host device, forced by name: few blocks, one thread each. */
#define HOST_GPU_SHAPED_BLOCKS 3

static bool is_host_path(onehop_algorithm a) {
    return a == ONEHOP_HOST_1SHOT || a == ONEHOP_HOST_2SHOT || a == ONEHOP_HOST_SCATTER ||
           a == ONEHOP_HOST_GATHER;
}

static bool is_pull(onehop_algorithm a) {
    return a == ONEHOP_1SHOT_PULL || a == ONEHOP_2SHOT_PULL;
}

static bool is_push(onehop_algorithm a) {
    return a == ONEHOP_1SHOT_PUSH || a == ONEHOP_2SHOT_PUSH;
}

/* ---- rules ----------------------------------------------------------------------------------- */

static int kernel_for(const oh_dispatch *d, unsigned algorithm, unsigned source, int dtype) {
    return source == ONEHOP_SOURCE_MULTICAST ? d->multicast[algorithm][dtype]
                                             : d->kernels[algorithm][dtype];
}

static bool has_kernel(const oh_dispatch *d, const oh_tuning_rule *rule) {
    for (int t = 0; t <= ONEHOP_BFLOAT16; t++)
        if (kernel_for(d, rule->algorithm, rule->source, t) >= 0) return true;
    return false;
}

/* What no call of the group can use is not kept. */
static bool group_can_use(const oh_dispatch *d, const oh_dispatch_group *group,
                          const oh_tuning_rule *rule) {
    const bool host = rule->device == OH_TUNING_HOST;
    if (host != (group->kind == ONEHOP_DEVICE_HOST)) return false;
    if (!host && rule->device != OH_TUNING_CUDA && rule->device != group->capability / 10)
        return false;
    if (group->world < rule->world_low || group->world > rule->world_high) return false;
    return rule->algorithm == ONEHOP_NCCL ? group->nccl : has_kernel(d, rule);
}

static bool rule_fits(const oh_tuning_rule *rule, const oh_question *q) {
    if (oh_collective_of(rule->algorithm) != q->collective) return false;
    return rule->modes >> q->mode & 1 && q->bytes > rule->above && q->bytes <= rule->up_to;
}

/* Words of 4 bytes of data and an sequence number; there is no second piece. */
static bool fits_ll(const oh_dispatch *d, size_t bytes) {
    return bytes <= d->regions.ll_bytes / 2;
}

/* Captured memory can be read by captured calls, and by 1shot_pull only out of place: a peer still
 * reads what it would overwrite. 2shot_push gives every rank a unit at least. */
static bool call_can_use(const oh_dispatch *d, const oh_tuning_rule *rule, const oh_question *q) {
    if (rule->algorithm == ONEHOP_NCCL) return true;
    if (kernel_for(d, rule->algorithm, rule->source, q->dtype) < 0) return false;
    if (rule->algorithm == ONEHOP_2SHOT_PUSH)
        return (q->bytes + OH_UNIT_BYTES - 1) / OH_UNIT_BYTES >= (size_t)d->world;
    if (rule->algorithm == ONEHOP_GATHER_LL) return fits_ll(d, q->bytes);
    if (rule->source != ONEHOP_SOURCE_GRAPH) return true;
    return q->mode == ONEHOP_MODE_GRAPH && !(rule->algorithm == ONEHOP_1SHOT_PULL && q->in_place);
}

/* The rule of a call, or with an algorithm the first that has it; NULL if there is none. */
static const oh_tuning_rule *rule_for(const oh_dispatch *d, const oh_question *q,
                                      onehop_algorithm algorithm) {
    for (size_t i = 0; i < d->row_count; i++) {
        const oh_tuning_rule *rule = &d->rules[i];
        if (algorithm != ONEHOP_ALGORITHM_AUTO && rule->algorithm != algorithm) continue;
        if (rule_fits(rule, q) && call_can_use(d, rule, q)) return rule;
    }
    return NULL;
}

/* Of the push slot that takes a message whole: all of it, or twice a shard in two shots. */
static size_t slot_for(const oh_dispatch *d, const oh_tuning_rule *rule, size_t bytes) {
    if (rule->algorithm != ONEHOP_2SHOT_PUSH) return bytes;
    return 2 * oh_round_up((bytes + (size_t)d->world - 1) / (size_t)d->world, OH_UNIT_BYTES);
}

/* The largest slot and the longest message by pull, up to `most` bytes. The choice changes only at
 * the bounds of rules, which belong to the piece below them. */
static void find_longest(const oh_dispatch *d, size_t max, size_t *push_out, size_t *pull_out) {
    *push_out = *pull_out = 0;
    for (size_t i = 0; i < 4 * d->row_count; i++) {
        const oh_tuning_rule *bound = &d->rules[i / 4];
        oh_question q = {i & 1 ? bound->above : bound->up_to,
                         ONEHOP_FLOAT32,
                         i & 2 ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER,
                         false,
                         NULL,
                         ONEHOP_ALL_REDUCE};
        if (q.bytes > max) q.bytes = max;
        const oh_tuning_rule *rule = q.bytes ? rule_for(d, &q, ONEHOP_ALGORITHM_AUTO) : NULL;
        if (!rule) continue;
        const size_t slot = slot_for(d, rule, q.bytes);
        if (is_push(rule->algorithm) && slot > *push_out) *push_out = slot;
        if (is_pull(rule->algorithm) && q.bytes > *pull_out) *pull_out = q.bytes;
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

static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

/* Equal pieces of whole lines, as few as fit `most`: what is left for the last one keeps all ranks
 * busy. */
static size_t equal_pieces(size_t bytes, size_t max) {
    const size_t pieces = (bytes + max - 1) / max;
    return oh_round_up((bytes + pieces - 1) / pieces, 128);
}

/* A message that fits a half of the pull buffer goes whole. Longer ones: 2shot_pull uses one place
 * again and again, 1shot_pull two in turn. Bytes of a chunk are counted in 32 bits. */
static size_t pull_chunk_bytes(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t whole = d->regions.pull_bytes < 2048 * M ? d->regions.pull_bytes : 2048 * M;
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    if (padded <= whole) return padded;
    return equal_pieces(bytes, oh_round_down(a == ONEHOP_1SHOT_PULL ? whole / 2 : whole, 128));
}

/* A message whose shards fit half a slot each goes whole; else its shards take a quarter at
 * most. */
static size_t push_2shot_chunk_bytes(const oh_dispatch *d, size_t bytes) {
    const size_t whole = (size_t)d->world * (d->regions.slot_bytes / 2);
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    return padded <= whole ? padded : equal_pieces(bytes, whole / 2);
}

/* Parts of W ranks in a half of the pull buffer, in four sub-slots in turn: one chunk ahead. On
 * GPUs a part goes whole only where it is short, so that copying overlaps with the link. */
static size_t gather_chunk_bytes(const oh_dispatch *d, size_t bytes) {
    const size_t grain = d->regions.pull_bytes / (4 * (size_t)d->world) < 128 ? OH_UNIT_BYTES : 128;
    const size_t max = oh_round_down(d->regions.pull_bytes / (4 * (size_t)d->world), grain);
    const size_t pieces = (bytes + max - 1) / max;
    const size_t even = oh_round_up((bytes + pieces - 1) / pieces, grain);
    return even < max ? even : max;
}

/* The host paths' (kernels/host_path.h). What fits a mailbox goes whole, if short, else pieces take
 * turns in the halves of it; host_2shot has a shard in a mailbox, and two results in a box. What is
 * published for all takes turns in the quarters of the own half. */
static size_t host_chunk_bytes(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES), half = d->regions.pull_bytes;
    const size_t box = OH_BOX_BYTES(half, (size_t)d->world), for_all = a == ONEHOP_HOST_GATHER;
    if (a == ONEHOP_HOST_2SHOT)
        return min_size(128 * K, (size_t)d->world * oh_round_down(box / 2, 128));
    if (padded <= (for_all ? min_size(64 * K, half) : min_size(256 * K, box))) return padded;
    return for_all ? min_size(128 * K, half / 4) : min_size(64 * K, box / 2);
}

/* Pieces: a message that fits its slot goes whole; else in halves of a push slot. */
static size_t chunk_bytes_for(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    if (is_pull(a)) return pull_chunk_bytes(d, a, bytes);
    if (a == ONEHOP_2SHOT_PUSH) return push_2shot_chunk_bytes(d, bytes);
    if (a == ONEHOP_GATHER_LL) return padded;
    if (a == ONEHOP_GATHER_PUSH) return gather_chunk_bytes(d, bytes);
    if (is_host_path(a)) return host_chunk_bytes(d, a, bytes);
    return padded <= d->regions.slot_bytes ? padded : oh_round_down(d->regions.slot_bytes / 2, 128);
}

/* ---- choices --------------------------------------------------------------------------------- */

static uint32_t min(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

/* The grid of the algorithm's rule; one that is named and has none takes that of another's. */
static void grid_from_table(const oh_dispatch *d, const oh_question *q, const oh_tuning_rule *rule,
                            uint32_t bound, onehop_choice *choice) {
    uint32_t blocks = HOST_GPU_SHAPED_BLOCKS, threads = 1;
    if (!rule) rule = rule_for(d, q, choice->algorithm);
    for (size_t i = 0; !rule && i < d->row_count && d->kind == ONEHOP_DEVICE_CUDA; i++)
        if (d->rules[i].blocks && rule_fits(&d->rules[i], q)) rule = &d->rules[i];
    if (rule) {
        blocks = rule->blocks;
        threads = rule->threads;
    }
    choice->blocks = is_host_path(choice->algorithm) ? 1 : min(blocks, d->regions.max_blocks);
    choice->threads = d->kind == ONEHOP_DEVICE_HOST ? 1 : min(threads, bound);
}

static onehop_result choose_grid(const oh_dispatch *d, const oh_question *q,
                                 const oh_tuning_rule *rule, onehop_choice *choice) {
    const onehop_call *call = q->call;
    const uint32_t bound = d->bounds[choice->algorithm][q->dtype];
    grid_from_table(d, q, rule, bound, choice);
    if (!call || (!call->blocks && !call->threads)) return ONEHOP_OK;
    const bool fixed = is_host_path(choice->algorithm);
    const uint32_t low = fixed ? 1 : 2, high = fixed ? 1 : d->regions.max_blocks;
    if (call->blocks && (call->blocks < low || call->blocks > high))
        return oh_error(ONEHOP_ERR_ALGORITHM, "%s takes %u..%u blocks here, found %u",
                        onehop_algorithm_name(choice->algorithm), low, high, call->blocks);
    const uint32_t fewest = d->kind == ONEHOP_DEVICE_HOST ? 1 : 32;
    const uint32_t max = d->kind == ONEHOP_DEVICE_HOST ? 1 : bound;
    if (call->threads && (call->threads < fewest || call->threads > max || call->threads % fewest))
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "%s takes %u..%u threads a block here, in multiples of %u, found %u",
                        onehop_algorithm_name(choice->algorithm), fewest, max, fewest,
                        call->threads);
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
    const bool pull = is_pull(choice->algorithm);
    const bool rules = q->mode == ONEHOP_MODE_GRAPH;
    const bool safe = choice->algorithm != ONEHOP_1SHOT_PULL || !q->in_place;
    if (!pull) {
        choice->source = ONEHOP_SOURCE_NONE;
        if (named == ONEHOP_SOURCE_NONE) return ONEHOP_OK;
        return oh_error(ONEHOP_ERR_ALGORITHM, "source %s belongs to pull algorithms; %s has none",
                        onehop_source_name(named), onehop_algorithm_name(choice->algorithm));
    }
    choice->source = named           ? named
                     : rule          ? (onehop_source)rule->source
                     : rules && safe ? ONEHOP_SOURCE_GRAPH
                                     : ONEHOP_SOURCE_WORKSPACE;
    if (choice->source == ONEHOP_SOURCE_GRAPH && !rules)
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
            const int k = oh_kernel_find(d->kind, (onehop_algorithm)a, (onehop_dtype)t, d->world);
            d->kernels[a][t] = (int16_t)k;
            d->bounds[a][t] = k < 0 ? 0 : list[k].max_threads;
            d->multicast[a][t] = -1;
            if (group->multicast)
                d->multicast[a][t] =
                    (int16_t)oh_kernel_find_multicast((onehop_algorithm)a, (onehop_dtype)t);
        }
    for (size_t i = 0; i < tuning->count; i++) {
        if (!group_can_use(d, group, &tuning->rules[i])) continue;
        if (d->row_count == OH_DISPATCH_RULES)
            return oh_error(ONEHOP_ERR_ENVIRONMENT,
                            "%s: the tables have more than %d rules for this device and %d ranks",
                            oh_env_describe(OH_ENV_TUNING)->name, OH_DISPATCH_RULES, d->world);
        d->rules[d->row_count++] = tuning->rules[i];
    }
    return ONEHOP_OK;
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

onehop_result oh_dispatch_choose(const oh_dispatch *d, const oh_question *q, oh_plan *plan_out) {
    oh_plan plan = {{ONEHOP_LOCAL_COPY, ONEHOP_SOURCE_NONE, 0, 0, 1, {0}}, -1, q->bytes};
    const onehop_algorithm forced = q->call ? q->call->algorithm : ONEHOP_ALGORITHM_AUTO;
    const oh_tuning_rule *rule = NULL;
    onehop_result result;
    if (d->world == 1) {
        result = choose_alone(d, q, &plan);
        if (!result) *plan_out = plan;
        return result;
    }
    plan.choice.algorithm = forced;
    if (forced != ONEHOP_ALGORITHM_AUTO && oh_collective_of(forced) != q->collective)
        return oh_error(ONEHOP_ERR_ALGORITHM, "%s (%d) does not serve %s",
                        onehop_algorithm_name(forced), (int)forced,
                        onehop_collective_name(q->collective));
    if (forced == ONEHOP_GATHER_LL && !fits_ll(d, q->bytes))
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "gather_ll takes up to %zu bytes a rank here, found %zu",
                        (size_t)d->regions.ll_bytes / 2, q->bytes);
    if (forced == ONEHOP_ALGORITHM_AUTO) {
        rule = rule_for(d, q, ONEHOP_ALGORITHM_AUTO);
        if (!rule)
            return oh_error(ONEHOP_ERR_INTERNAL, "no rule of the tables serves %s of %zu bytes",
                            onehop_collective_name(q->collective), q->bytes);
        plan.choice.algorithm = rule->algorithm;
    }
    if (plan.choice.algorithm == ONEHOP_NCCL && d->nccl) {
        result = choose_nccl(d, q, &plan);
        if (!result) *plan_out = plan;
        return result;
    }
    /* Shards of no unit: some rank would own none. */
    if (plan.choice.algorithm == ONEHOP_2SHOT_PUSH &&
        oh_round_up(q->bytes, OH_UNIT_BYTES) < (size_t)d->world * OH_UNIT_BYTES)
        plan.choice.algorithm = ONEHOP_1SHOT_PUSH;
    const bool known = (unsigned)plan.choice.algorithm < OH_ALGORITHMS;
    plan.kernel = known ? d->kernels[plan.choice.algorithm][q->dtype] : -1;
    if (plan.kernel < 0)
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "%s (%d) is not available on the %s device for %s, world size %d",
                        onehop_algorithm_name(forced), (int)forced,
                        d->kind == ONEHOP_DEVICE_CUDA ? "cuda" : "host",
                        q->dtype ? onehop_dtype_name(q->dtype) : "bytes", d->world);
    result = choose_source(d, q, rule, &plan.choice);
    if (!result)
        plan.kernel =
            kernel_for(d, (unsigned)plan.choice.algorithm, (unsigned)plan.choice.source, q->dtype);
    if (!result) result = choose_grid(d, q, rule, &plan.choice);
    if (result) return result;
    plan.chunk_bytes = chunk_bytes_for(d, plan.choice.algorithm, q->bytes);
    plan.choice.chunks = (uint32_t)((q->bytes + plan.chunk_bytes - 1) / plan.chunk_bytes);
    *plan_out = plan;
    return ONEHOP_OK;
}
