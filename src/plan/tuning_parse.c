/* Reading tuning tables. Everything is checked while reading, so that choosing cannot fail: what is
 * not understood is refused with file, line, what was expected and what was found. */
#include "base/descriptor.h"
#include "plan/tuning.h"
#include "kernels/kernels.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES ((uint64_t)1 << 40) /* of a call */
#define MAX_FILE  ((size_t)1 << 20)

enum {
    COLUMNS = 7,
    WORD = 32, /* longest word of a rule, with its end */
};

/* Pairs of name and text, ended by an empty name; see cmake/tables_image.S. */
extern const char oh_tables_image[];

typedef struct reader {
    const char *name, *at, *end;
    unsigned line;
    bool versioned;
    uint16_t device; /* 0: no device line yet */
    oh_operation operation;
    uint32_t place; /* of line 0 */
} reader;

static onehop_result refuse(const reader *r, const char *expected, const char *found) {
    return oh_error(ONEHOP_ERR_ENVIRONMENT, "%s:%u: expected %s, found \"%s\"", r->name, r->line,
                    expected, found);
}

/* ---- words ----------------------------------------------------------------------------------- */

static bool blank(char c) {
    return c == ' ' || c == '\t' || c == '\r';
}

/* Splits the next line into words; of a longer word than any that is known the beginning is kept.
 * Returns the number of words, also beyond `most`. */
static int next_line(reader *r, char words[][WORD], int max) {
    int count = 0;
    r->line++;
    while (r->at < r->end && *r->at != '\n' && *r->at != '#') {
        size_t length = 0;
        for (; r->at < r->end && !blank(*r->at) && *r->at != '\n' && *r->at != '#'; r->at++)
            if (count < max && length < WORD - 1) words[count][length++] = *r->at ? *r->at : '?';
        if (count < max) words[count][length] = '\0';
        count += length > 0 || count >= max;
        while (r->at < r->end && blank(*r->at)) r->at++;
    }
    while (r->at < r->end && *r->at++ != '\n') {
    }
    return count;
}

/* Decimal digits without a sign, and with `suffix` perhaps K, M or G, up to `end` or the end of the
 * text; false if it is no such number, or above `most`. */
static bool number(const char *text, const char *end, bool suffix, uint64_t max, uint64_t *out) {
    static const char suffixes[] = "KMG";
    const char *const first = text;
    uint64_t value = 0;
    for (; text != end && *text >= '0' && *text <= '9'; text++) {
        value = 10 * value + (uint64_t)(*text - '0');
        if (value > max) return false;
    }
    if (text == first) return false;
    const char *found = suffix && text != end && *text ? strchr(suffixes, *text) : NULL;
    if (found) {
        const int shift = 10 * (int)(found - suffixes + 1);
        if (value > max >> shift) return false;
        value <<= shift;
        text++;
    }
    if (text != end && *text) return false;
    *out = value;
    return true;
}

static bool read_world(const char *word, oh_tuning_rule *rule) {
    const char *dash = strchr(word, '-');
    uint64_t low, high;
    if (!number(word, dash, false, ONEHOP_MAX_RANKS, &low)) return false;
    high = low;
    if (dash && !number(dash + 1, NULL, false, ONEHOP_MAX_RANKS, &high)) return false;
    rule->world_low = (uint8_t)low;
    rule->world_high = (uint8_t)high;
    return low >= 2 && low <= high;
}

static bool read_mode(const char *word, oh_tuning_rule *rule) {
    rule->modes = !strcmp(word, "eager")   ? 1u << ONEHOP_MODE_EAGER
                  : !strcmp(word, "graph") ? 1u << ONEHOP_MODE_GRAPH
                  : !strcmp(word, "any")   ? 1u << ONEHOP_MODE_EAGER | 1u << ONEHOP_MODE_GRAPH
                                           : 0;
    return rule->modes != 0;
}

