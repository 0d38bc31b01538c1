/* The table of captured inputs: rows taken during capture, filled after it, recycled when no graph
 * can run that uses them. Each taking gives a row a new tag, which the captured call carries: a
 * graph that outlives its row finds a wrong one. */
#include "comm/comm.h"

#include <stdlib.h>
#include <string.h>

static onehop_result check_row(const onehop_comm *comm, uint32_t row, const char *call) {
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "%s: comm is NULL", call);
    if (!oh_process_is(comm->process)) return oh_process_refuse("communicator");
    if (row >= comm->stats.rows_total || !comm->row_tags[row])
        return oh_error(ONEHOP_ERR_ARGUMENT, "%s: row %u is not taken", call, row);
    return ONEHOP_OK;
}

/* One copy for each run of consecutive rows: on CUDA a copy costs some 10 us. */
static onehop_result write_rows(onehop_comm *comm, const uint32_t *rows, const oh_row *values,
                                size_t count) {
    char *table = (char *)(uintptr_t)(comm->args.local + comm->args.planes.rows);
    onehop_result result = ONEHOP_OK;
    for (size_t i = 0, run; i < count && !result; i += run) {
        for (run = 1; i + run < count && rows[i + run] == rows[i] + run;) run++;
        result = comm->device->ops->copy(comm->device, table + rows[i] * sizeof *values, &values[i],
                                         run * sizeof *values);
    }
    return result;
}

/* Identities are the caller's. */
onehop_result oh_comm_rows_fill(onehop_comm *comm, const uint32_t *rows, oh_row *values,
                                size_t count) {
    for (size_t i = 0; i < count; i++) values[i].tag = comm->row_tags[rows[i]];
    onehop_result result = write_rows(comm, rows, values, count);
    for (size_t i = 0; i < count && !result; i++) {
        const bool direct = values[i].mode == OH_ROW_DIRECT;
        comm->stats.rows_direct += direct;
        comm->stats.rows_staged += !direct;
    }
    return result;
}

onehop_result oh_comm_rows_release(onehop_comm *comm, const uint32_t *rows, size_t count) {
    if (!count) return ONEHOP_OK;
    oh_row *empty = calloc(count, sizeof *empty);
    if (!empty) return oh_error(ONEHOP_ERR_MEMORY, "no memory to release %zu rows", count);
    onehop_result result = write_rows(comm, rows, empty, count);
    free(empty);
    if (result) return result;
    for (size_t i = 0; i < count; i++) {
        comm->row_tags[rows[i]] = 0;
        if (rows[i] < comm->first_row) comm->first_row = rows[i];
    }
    comm->rows_used -= (uint32_t)count;
    return ONEHOP_OK;
}

onehop_result onehop_comm_row_take(onehop_comm *comm, uint32_t *row_out) {
    if (!comm || !row_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_comm_row_take: a pointer is NULL");
    if (!oh_process_is(comm->process)) return oh_process_refuse("communicator");
    for (uint32_t row = comm->first_row; row < comm->stats.rows_total; row++) {
        if (comm->row_tags[row]) continue;
        if (++comm->last_tag == 0) comm->last_tag = 1;
        comm->row_tags[row] = comm->last_tag;
        comm->first_row = row + 1;
        comm->rows_used++;
        *row_out = row;
        return ONEHOP_OK;
    }
    return oh_error(ONEHOP_ERR_TOO_LARGE,
                    "all %u rows for captured inputs are taken; release some or raise max_rows",
                    comm->stats.rows_total);
}

onehop_result oh_comm_row_fill(onehop_comm *comm, uint32_t row, uint32_t number,
                               const void *const *in, void *const *out) {
    oh_row value;
    memset(&value, 0, sizeof value);
    value.identity = OH_ROW_IDENTITY(number);
    value.mode = in ? OH_ROW_DIRECT : OH_ROW_STAGED;
    for (int r = 0; in && r < comm->world; r++) {
        if (!in[r] || (out && !out[r]))
            return oh_error(ONEHOP_ERR_NULL, "onehop_comm_row_fill: %s of rank %d is NULL",
                            in[r] ? "out" : "in", r);
        if ((uintptr_t)in[r] % OH_UNIT_BYTES || (out && (uintptr_t)out[r] % OH_UNIT_BYTES))
            return oh_error(ONEHOP_ERR_ALIGNMENT,
                            "onehop_comm_row_fill: in at %p, out at %p of rank %d, expected "
                            "addresses aligned to %d",
                            in[r], out ? out[r] : NULL, r, OH_UNIT_BYTES);
        value.in[r] = (uintptr_t)in[r];
        value.out[r] = out ? (uintptr_t)out[r] : 0;
    }
    return oh_comm_rows_fill(comm, &row, &value, 1);
}

/* The tag counts the rows taken so far. */
onehop_result onehop_comm_row_fill(onehop_comm *comm, uint32_t row, const void *const *in,
                                   void *const *out) {
    onehop_result result = check_row(comm, row, "onehop_comm_row_fill");
    return result ? result : oh_comm_row_fill(comm, row, comm->row_tags[row], in, out);
}

onehop_result onehop_comm_row_release(onehop_comm *comm, uint32_t row) {
    OH_NO_CANCEL;
    onehop_result result = check_row(comm, row, "onehop_comm_row_release");
    return result ? result : oh_comm_rows_release(comm, &row, 1);
}
