/* The report of `onehop check`: a table on stdout, and JSON. */
#include "cli/check.h"
#include "cli/json.h"

#include <string.h>

static const char *const layout_names[] = {"process", "thread", "single"};

#define EACH_KIND(a, s, graph)                                                                     \
    for (int a = 0; a < CHECK_ALGORITHMS; a++)                                                     \
        for (int s = 0; s < CHECK_SOURCES; s++)                                                    \
            for (int graph = 0; graph < 2; graph++)

static bool failed(const check_cell *cell) {
    return cell->wrong || cell->outside;
}

check_totals check_count(const check_report *report) {
    check_totals totals = {0};
    for (int c = 0; c < report->columns; c++) EACH_KIND(a, s, graph) {
            const check_column *column = &report->column[c];
            if (!check_applies(a, s, column->world_size)) continue;
            for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
                const check_cell *cell = &column->cell[a][s][graph][d];
                totals.ran += cell->outputs > 0;
                totals.skipped += cell->tried && !cell->outputs;
                totals.failed += failed(cell);
                totals.missing += !cell->tried;
                totals.outputs += cell->outputs;
                totals.wrong += cell->wrong;
                totals.outside += cell->outside;
            }
        }
    return totals;
}

/* One place of the table: all types together. */
static void print_place(const check_column *column, int a, int s, int graph) {
    uint64_t outputs = 0;
    bool wrong = false, tried = false;
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        const check_cell *cell = &column->cell[a][s][graph][d];
        outputs += cell->outputs;
        wrong |= failed(cell);
        tried |= cell->tried;
    }
    if (!check_applies(a, s, column->world_size))
        printf(" %6s", "");
    else if (wrong)
        printf(" %6s", "WRONG");
    else if (outputs)
        printf(" %6llu", (unsigned long long)outputs);
    else
        printf(" %6s", tried ? "-" : "?");
}

static bool any_applies(const check_report *report, int a, int s) {
    for (int c = 0; c < report->columns; c++)
        if (check_applies(a, s, report->column[c].world_size)) return true;
    return false;
}

static void print_table(const check_report *report) {
    printf("# outputs compared, by ranks (p: processes, t: threads, s: all driven by one thread); "
           "-: skipped, ?: not reached\n#\n");
    printf("# %-10s  %-9s  %-5s", "algorithm", "source", "mode");
    for (int c = 0; c < report->columns; c++)
        printf(" %5d%c", report->column[c].world_size, layout_names[report->column[c].layout][0]);
    printf("\n");
    EACH_KIND(a, s, graph) {
        if (!any_applies(report, a, s)) continue;
        printf("  %-10s  %-9s  %-5s", onehop_algorithm_name((onehop_algorithm)a),
               onehop_source_name((onehop_source)s), graph ? "graph" : "eager");
        for (int c = 0; c < report->columns; c++) print_place(&report->column[c], a, s, graph);
        printf("\n");
    }
}

/* One line for all types, sizes and layouts that one kind of call was refused for. */
static void print_refusals(const check_report *report, int a, int s, int graph) {
    const char *first = NULL;
    int whole = 0, part = 0;
    for (int c = 0; c < report->columns; c++)
        for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
            const check_cell *cell = &report->column[c].cell[a][s][graph][d];
            if (!cell->refused[0]) continue;
            if (!first) first = cell->refused;
            *(cell->outputs ? &part : &whole) += 1;
        }
    if (!first) return;
    printf("# %s %s, source %s, %s (%d combinations%s): %s\n",
           whole ? "skipped" : "skipped in part", onehop_algorithm_name((onehop_algorithm)a),
           onehop_source_name((onehop_source)s), graph ? "graph" : "eager", whole + part,
           whole && part ? ", some in part" : "", first);
}

static void print_failures(const check_report *report) {
    for (int c = 0; c < report->columns; c++) EACH_KIND(a, s, graph)
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        const check_column *column = &report->column[c];
        const check_cell *cell = &column->cell[a][s][graph][d];
        if (failed(cell))
            printf("# WRONG: %s, source %s, %s, %s, %d ranks (%s): %llu elements, %llu bytes "
                   "outside\n",
                   onehop_algorithm_name((onehop_algorithm)a), onehop_source_name((onehop_source)s),
                   graph ? "graph" : "eager", onehop_dtype_name((onehop_dtype)d),
                   column->world_size, layout_names[column->layout],
                   (unsigned long long)cell->wrong, (unsigned long long)cell->outside);
    }
}

void check_print(const check_report *report) {
    check_totals totals = check_count(report);
    printf("# onehop %s (commit %s)\n# Check starting: all_reduce on %s\n", cli_version(),
           ONEHOP_COMMIT, report->line);
    print_table(report);
    printf("#\n");
    EACH_KIND(a, s, graph) print_refusals(report, a, s, graph);
    print_failures(report);
    printf("# combinations of algorithm, source, mode, type and ranks : %llu ran, %llu skipped, "
           "%llu not reached\n",
           (unsigned long long)totals.ran, (unsigned long long)totals.skipped,
           (unsigned long long)totals.missing);
    printf("# outputs compared bit by bit                             : %llu\n",
           (unsigned long long)totals.outputs);
    printf("# Out of bounds values : %llu %s\n", (unsigned long long)totals.outside,
           totals.outside ? "FAILED" : "OK");
    printf("# %llu wrong\n", (unsigned long long)totals.wrong);
    fflush(stdout);
}

/* ---- JSON ---- */

static void write_cell(FILE *file, const check_column *column, int a, int s, int graph, int d,
                       bool last) {
    const check_cell *cell = &column->cell[a][s][graph][d];
    fprintf(file,
            "    {\"ranks\": %d, \"layout\": \"%s\", \"ranks_per_device\": %d, \"algorithm\": "
            "\"%s\", \"source\": \"%s\", \"mode\": \"%s\", \"type\": \"%s\", \"state\": \"%s\",\n"
            "     \"outputs\": %llu, \"wrong\": %llu, \"out_of_bounds\": %llu,\n   ",
            column->world_size, layout_names[column->layout], column->ranks_per_device,
            onehop_algorithm_name((onehop_algorithm)a), onehop_source_name((onehop_source)s),
            graph ? "graph" : "eager", onehop_dtype_name((onehop_dtype)d),
            failed(cell)    ? "wrong"
            : cell->outputs ? "ok"
            : cell->tried   ? "skipped"
                            : "not reached",
            (unsigned long long)cell->outputs, (unsigned long long)cell->wrong,
            (unsigned long long)cell->outside);
    json_text(file, "refused", cell->refused, "");
    fprintf(file, "    }%s\n", last ? "" : ",");
}

static void write_cells(FILE *file, const check_report *report) {
    check_totals totals = check_count(report);
    uint64_t left = totals.ran + totals.skipped + totals.missing;
    for (int c = 0; c < report->columns; c++) EACH_KIND(a, s, graph)
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        const check_column *column = &report->column[c];
        if (!check_applies(a, s, column->world_size)) continue;
        write_cell(file, column, a, s, graph, d, --left == 0);
    }
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
            "%llu,\n  \"wrong\": %llu,\n  \"out_of_bounds\": %llu,\n  \"cells\": [\n",
            (unsigned long long)totals.ran, (unsigned long long)totals.skipped,
            (unsigned long long)totals.missing, (unsigned long long)totals.outputs,
            (unsigned long long)totals.wrong, (unsigned long long)totals.outside);
    write_cells(file, report);
    fprintf(file, "  ]\n}\n");
}
