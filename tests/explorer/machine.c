/* Depth-first search over the states of a machine; machine.h says what the machine is.
 *
 * Two kinds of steps are branched on: a pending store becomes visible; a thread reads. Everything
 * else is done at once by `settle`, and so is every step that no other step can disturb. No state
 * that matters is lost, since programs end, every step moves one forward, and such a step stays
 * possible and commutes with all others: issuing a store, a fence, passing a barrier that is open:
 * nobody sees it; reading a slot that has data: only a store into that slot does not commute, and
 * that store is an error whether the slot has been read or not, as long as its re-arming is not
 * visible, which remains a step of its own; reading an sequence word to which nobody else stores
 * between the same two barriers. Where ranks give up, a wait is always a step of its own. A store
 * that nobody can read any more becomes visible at once there: without that, most states would
 * differ in the stores of dead ranks alone. */
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MARKER 0xFFu /* the word of a pending fence */

typedef struct pending {
    uint16_t value;
    uint8_t word, readers;
    bool release;
} pending;

typedef struct state {
    uint16_t at[MAX_THREADS];
    uint8_t sequence[MAX_THREADS];
    uint8_t pendings[MAX_THREADS];
    uint8_t named[MAX_THREADS]; /* 0, or has given up: number of the call that its verdict names */
    uint8_t tainted[MAX_THREADS]; /* 1 + the first wrong word that it has read */
    uint8_t strays[MAX_THREADS];  /* stores to peers' programs with given_up set */
    uint16_t value[MAX_WORDS];
    uint8_t unread[MAX_WORDS];
    pending pending[MAX_THREADS][MAX_PENDING];
} state;

typedef struct frame {
    state at;
    /* The step taken last. Choice 0: the thread reads; i: its pending store i-1; one more: it gives
     * up. */
    int thread, choice;
    bool stepped; /* any taken yet */
} frame;

typedef struct search {
    const machine *m;
    bool private_word[MAX_WORDS]; /* one thread alone uses it: no need to delay */
    bool alone[MAX_THREADS]
              [MAX_OPS]; /* OP_SEQUENCE: nobody else stores there between the same two barriers */
    int last_read[MAX_THREADS][MAX_WORDS]; /* op number, -1 if there is none */
    uint64_t *seen;
    uint64_t seen_room, seen_count;
    frame *stack;
    size_t depth, room;
    outcome result;
} search;

static void out_of(const char *what) {
    fprintf(stderr, "explorer: out of %s\n", what);
    exit(2);
}

/* ---- one thread's view ----------------------------------------------------------------------- */
static unsigned sequence_after(const machine *m, unsigned sequence) {
    if (sequence == SEQUENCE_MASK) return m->wraps_to_odd ? 3 : 2;
    return sequence + 1;
}

static unsigned word_of(const state *x, int t, const op *o) {
    return o->word + ((x->sequence[t] + o->flips) & 1u ? o->parity_step : 0u);
}

static bool is_pending(const state *x, int t, unsigned word, uint16_t *value_out) {
    for (int i = x->pendings[t]; i-- > 0;)
        if (x->pending[t][i].word == word) {
            *value_out = x->pending[t][i].value;
            return true;
        }
    return false;
}

static uint16_t value_seen(const state *x, int t, unsigned word) {
    uint16_t value = x->value[word];
    (void)is_pending(x, t, word, &value);
    return value;
}

static void append(state *x, int t, pending p) {
    if (x->pendings[t] == MAX_PENDING) out_of("pending stores");
    x->pending[t][x->pendings[t]++] = p;
}

/* Fences with nothing before them, or no store between them, order nothing. */
static void drop_markers(state *x, int t) {
    int kept = 0;
    for (int i = 0; i < x->pendings[t]; i++) {
        const pending p = x->pending[t][i];
        if (p.word == MARKER && (kept == 0 || x->pending[t][kept - 1].word == MARKER)) continue;
        x->pending[t][kept++] = p;
    }
    x->pendings[t] = (uint8_t)kept;
}

