/* Each emit_ function mirrors a function of src/kernels, op by op; only what other threads can see
 * is there. */
#include "models.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct layout {
    int slots, slot_units, half_units, unit_words; /* half: where sums begin in a slot */
    int sequences, blocks, threads;
    int signatures, progress;
    int areas;
    int signals, inputs, outputs, units;
    int given_up, verdicts;
} layout;

typedef struct builder {
    const model *m;
    machine *out;
    layout at;
} builder;

/* More than any call makes. */
#define OLD_STEPS 100

static int calls_of(const model *m) {
    int n = 0;
    while (m->calls[n].units) n++;
    return n;
}

static int or_default(int value, int usual) {
    return value ? value : usual;
}

static int chunk_units_of(const call *c) {
    return or_default(c->chunk_units, c->units);
}

static int chunks_of(const call *c) {
    return (c->units + chunk_units_of(c) - 1) / chunk_units_of(c);
}

static bool is_host_path(const call *c) {
    return c->algorithm == HOST_1SHOT || c->algorithm == HOST_2SHOT || c->algorithm == HOST_GATHER;
}

static bool is_push(const call *c) {
    return c->algorithm == PUSH_1SHOT || c->algorithm == PUSH_2SHOT;
}

/* oh_shard_begin, of units */
static int shard_begin(const call *c, int world, int rank) {
    const int units = chunk_units_of(c), more = units % world;
    return rank * (units / world) + (rank < more ? rank : more);
}

/* Host paths: a rank's peers, a bit each. */
static uint8_t peers_of(const builder *b, int rank) {
    return (uint8_t)(((1 << b->m->world) - 1) & ~(1 << rank));
}

/* ---- words: this one in parity 0 ------------------------------------------------------------- */
static int slot_word(const builder *b, int to, int from, int unit, int word) {
    const int source = from - (from > to), slot = to * (b->m->world - 1) + source;
    return b->at.slots + (slot * 2 * b->at.slot_units + unit) * b->at.unit_words + word;
}
static int slot_step(const builder *b) {
    return b->m->one_parity ? 0 : b->at.slot_units * b->at.unit_words;
}
static int sequence_word(const builder *b, int rank, int block) {
    return b->at.sequences + rank * b->at.blocks +
           (b->m->sequences == SEQUENCE_BUMPED_BY_ONE ? 0 : block);
}
/* On a GPU in the reader's page; on the host in the writer's, one for all. */
static int signature_word(const builder *b, int to, int from) {
    return b->at.signatures + 2 * (b->m->lane ? from : to * b->m->world + from);
}
static int progress_word(const builder *b, int rank) {
    return b->at.progress + 2 * rank;
}
/* A half is four areas of a word per rank; the first two are the halves of its boxes. */
static int area_word(const builder *b, int rank, int area, int shard) {
    return b->at.areas + (rank * 2 * 4 + area) * b->m->world + shard;
}
static int area_step(const builder *b) {
    return b->m->one_parity ? 0 : 4 * b->m->world;
}

/* Direct pull: a block's word from a peer; a unit of a rank's input, of its output. */
static int signal_word(const builder *b, int to, int from, int block, int exit) {
    const int row = (to * b->m->world + from) * b->at.blocks + block;
    return b->at.signals + 2 * row + (b->m->one_signal ? 0 : exit);
}
static int input_word(const builder *b, int rank, int unit) {
    return b->at.inputs + rank * b->at.units + unit;
}
static int output_word(const builder *b, int rank, int unit) {
    return b->at.outputs + rank * b->at.units + unit;
}

static int given_up_word(const builder *b, int rank) {
    return b->at.given_up + rank;
}
static int verdict_word(const builder *b, int to, int from) {
    return b->at.verdicts + to * b->m->world + from;
}

static int take(machine *out, int count, const char *name) {
    const int first = out->words;
    if (first + count > MAX_WORDS) {
        fprintf(stderr, "explorer: a model needs too many words\n");
        exit(2);
    }
    for (int w = 0; w < count; w++)
        snprintf(out->names[first + w], sizeof out->names[0], "%s[%d]", name, w);
    out->words += count;
    return first;
}

