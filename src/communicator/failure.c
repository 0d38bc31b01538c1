/* Life and death of a communicator, as seen by the host: the record that kernels leave, verdicts of
 * peers, processes that are gone, abort. */
#include "communicator/comm.h"

#include "protocol/algorithms.h"
#include "base/wait.h"
#include "kernels/guard.h"

#include <stdio.h>
#include <string.h>

/* How long a call may go on after a peer was seen gone, for what the others still send each
 * other. */
#define OH_GONE_NS 200000000ull

_Static_assert(OH_MAX_LOOK_TICKS == OH_MAX_LOOK_NS >> OH_TICK_SHIFT, "one rule for all waits");

static onehop_result result_of(uint32_t kind) {
    switch (kind) {
    case OH_FAIL_TIMEOUT:
        return ONEHOP_ERR_TIMEOUT;
    case OH_FAIL_LOST:
        return ONEHOP_ERR_PEER_LOST;
    case OH_FAIL_MISMATCH:
        return ONEHOP_ERR_MISMATCH;
    case OH_FAIL_ABORTED:
        return ONEHOP_ERR_ABORTED;
    case OH_FAIL_OVERLAP:
        return ONEHOP_ERR_CALLS_OVERLAP;
    case OH_FAIL_REGISTRATION:
        return ONEHOP_ERR_REGISTRATION;
    default:
        return ONEHOP_ERR_INTERNAL;
    }
}

/* CUDA loads a kernel at its first launch, and that may wait for kernels that run: for a call of
 * one rank that waits for another rank of the same process, which is held up there. */
static const char *lazy_loading(const onehop_comm *comm, int peer) {
    const char *mode = oh_env_text(OH_ENV_MODULE_LOADING);
    if (comm->dispatch.kind != ONEHOP_DEVICE_CUDA || (mode && !strcmp(mode, "EAGER"))) return "";
    bool threads = !comm->group && !comm->owns_device; /* onehop_create_all */
    for (int r = 0; r < comm->world && comm->group; r++)
        threads |= r != comm->rank && (r == peer || peer == comm->rank) &&
                   oh_rendezvous_same_process(comm->group, r);
    return threads ? "; a kernel loaded lazily can block it: set CUDA_MODULE_LOADING=EAGER" : "";
}

/* "all_reduce of 1000 float32 (1shot_push, grid 9x512)". A peer wrote these words: names are looked
 * up. */
static void describe_call(const oh_facts *facts, char *text, size_t size) {
    const uint32_t called = (uint32_t)(facts->head >> 32), operation = called >> 24;
    const onehop_algorithm algorithm = (onehop_algorithm)(called & 0xff);
    const onehop_source source = (onehop_source)(called >> 8 & 0xff);
    const uint32_t dtype = called >> 16 & 0xff;
    snprintf(text, size, "%s of %llu %s (%s%s%s, grid %ux%u)",
             operation ? oh_operation_name((oh_operation)operation)
                       : onehop_collective_name(oh_collective_of(algorithm)),
             (unsigned long long)facts->count,
             dtype ? onehop_dtype_name((onehop_dtype)dtype) : "bytes",
             onehop_algorithm_name(algorithm), source ? " " : "",
             source ? onehop_source_name(source) : "", (uint32_t)facts->grid,
             (uint32_t)(facts->grid >> 32));
}

/* `calls`: rank 0's and the culprit's, as far as they are of this call. */
static void describe_mismatch(const oh_facts *calls, onehop_failure *f) {
    char first[160] = "", other[160] = "";
    if (calls && (uint32_t)calls[0].head == f->sequence)
        describe_call(&calls[0], first, sizeof first);
    if (calls && (uint32_t)calls[1].head == f->sequence)
        describe_call(&calls[1], other, sizeof other);
    if (!first[0] || !other[0])
        snprintf(f->text, sizeof f->text,
                 "call %u: rank %d made another call (count, type, reduction, algorithm or grid "
                 "differs from rank 0's)",
                 f->sequence, f->peer);
    else if (strcmp(first, other))
        snprintf(f->text, sizeof f->text, "call %u: rank %d made %.90s, rank 0 %.90s", f->sequence,
                 f->peer, other, first);
    else if ((calls[0].head >> 40 & 0xff) == ONEHOP_SOURCE_GRAPH)
        snprintf(f->text, sizeof f->text,
                 "call %u: ranks 0 and %d replayed different captured calls, each %.90s",
                 f->sequence, f->peer, first);
    else
        snprintf(f->text, sizeof f->text,
                 "call %u: ranks 0 and %d made %.90s, but with other values, expression, memory "
                 "or chunks",
                 f->sequence, f->peer, first);
}

