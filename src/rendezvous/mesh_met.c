/* The last groups that this process has opened by name, and of which processes they were; mesh.h
 * says what for. A few places, the oldest is given up: who is forgotten waits, no more. A forked
 * child has another process id, so that it does not take its parent's memory for its own. */
#include "rendezvous/opening.h"

#include <pthread.h>
#include <string.h>

#define OH_PLACES 16

typedef struct oh_met {
    oh_id128 name;
    int rank, world_size; /* 0: free place */
    oh_id128 processes[ONEHOP_MAX_RANKS];
} oh_met;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(lock)
static oh_met places[OH_PLACES];
static unsigned next_place;

static oh_met *find(const oh_mesh_plan *plan) {
    for (int i = 0; i < OH_PLACES; i++)
        if (places[i].world_size == plan->world_size && places[i].rank == plan->rank &&
            oh_id128_equal(places[i].name, plan->name))
            return &places[i];
    return NULL;
}

bool oh_mesh_met_before(const oh_opening *opening) {
    const oh_mesh_plan *plan = opening->plan;
    pthread_mutex_lock(&lock);
    const oh_met *met = find(plan);
    bool same = met && oh_id128_equal(met->processes[plan->rank], opening->hello.process);
    for (int i = 0; i < plan->world_size && same; i++)
        same = i == plan->rank || oh_id128_equal(met->processes[i], opening->links[i].process);
    pthread_mutex_unlock(&lock);
    return same;
}

void oh_mesh_remember(const oh_opening *opening, const oh_mesh *mesh) {
    const oh_mesh_plan *plan = opening->plan;
    if (!plan->guesses) return;
    pthread_mutex_lock(&lock);
    oh_met *met = find(plan);
    if (!met) met = &places[next_place++ % OH_PLACES];
    met->name = plan->name;
    met->rank = plan->rank;
    met->world_size = plan->world_size;
    memcpy(met->processes, mesh->processes, sizeof met->processes);
    pthread_mutex_unlock(&lock);
}
