/* Property: the library's own sources, as it carries them, compile at run time for every
 * architecture, without a GPU; a caller's expression becomes part of them, or is refused on all
 * ranks with the compiler's words and the caller's line; what was compiled is found again; and the
 * host device, which has no compiler, says so. Skipped without NVRTC. */
/* labels: timeout=240 */
#include "harness.h"
#include "rank_contexts.h"

#include "jit/jit.h"
#include "jit/program.h"

static const uint32_t archs[] = {80, 90, 100, 120};
static char root[] = "/tmp/onehop-test-jit-XXXXXX";

/* The one that the checks of the kernels use, unless told otherwise. */
static void find_nvrtc(void) {
    char command[600], path[4096] = "";
    const char *source = getenv("ONEHOP_SOURCE_DIR");
    if (getenv("ONEHOP_NVRTC")) return;
    snprintf(command, sizeof command, "python3 %s/tools/check_kernels.py --find-nvrtc",
             source ? source : ".");
    FILE *from = popen(command, "r");
    CHECK(from != NULL);
    if (fgets(path, sizeof path, from)) {
        path[strcspn(path, "\n")] = 0;
        setenv("ONEHOP_NVRTC", path, 1);
    }
    pclose(from);
}

static bool contains(const oh_jit_image *image, const char *text) {
    return memmem(image->bytes, image->size, text, strlen(text)) != NULL;
}

static oh_jit_image compile(int kernel, const onehop_expression_config *op, bool quick,
                            uint32_t arch) {
    oh_program program;
    oh_jit_image image;
    CHECK_OK(oh_program_make(kernel, op, &program));
    program.quick = quick;
    CHECK_OK(oh_nvrtc_compile(&program, arch, &image));
    oh_program_free(&program);
    CHECK(contains(&image, "\177ELF"));
    return image;
}

/* ---- without ranks --------------------------------------------------------------------------- */

/* Without optimization: that the sources are accepted, and all assembly with them. */
static void every_kernel(int index) {
    size_t count;
    const oh_kernel *list = oh_kernel_list(&count);
    const uint32_t arch = archs[index];
    oh_jit_image image = compile(OH_EVERY_KERNEL, NULL, true, arch);
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        if (!list[i].name) continue;
        const bool expected = arch >= 90 || !strstr(list[i].name, "_multicast_");
        if (contains(&image, list[i].name) != expected)
            FAIL("%s for sm_%u: expected %s", list[i].name, arch, expected ? "it" : "none");
        found += expected;
    }
    printf("sm_%u: %zu kernels\n", arch, found);
    free(image.bytes);
}

/* As they would run: each one that is asked for, and no other. */
static void one_kernel(void) {
    size_t count;
    const oh_kernel *list = oh_kernel_list(&count);
    const int push = oh_kernel_find(ONEHOP_DEVICE_CUDA, OH_PLAIN, ONEHOP_1SHOT_PUSH,
                                    ONEHOP_BFLOAT16, 2),
              pull = oh_kernel_find(ONEHOP_DEVICE_CUDA, OH_PLAIN, ONEHOP_2SHOT_PULL, ONEHOP_FLOAT32,
                                    8);
    oh_jit_image image = compile(push, NULL, false, 90);
    CHECK(contains(&image, list[push].name));
    CHECK(!contains(&image, list[pull].name));
    free(image.bytes);
}

static void keys_differ(void) {
    oh_program a, b;
    CHECK_OK(oh_program_make(0, NULL, &a));
    CHECK_OK(oh_program_make(1, NULL, &b));
    const oh_digest keys[] = {oh_jit_key(&a, 90, 13000, 13000), oh_jit_key(&b, 90, 13000, 13000),
                              oh_jit_key(&a, 80, 13000, 13000), oh_jit_key(&a, 90, 12090, 13000),
                              oh_jit_key(&a, 90, 13000, 12090)};
    const oh_digest again = oh_jit_key(&a, 90, 13000, 13000);
    CHECK_BYTES(keys[0].bytes, again.bytes, sizeof again);
    for (size_t i = 0; i < OH_LENGTH(keys); i++)
        for (size_t j = 0; j < i; j++) CHECK(memcmp(&keys[i], &keys[j], sizeof *keys));
    /* Any of the sources. */
    a.sources[a.count - 1].text = "changed";
    const oh_digest changed = oh_jit_key(&a, 90, 13000, 13000);
    CHECK(memcmp(&changed, &keys[0], sizeof changed));
    oh_program_free(&a);
    oh_program_free(&b);
}

