/* Property: wherever one system call fails, moves one byte, kills its rank or stops it, no step
 * hangs, no process crashes, no sum is wrong, all survivors name the rank that failed, and nothing
 * is left behind. This program makes all runs of the sweep, or a sample of them.
 *
 * What is wrong is run twice more, to tell what always fails from what needs luck. One run by
 * itself is repeated with --case, with the library's log if SWEEP_LOG is set. */
/* labels: timeout=180 */
#include "sweep.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

sweep_options options = {.jobs = 4, .limit_ms = 2000, .stop_limit_ms = 1000, .times = 1};

static const char usage[] =
    "sweep [--jobs N] [--world 2|3] [--only FUNCTION] [--sample N [--seed HEX]] [--list]\n"
    "      [--limit-ms N] [--stop-limit-ms N] [--case "
    "WORLD,RANK,FUNCTION,NTH,ACTION [--times N]]\n";

/* ---- a single run ---------------------------------------------------------------------------- */

static int misused(void) {
    fputs(usage, stderr);
    return 2;
}

static int run_one(void) {
    life_report *reports = shared_memory(SWEEP_RANKS * sizeof *reports);
    char function[64], action[32];
    sweep_case c;
    sweep_verdict v;
    rank_end ends[SWEEP_RANKS];
    int bad = 0;
    if (sscanf(options.one, "%d,%d,%63[^,],%u,%31s", &c.world, &c.rank, function, &c.fault.nth,
               action) != 5)
        return misused();
    for (c.fault.function = 0; c.fault.function < IN_COUNT; c.fault.function++)
        if (!strcmp(inject_name(c.fault.function), function)) break;
    c.fault.action = inject_action(action);
    if (c.fault.function == IN_COUNT || c.fault.action < 0 || c.world < 2 ||
        c.world > SWEEP_RANKS || c.rank < 0 || c.rank >= c.world)
        return misused();
    for (int i = 0; i < options.times; i++) {
        run_case(&c, reports, ends);
        judge(&c, limit_of(&c), reports, ends, &v);
        print_reports(&c, reports, ends);
        printf("%s\n", v.bad ? v.text : v.reached ? "well" : "not reached");
        bad += v.bad != 0;
    }
    printf("%d of %d times wrong\n", bad, options.times);
    return bad ? 1 : 0;
}

/* ---- the place where it runs ----------------------------------------------------------------- */

static char place[] = "/tmp/onehop-sweep-XXXXXX";

/* Whatever the library writes by itself would lie in here. */
static void make_place(void) {
    if (!mkdtemp(place) || chdir(place)) {
        perror("sweep: mkdtemp");
        exit(2);
    }
    setenv("HOME", place, 1);
    setenv("TMPDIR", place, 1);
    setenv("XDG_CACHE_HOME", place, 1);
}

static int leave_place(void) {
    if (chdir("/") || rmdir(place)) {
        printf("files are left in %s\n", place);
        return 1;
    }
    return 0;
}

/* Names with "onehop" in shared memory. */
static int count_shm(void) {
    int count = 0;
    DIR *directory = opendir("/dev/shm");
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        count += strstr(entry->d_name, "onehop") != NULL;
    if (directory) closedir(directory);
    return count;
}

/* ---- main ------------------------------------------------------------------------------------ */

static bool parse(int argc, char **argv) {
    bool has_seed = false;
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *next = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(name, "--list")) {
            options.list = true;
            continue;
        }
        i++;
        if (!strcmp(name, "--jobs")) {
            options.jobs = atoi(next);
        } else if (!strcmp(name, "--world")) {
            options.world = atoi(next);
        } else if (!strcmp(name, "--only")) {
            options.only = next;
        } else if (!strcmp(name, "--sample")) {
            options.sample = (uint32_t)atoi(next);
        } else if (!strcmp(name, "--seed")) {
            options.seed = strtoull(next, NULL, 16);
            has_seed = true;
        } else if (!strcmp(name, "--limit-ms")) {
            options.limit_ms = (uint32_t)atoi(next);
        } else if (!strcmp(name, "--stop-limit-ms")) {
            options.stop_limit_ms = (uint32_t)atoi(next);
        } else if (!strcmp(name, "--case")) {
            options.one = next;
        } else if (!strcmp(name, "--times")) {
            options.times = atoi(next);
        } else {
            return false;
        }
    }
    if (options.sample && !has_seed) options.seed = seed_of_commit();
    return options.jobs > 0 && options.limit_ms && options.stop_limit_ms;
}

static int sweep(void) {
    sweep_list list = {0};
    const int shm = count_shm();
    count_all_calls();
    if (options.list) print_counts();
    if (options.one) return run_one();
    add_all(&list);
    printf("%u places and actions", list.count);
    if (options.sample) {
        draw_sample(&list);
        printf(", a sample of %u: --sample %u --seed %016llx", list.count, options.sample,
               (unsigned long long)options.seed);
    }
    printf("\n");
    if (options.list) return 0;
    run_all(&list);
    int result = print_totals(&list);
    if (count_shm() > shm) {
        printf("files are left in /dev/shm\n");
        result = 1;
    }
    return result;
}

int main(int argc, char **argv) {
    if (!parse(argc, argv)) return misused();
    setvbuf(stdout, NULL, _IOLBF, 0);
    make_place();
    const int result = sweep();
    return leave_place() ? 1 : result;
}
