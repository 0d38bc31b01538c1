/* From the caller's config and the environment to a plan: who am I, how many, which name. */
#include "rendezvous/group.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

onehop_result oh_group_timeout(uint32_t given, uint32_t *timeout_out) {
    int64_t value = given;
    if (!given) {
        onehop_result result =
            oh_env_integer(OH_ENV_INIT_TIMEOUT_MS, 1, (int64_t)1 << 31, 300000, &value);
        if (result) return result;
    }
    *timeout_out = (uint32_t)value;
    return ONEHOP_OK;
}

static onehop_result need_integer(oh_env id, int64_t low, int *value_out) {
    int64_t value = 0;
    if (!oh_env_text(id))
        return oh_error(
            ONEHOP_ERR_ENVIRONMENT,
            "world_size is 0, which takes rank and world size from the environment, but "
            "%s is not set",
            oh_env_describe(id)->name);
    onehop_result result = oh_env_integer(id, low, INT_MAX, 0, &value);
    if (!result) *value_out = (int)value;
    return result;
}

static onehop_result place_from_environment(oh_group_plan *plan) {
    onehop_result result = need_integer(OH_ENV_RANK, 0, &plan->rank);
    if (!result) result = need_integer(OH_ENV_WORLD_SIZE, 1, &plan->world_size);
    if (result) return result;
    int64_t local = plan->world_size;
    result = oh_env_integer(OH_ENV_LOCAL_WORLD_SIZE, 1, INT_MAX, local, &local);
    /* A callback compares boot ids, which is better evidence. */
    if (!result && !plan->allgather && local != plan->world_size)
        result = oh_error(ONEHOP_ERR_SEVERAL_HOSTS,
                          "WORLD_SIZE is %d and LOCAL_WORLD_SIZE is %lld: the ranks are on several "
                          "hosts, and onehop serves the ranks of one host",
                          plan->world_size, (long long)local);
    return result;
}

static onehop_result check_place(const oh_group_plan *plan) {
    if (plan->world_size < 1 || plan->world_size > ONEHOP_MAX_RANKS)
        return oh_error(ONEHOP_ERR_WORLD_SIZE, "world size is %d: expected 1 to %d",
                        plan->world_size, ONEHOP_MAX_RANKS);
    if (plan->rank < 0 || plan->rank >= plan->world_size)
        return oh_error(ONEHOP_ERR_RANK, "rank is %d: expected 0 to %d", plan->rank,
                        plan->world_size - 1);
    return ONEHOP_OK;
}

/* Adds one part of a name. The parts' tags keep names of different origin and cut apart. */
static void add_to_name(oh_group_plan *plan, char tag, const char *part) {
    for (int i = 0; i < 2; i++) {
        plan->name.word[i] = oh_hash(plan->name.word[i], &tag, 1);
        plan->name.word[i] = oh_hash(plan->name.word[i], part, strlen(part) + 1);
    }
    size_t used = strlen(plan->label);
    snprintf(plan->label + used, sizeof plan->label - used, "%s%s", used ? ":" : "", part);
    for (char *c = plan->label + used; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
}

static onehop_result find_name(const onehop_group_config *config, oh_group_plan *plan) {
    plan->name.word[0] = OH_HASH_START;
    plan->name.word[1] = ~OH_HASH_START;
    const char *name = config->name ? config->name : oh_env_text(OH_ENV_NAME);
    if (name) {
        add_to_name(plan, 'n', name);
        return ONEHOP_OK;
    }
    const char *address = oh_env_text(OH_ENV_MASTER_ADDR);
    const char *port = oh_env_text(OH_ENV_MASTER_PORT);
    const char *run = oh_env_text(OH_ENV_TORCHELASTIC_RUN_ID);
    if (!address || !port)
        return oh_error(ONEHOP_ERR_ENVIRONMENT,
                        "the group has no name: give one in the config, or set ONEHOP_NAME, or "
                        "MASTER_ADDR and MASTER_PORT");
    add_to_name(plan, 'a', address);
    add_to_name(plan, 'p', port);
    if (run) add_to_name(plan, 'r', run);
    return ONEHOP_OK;
}

onehop_result oh_group_plan_make(const onehop_group_config *config, oh_group_plan *plan_out) {
    onehop_group_config copy;
    onehop_result result = oh_config_copy(&copy, sizeof copy, config, "onehop_group_config");
    if (result) return result;
    if (copy.pass_fd && !copy.allgather)
        return oh_error(ONEHOP_ERR_NULL, "pass_fd is given but allgather is NULL");
    oh_group_plan plan = {.rank = copy.rank,
                          .world_size = copy.world_size,
                          .allgather = copy.allgather,
                          .pass_fd = copy.pass_fd,
                          .user = copy.user};
    if (!plan.world_size) result = place_from_environment(&plan);
    if (!result) result = check_place(&plan);
    if (!result) result = oh_group_timeout(copy.timeout_ms, &plan.timeout_ms);
    if (!result && !plan.allgather && plan.world_size > 1) result = find_name(&copy, &plan);
    if (!result) *plan_out = plan;
    return result;
}
