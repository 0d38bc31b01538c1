/* Which algorithm serves which call, as text that people read and `onehop tune` writes:
 *
 *   onehop-tuning 1                                        first line that is no comment
 *   device sm_90                                           sm_NN (its family), cuda (any GPU) or
 *                                                          host
 *   # world mode bytes    algorithm  source    blocks threads
 *   2       any  16K      1shot_push -         9      128
 *   3-16    graph 16M-any 2shot_pull graph     65     max
 *
 *   world    ranks: W or LOW-HIGH
 *   mode     eager, graph, any
 *   bytes    up to so many, with K, M, G; or LOW-HIGH: more than LOW, up to HIGH; any is the end
 *   source   workspace, graph, multicast for the pull algorithms, - for all others
 *   blocks   grid, the signature's block included; max: as many as fit; - for nccl
 *   threads  of a block; max: as many as the kernel takes; - for nccl
 *
 * A line `operation all_reduce_norm`, or tp_qknorm, says that the rules below it, up to the next
 * such line or the next device, serve that fused operation (`operation plain`: none). `bytes` are
 * those of the rows that travel: of all_reduce_norm rounded up to 16 bytes each, of tp_qknorm 8
 * bytes a token. Threads follow from the width of a row: -, and of more blocks than there are
 * rows only so many are used.
 *
 * Rules of scatter_push and host_scatter serve reduce-scatters, those of gather_ll, gather_push and
 * host_gather all-gathers, `bytes` being one rank's part there; all others serve all-reduces.
 *
 * The first rule that fits serves a call; a rule that the call or the group cannot use is passed
 * over. Rules of the file that ONEHOP_TUNING names come first, then those of the group's family of
 * GPUs, then those for any GPU; the last of these serve everything. src/plan/tables has them. */
#ifndef OH_TUNING_H
#define OH_TUNING_H

#include "protocol/algorithms.h"

enum {
    OH_TUNING_HOST = 1,
    OH_TUNING_CUDA = 2, /* any GPU; else the major compute capability, 8 and up */
    OH_TUNING_MAX = UINT16_MAX,
};

/* No padding: rules are compared across ranks by a hash of their bytes but for `place`. */
typedef struct oh_tuning_rule {
    uint64_t above, up_to; /* bytes */
    uint16_t device;       /* OH_TUNING_HOST, _CUDA or a family */
    uint8_t world_low, world_high;
    uint8_t modes; /* a bit for each onehop_mode */
    uint8_t algorithm, source, operation;
    uint16_t blocks, threads; /* 0: has none; OH_TUNING_MAX: max */
    uint32_t place;           /* where it was read, see oh_tuning_where; not compared */
} oh_tuning_rule;

typedef struct oh_tuning {
    oh_tuning_rule *rules;
    size_t count, room;
} oh_tuning;

/* Appends the rules of a text of `bytes`; `name` is for the sentence of an error, "<name>:<line>:
 * ...". ENVIRONMENT if it is not understood, MEMORY; the table is then to be freed only. */
onehop_result oh_tuning_parse(oh_tuning *tuning, const char *name, const char *text, size_t bytes);

/* The file of ONEHOP_TUNING, if it is set, and the tables compiled in. Free it in any case. */
onehop_result oh_tuning_load(oh_tuning *tuning_out);
void oh_tuning_free(oh_tuning *tuning);

/* The place of line 0 of a table, to which lines are added. */
uint32_t oh_tuning_place(const char *table);

/* Name of the table, a static string, and line of a rule. */
const char *oh_tuning_where(const oh_tuning_rule *rule, uint32_t *line_out);

/* The rule as a line of a table: "2-16 any 64K 1shot_push - 33 128". */
#define OH_TUNING_TEXT 128
char *oh_tuning_text(const oh_tuning_rule *rule, char text[OH_TUNING_TEXT]);

uint64_t oh_tuning_hash(const oh_tuning *tuning);

#endif
