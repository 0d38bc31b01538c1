/* What is wrong with how the ranks of one run ended. */
#include "sweep.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#define NOBODY  -1
#define SEVERAL -2

/* ---- whom a sentence names ------------------------------------------------------------------- */

/* The next number after "rank" or "ranks" in *text, which moves behind it. A list is SEVERAL.
 * `prefix`: nothing stands before it and a colon behind, so the rank is who says the rest, unless
 * nothing else is named. */
static int next_rank(const char **text, bool *prefix) {
    const char *begin = *text, *at = strstr(begin, "rank");
    char *behind;
    if (!at) return NOBODY;
    at += at[4] == 's' ? 5 : 4;
    *text = at;
    *prefix = false;
    if (at[0] != ' ' || at[1] < '0' || at[1] > '9') return next_rank(text, prefix);
    const int rank = (int)strtol(at, &behind, 10);
    *prefix = *behind == ':' && at - begin <= (ptrdiff_t)sizeof ": rank" - 1;
    *text = behind;
    return *behind == ',' && behind[1] == ' ' && behind[2] >= '0' && behind[2] <= '9' ? SEVERAL
                                                                                      : rank;
}

/* Of a failure of a peer the first rank that is told of; of a failure at home the rank that
 * tells. */
static int named(const life_report *r, int own) {
    const bool of_peer = r->result == ONEHOP_ERR_PEER_FAILED ||
                         r->result == ONEHOP_ERR_MISSING_PEER || r->result <= -300;
    const char *text = r->text;
    bool prefix = false;
    int teller = NOBODY;
    if (r->peer >= 0) return r->peer;
    for (int rank = next_rank(&text, &prefix); rank != NOBODY; rank = next_rank(&text, &prefix)) {
        if (prefix)
            teller = rank;
        else if (of_peer)
            return rank;
    }
    return teller == NOBODY && !of_peer ? own : teller;
}

/* ---- the verdict ----------------------------------------------------------------------------- */

/* The most serious comes first and is the one that is told. */
__attribute__((format(printf, 3, 4))) static void blame(sweep_verdict *v, sweep_fault fault,
                                                        const char *format, ...) {
    va_list list;
    if (!v->bad) {
        va_start(list, format);
        vsnprintf(v->text, sizeof v->text, format, list);
        va_end(list);
    }
    v->bad |= 1u << fault;
}

static bool survives(const sweep_case *c, int rank) {
    return rank != c->rank || c->fault.action < DO_KILL;
}

static void judge_ends(const sweep_case *c, const life_report *reports, const rank_end *ends,
                       sweep_verdict *v) {
    for (int r = 0; r < c->world; r++)
        if (reports[r].wrong)
            blame(v, BAD_wrong, "rank %d: a wrong sum, at %s at the latest", r,
                  life_step_name(reports[r].step));
    for (int r = 0; r < c->world; r++) {
        const int status = ends[r].status;
        if (!survives(c, r) || ends[r].hung || (WIFEXITED(status) && !WEXITSTATUS(status)))
            continue;
        blame(v, BAD_crash, "rank %d ended with %s %d at %s", r,
              WIFSIGNALED(status) ? "signal" : "status",
              WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
              life_step_name(reports[r].step));
    }
}

/* On a busy machine: what ranks waited for a processor is not the library's. */
static float seconds_late(const sweep_case *c, const life_report *reports) {
    float sum = 0;
    for (int r = 0; r < c->world; r++) sum += reports[r].late;
    return sum;
}

/* A fault that ends something is told at once; only a rank that stopped is seen by the limit
 * alone. */
static void judge_time(const sweep_case *c, uint32_t limit_ms, const life_report *reports,
                       const rank_end *ends, sweep_verdict *v) {
    const float limit = (float)limit_ms * 0.001f + seconds_late(c, reports);
    for (int r = 0; r < c->world; r++) {
        const life_report *report = &reports[r];
        if (!survives(c, r)) continue;
        if (ends[r].hung)
            blame(v, BAD_hang, "rank %d does not end: it is at %s", r,
                  life_step_name(report->step));
        else if (report->longest > limit + 1.05f)
            blame(v, BAD_hang, "rank %d: %s took %.2f s: %s", r,
                  life_step_name(report->longest_step), report->longest, report->text);
    }
}

/* A rank that fails in an opening before it has said a word is nobody's peer yet. */
static bool is_unknown(const sweep_case *c, const life_report *report) {
    const uint32_t said = report->counts[IN_send] - report->sends_before;
    return (report->step == AT_create || report->step == AT_group_open) &&
           said <= (c->fault.function == IN_send);
}

/* Whoever dies where its peers need nothing more of it is not missed there. One that then opens
 * another group by name waits for a rank that never begins to: only the limit can end that. */
static bool waits_for_unborn(const sweep_case *c, const life_report *dead,
                             const life_report *report) {
    return c->fault.action == DO_KILL && dead->step < AT_group_open &&
           report->longest_step == AT_group_open;
}

