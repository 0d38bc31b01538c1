/* The table of captured inputs: registrations taken during capture, filled after it, recycled when
 * no graph can run that uses them. Each taking gives a registration a new tag, which the captured
 * call carries: a graph that outlives its registration finds a wrong one. */
#include "communicator/comm.h"

#include <stdlib.h>
#include <string.h>

static onehop_result check_row(const onehop_comm *comm, uint32_t registration, const char *call) {
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "%s: comm is NULL", call);
    if (!oh_process_is(comm->process)) return oh_process_refuse("communicator");
    if (registration >= comm->stats.registrations_total || !comm->registration_tags[registration])
        return oh_error(ONEHOP_ERR_ARGUMENT, "%s: registration %u is not taken", call,
                        registration);
    return ONEHOP_OK;
}

/* One copy for each run of consecutive registrations: on CUDA a copy costs some 10 us. */
static onehop_result write_rules(onehop_comm *comm, const uint32_t *registrations,
                                 const oh_registration *values, size_t count) {
    char *table = (char *)(uintptr_t)(comm->args.local + comm->args.regions.registrations);
    onehop_result result = ONEHOP_OK;
    for (size_t i = 0, run; i < count && !result; i += run) {
        for (run = 1; i + run < count && registrations[i + run] == registrations[i] + run;) run++;
        result = comm->device->ops->copy(comm->device, table + registrations[i] * sizeof *values,
                                         &values[i], run * sizeof *values);
    }
    return result;
}

/* Identities are the caller's. */
onehop_result oh_comm_registrations_fill(onehop_comm *comm, const uint32_t *registrations,
                                         oh_registration *values, size_t count) {
    for (size_t i = 0; i < count; i++) values[i].tag = comm->registration_tags[registrations[i]];
    onehop_result result = write_rules(comm, registrations, values, count);
    for (size_t i = 0; i < count && !result; i++) {
        const bool direct = values[i].mode == OH_REGISTRATION_DIRECT;
        comm->stats.registrations_direct += direct;
        comm->stats.registrations_staged += !direct;
    }
    return result;
}

onehop_result oh_comm_registrations_release(onehop_comm *comm, const uint32_t *registrations,
                                            size_t count) {
    if (!count) return ONEHOP_OK;
    oh_registration *empty = calloc(count, sizeof *empty);
    if (!empty) return oh_error(ONEHOP_ERR_MEMORY, "no memory to release %zu registrations", count);
    onehop_result result = write_rules(comm, registrations, empty, count);
    free(empty);
    if (result) return result;
    for (size_t i = 0; i < count; i++) {
        comm->registration_tags[registrations[i]] = 0;
        if (registrations[i] < comm->first_row) comm->first_row = registrations[i];
    }
    comm->registrations_used -= (uint32_t)count;
    return ONEHOP_OK;
}

onehop_result onehop_comm_registration_take(onehop_comm *comm, uint32_t *registration_out) {
    if (!comm || !registration_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_comm_registration_take: a pointer is NULL");
    if (!oh_process_is(comm->process)) return oh_process_refuse("communicator");
    for (uint32_t registration = comm->first_row; registration < comm->stats.registrations_total;
         registration++) {
        if (comm->registration_tags[registration]) continue;
        if (++comm->last_tag == 0) comm->last_tag = 1;
        comm->registration_tags[registration] = comm->last_tag;
        comm->first_row = registration + 1;
        comm->registrations_used++;
        *registration_out = registration;
        return ONEHOP_OK;
    }
    return oh_error(ONEHOP_ERR_TOO_LARGE,
                    "all %u registrations for captured inputs are taken; release some or raise "
                    "max_registrations",
                    comm->stats.registrations_total);
}

onehop_result oh_comm_registration_fill(onehop_comm *comm, uint32_t registration, uint32_t number,
                                        const void *const *in, void *const *out) {
    oh_registration value;
    memset(&value, 0, sizeof value);
    value.identity = OH_REGISTRATION_IDENTITY(number);
    value.mode = in ? OH_REGISTRATION_DIRECT : OH_REGISTRATION_STAGED;
    for (int r = 0; in && r < comm->world; r++) {
        if (!in[r] || (out && !out[r]))
            return oh_error(ONEHOP_ERR_NULL, "onehop_comm_registration_fill: %s of rank %d is NULL",
                            in[r] ? "out" : "in", r);
        if ((uintptr_t)in[r] % OH_UNIT_BYTES || (out && (uintptr_t)out[r] % OH_UNIT_BYTES))
            return oh_error(
                ONEHOP_ERR_ALIGNMENT,
                "onehop_comm_registration_fill: in at %p, out at %p of rank %d, expected "
                "addresses aligned to %d",
                in[r], out ? out[r] : NULL, r, OH_UNIT_BYTES);
        value.in[r] = (uintptr_t)in[r];
        value.out[r] = out ? (uintptr_t)out[r] : 0;
    }
    return oh_comm_registrations_fill(comm, &registration, &value, 1);
}

/* The tag counts the registrations taken so far. */
onehop_result onehop_comm_registration_fill(onehop_comm *comm, uint32_t registration,
                                            const void *const *in, void *const *out) {
    onehop_result result = check_row(comm, registration, "onehop_comm_registration_fill");
    return result ? result
                  : oh_comm_registration_fill(comm, registration,
                                              comm->registration_tags[registration], in, out);
}

onehop_result onehop_comm_registration_release(onehop_comm *comm, uint32_t registration) {
    OH_NO_CANCEL;
    onehop_result result = check_row(comm, registration, "onehop_comm_registration_release");
    return result ? result : oh_comm_registrations_release(comm, &registration, 1);
}
