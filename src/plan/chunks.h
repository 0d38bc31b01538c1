/* How a message goes: the pieces it is cut into, by algorithm and the sizes of the buffers. */
#ifndef OH_CHUNKS_H
#define OH_CHUNKS_H

#include "plan/plan.h"

/* Bytes of a piece. A message that fits its slot goes whole; else in halves of a push slot. */
size_t oh_chunk_bytes(const oh_dispatch *d, onehop_algorithm a, size_t bytes);

/* Why the algorithm cannot serve such rows here; NULL if it can. */
const char *oh_rows_lack(const oh_dispatch *d, onehop_algorithm a, const oh_rows *rows);

/* Rows of a piece; of two shots a multiple of the world size. Only where the algorithm can serve
 * them. */
uint32_t oh_chunk_rows(const oh_dispatch *d, onehop_algorithm a, const oh_rows *rows);

#endif
