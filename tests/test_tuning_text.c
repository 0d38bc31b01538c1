/* Property: a tuning table is read whole, or refused with its line and the words that say why.
 * Blanks and comments do not matter. Files that are no tables are refused and not waited for. */
/* labels: quick */
#include "tuning_kit.h"

#include "device/nccl/nccl.h"
#include "jit/nvrtc.h"

#include <sys/stat.h>

static void refused(const char *text, int line, const char *expected, const char *found) {
    oh_tuning tuning;
    char place[32];
    snprintf(place, sizeof place, "some.table:%d: expected", line);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, parse(text, strlen(text), &tuning));
    CHECK_CONTAINS(place, onehop_last_error());
    CHECK_CONTAINS(expected, onehop_last_error());
    CHECK_CONTAINS(found, onehop_last_error());
}

static void refusals(void) {
    static const char nothing[] = "found \"nothing\"";
    refused("", 0, "onehop-tuning 1", nothing);
    refused("# only a comment\n\n", 2, "onehop-tuning 1", nothing);
    refused("onehop-tuning 2\n", 1, "onehop-tuning 1", "onehop-tuning");
    refused("\n\n2 any any 1shot_push - 3 64", 3, "onehop-tuning 1", "\"2\"");
    refused(HEAD "2 any any 1shot_push - 3 64\n", 2, "\"device ...\" before", "\"2\"");
    refused(HEAD "device\n", 2, "one device", nothing);
    refused(HEAD "device cuda host\n", 2, "one device", "\"host\"");
    refused(HEAD "device tpu\n", 2, "host, cuda", "\"tpu\"");
    refused(HEAD "device sm_91\n", 2, "sm_90", "\"sm_91\"");
    refused(HEAD "device sm_70\n", 2, "sm_90", "\"sm_70\"");
    refused(HEAD "device sm_\n", 2, "sm_90", "\"sm_\"");
    refused(CUDA "2 any any 1shot_push - 3\n", 3, "7 words", "found 6");
    refused(CUDA "2 any any 1shot_push - 3 64 1 2 3\n", 3, "7 words", "found 10");
    static const struct {
        const char *rule, *expected, *found;
    } rules[] = {
        {"1 any any 1shot_push - 3 64", "world size of 2..16", "\"1\""},
        {"17 any any 1shot_push - 3 64", "world size", "\"17\""},
        {"8-3 any any 1shot_push - 3 64", "world size", "\"8-3\""},
        {"2- any any 1shot_push - 3 64", "world size", "\"2-\""},
        {"2K any any 1shot_push - 3 64", "world size", "\"2K\""},
        {"-2 any any 1shot_push - 3 64", "world size", "\"-2\""},
        {"99999999999999999999 any any 1shot_push - 3 64", "world size", "\"9999"},
        {"2 both any 1shot_push - 3 64", "eager, graph or any", "\"both\""},
        {"2 any 1X 1shot_push - 3 64", "bytes such as", "\"1X\""},
        {"2 any K 1shot_push - 3 64", "bytes", "\"K\""},
        {"2 any 0 1shot_push - 3 64", "bytes", "\"0\""},
        {"2 any -8M 1shot_push - 3 64", "bytes", "\"-8M\""},
        {"2 any 8M-8M 1shot_push - 3 64", "bytes", "\"8M-8M\""},
        {"2 any any-8M 1shot_push - 3 64", "bytes", "\"any-8M\""},
        {"2 any 1025G 1shot_push - 3 64", "bytes", "\"1025G\""},
        {"2 any 99999999999G 1shot_push - 3 64", "bytes", "\"99999999999G\""},
        {"2 any 1KB 1shot_push - 3 64", "bytes", "\"1KB\""},
        {"2 any any ring - 3 64", "an algorithm: 1shot_push", "\"ring\""},
        {"2 any any local_copy - 3 64", "an algorithm", "\"local_copy\""},
        {"2 any any auto - 3 64", "an algorithm", "\"auto\""},
        {"2 any any 1shot_push graph 3 64", "- for others", "\"graph\""},
        {"2 any any 1shot_pull - 3 64", "workspace, graph or multicast", "\"-\""},
        {"2 any any 1shot_push - 1 64", "blocks: 2..1024", "\"1\""},
        {"2 any any 1shot_push - 1025 64", "blocks", "\"1025\""},
        {"2 any any 1shot_push - - 64", "blocks", "\"-\""},
        {"2 any any host_1shot - 1 1", "for the host host_1shot", "\"host_1shot\""},
        {"2 any any nccl - 3 64", "- for nccl", "\"3\""},
        {"2 any any nccl - - 64", "- for nccl", "\"64\""},
        {"2 any any 1shot_push - 3 48", "a multiple of 32", "\"48\""},
        {"2 any any 1shot_push - 3 0", "threads", "\"0\""},
        {"2 any any 1shot_push - 3 1056", "threads", "\"1056\""},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        char text[160];
        snprintf(text, sizeof text, CUDA "# fine\n2 any 1K 1shot_push - 3 64 # fine\n%s\n",
                 rules[i].rule);
        refused(text, 5, rules[i].expected, rules[i].found);
    }
    refused(HOST "2 any any 1shot_push - 3 32\n", 3, "1 on the host", "\"32\"");
    refused(HOST "2 any any host_1shot - 2 1\n", 3, "1 for host_1shot", "\"2\"");
    refused(HOST "2 any any nccl - - -\n", 3, "for GPUs nccl", "\"nccl\"");
    oh_tuning tuning;
    static const char binary[] = CUDA "2 any any 1sh\0t_push - 3 64\n";
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, parse(binary, sizeof binary - 1, &tuning));
    CHECK_CONTAINS("1sh?t_push", onehop_last_error());
}