static bool may_become_visible(const machine *m, const state *x, int t, int i) {
    const pending *p = x->pending[t];
    if (p[i].word == MARKER) return false;
    if (i > 0 && (p[i].release || m->in_order)) return false;
    for (int j = 0; j < i; j++)
        if (p[j].word == MARKER || p[j].word == p[i].word) return false;
    return true;
}

/* ---- a store becomes visible, a word is read ------------------------------------------------- */
static bool fail(search *s, verdict v, const machine *m, int t, const char *what, unsigned word,
                 uint16_t found, uint16_t wanted) {
    const program *p = &m->threads[t];
    s->result.verdict = v;
    snprintf(s->result.detail, sizeof s->result.detail,
             "rank %d block %d thread %d: %s %s: %u.%u there, %u.%u here", p->rank, p->block,
             p->thread, what, m->names[word], TAG_OF(found), SEQUENCE_OF(found), TAG_OF(wanted),
             SEQUENCE_OF(wanted));
    return false;
}

/* False: an error, noted. */
static bool become_visible(search *s, state *x, int t, int i) {
    const pending p = x->pending[t][i];
    const bool is_slot = p.word < s->m->slot_words;
    if (is_slot ? p.value && x->value[p.word] : x->unread[p.word])
        return fail(s, OVERWRITES, s->m, t, is_slot ? "lands on unarmed" : "overwrites unread",
                    p.word, x->value[p.word], p.value);
    x->value[p.word] = p.value;
    x->unread[p.word] = p.readers;
    x->pendings[t]--;
    memmove(&x->pending[t][i], &x->pending[t][i + 1], sizeof p * (size_t)(x->pendings[t] - i));
    drop_markers(x, t);
    return true;
}

static bool may_read(const machine *m, const state *x, int t, const op *o, uint16_t value) {
    switch (o->kind) {
    case OP_AWAIT_WORD:
        return value == WORD(o->tag, x->sequence[t]);
    case OP_AWAIT_DATA:
        return value != 0;
    case OP_AWAIT_SEQUENCE:
        return SEQUENCE_OF(value) == x->sequence[t];
    case OP_AWAIT_STEPS:
        return (SEQUENCE_OF(value) == x->sequence[t] && TAG_OF(value) >= o->tag) ||
               (o->or_next && SEQUENCE_OF(value) == sequence_after(m, x->sequence[t]));
    default:
        return true;
    }
}

static bool guard_is_quiet(const machine *m, const state *x, int t, const op *o) {
    for (unsigned w = o->word; w < o->word + (unsigned)o->span; w++) {
        const unsigned sequence = SEQUENCE_OF(value_seen(x, t, w));
        if (sequence != x->sequence[t] && sequence_after(m, sequence) != x->sequence[t])
            return false;
    }
    return true;
}

/* Number of the call that the first verdict on the rank's page names, of those that end `call`. */
static unsigned verdict_on(const machine *m, const state *x, int t, int call, int spared_from) {
    const int page = m->verdicts + m->threads[t].rank * m->world;
    for (int w = page; w < page + m->world; w++) {
        const unsigned named = SEQUENCE_OF(x->value[w]);
        if (named && (int)named < call + 1 + spared_from) return named;
    }
    return 0;
}

static bool may_give_up(const machine *m, const state *x, int t, const op *o) {
    if (!o->otherwise || o->kind < OP_AWAIT_DATA || o->kind > OP_AWAIT_WORD) return false;
    return m->gives_up >> m->threads[t].rank & 1 || verdict_on(m, x, t, o->call, m->spared_from);
}

/* OP_LOOK, OP_VERDICT, OP_FAIL */
static void look(const machine *m, state *x, int t, const op *o) {
    bool goes = false;
    if (o->kind == OP_LOOK) {
        goes = value_seen(x, t, o->word) != 0;
    } else if (o->kind == OP_VERDICT) {
        goes = verdict_on(m, x, t, o->call, m->spared_from) != 0;
    } else {
        const unsigned own = o->call + 1u, found = verdict_on(m, x, t, 0, MAX_CALLS);
        x->named[t] = (uint8_t)(found && found < own ? found : own);
        x->tainted[t] = 0;
    }
    x->at[t] = goes ? o->otherwise : (uint16_t)(x->at[t] + 1);
}

