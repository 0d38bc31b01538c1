/* See perf_plan.h. */
#include "cli/perf/perf_plan.h"

#include "cli/shared/backend.h"
#include "cli/shared/ranks.h"

#include <stdio.h>
#include <string.h>

const char *const perf_device_words[] = {"auto", "cuda", "host", NULL};

int perf_find_device(perf_plan *plan, int64_t flag) {
    int kind = flag < 0 ? 0 : (int)flag;
    if (kind == 0 && oh_env_word(OH_ENV_DEVICE, perf_device_words, 0, &kind) != ONEHOP_OK)
        return cli_fail(cli_command, CLI_USAGE, "%s", onehop_last_error());
    cuda_census census = {0, false, "the driver could not be asked"};
    if (kind != ONEHOP_DEVICE_HOST) {
        /* Not in this process if it is going to fork. */
        if (plan->env_rank >= 0)
            cuda_take_census(&census);
        else
            ranks_ask_child(cuda_take_census, &census, sizeof census);
    }
    if (kind == ONEHOP_DEVICE_CUDA && census.count == 0)
        return cli_fail(cli_command, CLI_UNSUPPORTED, "%s: %s",
                        flag > 0 ? "--device cuda" : "ONEHOP_DEVICE=cuda", census.reason);
    plan->devices = census.count;
    plan->mps = census.mps;
    plan->device = census.count ? ONEHOP_DEVICE_CUDA : ONEHOP_DEVICE_HOST;
    return CLI_OK;
}

int perf_refuse_launcher(void) {
    const oh_launcher *by = oh_launcher_find();
    if (!by || strcmp(oh_env_text(by->size), "1") == 0) return CLI_OK;
    return cli_fail(cli_command, CLI_USAGE,
                    "starts its ranks itself, but was started as one of %s (%s, %s): run it once",
                    oh_env_text(by->size), by->name, oh_env_describe(by->size)->name);
}

void perf_fresh_name(perf_plan *plan) {
    uint64_t random[2] = {0, 0};
    oh_random(random, sizeof random);
    snprintf(plan->name, sizeof plan->name, "onehop-perf-%016llx%016llx",
             (unsigned long long)random[0], (unsigned long long)random[1]);
}

void perf_command_line(int argc, char **argv, char *line, size_t size) {
    size_t used = 0;
    line[0] = 0;
    for (int i = 0; i < argc && used < size - 1; i++)
        used += (size_t)snprintf(line + used, size - used, "%s%s", i ? " " : "", argv[i]);
}
