/* Rules as people see them: where they were read, and as lines of a table. */
#include "plan/tuning.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- places ---------------------------------------------------------------------------------- */

/* Names of tables, kept for good: rules outlive the text that they were read from. The last of them
 * stands for all that have no room. Filled by any thread, without a lock, which a fork could leave
 * locked. */
#define TABLES    64
#define LINE_BITS 24
static _Atomic(char *) tables[TABLES];

static uint32_t number_of(const char *name) {
    for (uint32_t i = 0; i < TABLES - 1; i++) {
        char *known = atomic_load_explicit(&tables[i], memory_order_acquire);
        if (!known) {
            char *own = strdup(name);
            if (!own) break;
            if (atomic_compare_exchange_strong_explicit(&tables[i], &known, own,
                                                        memory_order_acq_rel, memory_order_acquire))
                return i;
            free(own);
        }
        if (!strcmp(known, name)) return i;
    }
    return TABLES - 1;
}

uint32_t oh_tuning_place(const char *table) {
    return number_of(table) << LINE_BITS;
}

const char *oh_tuning_where(const oh_tuning_rule *row, uint32_t *line_out) {
    const char *name = atomic_load_explicit(&tables[row->place >> LINE_BITS], memory_order_acquire);
    *line_out = row->place & ((1u << LINE_BITS) - 1);
    return name ? name : "some table";
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef char cell[24];

static const char *bytes_text(uint64_t bytes, cell text) {
    static const char suffixes[] = " KMG";
    int power = 0;
    if (bytes == UINT64_MAX) return "any";
    while (power < 3 && bytes && bytes % 1024 == 0) {
        bytes /= 1024;
        power++;
    }
    snprintf(text, sizeof(cell), power ? "%llu%c" : "%llu", (unsigned long long)bytes,
             suffixes[power]);
    return text;
}

static const char *size_text(uint16_t size, cell text) {
    if (size == OH_TUNING_MAX) return "max";
    snprintf(text, sizeof(cell), size ? "%u" : "-", size);
    return text;
}

char *oh_tuning_text(const oh_tuning_rule *row, char text[OH_TUNING_TEXT]) {
    static const char *const modes[] = {"none", "eager", "graph", "any"};
    cell world, low, high, blocks, threads;
    snprintf(world, sizeof world, row->world_high > row->world_low ? "%u-%u" : "%u", row->world_low,
             row->world_high);
    snprintf(text, OH_TUNING_TEXT, "%s %s %s%s%s %s %s %s %s", world, modes[row->modes & 3],
             row->above ? bytes_text(row->above, low) : "", row->above ? "-" : "",
             bytes_text(row->up_to, high), onehop_algorithm_name((onehop_algorithm)row->algorithm),
             row->source ? onehop_source_name((onehop_source)row->source) : "-",
             size_text(row->blocks, blocks), size_text(row->threads, threads));
    return text;
}