static void lay_out(builder *b) {
    const model *m = b->m;
    layout *at = &b->at;
    bool areas = false, host = false, direct = false;
    at->unit_words = or_default(m->unit_words, 1);
    at->threads = at->blocks = 1;
    for (const call *c = m->calls; c->units; c++) {
        const int max =
            shard_begin(c, m->world, 1) * (chunks_of(c) > 1 ? or_default(m->sub_slots, 2) : 1);
        if (c->algorithm == PUSH_2SHOT && max > at->half_units) at->half_units = max;
    }
    for (const call *c = m->calls; c->units; c++) {
        const int subs = chunks_of(c) > 1 ? or_default(m->sub_slots, 2) : 1;
        int room = chunk_units_of(c) * subs;
        if (is_host_path(c)) {
            host = true;
            continue;
        }
        if (c->algorithm == PUSH_2SHOT)
            room = at->half_units +
                   shard_begin(c, m->world, 1) * (chunks_of(c) > 1 && !m->one_result ? 2 : 1);
        if (c->blocks + 1 > at->blocks) at->blocks = c->blocks + 1;
        if (c->threads > at->threads) at->threads = c->threads;
        if (c->algorithm == GATHER_PUSH) {
            direct = areas = true;
            continue;
        }
        if (!is_push(c)) {
            direct = true;
            if (c->units > at->units) at->units = c->units;
            continue;
        }
        if (room > at->slot_units) at->slot_units = room;
    }
    at->slots =
        take(b->out, m->world * (m->world - 1) * 2 * at->slot_units * at->unit_words, "slot");
    b->out->slot_words = b->out->words;
    at->sequences = take(b->out, m->world * at->blocks, "sequence");
    at->signatures = take(b->out, 2 * m->world * (m->lane ? 1 : m->world), "signature");
    if (direct) {
        at->signals = take(b->out, 2 * m->world * m->world * at->blocks, "signal");
        at->inputs = take(b->out, m->world * at->units, "input");
        at->outputs = take(b->out, m->world * at->units, "output");
    }
    if (host) at->progress = take(b->out, 2 * m->world, "progress");
    if (host || areas) at->areas = take(b->out, m->world * 2 * 4 * m->world, "area");
    if (m->gives_up) at->given_up = take(b->out, m->world, "given_up");
    if (m->gives_up) at->verdicts = take(b->out, m->world * m->world, "verdict");
}

/* ---- ops ------------------------------------------------------------------------------------- */
static op *emit(program *p, op_kind kind, int word, int parity_step, int tag) {
    if (p->count == MAX_OPS) {
        fprintf(stderr, "explorer: a program is too long\n");
        exit(2);
    }
    op *o = &p->ops[p->count++];
    o->kind = (uint8_t)kind;
    o->word = (uint8_t)word;
    o->parity_step = (uint8_t)parity_step;
    o->tag = (uint16_t)tag;
    return o;
}

static void emit_at(program *p, op_kind kind, int k) {
    emit(p, kind, 0, 0, 0)->call = (uint8_t)k;
    if (kind == OP_BARRIER) p->met[k] = p->count - 1;
    if (kind == OP_END) p->ended[k] = p->count;
}

static int tag_of(int k, int chunk) {
    return 1 + 8 * k + chunk;
}

/* ---- 1shot_push ------------------------------------------------------------------------------ */
typedef struct chunk_at {
    int k, chunk, flips, first; /* first: its units begin here in the slot */
} chunk_at;

static void emit_push_unit(const builder *b, program *p, chunk_at c, int unit) {
    for (int d = 1; d < b->m->world; d++)
        for (int w = 0; w < b->at.unit_words; w++) {
            const int to = (p->rank + d) % b->m->world;
            op *o = emit(p, OP_STORE, slot_word(b, to, p->rank, c.first + unit, w), slot_step(b),
                         tag_of(c.k, c.chunk));
            o->flips = (uint8_t)c.flips;
        }
}

static void emit_finish_unit(const builder *b, program *p, chunk_at c, int unit) {
    for (int rearm = 0; rearm < 2; rearm++)
        for (int from = 0; from < b->m->world; from++)
            for (int w = 0; w < b->at.unit_words && from != p->rank; w++) {
                const int word = slot_word(b, p->rank, from, c.first + unit, w);
                op *o = emit(p, rearm ? OP_STORE : OP_AWAIT_DATA, word, slot_step(b),
                             rearm ? 0 : tag_of(c.k, c.chunk));
                o->flips = (uint8_t)c.flips;
            }
}

static void emit_data(const builder *b, program *p, int k) {
    const model *m = b->m;
    const call *c = &m->calls[k];
    const int stride = c->blocks * c->threads, subs = or_default(m->sub_slots, 2),
              full = chunk_units_of(c);
    for (int chunk = 0; chunk < chunks_of(c); chunk++) {
        const int left = c->units - chunk * full, units = left < full ? left : full;
        const int wander = m->units_wander ? chunk / 2 : 0;
        const int first = (p->block * c->threads + p->thread + wander) % stride;
        chunk_at here = {k, chunk, 0, chunk % subs * full};
        if (m->parity_per_chunk) here.flips = chunk, here.first = 0;
        if (chunk && !m->no_fence) emit(p, OP_FENCE, 0, 0, 0);
        if (m->whole_chunks || m->lane)
            for (int u = first; u < units; u += stride) emit_push_unit(b, p, here, u);
        for (int u = first; u < units; u += stride) {
            if (!m->whole_chunks && !m->lane) emit_push_unit(b, p, here, u);
            emit_finish_unit(b, p, here, u);
        }
    }
}