static void describe(const onehop_comm *comm, onehop_failure *f, const oh_facts *calls) {
    char *text = f->text;
    const size_t size = sizeof f->text;
    switch (f->result) {
    case ONEHOP_ERR_TIMEOUT:
        if (f->peer == comm->rank)
            snprintf(
                text, size,
                "rank %d (this one) came later than the deadline in call %u; its peers gave up%s",
                f->peer, f->sequence, lazy_loading(comm, f->peer));
        else
            snprintf(text, size, "rank %d did not take part in call %u within the deadline%s",
                     f->peer, f->sequence, lazy_loading(comm, f->peer));
        break;
    case ONEHOP_ERR_PEER_LOST:
        snprintf(text, size,
                 "rank %d: its process ended or it left the group, call %u cannot complete",
                 f->peer, f->sequence);
        break;
    case ONEHOP_ERR_MISMATCH:
        describe_mismatch(calls, f);
        break;
    case ONEHOP_ERR_REGISTRATION:
        snprintf(text, size,
                 "call %u: rank %d's registration of captured inputs was not filled for this call, "
                 "or was "
                 "released since",
                 f->sequence, f->peer);
        break;
    case ONEHOP_ERR_ABORTED:
        snprintf(text, size, "call %u: aborted by onehop_abort or a wait hook", f->sequence);
        break;
    case ONEHOP_ERR_CALLS_OVERLAP:
        snprintf(text, size,
                 "call %u began before the call before it had ended on this communicator",
                 f->sequence);
        break;
    case ONEHOP_ERR_INTERNAL:
        snprintf(text, size,
                 "call %u: a peer wrote what no rank writes into the others' control pages",
                 f->sequence);
        break;
    default:
        snprintf(text, size, "call %u: %s", f->sequence, onehop_result_text(f->result));
        break;
    }
}

/* What a peer says of a failure, looked at before it is believed: a known kind, and a rank that
 * exists or, where nobody is to blame, none. */
static void believe(const onehop_comm *comm, uint32_t kind, int culprit, onehop_failure *f) {
    const int lowest = kind == OH_FAIL_ABORTED || kind == OH_FAIL_OVERLAP ? -1 : 0;
    const bool sane = culprit >= lowest && culprit < comm->world;
    f->result = sane ? result_of(kind) : ONEHOP_ERR_INTERNAL;
    f->peer = f->result == ONEHOP_ERR_INTERNAL ? -1 : culprit;
}