/* False: an error, noted. */
static bool read_word(search *s, state *x, int t, const op *o) {
    const unsigned word = word_of(x, t, o);
    const uint16_t value = value_seen(x, t, word);
    if (o->kind >= OP_LOOK) {
        look(s->m, x, t, o);
        return true;
    }
    if (o->kind == OP_SEQUENCE) {
        x->sequence[t] = (uint8_t)sequence_after(s->m, SEQUENCE_OF(value));
    } else if (o->kind == OP_GUARD) {
        if (!guard_is_quiet(s->m, x, t, o))
            return fail(s, FALSE_ALARM, s->m, t, "guard at", word, value, 0);
    } else if (o->kind != OP_AWAIT_STEPS && TAG_OF(value) != o->tag) {
        if (!x->tainted[t]) x->tainted[t] = (uint8_t)(word + 1);
        if (!o->program_memory)
            return fail(s, READS_WRONG, s->m, t, "reads", word, value, WORD(o->tag, 0));
    }
    x->unread[word] &= (uint8_t)~(1u << s->m->threads[t].rank);
    x->at[t]++;
    return true;
}

/* ---- steps done at once ---------------------------------------------------------------------- */
static bool all_past(const machine *m, const state *x, int t, const op *o) {
    for (int i = 0; i < m->thread_count; i++) {
        const program *p = &m->threads[i], *own = &m->threads[t];
        if (p->rank != own->rank) continue;
        if (o->kind == OP_BARRIER && p->block == own->block && x->at[i] < p->met[o->call])
            return false;
        if (o->kind == OP_START && o->call && x->at[i] < p->ended[o->call - 1]) return false;
    }
    return true;
}

/* False: an error, noted. */
static bool issue_store(search *s, state *x, int t, const op *o) {
    const unsigned sequence = x->sequence[t] + o->flips;
    pending p = {WORD(o->tag, o->with_sequence ? sequence & SEQUENCE_MASK : 0u),
                 (uint8_t)word_of(x, t, o), o->readers, o->release};
    if (o->with_verdict) p.value = WORD(o->tag, x->named[t]);
    if (o->program_memory && x->tainted[t]) p.value = POISON;
    if (o->program_memory && x->value[s->m->given_up + s->m->threads[t].rank] &&
        ++x->strays[t] >= s->m->world)
        return fail(s, OVERWRITES, s->m, t, "goes on storing to", p.word, x->value[p.word],
                    p.value);
    if (s->private_word[p.word])
        x->value[p.word] = p.value;
    else
        append(x, t, p);
    return true;
}

typedef enum step {
    NO_STEP,
    A_STEP,
    AN_ERROR
} step;

static step step_at_once(search *s, state *x, int t) {
    const program *p = &s->m->threads[t];
    if (x->at[t] == p->count) return NO_STEP;
    const op *o = &p->ops[x->at[t]];
    switch (o->kind) {
    case OP_STORE:
        if (!issue_store(s, x, t, o)) return AN_ERROR;
        break;
    case OP_FENCE:
        append(x, t, (pending){0, MARKER, 0, false});
        drop_markers(x, t);
        break;
    case OP_START:
    case OP_BARRIER:
        if (!all_past(s->m, x, t, o)) return NO_STEP;
        break;
    case OP_END:
        drop_markers(x, t);
        if (x->pendings[t]) return NO_STEP;
        if (x->tainted[t]) {
            const unsigned word = x->tainted[t] - 1u;
            (void)fail(s, READS_WRONG, s->m, t, "ends well with wrong data of", word,
                       x->value[word], 0);
            return AN_ERROR;
        }
        x->sequence[t] = 0;
        break;
    case OP_JUMP:
        x->at[t] = o->otherwise;
        return A_STEP;
    case OP_SEQUENCE:
        if (s->m->branches_on_all || !s->alone[t][x->at[t]]) return NO_STEP;
        return read_word(s, x, t, o) ? A_STEP : AN_ERROR;
    case OP_AWAIT_DATA:
        if (s->m->branches_on_all || o->otherwise ||
            !may_read(s->m, x, t, o, value_seen(x, t, word_of(x, t, o))))
            return NO_STEP;
        return read_word(s, x, t, o) ? A_STEP : AN_ERROR;
    default:
        return NO_STEP;
    }
    x->at[t]++;
    return A_STEP;
}