/* ---- 2shot_push ------------------------------------------------------------------------------ */
/* Stores one unit to `to`, or polls and re-arms the one from there. */
static void emit_2shot_store(const builder *b, program *p, chunk_at c, int to, int j) {
    op *o = emit(p, OP_STORE, slot_word(b, to, p->rank, c.first + j, 0), slot_step(b),
                 tag_of(c.k, c.chunk));
    o->flips = (uint8_t)c.flips;
}
static void emit_2shot_poll(const builder *b, program *p, chunk_at c, int from, int j) {
    op *o = emit(p, OP_AWAIT_DATA, slot_word(b, p->rank, from, c.first + j, 0), slot_step(b),
                 tag_of(c.k, c.chunk));
    o->flips = (uint8_t)c.flips;
}
static void emit_2shot_rearm(const builder *b, program *p, chunk_at c, int from, int j) {
    op *o = emit(p, OP_STORE, slot_word(b, p->rank, from, c.first + j, 0), slot_step(b), 0);
    o->flips = (uint8_t)c.flips;
}

/* A thread's part in one chunk: places of data and of sums in a slot, sub-indices. */
typedef struct part {
    chunk_at scatter, gather;
    const call *c;
    int units, first, stride;
} part;

static part part_of(const builder *b, const program *p, int k, int chunk) {
    const model *m = b->m;
    const call *c = &m->calls[k];
    const int full = chunk_units_of(c), left = c->units - chunk * full,
              max = shard_begin(c, m->world, 1), subs = or_default(m->sub_slots, 2);
    part t = {{k, chunk, 0, chunk % subs * max},
              {k, chunk, 0, 0},
              c,
              left < full ? left : full,
              0,
              c->blocks * c->threads};
    t.gather.first = b->at.half_units + (m->one_result ? 0 : chunk % 2 * max);
    t.first = (p->block * c->threads + p->thread + (m->units_wander ? chunk / 2 : 0)) % t.stride;
    if (m->parity_per_chunk) {
        t.scatter.flips = t.gather.flips = chunk;
        t.scatter.first = 0, t.gather.first = b->at.half_units;
    }
    return t;
}

/* Sub-indices of a shard in a chunk that may be short. */
static int shard_units(const builder *b, const part *t, int rank) {
    const int begin = shard_begin(t->c, b->m->world, rank),
              end = shard_begin(t->c, b->m->world, rank + 1);
    return (end < t->units ? end : t->units) - begin;
}

static void emit_scatter(const builder *b, program *p, const part *t) {
    for (int d = 1; d < b->m->world; d++) {
        const int to = (p->rank + d) % b->m->world;
        for (int j = t->first; j < shard_units(b, t, to); j += t->stride)
            emit_2shot_store(b, p, t->scatter, to, j);
    }
}

static void emit_2shot_reduce(const builder *b, program *p, const part *t) {
    for (int j = t->first; j < shard_units(b, t, p->rank); j += t->stride)
        for (int step = 0; step < 3; step++)
            for (int r = 0; r < b->m->world; r++) {
                if (r == p->rank) continue;
                if (step == 0) emit_2shot_poll(b, p, t->scatter, r, j);
                if (step == 1) emit_2shot_store(b, p, t->gather, r, j);
                if (step == 2) emit_2shot_rearm(b, p, t->scatter, r, j);
            }
}

static void emit_2shot_gather(const builder *b, program *p, const part *t) {
    for (int r = 0; r < b->m->world; r++)
        for (int j = t->first; r != p->rank && j < shard_units(b, t, r); j += t->stride) {
            emit_2shot_poll(b, p, t->gather, r, j);
            emit_2shot_rearm(b, p, t->gather, r, j);
        }
}

static void emit_2shot(const builder *b, program *p, int k) {
    const model *m = b->m;
    const int chunks = chunks_of(&m->calls[k]);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const part t = part_of(b, p, k, chunk), next = part_of(b, p, k, chunk + 1);
        if (chunk && !m->no_fence) emit(p, OP_FENCE, 0, 0, 0);
        if (!chunk || !m->scatters_ahead) emit_scatter(b, p, &t);
        emit_2shot_reduce(b, p, &t);
        if (m->scatters_ahead && chunk + 1 < chunks) emit_scatter(b, p, &next);
        emit_2shot_gather(b, p, &t);
    }
}

static void emit_signature_send(const builder *b, program *p, int k, int to, uint8_t readers,
                                bool release) {
    op *o = emit(p, OP_STORE, signature_word(b, to, p->rank), b->m->one_parity ? 0 : 1, k + 1);
    o->with_sequence = true;
    o->readers = readers;
    o->release = release;
}