/* The first failure stays; false if there was one. `calls` is for a mismatch, else NULL. */
static bool set_failure(onehop_comm *comm, onehop_failure *f, const oh_facts *calls) {
    pthread_mutex_lock(&comm->failure_lock);
    const bool first = !comm->failure.result;
    if (first) {
        describe(comm, f, calls);
        comm->failure = *f;
        __atomic_store_n(&comm->dead, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&comm->failure_lock);
    /* Peers who are in an exchange see both ends when this rank leaves now. */
    if (first && comm->group && f->result == ONEHOP_ERR_PEER_LOST)
        oh_rendezvous_hint_lost(comm->group, f->peer);
    return first;
}

static onehop_result report(onehop_comm *comm) {
    pthread_mutex_lock(&comm->failure_lock);
    const onehop_failure f = comm->failure;
    pthread_mutex_unlock(&comm->failure_lock);
    return oh_error(f.result, "rank %d: %s", comm->rank, f.text);
}

/* All ranks are in this call, and each notices at once, but may lack a core. */
#define OH_FACTS_WAIT_NS 500000000ull

static uint64_t control_of(const onehop_comm *comm, int rank) {
    return comm->args.buffers[rank] + comm->args.regions.control;
}

/* Rank 0's and the culprit's from the own control page. Both make this call, and tell soon. */
static void load_calls(onehop_comm *comm, const onehop_failure *f, oh_facts calls[2]) {
    const int ranks[2] = {0, f->peer >= 0 && f->peer < comm->world ? f->peer : 0};
    const uint64_t since = oh_clock_ns();
    memset(calls, 0, 2 * sizeof *calls);
    for (int i = 0; i < 2; i++) {
        const uint64_t from = OH_MEMBER(control_of(comm, comm->rank), oh_control, facts[ranks[i]]);
        while (!oh_comm_load_u64s(comm, from, (uint64_t *)&calls[i], 1) &&
               (uint32_t)calls[i].head != f->sequence && oh_clock_ns() - since < OH_FACTS_WAIT_NS)
            oh_sleep_us(200);
        /* With the loads above an acquire: pairs with the release in oh_tell_call. */
        oh_fence_acq_rel_sys();
        oh_comm_load_u64s(comm, from, (uint64_t *)&calls[i], sizeof *calls / 8);
    }
}

static void adopt_record(onehop_comm *comm, uint32_t kind) {
    const oh_record *r = &comm->page->record;
    onehop_failure f;
    memset(&f, 0, sizeof f);
    believe(comm, kind & 0xffu, __atomic_load_n(&r->peer, __ATOMIC_RELAXED), &f);
    f.rank = comm->rank;
    f.site = __atomic_load_n(&r->site, __ATOMIC_RELAXED);
    f.sequence = __atomic_load_n(&r->sequence, __ATOMIC_RELAXED);
    f.expected = __atomic_load_n(&r->expected, __ATOMIC_RELAXED);
    f.seen = __atomic_load_n(&r->seen, __ATOMIC_RELAXED);
    oh_facts calls[2];
    if (f.result == ONEHOP_ERR_MISMATCH) load_calls(comm, &f, calls);
    set_failure(comm, &f, f.result == ONEHOP_ERR_MISMATCH ? calls : NULL);
}

static bool is_dead(onehop_comm *comm) {
    /* Pairs with the release in oh_conclude: the record is whole. */
    const uint32_t kind = __atomic_load_n(&comm->page->record.kind, __ATOMIC_ACQUIRE);
    const int dead = __atomic_load_n(&comm->dead, __ATOMIC_ACQUIRE);
    if (kind && !dead) adopt_record(comm, kind);
    return kind || dead;
}

/* A forked child's copy first: the host memory of a GPU may not even be mapped there. */
onehop_result oh_comm_check(onehop_comm *comm) {
    if (!oh_process_is(comm->process)) return oh_process_refuse("communicator");
    return is_dead(comm) ? report(comm) : ONEHOP_OK;
}

onehop_result oh_comm_store_u32(onehop_comm *comm, uint64_t address, uint32_t value) {
    if (comm->dispatch.kind != ONEHOP_DEVICE_HOST)
        return comm->device->ops->copy(comm->device, (void *)(uintptr_t)address, &value,
                                       sizeof value);
    __atomic_store_n((uint32_t *)(uintptr_t)address, value, __ATOMIC_RELAXED);
    return ONEHOP_OK;
}

onehop_result oh_comm_store_u64(onehop_comm *comm, uint64_t address, uint64_t value) {
    if (comm->dispatch.kind != ONEHOP_DEVICE_HOST)
        return comm->device->ops->copy(comm->device, (void *)(uintptr_t)address, &value,
                                       sizeof value);
    __atomic_store_n((uint64_t *)(uintptr_t)address, value, __ATOMIC_RELAXED);
    return ONEHOP_OK;
}

onehop_result oh_comm_load_u64s(onehop_comm *comm, uint64_t address, uint64_t *values,
                                size_t count) {
    const uint64_t *from = (const uint64_t *)(uintptr_t)address;
    if (comm->dispatch.kind != ONEHOP_DEVICE_HOST)
        return comm->device->ops->copy(comm->device, values, from, count * sizeof *values);
    for (size_t i = 0; i < count; i++) values[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    return ONEHOP_OK;
}

onehop_result oh_comm_set_timeout(onehop_comm *comm, uint32_t timeout_ms) {
    return oh_comm_store_u64(comm, OH_MEMBER(comm->args.local, oh_local, deadline_ns),
                             timeout_ms * 1000000ull);
}

/* Sequence number of the last call of block 0; 0 if it cannot be read. */
static uint32_t last_sequence(onehop_comm *comm) {
    uint64_t word = 0;
    if (oh_comm_load_u64s(comm, comm->args.local + OH_LOCAL_SEQUENCES, &word, 1)) return 0;
    return (uint32_t)word;
}

void oh_comm_kill(onehop_comm *comm, uint32_t kind, int culprit) {
    onehop_failure f;
    memset(&f, 0, sizeof f);
    f.result = result_of(kind);
    f.rank = comm->rank;
    f.peer = culprit;
    f.site = OH_SITE_OUTSIDE;
    f.sequence = OH_SEQUENCE_NEXT(last_sequence(comm)); /* the call that runs or would be made */
    /* One that is dead has told its peers already: a second verdict would have late ranks name
     * another culprit. */
    if (is_dead(comm) || !set_failure(comm, &f, NULL)) return;
    /* Verdicts before the abort: a kernel that is aborted here adopts the verdict it finds. Own
     * page first. */
    const uint64_t verdict = OH_VERDICT(kind, culprit, f.sequence);
    for (int k = 0; k < comm->world; k++) {
        const int r = (comm->rank + k) % comm->world;
        oh_comm_store_u64(comm, OH_MEMBER(control_of(comm, r), oh_control, verdicts[comm->rank]),
                          verdict);
    }
    for (int r = 0; r < comm->world; r++)
        oh_comm_store_u64(comm, OH_MEMBER(control_of(comm, r), oh_control, given_up), 1);
    __atomic_store_n(&comm->page->abort, 1, __ATOMIC_RELEASE);
}

/* A verdict on the own control page that no call of this rank has met yet. */
static void adopt_verdicts(onehop_comm *comm) {
    uint64_t verdicts[OH_MAX_RANKS];
    const uint32_t next = OH_SEQUENCE_NEXT(last_sequence(comm));
    if (oh_comm_load_u64s(comm, OH_MEMBER(control_of(comm, comm->rank), oh_control, verdicts),
                          verdicts, (size_t)comm->world))
        return;
    for (int r = 0; r < comm->world; r++) {
        if (!verdicts[r] || OH_VERDICT_IS_FOR_LATER(verdicts[r], next)) continue;
        onehop_failure f;
        memset(&f, 0, sizeof f);
        believe(comm, OH_VERDICT_KIND(verdicts[r]), OH_VERDICT_CULPRIT(verdicts[r]), &f);
        f.rank = r;
        f.sequence = OH_VERDICT_SEQUENCE(verdicts[r]);
        f.site = OH_SITE_OUTSIDE;
        oh_facts calls[2];
        if (f.result == ONEHOP_ERR_MISMATCH) load_calls(comm, &f, calls);
        set_failure(comm, &f, f.result == ONEHOP_ERR_MISMATCH ? calls : NULL);
        return;
    }
}

/* A rank that has left or whose process is gone, -1 if none. */
static int gone_peer(onehop_comm *comm) {
    uint64_t words[OH_MAX_RANKS / 2];
    uint32_t left[OH_MAX_RANKS];
    const int lost = comm->group ? oh_rendezvous_lost_peer(comm->group) : -1;
    if (lost >= 0) return lost;
    if (oh_comm_load_u64s(comm, OH_MEMBER(control_of(comm, comm->rank), oh_control, left), words,
                          OH_LENGTH(words)))
        return -1;
    memcpy(left, words, sizeof left);
    for (int r = 0; r < comm->world; r++)
        if (left[r]) return r;
    return -1;
}

/* Is a call of this rank running right now? Host paths raise busy; kernels run ahead of their
 * sequence number words. */
static bool in_flight(onehop_comm *comm) {
    uint64_t words[OH_LOCAL_SEQUENCES / 8], sequences[160]; /* as many at a time, for the stack */
    oh_local head;
    const uint32_t blocks = comm->dispatch.regions.max_blocks;
    if (oh_comm_load_u64s(comm, comm->args.local, words, OH_LENGTH(words))) return false;
    memcpy(&head, words, sizeof words);
    for (uint32_t b = 0; b < blocks; b++) {
        const uint32_t at = b % OH_LENGTH(sequences), left = blocks - b;
        if (at == 0 &&
            oh_comm_load_u64s(comm, comm->args.local + OH_LOCAL_SEQUENCES + b * 8, sequences,
                              left < OH_LENGTH(sequences) ? left : OH_LENGTH(sequences)))
            return false;
        if (head.running == OH_SEQUENCE_NEXT((uint32_t)sequences[at])) return true;
    }
    return head.busy;
}

/* Has the peer made the call that this rank will make next? Then it may have left after that.
 * Signatures lie where OH_SIGNATURE_HOME says. */
static bool made_next_call(onehop_comm *comm, int peer) {
    const uint32_t sequence = OH_SEQUENCE_NEXT(last_sequence(comm));
    const int home = comm->dispatch.kind == ONEHOP_DEVICE_HOST ? peer : comm->rank;
    uint64_t word = 0;
    const uint64_t line =
        OH_MEMBER(control_of(comm, home), oh_control, lines[sequence & 1][peer].signature);
    return !oh_comm_load_u64s(comm, line, &word, 1) && (uint32_t)word == sequence;
}

static void mark_left(onehop_comm *comm, int rank) {
    oh_comm_store_u32(comm, OH_MEMBER(control_of(comm, comm->rank), oh_control, left[rank]), 1);
}

/* The group shows one lost rank at a time, so a call that waits for another lost one would never
 * hear of it. But a call that a peer has completed needs nothing more from anyone than is already
 * sent: one that is still waiting this long after a peer was seen gone cannot complete. */
bool oh_comm_gone_for_long(onehop_comm *comm) {
    const uint64_t now = oh_clock_ns();
    uint64_t since = 0;
    /* Relaxed: the value stands for itself. */
    __atomic_compare_exchange_n(&comm->gone_since_ns, &since, now, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return since && now - since > OH_GONE_NS;
}

/* A peer that is gone may have sent all that a running call needs: that call decides, by its own
 * wait, at first. */
static void go_on_without(onehop_comm *comm, int gone) {
    if (oh_comm_gone_for_long(comm))
        oh_comm_kill(comm, OH_FAIL_LOST, gone);
    else
        mark_left(comm, gone);
}

onehop_result oh_comm_look(onehop_comm *comm) {
    onehop_result result = oh_comm_check(comm);
    if (result) return result;
    adopt_verdicts(comm);
    const int gone = __atomic_load_n(&comm->dead, __ATOMIC_ACQUIRE) ? -1 : gone_peer(comm);
    /* Between the two looks a peer may have told of another's death and left. It told first: the
     * fence pairs with that of oh_comm_leave. */
    oh_fence_acq_rel_sys();
    if (gone >= 0) adopt_verdicts(comm);
    if (gone >= 0 && in_flight(comm))
        go_on_without(comm, gone);
    else if (gone >= 0 && !made_next_call(comm, gone))
        oh_comm_kill(comm, OH_FAIL_LOST, gone);
    return oh_comm_check(comm);
}

void oh_comm_watch(onehop_comm *comm) {
    const int lost = comm->group ? oh_rendezvous_lost_peer(comm->group) : -1;
    if (lost >= 0 && in_flight(comm)) go_on_without(comm, lost);
}

/* Polled: bare at first, since most waits are short, then with rests; the peers are looked at every
 * millisecond. */
onehop_result oh_comm_wait(onehop_comm *comm, onehop_stream stream) {
    uint64_t looked = oh_clock_ns();
    const uint64_t begun = looked;
    for (;;) {
        bool idle = false;
        onehop_result result = comm->device->ops->stream_idle(comm->device, stream, &idle);
        if (result) return result;
        if (idle) return oh_comm_check(comm);
        const uint64_t now = oh_clock_ns();
        if (now - begun > 100000) oh_sleep_us(oh_wait_rest_us(now - begun));
        if (now - looked < 1000000) continue;
        looked = now;
        oh_comm_watch(comm);
        if (oh_wait_interrupted()) return oh_wait_ended("waiting for the calls of a stream");
    }
}

void oh_comm_leave(onehop_comm *comm) {
    oh_fence_acq_rel_sys(); /* after its verdict, see oh_comm_look */
    for (int r = 0; r < comm->world; r++)
        if (r != comm->rank)
            oh_comm_store_u32(comm, OH_MEMBER(control_of(comm, r), oh_control, left[comm->rank]),
                              1);
}