static bool read_bytes(const char *word, oh_tuning_rule *rule) {
    const char *dash = strchr(word, '-'), *high = dash ? dash + 1 : word;
    rule->above = 0;
    if (dash && !number(word, dash, true, MAX_BYTES, &rule->above)) return false;
    rule->up_to = UINT64_MAX;
    if (strcmp(high, "any") && !number(high, NULL, true, MAX_BYTES, &rule->up_to)) return false;
    return rule->above < rule->up_to;
}

static const oh_algorithm *algorithm_of(const oh_tuning_rule *rule) {
    return oh_algorithm_of((onehop_algorithm)rule->algorithm);
}

/* Float32 and two ranks stand for all types and sizes. */
static bool is_fused(oh_operation o, uint16_t device, onehop_algorithm a) {
    const bool host = device == OH_TUNING_HOST;
    return oh_kernel_find(host ? ONEHOP_DEVICE_HOST : ONEHOP_DEVICE_CUDA, o, a, ONEHOP_FLOAT32,
                          2) >= 0;
}

static bool read_algorithm(const char *word, oh_tuning_rule *rule) {
    const uint32_t device = rule->device == OH_TUNING_HOST ? OH_RUNS_HOST : OH_RUNS_CUDA;
    const onehop_algorithm a = oh_algorithm_named(word);
    rule->algorithm = (uint8_t)a;
    if (rule->operation) return is_fused((oh_operation)rule->operation, rule->device, a);
    return algorithm_of(rule)->devices & device && rule->algorithm != ONEHOP_LOCAL_COPY;
}

static bool read_source(const char *word, oh_tuning_rule *rule) {
    const bool pull = algorithm_of(rule)->family == OH_FAMILY_PULL;
    rule->source = ONEHOP_SOURCE_NONE;
    if (!pull) return !strcmp(word, "-");
    for (int s = ONEHOP_SOURCE_WORKSPACE; s <= ONEHOP_SOURCE_MULTICAST; s++)
        if (!strcmp(word, onehop_source_name((onehop_source)s))) rule->source = (uint8_t)s;
    return rule->source != ONEHOP_SOURCE_NONE;
}

/* A dimension of the grid. NCCL has none. */
static bool read_size(const char *word, const oh_tuning_rule *rule, uint64_t max, uint16_t *out) {
    uint64_t value;
    *out = 0;
    if (!algorithm_of(rule)->min_blocks) return !strcmp(word, "-");
    *out = OH_TUNING_MAX;
    if (!strcmp(word, "max")) return true;
    if (!number(word, NULL, false, max, &value)) return false;
    *out = (uint16_t)value;
    return value > 0;
}

/* A grid of a GPU has the signature's block and one more, and whole warps; a block on the host has
 * one thread. */
static bool read_blocks(const char *word, oh_tuning_rule *rule) {
    const bool one = algorithm_of(rule)->family == OH_FAMILY_HOST;
    if (!read_size(word, rule, one ? 1 : 1024, &rule->blocks)) return false;
    return rule->blocks >= algorithm_of(rule)->min_blocks;
}

static bool read_threads(const char *word, oh_tuning_rule *rule) {
    const bool host = rule->device == OH_TUNING_HOST;
    if (rule->operation) return !strcmp(word, "-");
    if (!read_size(word, rule, host ? 1 : 1024, &rule->threads)) return false;
    return host || rule->threads == OH_TUNING_MAX || rule->threads % 32 == 0;
}

/* ---- lines ----------------------------------------------------------------------------------- */

static uint32_t that_run_on(uint32_t devices) {
    uint32_t mask = 0;
    for (int a = 1; a < OH_ALGORITHMS; a++)
        if (oh_algorithms[a].devices == devices && a != ONEHOP_LOCAL_COPY) mask |= 1u << a;
    return mask;
}