/* May a thread other than t still read the word? One in the ops of giving up may go back. */
static bool is_read_later(const search *s, const state *x, int t, unsigned word) {
    for (int i = 0; i < s->m->thread_count; i++) {
        const program *p = &s->m->threads[i];
        const int last = s->last_read[i][word];
        if (i == t || last < 0 || x->at[i] == p->count) continue;
        if (x->at[i] >= p->normal_count || last >= x->at[i]) return true;
    }
    return false;
}

static step show_unread(search *s, state *x, int t) {
    if (!s->m->gives_up || s->m->branches_on_all) return NO_STEP;
    for (int i = 0; i < x->pendings[t]; i++)
        if (may_become_visible(s->m, x, t, i) && !is_read_later(s, x, t, x->pending[t][i].word))
            return become_visible(s, x, t, i) ? A_STEP : AN_ERROR;
    return NO_STEP;
}

/* False: an error, noted. */
static bool settle(search *s, state *x) {
    bool moved = true;
    while (moved) {
        moved = false;
        for (int t = 0; t < s->m->thread_count; t++) {
            step taken;
            while ((taken = step_at_once(s, x, t)) == A_STEP) moved = true;
            if (taken == NO_STEP && (taken = show_unread(s, x, t)) == A_STEP) moved = true;
            if (taken == AN_ERROR) return false;
        }
    }
    return true;
}

/* ---- states seen ----------------------------------------------------------------------------- */
static uint64_t stir(uint64_t h, uint64_t v) {
    h = (h ^ v) * 0x9e3779b97f4a7c15ull;
    return h ^ h >> 29;
}

static uint64_t stir_bytes(uint64_t h, const void *bytes, size_t count) {
    const unsigned char *p = bytes;
    for (; count; p += 8) {
        uint64_t v = 0;
        const size_t n = count < 8 ? count : 8;
        if (n == 8)
            memcpy(&v, p, 8);
        else
            memcpy(&v, p, n);
        h = stir(h, v);
        count -= n;
    }
    return h;
}

static uint64_t fingerprint(const machine *m, const state *x) {
    const size_t threads = (size_t)m->thread_count, words = (size_t)m->words;
    uint64_t h = stir_bytes(0x243f6a8885a308d3ull, x->at, sizeof x->at[0] * threads);
    h = stir_bytes(h, x->sequence, threads);
    h = stir_bytes(h, x->pendings, threads);
    h = stir_bytes(h, x->named, threads);
    h = stir_bytes(h, x->tainted, threads);
    h = stir_bytes(h, x->strays, threads);
    h = stir_bytes(h, x->value, sizeof x->value[0] * words);
    h = stir_bytes(h, x->unread, words);
    for (size_t t = 0; t < threads; t++)
        for (int i = 0; i < x->pendings[t]; i++) {
            const pending p = x->pending[t][i];
            h = stir(h, (uint64_t)p.value << 24 | (uint64_t)p.word << 16 |
                            (uint64_t)p.readers << 8 | p.release);
        }
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93ull;
    h ^= h >> 32;
    return h ? h : 1;
}

static void grow(search *s) {
    const uint64_t room = s->seen_room ? 2 * s->seen_room : 1u << 14;
    uint64_t *wide = calloc(room, sizeof *wide);
    if (!wide) out_of("memory");
    for (uint64_t i = 0; i < s->seen_room; i++) {
        uint64_t at = s->seen[i] & (room - 1);
        if (!s->seen[i]) continue;
        while (wide[at]) at = (at + 1) & (room - 1);
        wide[at] = s->seen[i];
    }
    free(s->seen);
    s->seen = wide;
    s->seen_room = room;
}

