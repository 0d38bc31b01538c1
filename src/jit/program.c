/* See program.h.
 *
 * The program is kernels.c itself, whose lists of instances are replaced by the one line that is
 * wanted, so what runs is what the build's compilers make of the same sources. An expression goes
 * in front: it becomes a function, and OH_EPILOGUE calls it where a body rounds its sum. Its result
 * is made canonical like any sum: -x of a NaN would be the sentinel, for which a peer would wait
 * for ever. Elements that pad the last unit are left alone: arrays end with the message. */
#include "jit/program.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pairs of name and text, ended by an empty name; see cmake/sources.cmake. */
extern const char oh_sources_image[];

static const char main_source[] = "kernels/kernels.c";

/* ---- expressions ----------------------------------------------------------------------------- */

static bool is_name(const char *name) {
    size_t length = 0;
    if (!isalpha((unsigned char)name[0])) return false;
    while (isalnum((unsigned char)name[length]) || name[length] == '_') length++;
    return !name[length] && length <= 31;
}

static bool is_taken(const char *name) {
    static const char *const taken[] = {"x", "i", "row", "col"};
    for (size_t k = 0; k < OH_LENGTH(taken); k++)
        if (!strcmp(name, taken[k])) return true;
    return !strncmp(name, "oh_", 3);
}

/* `known` are the names before it. */
static onehop_result check_name(const char *name, const char *const *known, size_t count) {
    if (!is_name(name))
        return oh_error(
            ONEHOP_ERR_ARGUMENT,
            "onehop_expression_config: \"%.40s\" is no name of up to 31 letters, digits and _, "
            "a letter first",
            name);
    bool used = is_taken(name);
    for (size_t k = 0; k < count; k++) used |= !strcmp(name, known[k]);
    return used ? oh_error(ONEHOP_ERR_ARGUMENT, "onehop_expression_config: the name %s is taken",
                           name)
                : ONEHOP_OK;
}

static onehop_result check_names(const onehop_expression_config *op) {
    const char *known[2 * ONEHOP_OP_NAMES];
    size_t count = 0;
    onehop_result result = ONEHOP_OK;
    for (int k = 0; k < 2 * ONEHOP_OP_NAMES && !result; k++) {
        const bool array = k >= ONEHOP_OP_NAMES;
        const int at = k % ONEHOP_OP_NAMES;
        const char *name = array ? op->arrays[at] : op->scalars[at];
        if (!name) continue;
        result = check_name(name, known, count);
        known[count++] = name;
        if (!result && array && op->array_dtypes[at] != ONEHOP_FLOAT32 &&
            op->array_dtypes[at] != op->dtype)
            result = oh_error(
                ONEHOP_ERR_DTYPE,
                "onehop_expression_config: array %s is of data type %d, expected float32 (1) "
                "or that of the "
                "messages (%d)",
                name, (int)op->array_dtypes[at], (int)op->dtype);
    }
    return result;
}

static onehop_result refuse(const char *text, const char *at, const char *why) {
    int line = 1;
    for (const char *c = text; c < at; c++) line += *c == '\n';
    return oh_error(ONEHOP_ERR_ARGUMENT, "expression(%d): %s", line, why);
}

/* What would let the text be more, or less, than one expression: all that ends it, begins a
 * comment, a directive, a literal or a block, also spelt otherwise. */
static onehop_result check_text(const char *text) {
    static const char *const pairs[] = {"//", "/*", "*/", "%:", "<%", "%>", "<:", ":>", "??"};
    char open[64];
    size_t depth = 0;
    bool empty = true;
    for (const char *c = text; *c; c++) {
        const bool blank = strchr(" \t\n", *c) != NULL;
        empty = empty && blank;
        if (!blank && (*c < ' ' || *c > '~' || strchr(";{}#\\\"'`@$", *c)))
            return refuse(text, c, "a character that no expression has (nor may it be commented)");
        for (size_t k = 0; k < OH_LENGTH(pairs); k++)
            if (!strncmp(c, pairs[k], 2))
                return refuse(text, c, "two characters that no expression has");
        if (*c == '(' || *c == '[') {
            if (depth == sizeof open) return refuse(text, c, "too many brackets");
            open[depth++] = *c == '(' ? ')' : ']';
        } else if ((*c == ')' || *c == ']') && (depth == 0 || open[--depth] != *c)) {
            return refuse(text, c, "a bracket closes what was not opened");
        }
    }
    if (empty) return refuse(text, text, "it is empty");
    return depth ? refuse(text, text + strlen(text), "a bracket is not closed") : ONEHOP_OK;
}

onehop_result oh_expression_check(const onehop_expression_config *op) {
    if (!op->expression)
        return oh_error(ONEHOP_ERR_NULL, "onehop_expression_config: expression is NULL");
    if (!onehop_dtype_bytes(op->dtype))
        return oh_error(
            ONEHOP_ERR_DTYPE,
            "onehop_expression_config: data type %d is unknown; expected float32 (1), float16 "
            "(2) or bfloat16 (3)",
            (int)op->dtype);
    if (strlen(op->expression) > 4096)
        return oh_error(
            ONEHOP_ERR_TOO_LARGE,
            "onehop_expression_config: the expression has %zu characters, expected at most 4096",
            strlen(op->expression));
    onehop_result result = check_names(op);
    return result ? result : check_text(op->expression);
}

/* ---- programs -------------------------------------------------------------------------------- */

static const char *const type_names[] = {"0", "OH_F32", "OH_F16", "OH_BF16"};