static const char *expected_algorithms(const oh_tuning_rule *rule, char *text, size_t size) {
    const oh_operation o = (oh_operation)rule->operation;
    char any[128], gpu[64], host[96];
    uint32_t fused = 0;
    for (int a = 1; a < OH_ALGORITHMS && o; a++)
        if (is_fused(o, rule->device, (onehop_algorithm)a)) fused |= 1u << a;
    if (o)
        snprintf(text, size, "an algorithm of %s: %s", oh_operation_name(o),
                 oh_algorithm_list(fused, any, sizeof any));
    else
        snprintf(text, size, "an algorithm: %s, for GPUs %s, for the host %s",
                 oh_algorithm_list(that_run_on(OH_RUNS_ANY), any, sizeof any),
                 oh_algorithm_list(that_run_on(OH_RUNS_CUDA), gpu, sizeof gpu),
                 oh_algorithm_list(that_run_on(OH_RUNS_HOST), host, sizeof host));
    return text;
}

static onehop_result read_rule(const reader *r, char words[][WORD], oh_tuning_rule *rule) {
    static const struct {
        bool (*read)(const char *word, oh_tuning_rule *rule);
        const char *expected;
    } columns[COLUMNS] = {
        {read_world, "a world size of 2..16, or a range such as 3-8"},
        {read_mode, "a mode: eager, graph or any"},
        {read_bytes, "bytes such as 64K, a range such as 8M-32M, or any"},
        {read_algorithm, NULL},
        {read_source, "a source: workspace, graph or multicast for pull algorithms, - for others"},
        {read_blocks, "blocks: 2..1024 or max; 1 for host_1shot and the others of the host alone, "
                      "- for nccl"},
        {read_threads, "threads: a multiple of 32 to 1024 or max; 1 on the host, - for nccl and "
                       "fused operations"},
    };
    char algorithms[300];
    memset(rule, 0, sizeof *rule);
    rule->device = r->device;
    rule->operation = (uint8_t)r->operation;
    rule->place = r->place | r->line;
    for (int i = 0; i < COLUMNS; i++) {
        const char *expected = columns[i].expected;
        if (columns[i].read(words[i], rule)) continue;
        return refuse(
            r, expected ? expected : expected_algorithms(rule, algorithms, sizeof algorithms),
            words[i]);
    }
    return ONEHOP_OK;
}

/* A family goes by the major number: sm_90 serves 9.0 to 9.9. */
static onehop_result read_device(reader *r, const char *word) {
    uint64_t capability;
    r->operation = OH_PLAIN;
    if (!strcmp(word, "host"))
        r->device = OH_TUNING_HOST;
    else if (!strcmp(word, "cuda"))
        r->device = OH_TUNING_CUDA;
    else if (!strncmp(word, "sm_", 3) && number(word + 3, NULL, false, 999, &capability) &&
             capability >= 80 && capability % 10 == 0)
        r->device = (uint16_t)(capability / 10);
    else
        return refuse(r, "a device: host, cuda, or a family of GPUs such as sm_90", word);
    return ONEHOP_OK;
}

static onehop_result read_operation(reader *r, const char *word) {
    for (int o = 0; o < OH_OPERATIONS; o++)
        if (!strcmp(word, oh_operation_name((oh_operation)o))) {
            r->operation = (oh_operation)o;
            return ONEHOP_OK;
        }
    return refuse(r, "an operation: plain, all_reduce_norm or tp_qknorm", word);
}

static onehop_result append(oh_tuning *tuning, const oh_tuning_rule *rule) {
    if (tuning->count == tuning->room) {
        const size_t room = tuning->room ? 2 * tuning->room : 64;
        oh_tuning_rule *rules = realloc(tuning->rules, room * sizeof *rules);
        if (!rules)
            return oh_error(ONEHOP_ERR_MEMORY, "tuning table: no memory for %zu rules", room);
        tuning->rules = rules;
        tuning->room = room;
    }
    tuning->rules[tuning->count++] = *rule;
    return ONEHOP_OK;
}

