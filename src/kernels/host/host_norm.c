/* host_norm: all-reduce, residual add and RMSNorm on the host device. As host_1shot.c, rows in
 * place of bytes: each rank gives every peer its rows and works out all of them; a chunk is so many
 * whole rows, and more than one take turns in two sub-slots of a mailbox, one chunk ahead.
 *
 * r = round(((x_0 + x_1) + ...) + residual) is one sum of world + 1 sources; the norm of it is
 * norm.h's. */
#include "kernels/host/host_path.h"
#include "kernels/kernels.h"
#include "kernels/fused/norm.h"

_Static_assert(OH_PLACE_WEIGHT == OH_KEPT_ROOM(OH_NORM_UNITS) * sizeof(oh_unit) &&
                   OH_PLACE_SQUARES == 2 * OH_PLACE_WEIGHT &&
                   OH_PLACE_MAX == OH_PLACE_SQUARES + OH_KEPT_ROOM(1) * sizeof(float) &&
                   OH_SCRATCH_BYTES == OH_PLACE_MAX + OH_KEPT_ROOM(1) * sizeof(float),
               "each place has room for what lanes keep there");

typedef struct norm_call {
    oh_host_call c;
    const oh_norm_args *n;
} norm_call;

static char *place_of(const norm_call *s, oh_u32 from, oh_u32 to, size_t chunk, oh_u32 row) {
    return oh_mailbox(&s->c, from, to, chunk / 2) + chunk % 2 * s->c.a->chunk_bytes +
           (size_t)row * s->c.a->units * OH_UNIT_BYTES;
}

static void give(const void *call, size_t chunk) {
    const norm_call *s = call;
    const oh_norm_args *n = s->n;
    const oh_u32 world = s->c.a->world, rank = s->c.a->rank,
                 rows = oh_rows_of_chunk(n->rows, n->chunk_rows, (oh_u32)chunk);
    for (oh_u32 step = 1; step < world; step++) {
        const oh_u32 to = (rank + step) % world;
        for (oh_u32 row = 0; row < rows; row++)
            s->c.vector->copy(
                place_of(s, rank, to, chunk, row),
                OH_AT(char, s->c.a->in + (chunk * n->chunk_rows + row) * n->in_stride),
                n->row_bytes);
    }
}

static void norm_row(const oh_norm_args *n, oh_u32 row, const oh_unit *r) {
    const oh_grid alone = {0, 1, 0, 1};
    const oh_norm_turn t = {row, 0, 1, 0.0f};
    if (n->call.dtype == OH_BF16)
        oh_norm_row(n, alone, t, r, OH_BF16);
    else if (n->call.dtype == OH_F16)
        oh_norm_row(n, alone, t, r, OH_F16);
    else
        oh_norm_row(n, alone, t, r, OH_F32);
}

static void finish(const void *call, size_t chunk) {
    const norm_call *s = call;
    const oh_norm_args *n = s->n;
    const oh_args *a = s->c.a;
    const oh_u32 rows = oh_rows_of_chunk(n->rows, n->chunk_rows, (oh_u32)chunk);
    OH_KEEP(oh_unit, r, OH_NORM_UNITS, a, OH_PLACE_ROW);
    for (oh_u32 i = 0; i < rows; i++) {
        const oh_u32 row = (oh_u32)chunk * n->chunk_rows + i;
        const void *in[OH_MAX_RANKS + 1];
        int sources = (int)a->world;
        for (oh_u32 from = 0; from < a->world; from++)
            in[from] = place_of(s, from, a->rank, chunk, i);
        in[a->rank] = OH_AT(char, a->in + row * n->in_stride);
        if (n->residual_in)
            in[sources++] = OH_AT(char, n->residual_in + row * n->residual_in_stride);
        memset(&r[a->units - 1], 0, sizeof *r);
        s->c.vector->reduce[a->dtype](r, in, sources, n->row_bytes / s->c.element);
        if (n->residual_out)
            s->c.vector->copy(OH_AT(char, n->residual_out + row * n->residual_out_stride), r,
                              n->row_bytes);
        norm_row(n, row, r);
    }
}

void oh_host_norm(const void *args, oh_grid grid) {
    norm_call s;
    s.n = args;
    (void)grid;
    if (!oh_host_begin(&s.c, &s.n->call, OH_SITE_HOST_1SHOT)) return;
    oh_host_chunks(&s.c, s.n->call.chunks, give, finish, &s);
    oh_host_end(&s.c);
}