/* An array of the caller's: any element type, read as fp32. Never by the read-only path, since the
 * kernel before this one may have written it. */
static const char array_text[] =
    "template <oh_u32 type> struct oh_array {\n"
    "    oh_u64 at;\n"
    "    __device__ __forceinline__ float operator[](oh_u64 k) const {\n"
    "        if (type == OH_F32) return oh_f32_of_bits(oh_ld_u32(at + 4 * k));\n"
    "        const oh_u32 bits = oh_ld_u16(at + 2 * k);\n"
    "        return type == OH_BF16 ? oh_f32_of_bits(bits << 16) : oh_f32_of_f16(bits);\n"
    "    }\n"
    "};\n";

static const char kernel_text[] =
    "#undef OH_KERNEL\n"
    "#define OH_KERNEL(name, bound, statement) \\\n"
    "    extern \"C\" __global__ void __launch_bounds__(bound, 1) \\\n"
    "        name(const __grid_constant__ oh_epilogue_args args) { \\\n"
    "        const oh_args *a = &args.call; \\\n"
    "        const oh_grid g = oh_grid_here(a->blocks); \\\n"
    "        statement; \\\n"
    "    }\n";

static void write_expression(FILE *to, const onehop_expression_config *op) {
    fputs("#define OH_EPILOGUE(a, x, i) oh_epilogue(a, x, i)\n"
          "#include \"kernels/prim/prim.h\"\n"
          "#include \"protocol/epilogue.h\"\n",
          to);
    fputs(array_text, to);
    fputs("static __device__ __forceinline__ float oh_expression(const float x, const oh_u64 i,\n"
          "    const oh_u64 row, const oh_u64 col",
          to);
    for (int k = 0; k < ONEHOP_OP_NAMES; k++)
        if (op->scalars[k]) fprintf(to, ", const float %s", op->scalars[k]);
    for (int k = 0; k < ONEHOP_OP_NAMES; k++)
        if (op->arrays[k])
            fprintf(to, ", const oh_array<%s> %s", type_names[op->array_dtypes[k]], op->arrays[k]);
    fprintf(to,
            ") {\n    return (float)(\n#line 1 \"expression\"\n%s\n#line 1 \"epilogue\"\n);\n}\n",
            op->expression);
}

static void write_call(FILE *to, const onehop_expression_config *op) {
    fputs("static __device__ __forceinline__ float oh_epilogue(const oh_args *a, float x, oh_u64 "
          "i) {\n"
          "    const oh_epilogue_args *e = (const oh_epilogue_args *)a;\n"
          "    if (i >= a->count) return x;\n",
          to);
    if (op->row_length)
        fprintf(to, "    const oh_u64 row = i / %zuull, col = i %% %zuull;\n", op->row_length,
                op->row_length);
    else
        fputs("    const oh_u64 row = 0, col = i;\n", to);
    fputs("    const float y = oh_expression(x, i, row, col", to);
    for (int k = 0; k < ONEHOP_OP_NAMES; k++)
        if (op->scalars[k]) fprintf(to, ", e->scalars[%d]", k);
    for (int k = 0; k < ONEHOP_OP_NAMES; k++)
        if (op->arrays[k])
            fprintf(to, ", oh_array<%s>{e->arrays[%d]}", type_names[op->array_dtypes[k]], k);
    fputs(");\n    return y != y ? oh_f32_of_bits(0x7FFFFFFFu) : y;\n}\n", to);
    fputs(kernel_text, to);
}

/* NULL: no memory. */
static char *write_text(const char *kernels, const onehop_expression_config *op) {
    char *text = NULL;
    size_t size;
    FILE *to = open_memstream(&text, &size);
    if (!to) return NULL;
    if (op) {
        write_expression(to, op);
        write_call(to, op);
    }
    fprintf(to, "#line 1 \"kernels.c\"\n%s", kernels);
    if (!fclose(to)) return text;
    free(text);
    return NULL;
}

/* What a list holds if one kernel is wanted. */
static const char *line_of(int kernel, const char *list) {
    const char *line = oh_kernel_line(kernel);
    const bool fused = !strncmp(line, OH_FUSED_LINE, strlen(OH_FUSED_LINE));
    return fused == !strcmp(list, "kernels/fused/fused.def") ? line : "";
}

static bool ends_in_def(const char *name) {
    const size_t length = strlen(name);
    return length > 4 && !strcmp(name + length - 4, ".def");
}

onehop_result oh_program_make(int kernel, const onehop_expression_config *op,
                              oh_program *program_out) {
    const char *kernels = "";
    memset(program_out, 0, sizeof *program_out);
    for (const char *name = oh_sources_image; *name;) {
        const char *text = name + strlen(name) + 1;
        oh_source source = {name, text};
        name = text + strlen(text) + 1;
        if (!strcmp(source.name, main_source)) {
            kernels = source.text;
            continue;
        }
        if (kernel != OH_EVERY_KERNEL && ends_in_def(source.name))
            source.text = line_of(kernel, source.name);
        if (program_out->count == OH_PROGRAM_SOURCES)
            return oh_error(ONEHOP_ERR_INTERNAL, "more than %d sources", OH_PROGRAM_SOURCES);
        program_out->sources[program_out->count++] = source;
    }
    program_out->expression = op != NULL;
    program_out->text = write_text(kernels, op);
    return program_out->text ? ONEHOP_OK : oh_error(ONEHOP_ERR_MEMORY, "no memory for a program");
}

void oh_program_free(oh_program *program) {
    free(program->text);
    program->text = NULL;
}