static void judge_speed(const sweep_case *c, uint32_t limit_ms, const life_report *reports,
                        sweep_verdict *v) {
    const float limit = (float)limit_ms * 0.0009f + seconds_late(c, reports);
    if (is_unknown(c, &reports[c->rank])) return;
    for (int r = 0; r < c->world; r++)
        if (survives(c, r) && c->fault.action != DO_STOP &&
            reports[r].longest_step != AT_comm_all_reduce && /* has no group to tell it */
            !waits_for_unborn(c, &reports[c->rank], &reports[r]) && reports[r].longest > limit)
            blame(v, BAD_slow, "rank %d: %s took %.2f s: %s", r,
                  life_step_name(reports[r].longest_step), reports[r].longest, reports[r].text);
}

/* Is the named rank no worse a choice? One that had no processor for long is late indeed; and a
 * communicator without a group sees of two ranks that are gone only that they do not come. */
static bool is_excused(const life_report *report, int culprit, uint32_t limit_ms,
                       const life_report *reports) {
    const bool of_silence =
        report->result == ONEHOP_ERR_TIMEOUT || report->result == ONEHOP_ERR_MISSING_PEER;
    if (culprit < 0 || !of_silence) return false;
    return reports[culprit].late > (float)limit_ms * 0.0005f ||
           (report->step == AT_comm_all_reduce && reports[culprit].result);
}

/* The connection to a peer that is well broke: both its ends are right to name the other. */
static bool is_of_two(int action) {
    return action == EPIPE || action == ECONNRESET;
}

static void judge_culprit(const sweep_case *c, uint32_t limit_ms, const life_report *reports,
                          sweep_verdict *v) {
    for (int r = 0; r < c->world; r++) {
        const life_report *report = &reports[r];
        if (!report->result || !survives(c, r)) continue;
        const int culprit = named(report, r);
        if (culprit == c->rank || (is_of_two(c->fault.action) && culprit >= 0)) continue;
        if (is_excused(report, culprit, limit_ms, reports)) continue;
        blame(v, BAD_culprit, "rank %d, at %s, names %s %d, not %d: %s: %s", r,
              life_step_name(report->step), culprit == SEVERAL ? "several" : "rank", culprit,
              c->rank, onehop_result_name(report->result), report->text);
    }
}

static bool is_set_up(int step) {
    return step == AT_create || step == AT_capture_end || step == AT_group_open ||
           step == AT_symmetric_alloc || step == AT_prepare;
}

/* The last word of an exchange is not answered: if a rank dies on the way to it, or cannot hear it,
 * the others may be through already, which nobody can help. They learn of it at their next call. */
static bool may_split(const sweep_case *c) {
    const int f = c->fault.function;
    return c->fault.action >= DO_KILL || is_of_two(c->fault.action) || f == IN_poll ||
           f == IN_recv || f == IN_recvmsg;
}

static void judge_split(const sweep_case *c, const life_report *reports, sweep_verdict *v) {
    for (int r = 0; !may_split(c) && r < c->world; r++)
        for (int other = 0; other < c->world; other++) {
            const life_report *failed = &reports[r], *passed = &reports[other];
            if (failed->result && is_set_up(failed->step) && passed->step > failed->step)
                blame(v, BAD_split, "%s failed on rank %d (%s: %s), not on rank %d",
                      life_step_name(failed->step), r, onehop_result_name(failed->result),
                      failed->text, other);
        }
}

static void judge_rest(const sweep_case *c, const life_report *reports, sweep_verdict *v) {
    for (int r = 0; r < c->world; r++) {
        const life_report *report = &reports[r];
        const bool unmap_failed = r == c->rank && c->fault.function == IN_munmap;
        if (!report->ended) continue;
        if (report->fds_left)
            blame(v, BAD_fds, "rank %d: %d descriptors are left, one is %s", r, report->fds_left,
                  report->left);
        if (report->maps_left && !unmap_failed)
            blame(v, BAD_maps, "rank %d: a mapping is left: %s", r, report->left);
        if (report->threads_left)
            blame(v, BAD_threads, "rank %d: %d threads are left", r, report->threads_left);
        if (report->heap_left)
            blame(v, BAD_heap, "rank %d: %d blocks of the heap are left", r, report->heap_left);
    }
}

void judge(const sweep_case *c, uint32_t limit_ms, const life_report *reports, const rank_end *ends,
           sweep_verdict *v) {
    memset(v, 0, sizeof *v);
    v->step = reports[c->rank].step;
    v->reached =
        c->fault.function >= 0 && reports[c->rank].counts[c->fault.function] >= c->fault.nth;
    for (int r = 0; r < c->world; r++) v->noticed = v->noticed || reports[r].result;
    judge_ends(c, reports, ends, v);
    judge_time(c, limit_ms, reports, ends, v);
    judge_culprit(c, limit_ms, reports, v);
    judge_split(c, reports, v);
    judge_speed(c, limit_ms, reports, v);
    judge_rest(c, reports, v);
}
