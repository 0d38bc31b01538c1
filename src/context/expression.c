/* A caller's expression within the all-reduce: creating, and what a call with it has of its own.
 * The kernels belong to the process (oh_jit_build), so an object is only a list of them. */
#include "context/expression.h"

#include "context/build.h"
#include "jit/program.h"

#include <stdlib.h>
#include <string.h>

static const char name[] = "onehop_expression_create";

struct onehop_expression {
    const onehop_context *context;
    onehop_dtype dtype;
    uint64_t identity;
    bool has_scalar[ONEHOP_OP_NAMES];
    uint32_t array_bytes[ONEHOP_OP_NAMES];        /* of an element; 0: no such array */
    oh_function functions[ONEHOP_2SHOT_PULL + 1]; /* by algorithm */
};

_Static_assert(ONEHOP_OP_NAMES == OH_EPILOGUE_NAMES, "values and their place in a kernel");

/* ---- creating -------------------------------------------------------------------------------- */

static uint64_t add_text(uint64_t hash, const char *text) {
    return text ? oh_hash(hash, text, strlen(text) + 1) : oh_hash(hash, "\1", 2);
}

static uint64_t identity_of(const onehop_expression_config *c) {
    uint64_t hash = add_text(OH_HASH_START, c->expression);
    hash = oh_hash(hash, &c->dtype, sizeof c->dtype);
    hash = oh_hash(hash, &c->row_length, sizeof c->row_length);
    for (int k = 0; k < ONEHOP_OP_NAMES; k++) {
        hash = add_text(add_text(hash, c->scalars[k]), c->arrays[k]);
        if (c->arrays[k]) hash = oh_hash(hash, &c->array_dtypes[k], sizeof c->array_dtypes[k]);
    }
    return hash;
}

static onehop_result check(const onehop_context *ctx, const onehop_expression_config *given,
                           onehop_expression_config *out) {
    memset(out, 0, sizeof *out);
    onehop_result result = oh_config_copy(out, sizeof *out, given, "onehop_expression_config");
    if (!result && out->reserved)
        result = oh_error(ONEHOP_ERR_ARGUMENT, "%s: reserved is not 0", name);
    if (!result) result = oh_expression_check(out);
    if (!result && !ctx->comm)
        result = oh_error(ONEHOP_ERR_UNSUPPORTED, "%s: a group of one rank copies, without kernels",
                          name);
    return result;
}

static void plan(const onehop_context *ctx, const onehop_expression_config *config, oh_build *b) {
    memset(b, 0, sizeof *b);
    b->op = config;
    b->identity = identity_of(config);
    for (int a = 1; a < OH_ALGORITHMS; a++)
        if (oh_takes_expression((onehop_algorithm)a))
            b->kernels[b->count++] = ctx->comm->dispatch.kernels[OH_PLAIN][a][config->dtype];
}

/* With ONEHOP_JIT_ARCH the expression has been compiled by now, so its errors were told. */
static onehop_result make(const onehop_context *ctx, const oh_build *b,
                          onehop_expression **op_out) {
    const onehop_expression_config *c = b->op;
    if (ctx->info.device.kind == ONEHOP_DEVICE_HOST)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "%s: the host device has no compiler at run time; expressions need GPUs",
                        name);
    onehop_expression *op = calloc(1, sizeof *op);
    if (!op) return oh_error(ONEHOP_ERR_MEMORY, "%s: no memory", name);
    op->context = ctx;
    op->dtype = c->dtype;
    op->identity = b->identity;
    for (int k = 0; k < ONEHOP_OP_NAMES; k++) {
        op->has_scalar[k] = c->scalars[k] != NULL;
        if (c->arrays[k]) op->array_bytes[k] = (uint32_t)onehop_dtype_bytes(c->array_dtypes[k]);
    }
    for (size_t i = 0; i < b->count; i++) op->functions[ONEHOP_1SHOT_PUSH + i] = b->functions[i];
    *op_out = op;
    return ONEHOP_OK;
}

