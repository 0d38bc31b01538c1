/* Foreign memory: what its two implementations share. */
#ifndef OH_FOREIGN_H
#define OH_FOREIGN_H

#include "device/device.h"

/* The piece that holds address `at`; for what is no piece of anything, OH_HANDLE_NONE of at ..
 * limit at most. Asked in order of address. `process` is filled in by the walk. */
typedef onehop_result (*oh_foreign_locate)(void *context, uint64_t at, uint64_t limit,
                                           oh_mem_handle *out);

/* The pieces of all ranges; see foreign_find. */
onehop_result oh_foreign_walk(const oh_range *ranges, size_t count, oh_foreign_locate locate,
                              void *context, oh_mem_handle **pieces_out, size_t *count_out);

/* Makes *piece one that no other process can map: `what` says why, and at .. at + bytes where. */
void oh_foreign_private(oh_mem_handle *piece, uint64_t at, uint64_t bytes, const char *what);

/* This process owns the memory, so the pointer itself serves. */
bool oh_foreign_is_own(const oh_mem_handle *piece);

/* The refusal of memory that only its process can use. */
onehop_result oh_foreign_refuse(const oh_mem_handle *piece);

/* Makes *span, if it is zeroed, lie where the memory of an own piece lies. */
void oh_foreign_span_in_place(const oh_mem_handle *piece, uint64_t span_bytes, uint64_t offset,
                              oh_mem *span);

/* A piece as a peer sent it, and where it is to go: does that make sense? */
onehop_result oh_foreign_check(const oh_mem_handle *piece, uint64_t span_bytes, uint64_t offset);

#endif