static onehop_result read_line(reader *r, oh_tuning *tuning, char words[][WORD], int count) {
    oh_tuning_rule rule;
    if (!r->versioned) {
        r->versioned = count == 2 && !strcmp(words[0], "onehop-tuning") && !strcmp(words[1], "1");
        return r->versioned ? ONEHOP_OK : refuse(r, "the line \"onehop-tuning 1\"", words[0]);
    }
    if (!strcmp(words[0], "device")) {
        if (count == 2) return read_device(r, words[1]);
        return refuse(r, "one device", count < 2 ? "nothing" : words[2]);
    }
    if (!strcmp(words[0], "operation")) {
        if (count == 2) return read_operation(r, words[1]);
        return refuse(r, "one operation", count < 2 ? "nothing" : words[2]);
    }
    if (!r->device) return refuse(r, "a line \"device ...\" before the first rule", words[0]);
    if (count != COLUMNS)
        return oh_error(ONEHOP_ERR_ENVIRONMENT,
                        "%s:%u: expected %d words (world, mode, bytes, algorithm, source, blocks, "
                        "threads), found %d",
                        r->name, r->line, COLUMNS, count);
    onehop_result result = read_rule(r, words, &rule);
    return result ? result : append(tuning, &rule);
}

onehop_result oh_tuning_parse(oh_tuning *tuning, const char *name, const char *text, size_t bytes) {
    char words[COLUMNS][WORD];
    reader r = {name, text, text + bytes, 0, false, 0, OH_PLAIN, oh_tuning_place(name)};
    while (r.at < r.end) {
        const int count = next_line(&r, words, COLUMNS);
        onehop_result result = count ? read_line(&r, tuning, words, count) : ONEHOP_OK;
        if (result) return result;
    }
    return r.versioned ? ONEHOP_OK : refuse(&r, "the line \"onehop-tuning 1\"", "nothing");
}

/* ---- files ----------------------------------------------------------------------------------- */

static onehop_result read_file(oh_tuning *tuning, const char *path) {
    const char *variable = oh_env_describe(OH_ENV_TUNING)->name;
    FILE *file = oh_fd_read_file(path);
    char *text = file ? malloc(MAX_FILE + 1) : NULL;
    const size_t bytes = text ? fread(text, 1, MAX_FILE + 1, file) : 0;
    onehop_result result;
    if (!file && errno == EINVAL)
        result =
            oh_error(ONEHOP_ERR_ENVIRONMENT,
                     "%s: the tuning table %s is no regular file (a directory, pipe or device)",
                     variable, path);
    else if (!file || (text && ferror(file)))
        result = oh_error_errno(ONEHOP_ERR_ENVIRONMENT, errno, "%s: the tuning table %s", variable,
                                path);
    else if (!text)
        result = oh_error(ONEHOP_ERR_MEMORY, "%s: no memory to read %s", variable, path);
    else if (bytes > MAX_FILE)
        result = oh_error(ONEHOP_ERR_ENVIRONMENT, "%s: %s is longer than any tuning table (1 MiB)",
                          variable, path);
    else
        result = oh_tuning_parse(tuning, path, text, bytes);
    free(text);
    if (file) fclose(file);
    return result;
}

onehop_result oh_tuning_load(oh_tuning *tuning_out) {
    const char *path = oh_env_text(OH_ENV_TUNING), *name = oh_tables_image;
    onehop_result result = ONEHOP_OK;
    memset(tuning_out, 0, sizeof *tuning_out);
    if (path) result = read_file(tuning_out, path);
    while (!result && *name) {
        const char *text = name + strlen(name) + 1;
        result = oh_tuning_parse(tuning_out, name, text, strlen(text));
        name = text + strlen(text) + 1;
    }
    return result;
}

void oh_tuning_free(oh_tuning *tuning) {
    free(tuning->rules);
    memset(tuning, 0, sizeof *tuning);
}

uint64_t oh_tuning_hash(const oh_tuning *tuning) {
    uint64_t hash = OH_HASH_START;
    for (size_t i = 0; i < tuning->count; i++) {
        oh_tuning_rule rule = tuning->rules[i];
        rule.place = 0;
        hash = oh_hash(hash, &rule, sizeof rule);
    }
    return hash;
}
