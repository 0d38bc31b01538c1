/* The list of runs: each function, each of its calls, each way to fail. Runs without a fault come
 * first and count the calls. */
#include "sweep.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t max_counts[SWEEP_RANKS + 1][SWEEP_RANKS][IN_COUNT];

/* ---- runs without a fault -------------------------------------------------------------------- */

static void count_calls(int world, life_report *reports) {
    const sweep_case c = {.world = world, .rank = 0, .fault = {-1, 0, DO_NOTHING}};
    rank_end ends[SWEEP_RANKS];
    sweep_verdict v;
    for (int i = 0; i < 3; i++) { /* a machine may be so busy that a deadline comes */
        run_case(&c, reports, ends);
        judge(&c, options.limit_ms, reports, ends, &v);
        if (!v.bad && !v.noticed) break;
    }
    if (v.bad || v.noticed) {
        printf("a run of %d ranks without a fault fails: %s\n", world, v.text);
        print_reports(&c, reports, ends);
        exit(1);
    }
    for (int r = 0; r < world; r++)
        for (int f = 0; f < IN_COUNT; f++)
            if (reports[r].counts[f] > max_counts[world][r][f])
                max_counts[world][r][f] = reports[r].counts[f];
}

void count_all_calls(void) {
    life_report *reports = shared_memory(SWEEP_RANKS * sizeof *reports);
    for (int i = 0; i < 3; i++)
        for (int world = 2; world <= SWEEP_RANKS; world++) count_calls(world, reports);
}

void print_counts(void) {
    for (int f = 0; f < IN_COUNT; f++)
        printf("%-24s W=2: %5u %5u   W=3: %5u %5u %5u   %s\n", inject_name(f), max_counts[2][0][f],
               max_counts[2][1][f], max_counts[3][0][f], max_counts[3][1][f], max_counts[3][2][f],
               inject_words(f));
}

/* ---- the list of runs ------------------------------------------------------------------------ */

static void add_case(sweep_list *list, int world, int rank, int function, uint32_t nth,
                     int action) {
    static uint32_t room;
    if (list->count == room) {
        room = room ? 2 * room : 1024;
        list->cases = realloc(list->cases, room * sizeof *list->cases);
        if (!list->cases) exit(2);
    }
    list->cases[list->count++] =
        (sweep_case){.world = world, .rank = rank, .fault = {function, nth, action}};
}

static void add_actions(sweep_list *list, int world, int rank, int function, uint32_t nth) {
    char words[128], *rest = words;
    snprintf(words, sizeof words, "%s", inject_words(function));
    for (char *word; (word = strsep(&rest, " "));)
        if (strcmp(word, "-") && strcmp(word, "~"))
            add_case(list, world, rank, function, nth, inject_action(word));
    add_case(list, world, rank, function, nth, DO_KILL);
    /* Takes the whole limit, and differs little from place to place. */
    if (!(nth & (nth - 1))) add_case(list, world, rank, function, nth, DO_STOP);
}

void add_all(sweep_list *list) {
    for (int world = 2; world <= SWEEP_RANKS; world++)
        for (int rank = 0; rank < world && (!options.world || options.world == world); rank++)
            for (int f = 0; f < IN_COUNT; f++) {
                const bool few = strchr(inject_words(f), '~');
                if (options.only && strcmp(options.only, inject_name(f))) continue;
                for (uint32_t n = 1; n <= max_counts[world][rank][f]; n = few ? 2 * n : n + 1)
                    add_actions(list, world, rank, f, n);
            }
}

static uint64_t random_next(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static uint64_t key_of(const sweep_case *c) {
    uint64_t state = options.seed ^ (uint64_t)c->world << 56 ^ (uint64_t)c->rank << 48 ^
                     (uint64_t)c->fault.function << 40 ^ (uint64_t)c->fault.action << 24 ^
                     c->fault.nth;
    return random_next(&state);
}

static int by_key(const void *a, const void *b) {
    const uint64_t x = key_of(a), y = key_of(b);
    return (x > y) - (x < y);
}

/* By a hash of the run itself: the number of calls varies a little, and must not change the
 * draw. */
void draw_sample(sweep_list *list) {
    qsort(list->cases, list->count, sizeof *list->cases, by_key);
    if (options.sample < list->count) list->count = options.sample;
}

/* The commit's: each commit looks at other places, and anyone can repeat it. */
uint64_t seed_of_commit(void) {
    const char *source = getenv("ONEHOP_SOURCE_DIR");
    char command[512], hash[17] = "";
    snprintf(command, sizeof command, "git -C '%s' rev-parse HEAD 2>/dev/null",
             source ? source : ".");
    FILE *git = popen(command, "r");
    if (git && !fgets(hash, sizeof hash, git)) hash[0] = 0;
    if (git) pclose(git);
    return strtoull(hash, NULL, 16);
}
