/* Walks over memory that somebody else allocated, piece by piece. */
#include "device/foreign.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool oh_foreign_joins(const oh_mem_handle *first, const oh_mem_handle *second) {
    return first->kind == second->kind && first->kind & (OH_HANDLE_FD | OH_HANDLE_FABRIC) &&
           first->device == second->device && first->base + first->bytes == second->base;
}

typedef struct list {
    oh_mem_handle *items;
    size_t count, room;
} list;

static oh_mem_handle *add(list *l) {
    if (l->count == l->room) {
        const size_t room = l->room ? 2 * l->room : 16;
        oh_mem_handle *grown = realloc(l->items, room * sizeof *grown);
        if (!grown) return NULL;
        l->items = grown;
        l->room = room;
    }
    return memset(&l->items[l->count++], 0, sizeof *l->items);
}

/* Adds the pieces of at .. end; *at_out is where the last one ends. */
static onehop_result walk_one(list *l, uint64_t at, uint64_t end, oh_foreign_locate locate,
                              void *context, uint64_t *at_out) {
    while (at < end) {
        oh_mem_handle *piece = add(l);
        if (!piece) return oh_error(ONEHOP_ERR_MEMORY, "no memory for a list of pieces of memory");
        onehop_result result = locate(context, at, end, piece);
        if (!result) result = oh_process_id(&piece->process);
        if (result) return result;
        at = piece->base + piece->bytes;
    }
    *at_out = at;
    return ONEHOP_OK;
}

onehop_result oh_foreign_walk(const oh_range *ranges, size_t count, oh_foreign_locate locate,
                              void *context, oh_mem_handle **pieces_out, size_t *count_out) {
    list l = {NULL, 0, 0};
    uint64_t covered = 0;
    onehop_result result = ONEHOP_OK;
    for (size_t i = 0; i < count && !result; i++) {
        const uint64_t end = ranges[i].base + ranges[i].bytes;
        const uint64_t at = ranges[i].base > covered ? ranges[i].base : covered;
        result = walk_one(&l, at, end, locate, context, &covered);
    }
    if (result) {
        free(l.items);
        return result;
    }
    *pieces_out = l.items;
    *count_out = l.count;
    return ONEHOP_OK;
}

void oh_foreign_private(oh_mem_handle *piece, uint64_t at, uint64_t bytes, const char *what) {
    piece->kind = OH_HANDLE_NONE;
    piece->base = at;
    piece->bytes = bytes;
    memset(piece->data, 0, sizeof piece->data);
    snprintf((char *)piece->data, sizeof piece->data, "%s", what);
}

bool oh_foreign_is_own(const oh_mem_handle *piece) {
    oh_id128 own;
    return oh_process_id(&own) == ONEHOP_OK && oh_id128_equal(own, piece->process);
}

onehop_result oh_foreign_refuse(const oh_mem_handle *piece) {
    return oh_error(ONEHOP_ERR_UNSUPPORTED,
                    "a peer's memory at 0x%llx cannot be mapped here: it is %.64s",
                    (unsigned long long)piece->base, (const char *)piece->data);
}

void oh_foreign_span_in_place(const oh_mem_handle *piece, uint64_t span_bytes, uint64_t offset,
                              oh_mem *span) {
    const oh_mem here = {(void *)(uintptr_t)(piece->base - offset), (size_t)span_bytes, NULL};
    *span = here;
}

onehop_result oh_foreign_check(const oh_mem_handle *piece, uint64_t span_bytes, uint64_t offset) {
    if (piece->bytes > 0 && piece->base > 0 && span_bytes <= PTRDIFF_MAX && offset <= span_bytes &&
        piece->bytes <= span_bytes - offset)
        return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_ARGUMENT,
                    "a peer's memory handle is damaged: %llu bytes at %llu of %llu bytes",
                    (unsigned long long)piece->bytes, (unsigned long long)offset,
                    (unsigned long long)span_bytes);
}
