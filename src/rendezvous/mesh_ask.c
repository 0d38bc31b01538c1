/* "Do you wait for somebody too?"
 *
 * Of ranks 0, 1 and 2 rank 0 stops after it has sent its frame to rank 1, not yet to rank 2. So
 * rank 2 waits for rank 0 in this exchange, and rank 1 in the next one, for both. When its time is
 * over, rank 1 asks both, and names the one that does not answer within OH_ANSWER_MS.
 *
 * Rank 2 has read all that this exchange wants of rank 1. The question lies behind rank 1's next
 * frame, which it must not take yet. So it looks at the end of what is unread, and takes nothing.
 * It answers once in an exchange: rank 1 cannot ask twice in the meantime. A question that is read
 * in its place, behind its frame, is an old one: by then the asker has the frame that it missed.
 *
 * The answer changes nothing for who gives it: it waits on, until its own time is over. If all
 * answer, each waits for another, and all are named. */
#include "rendezvous/mesh.h"

#include <string.h>

static const oh_notice question = {.magic = OH_NOTICE_MAGIC, .kind = OH_NOTICE_ASK, .culprit = -1};
static const oh_notice answer = {.magic = OH_NOTICE_MAGIC, .kind = OH_NOTICE_HERE, .culprit = -1};

void oh_mesh_ask(oh_mesh *mesh, uint32_t ranks) {
    for (int i = 0; i < mesh->world_size; i++)
        if (ranks >> i & 1) oh_mesh_send_notice(mesh, i, &question);
}

bool oh_mesh_is_asked(int fd) {
    oh_notice last;
    return oh_mesh_last_words(fd, &last) && last.kind == OH_NOTICE_ASK;
}

void oh_mesh_answer(oh_mesh *mesh, uint32_t ranks) {
    /* Relaxed: each bit stands for itself. */
    ranks &= ~atomic_load_explicit(&mesh->answered, memory_order_relaxed);
    for (int i = 0; i < mesh->world_size; i++)
        if (ranks >> i & 1 && oh_mesh_is_asked(mesh->sockets[i]) &&
            oh_mesh_send_notice(mesh, i, &answer))
            atomic_fetch_or_explicit(&mesh->answered, 1u << i, memory_order_relaxed);
}

uint32_t oh_mesh_silent(uint32_t missing, uint32_t asked, uint32_t here) {
    return missing & asked & ~here ? missing & ~here : missing;
}
