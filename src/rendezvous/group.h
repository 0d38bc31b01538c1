/* Inside of a group, shared by the files of this directory.
 *
 * Four kinds: alone (world size 1), local (ranks of one process), mesh (sockets, found by name or
 * through a callback) and callback (no sockets reach, everything goes through the caller). Each
 * gives a table of four functions; group.c checks arguments and keeps the state that they share. */
#ifndef OH_GROUP_H
#define OH_GROUP_H

#include "rendezvous/mesh.h"
#include "rendezvous/rendezvous.h"

#include <sys/types.h>

#define OH_MAX_BLOB ((size_t)16 << 20) /* longest blob of an exchange */
#define OH_MAX_FDS  64                 /* most descriptors a rank passes at once */

/* A failure returned by allgather or pass_fds breaks the group. `mine` of pass_fds is for failures
 * of this rank alone that leave the exchange whole (its table of descriptors is full). */
typedef struct oh_group_kind {
    onehop_result (*allgather)(onehop_group *group, const void *send, void *recv, size_t bytes);
    onehop_result (*pass_fds)(onehop_group *group, const int *fds, int count, int *fds_out,
                              onehop_result *mine);
    int (*lost_peer)(onehop_group *group);
    void (*close)(onehop_group *group, bool owner); /* owner: false in a forked child */
} oh_group_kind;

/* A rank's result with its sentence, as ranks send it to each other. */
typedef struct oh_opinion {
    int32_t result;
    char text[508];
} oh_opinion;

struct oh_local;

struct onehop_group {
    const oh_group_kind *kind;
    int rank, world_size;
    uint32_t timeout_ms;
    uint64_t process;     /* that opened it */
    onehop_result broken; /* first failure of an exchange; later ones return it again */
    char broken_text[512];
    bool same_process[ONEHOP_MAX_RANKS];
    bool can_pass_fds;
    oh_mesh mesh;           /* kind mesh */
    struct oh_local *local; /* kind local */
    onehop_allgather_fn user_allgather;
    onehop_pass_fd_fn user_pass_fd;
    void *user;
    /* Of the exchange that is going on: 8 KiB, too much for some threads' stacks. */
    oh_opinion opinions[ONEHOP_MAX_RANKS];
};

/* What onehop_group_open found out from its config and the environment. */
typedef struct oh_group_plan {
    int rank, world_size;
    uint32_t timeout_ms;
    oh_id128 name;  /* hash of user, secret and name */
    bool secret;    /* so that other users cannot know it */
    oh_id128 job;   /* of a launcher; zero: not known */
    char label[80]; /* the name as messages print it */
    onehop_allgather_fn allgather;
    onehop_pass_fd_fn pass_fd;
    void *user;
} oh_group_plan;

onehop_result oh_group_plan_make(const onehop_group_config *config, oh_group_plan *plan_out);
onehop_result oh_group_timeout(uint32_t given, uint32_t *timeout_out);

/* Opens through the caller's all-gather; group has rank, size and the three user members. */
/* `mine`: a failure of this rank's, which then is all ranks'. */
onehop_result oh_group_open_callback(onehop_group *group, onehop_result mine);

/* Writes "rank 3" or "ranks 1, 3" for the bits set in `ranks`. */
void oh_list_ranks(uint32_t ranks, char *text, size_t size);

extern const oh_group_kind oh_group_mesh, oh_group_local, oh_group_callback;

void oh_opinion_make(oh_opinion *opinion_out, onehop_result mine);

/* The lowest failing rank's, prefixed with its number unless it is `rank`; OK if there is none. */
onehop_result oh_opinion_judge(const oh_opinion *opinions, int world_size, int rank);

#endif