static bool is_new(search *s, const state *x) {
    const uint64_t print = fingerprint(s->m, x);
    if (s->seen_count * 5 >= s->seen_room * 3) grow(s);
    uint64_t at = print & (s->seen_room - 1);
    while (s->seen[at] && s->seen[at] != print) at = (at + 1) & (s->seen_room - 1);
    if (s->seen[at]) return false;
    s->seen[at] = print;
    s->seen_count++;
    return true;
}

/* ---- the search ------------------------------------------------------------------------------ */
static frame *push_frame(search *s) {
    if (s->depth == s->room) {
        s->room = s->room ? 2 * s->room : 256;
        s->stack = realloc(s->stack, s->room * sizeof *s->stack);
        if (!s->stack) out_of("memory");
    }
    frame *f = &s->stack[s->depth++];
    f->thread = f->choice = 0;
    f->stepped = false;
    return f;
}

static bool is_possible(const machine *m, const state *x, int t, int choice) {
    if (choice > 0 && choice <= x->pendings[t]) return may_become_visible(m, x, t, choice - 1);
    if (x->at[t] == m->threads[t].count) return false;
    const op *o = &m->threads[t].ops[x->at[t]];
    if (choice > 0) return may_give_up(m, x, t, o);
    /* What settle has left of these waits at a barrier. */
    if (o->kind == OP_START || o->kind == OP_BARRIER || o->kind == OP_END) return false;
    return may_read(m, x, t, o, value_seen(x, t, word_of(x, t, o)));
}

/* The next possible step of a state, from {thread, choice} on. False: there is none. */
static bool find_step(const search *s, frame *f) {
    for (; f->thread < s->m->thread_count; f->thread++, f->choice = 0)
        for (; f->choice <= f->at.pendings[f->thread] + 1; f->choice++)
            if (is_possible(s->m, &f->at, f->thread, f->choice)) return true;
    return false;
}

static bool take_step(search *s, const frame *f, state *x) {
    const int t = f->thread;
    const op *o = &s->m->threads[t].ops[x->at[t]];
    if (f->choice > x->pendings[t]) {
        x->at[t] = o->otherwise;
        return true;
    }
    if (f->choice > 0) return become_visible(s, x, t, f->choice - 1);
    return read_word(s, x, t, o);
}

/* No step is left. False: it is not the end that was hoped for. */
static bool ends_well(search *s, const state *x) {
    const machine *m = s->m;
    for (int t = 0; t < m->thread_count; t++)
        if (x->at[t] < m->threads[t].count) {
            const op *o = &m->threads[t].ops[x->at[t]];
            const unsigned word = word_of(x, t, o);
            return fail(s, DEADLOCKS, m, t, "waits at", word, x->value[word],
                        WORD(o->tag, x->sequence[t]));
        }
    for (int t = 0; t < m->thread_count; t++)
        if (x->named[t]) return true;
    for (int w = 0; w < m->slot_words; w++)
        if (x->value[w]) return fail(s, UNARMED, m, 0, "in the end", (unsigned)w, x->value[w], 0);
    return true;
}

static void print_read(const search *s, const frame *f) {
    const op *o = &s->m->threads[f->thread].ops[f->at.at[f->thread]];
    const unsigned word = word_of(&f->at, f->thread, o);
    const uint16_t value = value_seen(&f->at, f->thread, word);
    if (o->kind == OP_VERDICT)
        printf("looks for verdicts\n");
    else if (o->kind == OP_FAIL)
        printf("fails\n");
    else
        printf("reads %u.%u from %s\n", TAG_OF(value), SEQUENCE_OF(value), s->m->names[word]);
}

static void print_way(const search *s) {
    for (size_t i = 0; i < s->depth; i++) {
        const frame *f = &s->stack[i];
        const program *p = &s->m->threads[f->thread];
        if (f->thread == s->m->thread_count) continue;
        printf("    rank %d block %d thread %d: ", p->rank, p->block, p->thread);
        if (f->choice > f->at.pendings[f->thread]) {
            printf("gives up\n");
            continue;
        }
        if (f->choice > 0) {
            const pending e = f->at.pending[f->thread][f->choice - 1];
            printf("store %u.%u to %s becomes visible\n", TAG_OF(e.value), SEQUENCE_OF(e.value),
                   s->m->names[e.word]);
            continue;
        }
        print_read(s, f);
    }
    printf("    %s\n", s->result.detail);
}