/* ---- expressions ----------------------------------------------------------------------------- */

static onehop_expression_config scaled(const char *expression) {
    onehop_expression_config op = ONEHOP_CONFIG_INIT(onehop_expression_config);
    op.expression = expression;
    op.dtype = ONEHOP_BFLOAT16;
    op.row_length = 4096;
    op.scalars[0] = "scale";
    op.arrays[2] = "bias";
    op.array_dtypes[2] = ONEHOP_BFLOAT16;
    op.arrays[5] = "gain";
    op.array_dtypes[5] = ONEHOP_FLOAT32;
    return op;
}

/* In the body of each algorithm: other code than with another expression. */
static void becomes_part(void) {
    const onehop_expression_config ops[] = {scaled("x * scale\n + bias[col]"),
                                            scaled("x * gain[row] + (float)i")};
    for (int a = ONEHOP_1SHOT_PUSH; a <= ONEHOP_2SHOT_PULL; a++) {
        const int kernel =
            oh_kernel_find(ONEHOP_DEVICE_CUDA, OH_PLAIN, (onehop_algorithm)a, ONEHOP_BFLOAT16, 2);
        oh_jit_image images[] = {compile(kernel, NULL, true, 90),
                                 compile(kernel, &ops[0], true, 90),
                                 compile(kernel, &ops[1], true, 90)};
        for (int k = 0; k < 3; k++) {
            const oh_jit_image *one = &images[k], *next = &images[(k + 1) % 3];
            CHECK(one->size != next->size || memcmp(one->bytes, next->bytes, one->size));
        }
        for (int k = 0; k < 3; k++) free(images[k].bytes);
    }
}

static void texts_are_refused(void) {
    static const char *const bad[] = {"",     " \n",    "x; y",      "x) + (x", "(x",
                                      "x]",   "f(x]",   "x // y",    "x /* y",  "x\n#define y",
                                      "x \\", "\"x\"",  "'x'",       "{x}",     "x ?\?/ y",
                                      "%: x", "x <% y", "x <: 1 :>", "x \x01",  "x\xc3\xa4"};
    static const char *const good[] = {"x", "fmaxf(x, 0.0f)",
                                       "x > 0 ? x : 0.1f * x\n\t + bias[(i + row) % 7]",
                                       "x * scale / 2", "(x < 3) - !(x >= 4) & 1"};
    for (size_t k = 0; k < OH_LENGTH(bad); k++) {
        const onehop_expression_config op = scaled(bad[k]);
        if (oh_expression_check(&op) != ONEHOP_ERR_ARGUMENT) FAIL("accepted: %s", bad[k]);
    }
    for (size_t k = 0; k < OH_LENGTH(good); k++) {
        const onehop_expression_config op = scaled(good[k]);
        CHECK_OK(oh_expression_check(&op));
    }
    const onehop_expression_config third = scaled("x +\n\n scale)");
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, oh_expression_check(&third));
    CHECK_CONTAINS("expression(3)", onehop_last_error());
}

static void names_are_refused(void) {
    static const char *const bad[] = {
        "",     "x",   "row", "2x",   "_x",
        "oh_x", "a b", "a-b", "bias", "a123456789012345678901234567890123"};
    for (size_t k = 0; k < OH_LENGTH(bad); k++) {
        onehop_expression_config op = scaled("x");
        op.scalars[3] = bad[k];
        if (oh_expression_check(&op) != ONEHOP_ERR_ARGUMENT) FAIL("accepted the name '%s'", bad[k]);
    }
    onehop_expression_config op = scaled("x");
    op.array_dtypes[5] = ONEHOP_FLOAT16;
    CHECK_RESULT(ONEHOP_ERR_DTYPE, oh_expression_check(&op));
}

/* ---- with ranks ------------------------------------------------------------------------------ */

