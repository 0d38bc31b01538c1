/* The report of `onehop check`: a table on stdout, and JSON. */
#include "cli/check/check_report.h"
#include "cli/shared/json.h"

#include <string.h>

check_kind check_kind_of(int number) {
    return (check_kind){(onehop_algorithm)(number / 8), (onehop_source)(number / 2 % 4),
                        number % 2 != 0};
}

bool check_applies(check_kind kind, int world_size) {
    if (oh_is_pull(kind.algorithm) != (kind.source != ONEHOP_SOURCE_NONE)) return false;
    if (kind.algorithm == ONEHOP_ALGORITHM_AUTO) return true;
    return (kind.algorithm == ONEHOP_LOCAL_COPY) == (world_size == 1);
}

static const char *const layout_names[] = {"process", "thread", "single"};

static bool failed(const check_cell *cell) {
    return cell->wrong || cell->outside;
}

static const char *mode_name(check_kind kind) {
    return kind.graph ? "graph" : "eager";
}

static void count_column(const check_column *column, check_totals *totals) {
    totals->lost += column->lost;
    for (int i = 0; i < CHECK_KINDS * CHECK_DTYPES; i++) {
        const check_cell *cell = &column->cell[0][0] + i;
        bool exists =
            i % CHECK_DTYPES && check_applies(check_kind_of(i / CHECK_DTYPES), column->world_size);
        totals->ran += cell->outputs > 0;
        totals->skipped += cell->tried && !cell->outputs;
        totals->missing += exists && !cell->tried;
        totals->outputs += cell->outputs;
        totals->wrong += cell->wrong;
        totals->outside += cell->outside;
    }
}

check_totals check_count(const check_report *report) {
    check_totals totals = {0};
    for (int c = 0; c < report->columns; c++) count_column(&report->column[c], &totals);
    return totals;
}

/* One place of the table: all types together. */
static void print_place(const check_column *column, int k) {
    uint64_t outputs = 0;
    bool wrong = false, tried = false;
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        const check_cell *cell = &column->cell[k][d];
        outputs += cell->outputs;
        wrong |= failed(cell);
        tried |= cell->tried;
    }
    if (!check_applies(check_kind_of(k), column->world_size))
        printf(" %6s", "");
    else if (wrong)
        printf(" %6s", "WRONG");
    else if (outputs)
        printf(" %6llu", (unsigned long long)outputs);
    else
        printf(" %6s", tried ? "-" : "?");
}

static bool any_applies(const check_report *report, int k) {
    for (int c = 0; c < report->columns; c++)
        if (check_applies(check_kind_of(k), report->column[c].world_size)) return true;
    return false;
}

static void print_table(const check_report *report) {
    printf("# outputs compared, by ranks (p: processes, t: threads, s: all driven by one thread); "
           "-: skipped, ?: not reached\n#\n");
    printf("# %-12s  %-9s  %-5s", "algorithm", "source", "mode");
    for (int c = 0; c < report->columns; c++)
        printf(" %5d%c", report->column[c].world_size, layout_names[report->column[c].layout][0]);
    printf("\n");
    for (int k = 0; k < CHECK_KINDS; k++) {
        check_kind kind = check_kind_of(k);
        if (!any_applies(report, k)) continue;
        printf("  %-12s  %-9s  %-5s", onehop_algorithm_name(kind.algorithm),
               onehop_source_name(kind.source), mode_name(kind));
        for (int c = 0; c < report->columns; c++) print_place(&report->column[c], k);
        printf("\n");
    }
}

/* One line for all types, sizes and layouts that one kind of call was refused for. */
static void print_refusals(const check_report *report, int k) {
    const char *first = NULL;
    check_kind kind = check_kind_of(k);
    int whole = 0, part = 0;
    for (int c = 0; c < report->columns; c++)
        for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
            const check_cell *cell = &report->column[c].cell[k][d];
            if (!cell->refused[0]) continue;
            if (!first) first = cell->refused;
            *(cell->outputs ? &part : &whole) += 1;
        }
    if (!first) return;
    printf("# %s %s, source %s, %s (%d combinations%s): %s\n",
           whole ? "skipped" : "skipped in part", onehop_algorithm_name(kind.algorithm),
           onehop_source_name(kind.source), mode_name(kind), whole + part,
           whole && part ? ", some in part" : "", first);
}

