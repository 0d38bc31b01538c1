/* host_norm: all-reduce, residual add and RMSNorm on the host device. As host_1shot.c, rows in place of
 * bytes: each rank publishes its rows once and every rank works out all of them; a chunk is so many whole
 * rows, and more than one take turns in 4 sub-slots, one chunk ahead.
 *
 * r = round(((x_0 + x_1) + ...) + residual) is one sum of world + 1 sources; the norm of it is norm.h's. */
#include "kernels/host_path.h"
#include "kernels/kernels.h"
#include "kernels/norm.h"

#define SUB_SLOTS 4

typedef struct chunk {
    oh_u32 first, rows;
    size_t at; /* in the area */
} chunk;

static chunk chunk_of(const oh_norm_args *n, oh_u32 index) {
    chunk k = {index * n->chunk_rows, n->chunk_rows, index % SUB_SLOTS * n->call.chunk_bytes};
    if (n->rows - k.first < k.rows) k.rows = n->rows - k.first;
    return k;
}

static size_t place_of(const oh_norm_args *n, chunk k, oh_u32 row) {
    return k.at + (size_t)row * n->call.units * OH_UNIT_BYTES;
}

static void copy_in(const oh_host_call *c, const oh_norm_args *n, oh_u32 index) {
    const chunk k = chunk_of(n, index);
    for (oh_u32 row = 0; row < k.rows; row++)
        c->vector->copy(oh_area_of(c, c->a->rank) + place_of(n, k, row),
                        OH_AT(char, c->a->in + (k.first + row) * n->in_stride), n->row_bytes);
}

static void norm_row(const oh_norm_args *n, oh_u32 row, const oh_unit *r) {
    const oh_grid alone = {0, 1, 0, 1};
    if (n->call.dtype == OH_BF16)
        oh_norm_row(n, alone, row, r, 0, 1, OH_BF16);
    else if (n->call.dtype == OH_F16)
        oh_norm_row(n, alone, row, r, 0, 1, OH_F16);
    else
        oh_norm_row(n, alone, row, r, 0, 1, OH_F32);
}

static void finish(const oh_host_call *c, const oh_norm_args *n, oh_u32 index) {
    const oh_args *a = c->a;
    const chunk k = chunk_of(n, index);
    oh_unit r[OH_KEPT_ROOM(OH_NORM_UNITS)];
    for (oh_u32 i = 0; i < k.rows; i++) {
        const oh_u32 row = k.first + i;
        const void *in[OH_MAX_RANKS + 1];
        int sources = (int)a->world;
        for (oh_u32 s = 0; s < a->world; s++) in[s] = oh_area_of(c, s) + place_of(n, k, i);
        in[a->rank] = OH_AT(char, a->in + row * n->in_stride);
        if (n->residual_in)
            in[sources++] = OH_AT(char, n->residual_in + row * n->residual_in_stride);
        memset(&r[a->units - 1], 0, sizeof *r);
        c->vector->reduce[a->dtype](r, in, sources, n->row_bytes / c->element);
        if (n->residual_out)
            c->vector->copy(OH_AT(char, n->residual_out + row * n->residual_out_stride), r,
                            n->row_bytes);
        norm_row(n, row, r);
    }
}

static void one_chunk(const oh_host_call *c, const oh_norm_args *n) {
    copy_in(c, n, 0);
    oh_publish_signature(c);
    for (oh_u32 r = 0; r < c->a->world; r++)
        if (r != c->a->rank && !oh_await_signature(c, r)) return;
    finish(c, n, 0);
}

static void many_chunks(const oh_host_call *c, const oh_norm_args *n) {
    oh_publish_signature(c);
    for (oh_u32 i = 0; i <= c->a->chunks; i++) {
        if (i < c->a->chunks) {
            copy_in(c, n, i);
            oh_publish_progress(c, i + 1);
        }
        if (i == 0) continue;
        if (!oh_await_all(c, i)) return;
        finish(c, n, i - 1);
    }
}

void oh_host_norm(const void *args, oh_grid grid) {
    const oh_norm_args *n = args;
    oh_host_call c;
    (void)grid;
    if (!oh_host_begin(&c, &n->call, OH_SITE_HOST_1SHOT)) return;
    if (n->call.chunks == 1)
        one_chunk(&c, n);
    else
        many_chunks(&c, n);
    oh_host_end(&c);
}
