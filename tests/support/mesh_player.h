/* A rank of a group that the test plays by hand: it speaks the protocol of src/rendezvous/mesh.h up
 * to the point that the test is about. */
#ifndef OH_TEST_MESH_PLAYER_H
#define OH_TEST_MESH_PLAYER_H

#include "harness.h"

#include "rendezvous/opening.h"

static inline void player_plan(const char *name, int rank, int world_size, oh_group_plan *plan,
                               oh_mesh_plan *mesh_plan) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = rank;
    config.world_size = world_size;
    config.name = own_name(name);
    CHECK_OK(oh_group_plan_make(&config, plan));
    *mesh_plan = (oh_mesh_plan){
        .rank = rank, .world_size = world_size, .name = plan->name, .replayed = plan->secret};
}

static inline int player_dial(const oh_mesh_plan *plan, int rank) {
    for (int i = 0; i < 400; i++) {
        struct sockaddr_un address;
        socklen_t size = oh_mesh_address(plan, rank, oh_mesh_slot(plan), &address);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (!connect(fd, (const struct sockaddr *)&address, size)) return fd;
        close(fd);
        sleep_ms(10);
    }
    FAIL("nobody listens for rank %d", rank);
}

static inline void player_hello(const oh_mesh_plan *plan, oh_hello *hello_out) {
    *hello_out = (oh_hello){.magic = OH_HELLO_MAGIC,
                            .major = ONEHOP_VERSION_MAJOR,
                            .minor = ONEHOP_VERSION_MINOR,
                            .rank = plan->rank,
                            .world_size = plan->world_size,
                            .name = plan->name};
}

#endif