static void emit_signature_await(const builder *b, program *p, int k, int from) {
    emit(p, OP_AWAIT_SEQUENCE, signature_word(b, p->rank, from), b->m->one_parity ? 0 : 1, k + 1);
}

/* oh_signature_exchange. On the host the W-1 equal stores to one word are one. */
static void emit_signatures(const builder *b, program *p, int k) {
    const model *m = b->m;
    const int threads = m->calls[k].threads;
    if (m->no_signatures) return;
    if (m->lane) emit_signature_send(b, p, k, 0, peers_of(b, p->rank), false);
    for (int r = p->thread; r < m->world && !m->lane; r += threads)
        if (r != p->rank) emit_signature_send(b, p, k, r, (uint8_t)(1 << r), false);
    if (!m->no_guard)
        emit(p, OP_GUARD, sequence_word(b, p->rank, 0), 0, 0)->span = (uint8_t)b->at.blocks;
    for (int r = p->thread; r < m->world; r += threads)
        if (r != p->rank) emit_signature_await(b, p, k, r);
}

static void emit_sequence(const builder *b, program *p, int block, int flips) {
    op *o = emit(p, OP_STORE, sequence_word(b, p->rank, block), 0, 0);
    o->with_sequence = true;
    o->flips = (uint8_t)flips;
}

/* oh_call_end; a data block of a direct pull has met before. */
static void emit_call_end(const builder *b, program *p, int k) {
    const model *m = b->m;
    const call *c = &m->calls[k];
    const int grid = c->blocks + 1, flips = m->parity_per_chunk ? chunks_of(c) - 1 : 0;
    const bool met =
        c->algorithm != PUSH_1SHOT && c->algorithm != GATHER_PUSH && p->block < c->blocks;
    if (!m->no_meeting && !m->lane && !met) emit_at(p, OP_BARRIER, k);
    switch (m->sequences) {
    case SEQUENCES_BY_STRIDE:
        for (int w = p->block + p->thread * grid; w < b->at.blocks; w += grid * c->threads)
            emit_sequence(b, p, w, flips);
        break;
    case SEQUENCE_BUMPED_BY_ONE:
        if (p->block == 0 && p->thread == 0) emit_sequence(b, p, 0, flips);
        break;
    case SEQUENCES_OWN_ONLY:
        if (p->thread == 0) emit_sequence(b, p, p->block, flips);
        break;
    }
}

/* ---- direct pull ----------------------------------------------------------------------------- */
/* Crossed calls have nothing in common: each wrong value is an error at once. */
static bool taints(const builder *b, int k) {
    return b->m->gives_up && b->m->crossed != k + 1;
}

/* Is this the other captured call of two that are crossed? */
static bool is_other(const builder *b, int rank, int k) {
    return b->m->crossed == k + 1 && rank == b->m->world - 1;
}

/* Of the input of direct call k, as this rank's addresses have it. */
static int input_tag(const builder *b, int rank, int k) {
    return tag_of(k - 1, is_other(b, rank, k));
}

/* What peers need of the input, and outputs that peers have stored. */
static void emit_write(const builder *b, program *p, int k) {
    const model *m = b->m;
    const bool two = k > 0 && m->calls[k - 1].algorithm == DIRECT_2SHOT;
    const bool next_two = m->calls[k + 1].algorithm == DIRECT_2SHOT;
    if (p->block || p->thread) return;
    for (int u = 0; u < m->calls[k].units; u++) {
        if (two && u % m->world != p->rank)
            emit(p, OP_READ, output_word(b, p->rank, u), 0, tag_of(k - 1, 0))->program_memory =
                taints(b, k - 1);
        op *o = emit(p, OP_STORE, input_word(b, p->rank, u), 0, input_tag(b, p->rank, k + 1));
        o->readers = (uint8_t)(peers_of(b, p->rank) & (next_two ? 1 << u % m->world : ~0));
        if (!m->calls[k + 1].units) o->readers = 0;
    }
}

static int enter_tag(const builder *b, int rank, int k) {
    return !b->m->no_identity && is_other(b, rank, k) ? 2 : 1;
}

static void emit_tell(const builder *b, program *p, int k, int exit, bool release) {
    for (int d = p->thread + 1; d < b->m->world; d += b->m->calls[k].threads) {
        const int to = (p->rank + d) % b->m->world;
        const int tag = exit ? 1 : enter_tag(b, p->rank, k);
        op *o = emit(p, OP_STORE, signal_word(b, to, p->rank, p->block, exit), 0, tag);
        o->with_sequence = true;
        o->release = release;
        o->readers = (uint8_t)(1 << to);
    }
}

static void emit_hear(const builder *b, program *p, int k, int exit) {
    const op_kind kind = b->m->identity_at_least ? OP_AWAIT_STEPS : OP_AWAIT_WORD;
    const int tag = exit ? 1 : enter_tag(b, p->rank, k);
    for (int from = 0; from < b->m->world; from++)
        if (from != p->rank) emit(p, kind, signal_word(b, p->rank, from, p->block, exit), 0, tag);
}