static void find_last_reads(search *s) {
    for (int t = 0; t < s->m->thread_count; t++) {
        const program *p = &s->m->threads[t];
        for (int w = 0; w < MAX_WORDS; w++) s->last_read[t][w] = -1;
        for (int i = 0; i < p->count; i++) {
            const op *o = &p->ops[i];
            if (o->kind == OP_STORE) continue;
            for (int w = 0; w < (o->span ? o->span : 1); w++) s->last_read[t][o->word + w] = i;
            s->last_read[t][o->word + o->parity_step] = i;
        }
    }
}

static void find_private_words(search *s) {
    int user[MAX_WORDS];
    for (int w = 0; w < s->m->words; w++) user[w] = -1, s->private_word[w] = true;
    for (int t = 0; t < s->m->thread_count; t++)
        for (int i = 0; i < s->m->threads[t].count; i++) {
            const op *o = &s->m->threads[t].ops[i];
            const int span = o->span ? o->span : 1;
            if (o->kind == OP_START || o->kind == OP_BARRIER || o->kind == OP_END ||
                o->kind == OP_FENCE || o->kind == OP_FAIL || o->kind == OP_JUMP)
                continue;
            for (int parity = 0; parity < 2; parity++)
                for (int w = o->word + parity * o->parity_step;
                     w < o->word + parity * o->parity_step + span; w++) {
                    if (user[w] >= 0 && user[w] != t) s->private_word[w] = false;
                    user[w] = t;
                }
        }
}

/* Does another thread store to this sequence word in the same call, other than behind a barrier of
 * the block? */
static bool is_alone(const machine *m, int t, int at) {
    const program *own = &m->threads[t];
    const int word = own->ops[at].word;
    int call = 0;
    while (at >= own->ended[call]) call++;
    for (int i = 0; i < m->thread_count; i++) {
        const program *p = &m->threads[i];
        if (i == t || p->rank != own->rank) continue;
        for (int j = call ? p->ended[call - 1] : 0; j < p->ended[call]; j++) {
            const op *o = &p->ops[j];
            if (j == p->met[call] && p->block == own->block && o->kind == OP_BARRIER) break;
            if (o->kind == OP_STORE && o->word == word) return false;
        }
    }
    return true;
}

static void find_alone(search *s) {
    const machine *m = s->m;
    for (int t = 0; t < m->thread_count; t++)
        for (int i = 0; i < m->threads[t].count; i++)
            s->alone[t][i] =
                m->has_kernels && m->threads[t].ops[i].kind == OP_SEQUENCE && is_alone(m, t, i);
}

outcome machine_explore(const machine *m, uint64_t limit, bool trace) {
    static search s;
    memset(&s, 0, sizeof s);
    s.m = m;
    state *first = calloc(1, sizeof *first), *next = malloc(sizeof *next);
    bool good = true;
    if (!first || !next) out_of("memory");
    find_private_words(&s);
    find_alone(&s);
    find_last_reads(&s);
    memcpy(first->value, m->initial, sizeof first->value);
    good = settle(&s, first);
    (void)is_new(&s, first);
    push_frame(&s)->at = *first;
    while (good && s.depth && s.seen_count < limit) {
        frame *f = &s.stack[s.depth - 1];
        f->choice += f->stepped;
        if (!find_step(&s, f)) {
            if (!f->stepped) good = ends_well(&s, &f->at);
            if (good) s.depth--;
            continue;
        }
        f->stepped = true;
        *next = f->at;
        good = take_step(&s, f, next) && settle(&s, next);
        if (good && is_new(&s, next)) push_frame(&s)->at = *next;
    }
    if (good && s.depth) s.result.verdict = UNDECIDED;
    if (!good && trace) print_way(&s);
    s.result.states = s.seen_count;
    free(s.seen);
    free(s.stack);
    free(first);
    free(next);
    return s.result;
}
