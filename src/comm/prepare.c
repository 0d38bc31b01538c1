/* onehop_prepare: a context's kernels, built for exactly its GPU. */
#include "comm/build.h"

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
    b->what = name;
    b->identity = (uint64_t)config->dtypes << 32 | config->flags;
    for (int t = ONEHOP_FLOAT32; t <= ONEHOP_BFLOAT16; t++) {
        if (!(config->dtypes >> t & 1)) continue;
        for (int a = ONEHOP_1SHOT_PUSH; a < OH_ALGORITHMS; a++) {
            add(ctx, config, d->kernels[a][t], b);
            add(ctx, config, d->multicast[a][t], b);
        }
        for (int o = 0; o < OH_OPERATIONS; o++) add(ctx, config, ctx->comm->fused[o][t], b);
    }
}

static void adopt(onehop_context *ctx, const oh_build *b) {
    for (size_t i = 0; i < b->count; i++)
        if (b->functions[i].handle) ctx->comm->functions[b->kernels[i]] = b->functions[i];
}

onehop_result onehop_prepare(onehop_context *context, const onehop_prepare_config *config) {
    OH_NO_CANCEL;
    onehop_prepare_config known;
    oh_build build;
    onehop_result result = oh_context_check(context, name);
    if (result) return result;
    result = check_config(config, &known);
    if (!context->comm) return result;
    plan(context, &known, &build);
    result = oh_build_by_group(context, &build, result);
    if (!result) adopt(context, &build);
    return result;
}

onehop_result onehop_prepare_all(onehop_context *const *contexts, int n,
                                 const onehop_prepare_config *config) {
    OH_NO_CANCEL;
    onehop_prepare_config known;
    onehop_result result = oh_check_all(contexts, n, "onehop_prepare_all");
    if (!result) result = check_config(config, &known);
    if (result || !contexts[0]->comm) return result;
    oh_build *builds = calloc((size_t)n, sizeof *builds);
    if (!builds) return oh_error(ONEHOP_ERR_MEMORY, "%s: no memory", name);
    for (int r = 0; r < n; r++) plan(contexts[r], &known, &builds[r]);
    result = oh_build_all(contexts, builds, n);
    for (int r = 0; r < n && !result; r++) adopt(contexts[r], &builds[r]);
    free(builds);
    return result;
}