static void emit_look(const builder *b, program *p, bool asks_verdict) {
    if (!b->m->gives_up) return;
    emit(p, OP_LOOK, given_up_word(b, p->rank), 0, 0)->asks_verdict = asks_verdict;
}

/* oh_direct_batch of one unit */
static void emit_direct_unit(const builder *b, program *p, int k, int u) {
    const model *m = b->m;
    const bool two = m->calls[k].algorithm == DIRECT_2SHOT;
    if (two && !m->unlooked) emit_look(b, p, false);
    for (int d = 1; d < m->world; d++)
        emit(p, OP_READ, input_word(b, (p->rank + d) % m->world, u), 0, input_tag(b, p->rank, k))
            ->program_memory = taints(b, k);
    if (two && m->looks_per_unit) emit_look(b, p, false);
    for (int d = 1; d < m->world && two; d++) {
        const int to = (p->rank + d) % m->world;
        op *o = emit(p, OP_STORE, output_word(b, to, u), 0, tag_of(k, 0));
        o->readers = (uint8_t)(1 << to);
        o->program_memory = taints(b, k);
    }
}

/* oh_pull_direct. 2shot: unit u is in the shard of rank u mod W. */
static void emit_direct(const builder *b, program *p, int k) {
    const model *m = b->m;
    const call *c = &m->calls[k];
    const bool two = c->algorithm == DIRECT_2SHOT, release = two && !m->exits_relaxed;
    const int first = p->block * c->threads + p->thread, stride = c->blocks * c->threads;
    const int shards = two ? m->world : 1;
    emit_tell(b, p, k, 0, false);
    if (!m->no_enter) emit_hear(b, p, k, 0);
    if (m->looks == LOOKS_BEFORE_LOADS) emit_look(b, p, true);
    if (m->exits_early) emit_tell(b, p, k, 1, release);
    for (int i = first; i * shards < c->units; i += stride)
        emit_direct_unit(b, p, k, i * shards + (two ? p->rank : 0));
    if (m->exits_unmet)
        p->met[k] = 0;
    else
        emit_at(p, OP_BARRIER, k);
    if (!m->exits_early && !m->no_exit) emit_tell(b, p, k, 1, release);
    if (m->looks == LOOKS_BEFORE_EXITS) emit_look(b, p, true);
    if (!m->no_exit) emit_hear(b, p, k, 1);
    if (m->looks == LOOKS_LAST) emit_look(b, p, true);
}

/* oh_gather_push: in a rank's area each source has a word for each sub-slot. */
static void emit_gather_push(const builder *b, program *p, int k) {
    const model *m = b->m;
    const int chunks = m->calls[k].units, subs = or_default(m->host_sub_slots, 4);
    for (int chunk = 0; chunk <= chunks; chunk++) {
        for (int d = 1; d < m->world && chunk < chunks; d++) {
            const int to = (p->rank + d) % m->world;
            emit(p, OP_STORE, area_word(b, to, chunk % subs, p->rank), area_step(b),
                 tag_of(k, chunk))
                ->readers = (uint8_t)(1 << to);
        }
        for (int d = 1; d < m->world && chunk < chunks; d++) {
            const int to = (p->rank + d) % m->world;
            op *o = emit(p, OP_STORE, signal_word(b, to, p->rank, p->block, 0), 0, chunk + 1);
            o->with_sequence = true;
            o->release = !m->flags_relaxed;
        }
        for (int d = 1; d < m->world && chunk; d++) {
            const int from = (p->rank + d) % m->world;
            emit(p, OP_AWAIT_STEPS, signal_word(b, p->rank, from, p->block, 0), 0, chunk)->or_next =
                true;
        }
        for (int d = 1; d < m->world && chunk; d++)
            emit(p, OP_READ, area_word(b, p->rank, (chunk - 1) % subs, (p->rank + d) % m->world),
                 area_step(b), tag_of(k, chunk - 1));
    }
}

static void emit_block(const builder *b, program *p, int k) {
    const call *c = &b->m->calls[k];
    if (c->algorithm == WRITE) {
        emit_write(b, p, k);
        return;
    }
    emit(p, OP_SEQUENCE, sequence_word(b, p->rank, p->block), 0, 0);
    if (p->block == c->blocks)
        emit_signatures(b, p, k);
    else if (c->algorithm == PUSH_2SHOT)
        emit_2shot(b, p, k);
    else if (c->algorithm == PUSH_1SHOT)
        emit_data(b, p, k);
    else if (c->algorithm == GATHER_PUSH)
        emit_gather_push(b, p, k);
    else
        emit_direct(b, p, k);
    emit_call_end(b, p, k);
}