static onehop_result create(const oh_members *m, const onehop_expression_config *config,
                            onehop_expression **ops_out) {
    onehop_expression_config known;
    onehop_expression *ops[ONEHOP_MAX_RANKS] = {NULL};
    onehop_result result = check(m->contexts[0], config, &known);
    if (!m->contexts[0]->comm) return result;
    oh_build *builds = result ? NULL : calloc((size_t)m->count, sizeof *builds);
    if (!result && !builds) result = oh_error(ONEHOP_ERR_MEMORY, "%s: no memory", name);
    for (int i = 0; i < m->count && !result; i++) plan(m->contexts[i], &known, &builds[i]);
    result = oh_build_run(m, name, builds, result);
    for (int i = 0; i < m->count && !result; i++)
        result = make(m->contexts[i], &builds[i], &ops[i]);
    for (int i = 0; i < m->count; i++) {
        if (result)
            onehop_expression_destroy(ops[i]);
        else
            ops_out[i] = ops[i];
    }
    free(builds);
    return result;
}

onehop_result onehop_expression_create(onehop_context *context,
                                       const onehop_expression_config *config,
                                       onehop_expression **op_out) {
    OH_NO_CANCEL;
    if (!context || !config || !op_out)
        return oh_error(ONEHOP_ERR_NULL, "%s: %s is NULL", name,
                        !context ? "context"
                        : config ? "op_out"
                                 : "config");
    onehop_result result = oh_context_check(context, name);
    if (result) return result;
    const oh_members m = oh_members_one(&context);
    return create(&m, config, op_out);
}

onehop_result onehop_expression_create_all(onehop_context *const *contexts, int n,
                                           const onehop_expression_config *config,
                                           onehop_expression **ops_out) {
    OH_NO_CANCEL;
    onehop_result result = oh_check_all(contexts, n, "onehop_expression_create_all");
    if (!result && (!config || !ops_out))
        result =
            oh_error(ONEHOP_ERR_NULL, "%s_all: %s is NULL", name, config ? "ops_out" : "config");
    const oh_members m = oh_members_all(contexts, n);
    return result ? result : create(&m, config, ops_out);
}

void onehop_expression_destroy(onehop_expression *op) {
    free(op);
}

/* ---- calls ----------------------------------------------------------------------------------- */

onehop_result oh_custom_check(const onehop_expression *op, const onehop_context *ctx,
                              const onehop_expression_values *values) {
    if (op->context != ctx)
        return oh_error(ONEHOP_ERR_ARGUMENT, "all_reduce_op: op was made from another context");
    for (int k = 0; k < ONEHOP_OP_NAMES; k++) {
        const uintptr_t at = (uintptr_t)values->arrays[k];
        if (!op->array_bytes[k]) continue;
        if (!at) return oh_error(ONEHOP_ERR_NULL, "all_reduce_op: array %d is NULL", k);
        if (at % op->array_bytes[k])
            return oh_error(ONEHOP_ERR_ALIGNMENT,
                            "all_reduce_op: array %d at %p is not aligned to its %u-byte element",
                            k, values->arrays[k], op->array_bytes[k]);
    }
    return ONEHOP_OK;
}

onehop_dtype oh_custom_dtype(const onehop_expression *op) {
    return op->dtype;
}

uint64_t oh_custom_identity(const onehop_expression *op, const onehop_expression_values *values) {
    uint64_t hash = op->identity;
    for (int k = 0; k < ONEHOP_OP_NAMES; k++)
        if (op->has_scalar[k]) hash = oh_hash(hash, &values->scalars[k], sizeof values->scalars[k]);
    return hash;
}

void oh_custom_extend(const onehop_expression *op, const onehop_expression_values *values,
                      const oh_args *args, const oh_plan *plan, oh_epilogue_args *extended,
                      oh_launch *launch) {
    extended->call = *args;
    for (int k = 0; k < ONEHOP_OP_NAMES; k++) {
        extended->arrays[k] = (uintptr_t)values->arrays[k];
        extended->scalars[k] = values->scalars[k];
    }
    launch->function = &op->functions[plan->choice.algorithm];
    launch->args = extended;
    launch->args_bytes = sizeof *extended;
}