/* As on a GPU, up to the point where the code would be loaded. */
static void creating(onehop_context *context, int rank, int world, void *argument) {
    onehop_expression *op = NULL;
    const onehop_expression_config good = scaled("x * scale + bias[col]"),
                                   bad = scaled("x * scale\n + biass[col]"), ugly = scaled("x)");
    (void)argument;
    (void)world;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_expression_create(context, &ugly, &op));
    CHECK_CONTAINS("expression(1)", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_expression_create(context, &good, &op));
    CHECK_CONTAINS("no compiler", onehop_last_error());
    const onehop_expression_config mine = rank == 1 ? scaled("x") : scaled("-x");
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, onehop_expression_create(context, &mine, &op));
    CHECK_CONTAINS("rank 1", onehop_last_error());
    if (argument) {
        CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_expression_create(context, &bad, &op));
        CHECK_CONTAINS("expression(2)", onehop_last_error());
        CHECK_CONTAINS("biass", onehop_last_error());
    }
    CHECK(op == NULL);
    /* The context is as good as before. */
    float one = 1.0f, sum;
    CHECK_OK(onehop_all_reduce(context, &one, &sum, 1, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK(sum == (float)world);
}

static void preparing(onehop_context *context, int rank, int world, void *argument) {
    onehop_prepare_config config = ONEHOP_CONFIG_INIT(onehop_prepare_config);
    (void)world;
    (void)argument;
    CHECK_OK(onehop_prepare(context, NULL));
    config.flags = rank == 1 ? 1u << 31 : 0;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_prepare(context, &config));
    config.flags = 0;
    config.dtypes = 1u << ONEHOP_BFLOAT16;
    CHECK_OK(onehop_prepare(context, &config));
    config.dtypes = 1u << (1 + rank);
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, onehop_prepare(context, &config));
}

/* Both ranks share the work, and later ones find it. */
static void preparing_for(onehop_context *context, int rank, int world, void *argument) {
    onehop_prepare_config config = ONEHOP_CONFIG_INIT(onehop_prepare_config);
    const char *failing = argument;
    (void)rank;
    (void)world;
    config.dtypes = 1u << ONEHOP_BFLOAT16;
    if (!failing) {
        const double start = seconds_now();
        CHECK_OK(onehop_prepare(context, &config));
        if (rank == 0) printf("prepared in %.3f s\n", seconds_now() - start);
        return;
    }
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_prepare(context, &config));
    CHECK_CONTAINS(failing, onehop_last_error());
}

static void all_in_one_thread(void) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    const onehop_expression_config bad = scaled("x +"), good = scaled("x");
    onehop_context *contexts[2];
    onehop_expression *ops[2];
    config.device.kind = ONEHOP_DEVICE_HOST;
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    CHECK_OK(onehop_prepare_all(contexts, 2, NULL));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_prepare(contexts[0], NULL));
    CHECK_CONTAINS("onehop_prepare_all", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_prepare_all(contexts, 1, NULL));
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_expression_create_all(contexts, 2, &good, ops));
    if (getenv("ONEHOP_JIT_ARCH"))
        CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_expression_create_all(contexts, 2, &bad, ops));
    for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
}

static void in_two_processes(int rank, int world_size, void *argument) {
    (void)world_size;
    (void)argument;
    every_kernel(rank);
    every_kernel(rank + 2);
}

int main(void) {
    uint32_t version;
    char directory[80], command[80];
    watchdog(220);
    CHECK(mkdtemp(root) != NULL);
    snprintf(directory, sizeof directory, "%s/cache", root);
    snprintf(command, sizeof command, "rm -rf %s", root);
    setenv("ONEHOP_CACHE_DIR", directory, 1);
    unsetenv("ONEHOP_JIT_ARCH");
    texts_are_refused();
    names_are_refused();
    keys_differ();
    ranks_run(RANKS_AS_THREADS, 2, NULL, preparing, NULL);
    ranks_run(RANKS_AS_THREADS, 2, NULL, creating, NULL);
    all_in_one_thread();
    find_nvrtc();
    if (oh_nvrtc_open(&version)) {
        printf("SKIPPED: %s\n", onehop_last_error());
        (void)!system(command);
        return HARNESS_SKIP;
    }
    run_ranks(2, in_two_processes, NULL);
    one_kernel();
    becomes_part();
    setenv("ONEHOP_JIT_ARCH", "90", 1);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, preparing_for, NULL);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, preparing_for, NULL);
    ranks_run(RANKS_AS_THREADS, 2, NULL, creating, &version);
    all_in_one_thread();
    setenv("ONEHOP_JIT", "off", 1);
    ranks_run(RANKS_AS_THREADS, 2, NULL, preparing_for, (void *)(uintptr_t)"ONEHOP_JIT is off");
    setenv("ONEHOP_JIT", "on", 1);
    setenv("ONEHOP_JIT_ARCH", "777", 1);
    ranks_run(RANKS_AS_THREADS, 2, NULL, preparing_for, (void *)(uintptr_t)"sm_777");
    return system(command) != 0;
}