/* ---- host paths ------------------------------------------------------------------------------ */
static void emit_publish(const builder *b, program *p, int steps) {
    op *o = emit(p, OP_STORE, progress_word(b, p->rank), b->m->one_parity ? 0 : 1, steps);
    o->with_sequence = true;
    o->release = !b->m->publishes_relaxed;
}

static void emit_await_all(const builder *b, program *p, int k, int steps) {
    for (int r = 0; r < b->m->world; r++) {
        if (r == p->rank) continue;
        if (steps == 1) emit_signature_await(b, p, k, r);
        emit(p, OP_AWAIT_STEPS, progress_word(b, r), b->m->one_parity ? 0 : 1, steps);
    }
}

/* A call's first step of several, and with it the signature. */
static void emit_first(const builder *b, program *p, int k) {
    const bool release = !b->m->publishes_relaxed;
    if (b->m->signature_first) emit_signature_send(b, p, k, 0, peers_of(b, p->rank), release);
    emit_publish(b, p, 1);
    if (!b->m->signature_first) emit_signature_send(b, p, k, 0, peers_of(b, p->rank), release);
}

static unsigned sequence_of(const model *m, int k) {
    unsigned sequence = (unsigned)or_default(m->last_sequence, 1);
    for (int i = 0; i <= k; i++) sequence = sequence == SEQUENCE_MASK ? 2 : sequence + 1;
    return sequence;
}

static int mailbox_word(const builder *b, int from, int to, int k, int use, int sub) {
    const bool swapped = !b->m->mail_one_way && ((sequence_of(b->m, k) >> 1 ^ (unsigned)use) & 1);
    return swapped ? area_word(b, to, sub, from) : area_word(b, from, sub, to);
}

/* To all peers, or from all; own data can be nothing but right. */
static void emit_mail(const builder *b, program *p, op_kind kind, int k, int chunk, int use,
                      int sub) {
    for (int step = 1; step < b->m->world; step++) {
        const int peer = (p->rank + step) % b->m->world;
        const int from = kind == OP_STORE ? p->rank : peer, to = kind == OP_STORE ? peer : p->rank;
        op *o =
            emit(p, kind, mailbox_word(b, from, to, k, use, sub), area_step(b), tag_of(k, chunk));
        if (kind == OP_STORE) o->readers = (uint8_t)(1 << to);
    }
}

/* The message may fill the whole boxes. */
static void emit_host_1shot_one(const builder *b, program *p, int k) {
    for (int sub = 0; sub < 2; sub++) emit_mail(b, p, OP_STORE, k, 0, 0, sub);
    emit_signature_send(b, p, k, 0, peers_of(b, p->rank), !b->m->publishes_relaxed);
    for (int r = 0; r < b->m->world; r++)
        if (r != p->rank) emit_signature_await(b, p, k, r);
    for (int sub = 0; sub < 2; sub++) emit_mail(b, p, OP_READ, k, 0, 0, sub);
}

static void emit_host_1shot(const builder *b, program *p, int k) {
    const model *m = b->m;
    const int chunks = m->calls[k].units, subs = or_default(m->host_sub_slots, 2);
    for (int i = 0; i <= chunks; i++) {
        for (int half = 0; half < 2; half++) {
            /* The usual order: publish chunk i, then read chunk i-1. */
            const bool publish = (half == 0) != m->publishes_late;
            if (publish && i < chunks) {
                emit_mail(b, p, OP_STORE, k, i, i / subs, i % subs);
                if (i == 0)
                    emit_first(b, p, k);
                else
                    emit_publish(b, p, i + 1);
            }
            if (publish || i == 0) continue;
            emit_await_all(b, p, k, i);
            emit_mail(b, p, OP_READ, k, i - 1, (i - 1) / subs, (i - 1) % subs);
        }
    }
}

static void emit_host_scatter(const builder *b, program *p, int k, int chunk) {
    emit_mail(b, p, OP_STORE, k, chunk, chunk, 0);
    if (chunk == 0)
        emit_first(b, p, k);
    else
        emit_publish(b, p, 2 * chunk + 1);
}

/* In the own box. */
static int result_word(const builder *b, int rank, int chunk) {
    return area_word(b, rank, chunk % or_default(b->m->results, 2), rank);
}

static void emit_reduce(const builder *b, program *p, int k, int chunk) {
    emit_await_all(b, p, k, 2 * chunk + 1);
    emit_mail(b, p, OP_READ, k, chunk, chunk, 0);
    emit(p, OP_STORE, result_word(b, p->rank, chunk), area_step(b), tag_of(k, chunk))->readers =
        peers_of(b, p->rank);
    emit_publish(b, p, 2 * chunk + 2);
}

