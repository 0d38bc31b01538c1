/* From the caller's config and the environment to a plan: who am I, how many, which name. */
#include "base/sha256.h"
#include "rendezvous/group.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

/* ---- rank and world size --------------------------------------------------------------------- */

/* Either launcher says on how many hosts the ranks are. A callback compares boot ids, which is
 * better evidence. */
static onehop_result check_hosts(const oh_group_plan *plan, const oh_launcher *by) {
    const bool counts_hosts = by->hosts < OH_ENV_COUNT;
    const oh_env from = counts_hosts ? by->hosts : by->local_size;
    const int64_t expected = counts_hosts ? 1 : plan->world_size;
    int64_t value = expected;
    onehop_result result = oh_env_integer(from, 1, INT_MAX, expected, &value);
    if (!result && !plan->allgather && value != expected)
        result = oh_error(ONEHOP_ERR_SEVERAL_HOSTS,
                          "%s is %d and %s is %lld: the ranks are on several hosts, and onehop "
                          "serves the ranks of one host",
                          oh_env_describe(by->size)->name, plan->world_size,
                          oh_env_describe(from)->name, (long long)value);
    return result;
}

static onehop_result place_from_environment(oh_group_plan *plan, const oh_launcher *by) {
    int64_t rank = 0, size = 0;
    if (!by)
        return oh_error(ONEHOP_ERR_ENVIRONMENT,
                        "world_size is 0, which takes rank and world size from the environment, "
                        "but %s is not set: expected RANK and WORLD_SIZE, as torchrun sets them, "
                        "or the variables of mpirun or srun",
                        oh_env_text(OH_ENV_RANK) ? "WORLD_SIZE" : "RANK");
    onehop_result result = oh_env_integer(by->rank, 0, INT_MAX, 0, &rank);
    if (!result) result = oh_env_integer(by->size, 1, INT_MAX, 0, &size);
    if (result) return result;
    plan->rank = (int)rank;
    plan->world_size = (int)size;
    return check_hosts(plan, by);
}

/* `by` is NULL if the config gave rank and world size. */
static onehop_result check_place(const oh_group_plan *plan, const oh_launcher *by) {
    const char *size = by ? oh_env_describe(by->size)->name : "world size";
    const char *rank = by ? oh_env_describe(by->rank)->name : "rank";
    if (plan->world_size < 1 || plan->world_size > ONEHOP_MAX_RANKS)
        return oh_error(ONEHOP_ERR_WORLD_SIZE, "%s is %d: expected 1 to %d", size, plan->world_size,
                        ONEHOP_MAX_RANKS);
    if (plan->rank < 0 || plan->rank >= plan->world_size)
        return oh_error(ONEHOP_ERR_RANK, "%s is %d: expected 0 to %d, since %s is %d", rank,
                        plan->rank, plan->world_size - 1, size, plan->world_size);
    return ONEHOP_OK;
}

/* ---- the name -------------------------------------------------------------------------------- */

typedef struct oh_naming {
    oh_sha256 hash;
    char *label; /* [size]; parts with colons between them */
    size_t size;
    int parts;
} oh_naming;

/* Adds one part of a name. The parts' tags keep names of different origin and cut apart. */
static void add_part(oh_naming *naming, char tag, const char *part) {
    oh_sha256_add(&naming->hash, &tag, 1);
    oh_sha256_add(&naming->hash, part, strlen(part) + 1);
    const size_t used = strlen(naming->label);
    snprintf(naming->label + used, naming->size - used, "%s%s", used ? ":" : "", part);
    for (char *c = naming->label + used; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    naming->parts++;
}

static void add_variable(oh_naming *naming, char tag, oh_env id) {
    const char *text = oh_env_text(id);
    if (text) add_part(naming, tag, text);
}

static oh_id128 finish(oh_naming *naming) {
    const oh_digest digest = oh_sha256_end(&naming->hash);
    oh_id128 id;
    memcpy(&id, digest.bytes, sizeof id);
    return id;
}

/* Which job of its launcher's this process belongs to; zero if nothing tells. One process alone is
 * no job: ranks may each have been started by a launcher call of their own. The address is left
 * out, for ranks may spell it differently. */
static oh_id128 find_job(const oh_launcher *by) {
    char label[8] = "";
    oh_naming naming = {.label = label, .size = sizeof label};
    if (!by || !strcmp(oh_env_text(by->size), "1")) return (oh_id128){{0, 0}};
    oh_sha256_begin(&naming.hash);
    for (int i = 0; by->job[i] < OH_ENV_COUNT; i++)
        if (by->job[i] != OH_ENV_MASTER_ADDR) add_variable(&naming, (char)('0' + i), by->job[i]);
    return naming.parts ? finish(&naming) : (oh_id128){{0, 0}};
}

/* The name if the program gives none: all that tells jobs apart. */
static void add_default_name(oh_naming *naming, const oh_launcher *by) {
    if (oh_env_text(OH_ENV_MASTER_ADDR) && oh_env_text(OH_ENV_MASTER_PORT)) {
        add_variable(naming, 'a', OH_ENV_MASTER_ADDR);
        add_variable(naming, 'p', OH_ENV_MASTER_PORT);
        add_variable(naming, 'r', OH_ENV_TORCHELASTIC_RUN_ID);
    }
    if (!by || by->rank == OH_ENV_RANK) return;
    add_part(naming, 'l', by->name);
    for (int i = 0; by->job[i] < OH_ENV_COUNT; i++)
        add_variable(naming, (char)('0' + i), by->job[i]);
}

static onehop_result find_name(const onehop_group_config *config, oh_group_plan *plan,
                               const oh_launcher *by) {
    oh_naming naming = {.label = plan->label, .size = sizeof plan->label};
    const uint32_t user = (uint32_t)geteuid();
    oh_id128 secret = {{0, 0}};
    plan->secret = oh_user_secret(&secret);
    oh_sha256_begin(&naming.hash);
    oh_sha256_add(&naming.hash, &user, sizeof user);
    oh_sha256_add(&naming.hash, &secret, sizeof secret);
    const char *name = config->name ? config->name : oh_env_text(OH_ENV_NAME);
    if (name)
        add_part(&naming, 'n', name);
    else
        add_default_name(&naming, by);
    if (!naming.parts)
        return oh_error(ONEHOP_ERR_ENVIRONMENT,
                        "the group has no name: give one in the config, or set ONEHOP_NAME, or "
                        "MASTER_ADDR and MASTER_PORT");
    plan->name = finish(&naming);
    plan->job = find_job(by);
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
    const oh_launcher *by = oh_launcher_find();
    if (!copy.world_size) result = place_from_environment(&plan, by);
    if (!result) result = check_place(&plan, copy.world_size ? NULL : by);
    if (!result) result = oh_group_timeout(copy.timeout_ms, &plan.timeout_ms);
    if (!result && !plan.allgather && plan.world_size > 1) result = find_name(&copy, &plan, by);
    if (!result) *plan_out = plan;
    return result;
}
