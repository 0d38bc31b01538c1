/* onehop_prepare: a context's kernels, built for exactly its GPU. */
#include "context/build.h"

#include <stdlib.h>
#include <string.h>

static const char name[] = "onehop_prepare";

static onehop_result check_config(const onehop_prepare_config *given, onehop_prepare_config *out) {
    const uint32_t types = 1u << ONEHOP_FLOAT32 | 1u << ONEHOP_FLOAT16 | 1u << ONEHOP_BFLOAT16;
    onehop_result result = ONEHOP_OK;
    memset(out, 0, sizeof *out);
    if (given) result = oh_config_copy(out, sizeof *out, given, "onehop_prepare_config");
    if (result) return result;
    if (out->dtypes & ~types || out->flags & ~ONEHOP_PREPARE_ALWAYS)
        return oh_error(ONEHOP_ERR_ARGUMENT, "%s: dtypes 0x%x or flags 0x%x has unknown bits", name,
                        out->dtypes, out->flags);
    if (!out->dtypes) out->dtypes = types;
    return ONEHOP_OK;
}

/* A kernel that calls use and that is not yet what it would become. */
static void add(const onehop_context *ctx, const onehop_prepare_config *config, int kernel,
                oh_build *b) {
    size_t count;
    const oh_kernel *list = oh_kernel_list(&count);
    const bool cuda = ctx->info.device.kind == ONEHOP_DEVICE_CUDA;
    if (kernel < 0 || !list[kernel].name || b->count == OH_BUILD_MAX) return;
    if (cuda && ctx->comm->functions[kernel].exact && !(config->flags & ONEHOP_PREPARE_ALWAYS))
        return;
    for (size_t i = 0; i < b->count; i++)
        if (b->kernels[i] == kernel) return; /* one for all types */
    b->kernels[b->count++] = kernel;
}

static void plan(const onehop_context *ctx, const onehop_prepare_config *config, oh_build *b) {
    const oh_dispatch *d = &ctx->comm->dispatch;
    memset(b, 0, sizeof *b);
    b->identity = (uint64_t)config->dtypes << 32 | config->flags;
    for (int t = ONEHOP_FLOAT32; t <= ONEHOP_BFLOAT16; t++) {
        if (!(config->dtypes >> t & 1)) continue;
        for (int a = 1; a < OH_ALGORITHMS; a++) {
            for (int o = 0; o < OH_OPERATIONS; o++) add(ctx, config, d->kernels[o][a][t], b);
            add(ctx, config, d->multicast[a][t], b);
        }
    }
}

static void adopt(onehop_context *ctx, const oh_build *b) {
    for (size_t i = 0; i < b->count; i++)
        if (b->functions[i].handle) ctx->comm->functions[b->kernels[i]] = b->functions[i];
}

static onehop_result prepare(const oh_members *m, const onehop_prepare_config *config) {
    onehop_prepare_config known;
    onehop_result result = check_config(config, &known);
    if (!m->contexts[0]->comm) return result;
    oh_build *builds = result ? NULL : calloc((size_t)m->count, sizeof *builds);
    if (!result && !builds) result = oh_error(ONEHOP_ERR_MEMORY, "%s: no memory", name);
    for (int i = 0; i < m->count && !result; i++) plan(m->contexts[i], &known, &builds[i]);
    result = oh_build_run(m, name, builds, result);
    for (int i = 0; i < m->count && !result; i++) adopt(m->contexts[i], &builds[i]);
    free(builds);
    return result;
}

onehop_result onehop_prepare(onehop_context *context, const onehop_prepare_config *config) {
    OH_NO_CANCEL;
    onehop_result result = oh_context_check(context, name);
    if (result) return result;
    const oh_members m = oh_members_one(&context);
    return prepare(&m, config);
}

onehop_result onehop_prepare_all(onehop_context *const *contexts, int n,
                                 const onehop_prepare_config *config) {
    OH_NO_CANCEL;
    onehop_result result = oh_check_all(contexts, n, "onehop_prepare_all");
    const oh_members m = oh_members_all(contexts, n);
    return result ? result : prepare(&m, config);
}