static void emit_gather(const builder *b, program *p, int k, int chunk) {
    for (int step = 1; step < b->m->world; step++) {
        const int r = (p->rank + step) % b->m->world;
        emit(p, OP_AWAIT_STEPS, progress_word(b, r), b->m->one_parity ? 0 : 1, 2 * chunk + 2);
        emit(p, OP_READ, result_word(b, r, chunk), area_step(b), tag_of(k, chunk));
    }
}

static void emit_host_2shot(const builder *b, program *p, int k) {
    const int chunks = b->m->calls[k].units;
    emit_host_scatter(b, p, k, 0);
    for (int chunk = 0; chunk < chunks; chunk++) {
        emit_reduce(b, p, k, chunk);
        if (chunk + 1 < chunks) emit_host_scatter(b, p, k, chunk + 1);
        emit_gather(b, p, k, chunk);
    }
}

/* For all, in the own half, where boxes are too: a sub-slot is an area with all its words. */
static void emit_part(const builder *b, program *p, op_kind kind, int rank, int k, int chunk) {
    const int area = chunk % or_default(b->m->host_sub_slots, 4);
    for (int w = 0; w < b->m->world; w++) {
        op *o = emit(p, kind, area_word(b, rank, area, w), area_step(b), tag_of(k, chunk));
        if (kind == OP_STORE) o->readers = peers_of(b, p->rank);
    }
}

static void emit_host_gather(const builder *b, program *p, int k) {
    const int chunks = b->m->calls[k].units;
    const uint8_t peers = peers_of(b, p->rank);
    emit_part(b, p, OP_STORE, p->rank, k, 0);
    if (chunks == 1)
        emit_signature_send(b, p, k, 0, peers, !b->m->publishes_relaxed);
    else
        emit_first(b, p, k);
    for (int i = 1; i <= chunks; i++) {
        if (i < chunks) {
            emit_part(b, p, OP_STORE, p->rank, k, i);
            emit_publish(b, p, i + 1);
        }
        for (int r = 0; r < b->m->world && chunks == 1; r++)
            if (r != p->rank) emit_signature_await(b, p, k, r);
        if (chunks > 1) emit_await_all(b, p, k, i);
        for (int step = 1; step < b->m->world; step++)
            emit_part(b, p, OP_READ, (p->rank + step) % b->m->world, k, i - 1);
    }
}

/* ---- giving up ------------------------------------------------------------------------------- */
/* oh_conclude: the verdict, then given_up, to every peer. */
static void emit_verdict(const builder *b, program *p) {
    const model *m = b->m;
    const int last = m->tells_one ? 1 : m->world - 1;
    if (m->adopts_silently && !(m->gives_up >> p->rank & 1)) return;
    for (int d = 1; d <= last; d++)
        emit(p, OP_STORE, verdict_word(b, (p->rank + d) % m->world, p->rank), 0, 1)->with_verdict =
            true;
    for (int d = 1; d <= last; d++)
        emit(p, OP_STORE, given_up_word(b, (p->rank + d) % m->world), 0, 1)->release = true;
}

/* The program has its memory back. */
static void emit_poison(const builder *b, program *p) {
    for (int u = 0; u < b->at.units; u++)
        emit(p, OP_STORE, input_word(b, p->rank, u), 0, TAG_OF(POISON));
}

/* Where a rank goes on that has given up in call k; 0: nowhere. */
static int next_begun(const builder *b, const program *p, int k) {
    const int next = k + (b->m->calls[k + 1].algorithm == WRITE ? 2 : 1);
    return b->m->dead_goes_on && next < calls_of(b->m) ? p->begun[next] : 0;
}

/* The rest of a failed call, and of the program. It begins with what the last look does that finds
 * given_up set. */
static void emit_failing(const builder *b, program *p, int k) {
    const model *m = b->m;
    const int asked = p->count, failing = asked + 2;
    op *o = emit(p, OP_VERDICT, verdict_word(b, p->rank, 0), 0, 0);
    o->span = (uint8_t)m->world;
    o->otherwise = (uint16_t)failing;
    op *back = emit(p, OP_JUMP, 0, 0, 0);
    emit(p, OP_FAIL, 0, 0, 0);
    if (m->dead_exits) emit_tell(b, p, k, 1, true);
    if (!m->tells_late) emit_verdict(b, p);
    for (int block = 0; block < b->at.blocks; block++)
        if (m->lane || block == p->block) emit_sequence(b, p, block, 0);
    if (!m->reuses_early) emit(p, OP_END, 0, 0, 0);
    emit_poison(b, p);
    if (m->tells_late) emit(p, OP_END, 0, 0, 0);
    if (m->tells_late) emit_verdict(b, p);
    emit(p, OP_JUMP, 0, 0, 0)->otherwise = (uint16_t)next_begun(b, p, k);
    for (int i = asked; i < p->count; i++) p->ops[i].call = (uint8_t)k;
    for (int i = p->begun[k]; i < p->begun[k + 1]; i++) {
        o = &p->ops[i];
        o->call = (uint8_t)k;
        o->otherwise = (uint16_t)(o->asks_verdict ? asked : failing);
        if (o->asks_verdict) back->otherwise = (uint16_t)(i + 1);
    }
}