static void print_failures(const check_column *column) {
    for (int i = 0; i < CHECK_KINDS * CHECK_DTYPES; i++) {
        const check_cell *cell = &column->cell[0][0] + i;
        check_kind kind = check_kind_of(i / CHECK_DTYPES);
        if (!failed(cell)) continue;
        printf("# WRONG: %s, source %s, %s, %s, %d ranks (%s): %llu elements, %llu bytes outside\n",
               onehop_algorithm_name(kind.algorithm), onehop_source_name(kind.source),
               mode_name(kind), onehop_dtype_name((onehop_dtype)(i % CHECK_DTYPES)),
               column->world_size, layout_names[column->layout], (unsigned long long)cell->wrong,
               (unsigned long long)cell->outside);
    }
    if (column->lost)
        printf("# ENDED EARLY: %d ranks (%s), %d of 2 runs, exit code %d; stderr says why\n",
               column->world_size, layout_names[column->layout], column->lost, column->code);
}

void check_print(const check_report *report) {
    check_totals totals = check_count(report);
    printf("# onehop %s (commit %s)\n# Check starting on %s\n", cli_version(), ONEHOP_COMMIT,
           report->line);
    print_table(report);
    printf("#\n");
    for (int k = 0; k < CHECK_KINDS; k++) print_refusals(report, k);
    for (int c = 0; c < report->columns; c++) print_failures(&report->column[c]);
    printf("# combinations of algorithm, source, mode, type and ranks : %llu ran, %llu skipped, "
           "%llu not reached\n",
           (unsigned long long)totals.ran, (unsigned long long)totals.skipped,
           (unsigned long long)totals.missing);
    printf("# outputs compared bit by bit : %llu\n", (unsigned long long)totals.outputs);
    printf("# Out of bounds values : %llu %s\n", (unsigned long long)totals.outside,
           totals.outside ? "FAILED" : "OK");
    printf("# %llu wrong", (unsigned long long)totals.wrong);
    if (totals.lost) printf(", %d runs ended early", totals.lost);
    printf("\n");
    cli_flush();
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void write_cell(FILE *file, const check_column *column, int k, int d) {
    const check_cell *cell = &column->cell[k][d];
    check_kind kind = check_kind_of(k);
    fprintf(file,
            "    {\"ranks\": %d, \"layout\": \"%s\", \"ranks_per_device\": %d, \"algorithm\": "
            "\"%s\", \"source\": \"%s\", \"mode\": \"%s\", \"type\": \"%s\", \"state\": \"%s\",\n"
            "     \"outputs\": %llu, \"wrong\": %llu, \"out_of_bounds\": %llu,\n   ",
            column->world_size, layout_names[column->layout], column->ranks_per_device,
            onehop_algorithm_name(kind.algorithm), onehop_source_name(kind.source), mode_name(kind),
            onehop_dtype_name((onehop_dtype)d),
            failed(cell)    ? "wrong"
            : cell->outputs ? "ok"
            : cell->tried   ? "skipped"
                            : "not reached",
            (unsigned long long)cell->outputs, (unsigned long long)cell->wrong,
            (unsigned long long)cell->outside);
    json_text(file, "refused", cell->refused, "");
    fprintf(file, "    }");
}

static void write_cells(FILE *file, const check_report *report) {
    const char *before = "";
    for (int c = 0; c < report->columns; c++)
        for (int i = 0; i < CHECK_KINDS * CHECK_DTYPES; i++) {
            const check_column *column = &report->column[c];
            int k = i / CHECK_DTYPES, d = i % CHECK_DTYPES;
            if (d == 0 || !check_applies(check_kind_of(k), column->world_size)) continue;
            fprintf(file, "%s", before);
            write_cell(file, column, k, d);
            before = ",\n";
        }
    fprintf(file, "\n");
}

void check_write_json(FILE *file, void *user) {
    const check_report *report = user;
    check_totals totals = check_count(report);
    fprintf(file, "{\n  \"schema\": \"onehop-check/1\",\n");
    json_machine(file, report->driver, report->clocks);
    json_text(file, "args", report->command_line, ",");
    json_text(file, "device", report->device == ONEHOP_DEVICE_CUDA ? "cuda" : "host", ",");
    json_text(file, "processor", report->line, ",");
    fprintf(file,
            "  \"ran\": %llu,\n  \"skipped\": %llu,\n  \"not_reached\": %llu,\n  \"outputs\": "
            "%llu,\n  \"wrong\": %llu,\n  \"out_of_bounds\": %llu,\n  \"ended_early\": %d,\n  "
            "\"cells\": [\n",
            (unsigned long long)totals.ran, (unsigned long long)totals.skipped,
            (unsigned long long)totals.missing, (unsigned long long)totals.outputs,
            (unsigned long long)totals.wrong, (unsigned long long)totals.outside, totals.lost);
    write_cells(file, report);
    fprintf(file, "  ]\n}\n");
}
