/* What ranks say to each other between the frames of an exchange (notices, see mesh.h), and whom an
 * exchange that fails names. */
#include "rendezvous/exchange.h"
#include "rendezvous/opening.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define OH_WORD_MS                                                                                 \
    100 /* for a last word behind a frame that the peer has not taken yet, and for
                        * the rest of a notice whose beginning is here */

/* Names the rank whose end explains that `peer` is gone without a word. In the middle of a frame it
 * may have had one that could not be sent: then whoever is the cause shows in a moment. */
onehop_result oh_run_lost(oh_run *run, const oh_flow *flow) {
    const uint64_t until = oh_clock_ns() + (flow->received ? OH_WORD_MS * 1000000ull : 0);
    bool sure;
    run->culprit = oh_mesh_culprit(run->mesh, flow->peer, &sure);
    while (!sure && oh_clock_ns() < until) {
        oh_sleep_us(1000);
        run->culprit = oh_mesh_culprit(run->mesh, flow->peer, &sure);
    }
    return oh_error(ONEHOP_ERR_PEER_LOST, "rank %d has ended or closed its group", run->culprit);
}

onehop_result oh_run_hear(oh_run *run, oh_flow *flow) {
    const uint64_t until = oh_clock_ns() + OH_WORD_MS * 1000000ull;
    oh_notice notice;
    size_t fill = flow->received;
    memcpy(&notice, &flow->in, fill);
    flow->received = 0;
    for (;;) { /* it was sent at once, so that this hardly ever turns */
        oh_read got = oh_mesh_read(run->mesh->sockets[flow->peer], &notice, sizeof notice, &fill);
        if (got == OH_READ_COMPLETE) break;
        if (got == OH_READ_FAILED)
            return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "receiving from rank %d failed",
                                  flow->peer);
        if (got != OH_READ_PARTIAL || oh_clock_ns() >= until) return oh_run_lost(run, flow);
        oh_sleep_us(100);
    }
    notice.text[sizeof notice.text - 1] = 0;
    oh_mesh_note(run->mesh, flow->peer, &notice);
    if (notice.kind == OH_NOTICE_LOST) return ONEHOP_OK; /* that end shows for itself */
    if (notice.kind == OH_NOTICE_ASK) return ONEHOP_OK;  /* an old question, see mesh_ask.c */
    if (notice.kind == OH_NOTICE_HERE) {
        run->here |= 1u << flow->peer;
        return ONEHOP_OK;
    }
    if (notice.kind == OH_NOTICE_LEFT) return oh_run_lost(run, flow);
    if (notice.kind != OH_NOTICE_FAIL || notice.result >= 0)
        return oh_error(ONEHOP_ERR_INTERNAL, "rank %d sent a notice of kind %d in an open group",
                        flow->peer, notice.kind);
    run->word = notice;
    return oh_mesh_adopt(&notice);
}

static uint32_t missing(const oh_run *run) {
    uint32_t ranks = 0;
    for (int i = 0; i < run->mesh->world_size; i++)
        if (run->flows[i].received < run->total) ranks |= 1u << i;
    return ranks;
}

bool oh_run_ask(oh_run *run) {
    const uint32_t ranks = missing(run);
    if (run->asked || !(ranks & (ranks - 1))) return false;
    run->asked = ranks;
    oh_mesh_ask(run->mesh, ranks);
    return true;
}

/* Not one that lacks this rank's frame: then it may be this one that is to be named. */
void oh_run_answer(const oh_run *run) {
    uint32_t ranks = 0;
    for (int i = 0; i < run->mesh->world_size; i++)
        if (run->flows[i].sent == run->total) ranks |= 1u << i;
    oh_mesh_answer(run->mesh, ranks);
}

onehop_result oh_run_missing(const oh_run *run) {
    char names[96];
    uint32_t ranks = oh_mesh_silent(missing(run), run->asked, run->here);
    /* All has arrived but a peer does not take what it is owed. */
    for (int i = 0; !ranks && i < run->mesh->world_size; i++)
        if (run->flows[i].sent < run->total) ranks |= 1u << i;
    oh_list_ranks(ranks, names, sizeof names);
    return oh_error(ONEHOP_ERR_MISSING_PEER, "%s did not complete the exchange within %u ms", names,
                    run->what->timeout_ms);
}

void oh_run_say_last(oh_run *run, onehop_result result) {
    const uint64_t until = oh_clock_ns() + OH_WORD_MS * 1000000ull;
    oh_notice word = run->word;
    char said[sizeof word.text];
    snprintf(said, sizeof said, "%.487s", onehop_last_error());
    if (!word.kind) {
        word = (oh_notice){.magic = OH_NOTICE_MAGIC,
                           .kind = OH_NOTICE_FAIL,
                           .result = result,
                           .origin = run->mesh->rank,
                           .culprit = run->culprit};
        memcpy(word.text, said, sizeof said);
    }
    if (result == ONEHOP_ERR_INTERRUPTED) { /* by its own hook; the peers are not interrupted */
        word.result = ONEHOP_ERR_PEER_FAILED;
        snprintf(word.text, sizeof word.text, "rank %d: %.470s", run->mesh->rank, said);
    }
    run->mesh->spoken = true;
    for (int i = 0; i < run->mesh->world_size; i++) {
        oh_flow *flow = &run->flows[i];
        if (i == run->mesh->rank || i == word.culprit) continue;
        while (flow->sent && flow->sent < run->total && !oh_flow_push(run, flow) &&
               flow->sent < run->total && oh_clock_ns() < until)
            oh_sleep_us(500);
        if (flow->sent && flow->sent < run->total) continue;
        while (!oh_mesh_send_notice(run->mesh, i, &word) && oh_clock_ns() < until) oh_sleep_us(500);
    }
    oh_error(result, "%s", said);
}