/* A dead rank leaves words unread, so no store counts as one over an unread word. Ranks that read a
 * wrong value show the same faults. */
static void emit_failings(const builder *b, program *p) {
    emit(p, OP_JUMP, 0, 0, 0);
    for (int k = 0; k < calls_of(b->m); k++)
        if (b->m->calls[k].algorithm != WRITE) emit_failing(b, p, k);
    for (int i = 0; i < p->count; i++) {
        p->ops[i].readers = 0;
        if (p->ops[i].kind == OP_JUMP && !p->ops[i].otherwise)
            p->ops[i].otherwise = (uint16_t)p->count;
    }
}

/* ---- programs -------------------------------------------------------------------------------- */
/* oh_host_run_worker: the last block first, each between the two fences of OH_KERNEL. */
static void emit_lane_push(const builder *b, program *p, int k) {
    for (int block = b->m->calls[k].blocks; block >= 0; block--) {
        p->block = block;
        if (!b->m->no_boundary) emit(p, OP_FENCE, 0, 0, 0);
        emit_block(b, p, k);
        if (!b->m->no_boundary) emit(p, OP_FENCE, 0, 0, 0);
    }
    p->block = 0;
}

static void emit_lane_host(const builder *b, program *p, int k) {
    const call *c = &b->m->calls[k];
    emit(p, OP_SEQUENCE, sequence_word(b, p->rank, 0), 0, 0);
    if (!is_host_path(c)) {
        fprintf(stderr, "explorer: a lane runs push and host paths alone\n");
        exit(2);
    }
    if (c->algorithm == HOST_2SHOT)
        emit_host_2shot(b, p, k);
    else if (c->algorithm == HOST_GATHER)
        emit_host_gather(b, p, k);
    else if (c->units > 1)
        emit_host_1shot(b, p, k);
    else
        emit_host_1shot_one(b, p, k);
    for (int block = 0; block < b->at.blocks; block++) emit_sequence(b, p, block, 0);
}

static void emit_lane(const builder *b, program *p) {
    for (int k = 0; k < calls_of(b->m); k++) {
        p->begun[k] = p->count;
        if (is_push(&b->m->calls[k]))
            emit_lane_push(b, p, k);
        else
            emit_lane_host(b, p, k);
    }
}

/* A thread of a grid; it sits out calls whose grid is smaller. */
static void emit_thread(const builder *b, program *p) {
    const model *m = b->m;
    for (int k = 0; k < calls_of(m); k++) {
        const call *c = &m->calls[k];
        p->begun[k] = p->count;
        if (!m->overlap) emit_at(p, OP_START, k);
        if (p->block <= c->blocks && p->thread < c->threads) {
            emit_block(b, p, k);
            if (m->no_meeting) p->met[k] = 0;
        }
        if (m->no_boundary)
            p->ended[k] = p->count;
        else
            emit_at(p, OP_END, k);
    }
}

void model_build(const model *m, machine *out) {
    builder b = {.m = m, .out = out};
    memset(out, 0, sizeof *out);
    out->has_kernels = !m->lane && !m->overlap && !m->no_boundary;
    out->in_order = m->in_order;
    out->wraps_to_odd = m->wraps_to_odd;
    lay_out(&b);
    out->world = m->world;
    out->given_up = b.at.given_up;
    out->verdicts = b.at.verdicts;
    out->gives_up = m->gives_up;
    out->spared_from = !m->losses ? MAX_CALLS : !m->spares_equal;
    for (int w = 0; w < m->world * b.at.blocks; w++)
        out->initial[b.at.sequences + w] = WORD(0, or_default(m->last_sequence, 1));
    for (int w = 0; m->old_progress && w < 2 * m->world; w++)
        out->initial[b.at.progress + w] =
            WORD(OLD_STEPS, sequence_of(m, (int)sequence_of(m, 0) % 2 != w % 2));
    for (int rank = 0; rank < m->world; rank++)
        for (int i = 0; i < (m->lane ? 1 : b.at.blocks * b.at.threads); i++) {
            if (out->thread_count == MAX_THREADS) {
                fprintf(stderr, "explorer: a model needs too many threads\n");
                exit(2);
            }
            program *p = &out->threads[out->thread_count++];
            p->rank = rank;
            p->block = i / b.at.threads;
            p->thread = i % b.at.threads;
            if (m->lane)
                emit_lane(&b, p);
            else
                emit_thread(&b, p);
            p->begun[calls_of(m)] = p->normal_count = p->count;
            if (m->gives_up) emit_failings(&b, p);
        }
}