/* Blanks, comments, ends of lines, a missing last one. */
static void layouts(void) {
    static const char neat[] = CUDA "3-8 graph 8M-any 2shot_pull graph 65 max\n";
    static const char wild[] = "\r\n#x\n \tonehop-tuning\t1#\r\n\n  device  cuda # y\n#\n"
                               "3-8\tgraph   8M-any 2shot_pull graph 65 max\r";
    oh_tuning a, b;
    CHECK_OK(parse(neat, sizeof neat - 1, &a));
    CHECK_OK(parse(wild, sizeof wild - 1, &b));
    CHECK_INT(1, a.count);
    CHECK(oh_tuning_hash(&a) == oh_tuning_hash(&b));
    const oh_tuning_rule *rule = &a.rules[0];
    CHECK(rule->device == OH_TUNING_CUDA && rule->world_low == 3 && rule->world_high == 8);
    CHECK(rule->modes == 1u << ONEHOP_MODE_GRAPH && rule->above == 8u << 20 &&
          rule->up_to == UINT64_MAX);
    CHECK(rule->algorithm == ONEHOP_2SHOT_PULL && rule->source == ONEHOP_SOURCE_GRAPH);
    CHECK(rule->blocks == 65 && rule->threads == OH_TUNING_MAX);
    oh_tuning_free(&b);
    b.rules = a.rules, b.count = a.count;
    const uint64_t hash = oh_tuning_hash(&a);
    b.rules[0].threads = 64;
    CHECK(oh_tuning_hash(&b) != hash);
    oh_tuning_free(&a);
}

/* A pipe to which nobody writes: neither the table nor a library is waited for. */
static void pipes(const char *folder) {
    char path[128];
    uint32_t version;
    snprintf(path, sizeof path, "%s/pipe", folder);
    CHECK(mkfifo(path, 0600) == 0);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from(path));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open(path));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    setenv("ONEHOP_NVRTC", path, 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nvrtc_open(&version));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    unsetenv("ONEHOP_NVRTC");
    unlink(path);
}

static void odd_files(void) {
    tables t;
    make_tables(&t, HOST "3 any 1K 1shot_push - 5 1\n", NULL);
    CHECK_OK(load_from(t.path[0]));
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from(t.folder));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from("/dev/zero"));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    pipes(t.folder);
    CHECK(truncate(t.path[0], 2 << 20) == 0);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from(t.path[0]));
    CHECK_CONTAINS("longer than", onehop_last_error());
    /* More rules than a group may have. */
    FILE *file = fopen(t.path[0], "w");
    fputs(HOST, file);
    for (int i = 1; i <= OH_DISPATCH_RULES; i++)
        fprintf(file, "2 any %d host_1shot - 1 1\n", 4 * i);
    fclose(file);
    setenv("ONEHOP_TUNING", t.path[0], 1);
    onehop_context *contexts[3];
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, onehop_create_all(&config, 2, NULL, contexts));
    CHECK_CONTAINS("more than 192 rules", onehop_last_error());
    CHECK_OK(onehop_create_all(&config, 3, NULL, contexts)); /* none is for 3 */
    for (int r = 0; r < 3; r++) onehop_destroy(contexts[r]);
    unsetenv("ONEHOP_TUNING");
    remove_tables(&t);
}

int main(void) {
    watchdog(60);
    unsetenv("ONEHOP_TUNING");
    refusals();
    layouts();
    odd_files();
    return 0;
}
