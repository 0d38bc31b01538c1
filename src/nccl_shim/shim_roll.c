/* How the shims of a communicator's ranks find each other: by a file in shared memory, before
 * anything is exchanged. Its name is a hash of what all ranks have in common (the unique id; of a
 * split the parent's key, a count and the colour). Each rank marks its place in it before it calls
 * the real init. A blocking init returns on no rank before all have called it: then all marks are
 * there that will ever be, and a missing one means, on all ranks alike, that a rank runs without
 * the shim, on another host, or with a communicator that is not blocking. Only if all are there
 * records are written and awaited. Nothing goes through NCCL, so no call of the program's can be
 * taken for a part of it. The last rank to leave removes the file. */
#include "nccl_shim/shim.h"

#include "base/descriptor.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Ranks that are there answer at once; one that has died never. */
#define PATIENCE_NS 600000000000ull
#define TELL_NS     20000000000ull

/* One rank's place in the file. Each word is written once, by that rank, after what it speaks
 * of. */
typedef struct slot {
    uint64_t marked, told, gone, unused;
    oh_shim_record record;
} slot;

static void path_of(const oh_shim_roll *roll, char path[64]) {
    snprintf(path, 64, "/dev/shm/onehop-nccl-%016llx%016llx", (unsigned long long)roll->key.word[0],
             (unsigned long long)roll->key.word[1]);
}

static void set(const oh_shim_roll *roll, size_t member) {
    const uint64_t yes = 1;
    (void)!pwrite(roll->fd, &yes, sizeof yes, (off_t)(roll->place * sizeof(slot) + member));
}

/* False: there is no such place. */
static bool slot_at(const oh_shim_roll *roll, size_t place, slot *out) {
    memset(out, 0, sizeof *out);
    return pread(roll->fd, out, sizeof *out, (off_t)(place * sizeof *out)) > 0;
}

static oh_id128 hash_of(const void *data, size_t bytes) {
    oh_id128 key;
    key.word[0] = oh_hash(OH_HASH_START, data, bytes);
    key.word[1] = oh_hash(key.word[0], data, bytes);
    return key;
}

static void mark(oh_shim_roll *roll) {
    char path[64];
    path_of(roll, path);
    roll->fd = oh_fd_high(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (roll->fd >= 0) set(roll, offsetof(slot, marked));
}

oh_shim_roll oh_shim_roll_init(const oh_nccl_unique_id *id, int rank, bool blocking) {
    oh_shim_roll roll = {.fd = -1, .place = (size_t)rank};
    roll.key = hash_of(id, sizeof *id);
    if (blocking) mark(&roll);
    return roll;
}

oh_shim_roll oh_shim_roll_child(oh_nccl_comm comm, int color, bool blocking) {
    oh_shim_roll roll = {.fd = -1};
    oh_shim_state *parent = oh_shim_find(comm);
    int rank = 0, result;
    if (!parent || !(parent->key.word[0] | parent->key.word[1])) return roll;
    const uint64_t of[] = {parent->key.word[0], parent->key.word[1], ++parent->children,
                           (uint64_t)(uint32_t)color};
    roll.key = hash_of(of, sizeof of);
    OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommUserRank, comm, &rank);
    roll.place = (size_t)rank;
    if (blocking && !result) mark(&roll);
    return roll;
}

bool oh_shim_roll_complete(const oh_shim_roll *roll, int ranks) {
    int marked = 0;
    slot s;
    for (size_t i = 0; roll->fd >= 0 && slot_at(roll, i, &s); i++) marked += s.marked != 0;
    return ranks > 0 && marked == ranks;
}

void oh_shim_roll_tell(const oh_shim_roll *roll, const oh_shim_record *own) {
    const off_t at = (off_t)(roll->place * sizeof(slot) + offsetof(slot, record));
    if (roll->fd < 0) return;
    (void)!pwrite(roll->fd, own, sizeof *own, at);
    set(roll, offsetof(slot, told));
}

bool oh_shim_roll_hear(const oh_shim_roll *roll, int ranks, oh_shim_record *all) {
    const uint64_t begun = oh_clock_ns();
    bool said = false;
    int heard = 0;
    slot s;
    for (size_t i = 0; heard < ranks && slot_at(roll, i, &s);) {
        const uint64_t waited = oh_clock_ns() - begun;
        if (s.told && s.record.rank < (uint32_t)ranks) all[s.record.rank] = s.record;
        heard += s.told != 0;
        if (s.told || !s.marked) {
            i++;
            continue;
        }
        if (waited > PATIENCE_NS) return false;
        if (waited > TELL_NS && !said)
            oh_log(ONEHOP_LOG_WARN, "NCCL shim: has waited 20 s for the shim of another rank");
        said = waited > TELL_NS;
        oh_sleep_us(50);
    }
    return heard == ranks;
}

void oh_shim_roll_leave(oh_shim_roll *roll) {
    char path[64];
    bool last = true;
    slot s;
    if (roll->fd < 0) return;
    set(roll, offsetof(slot, gone));
    for (size_t i = 0; slot_at(roll, i, &s); i++) last = last && (!s.marked || s.gone);
    path_of(roll, path);
    if (last) unlink(path);
    close(roll->fd);
    roll->fd = -1;
}

void oh_shim_roll_refuse(oh_shim_roll *roll) {
    oh_shim_record none;
    memset(&none, 0, sizeof none);
    none.failed = 1;
    oh_shim_roll_tell(roll, &none);
    oh_shim_roll_leave(roll);
}
