/* How ranks come to one result: each tells its own, all take the lowest failing rank's. */
#include "rendezvous/group.h"

#include <stdio.h>
#include <string.h>

void oh_list_ranks(uint32_t ranks, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, ranks & (ranks - 1) ? "ranks" : "rank");
    for (int i = 0; i < 32 && used < size; i++)
        if (ranks >> i & 1) {
            used +=
                (size_t)snprintf(text + used, size - used, " %d%s", i, ranks >> i >> 1 ? "," : "");
        }
}

void oh_opinion_make(oh_opinion *opinion_out, onehop_result mine) {
    memset(opinion_out, 0, sizeof *opinion_out);
    opinion_out->result = mine;
    if (mine) snprintf(opinion_out->text, sizeof opinion_out->text, "%.507s", onehop_last_error());
}

onehop_result oh_opinion_judge(const oh_opinion *opinions, int world_size, int rank) {
    for (int i = 0; i < world_size; i++) {
        const oh_opinion *opinion = &opinions[i];
        if (!opinion->result) continue;
        if (i == rank) return oh_error((onehop_result)opinion->result, "%.507s", opinion->text);
        return oh_error((onehop_result)opinion->result, "rank %d: %.507s", i, opinion->text);
    }
    return ONEHOP_OK;
}

onehop_result oh_rendezvous_agree(onehop_group *group, onehop_result mine) {
    oh_opinion own, *all = group ? group->opinions : NULL; /* no group: refused below */
    oh_opinion_make(&own, mine);
    onehop_result result = oh_rendezvous_allgather(group, &own, all, sizeof own);
    if (!result) return oh_opinion_judge(all, group->world_size, group->rank);
    if (!mine) return result;
    /* One result on all ranks; the peers do not know what failed here. */
    char text[256];
    snprintf(text, sizeof text, "%.255s", onehop_last_error());
    return oh_error(result, "%s (before that, here: %.220s)", text, own.text);
}
