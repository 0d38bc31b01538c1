/* `onehop run -- COMMAND...`: runs a program with the NCCL shim in NCCL's place. Programs that are
 * linked to NCCL, and those that open "libnccl.so.2", get it by LD_PRELOAD; vLLM and SGLang, which
 * may open a path, by their own variables. */
#include "cli/shared/cli.h"

#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: onehop run [--print] -- COMMAND [ARGUMENT...]\n\n"
    "Runs COMMAND with the NCCL shim (docs/nccl.md): LD_PRELOAD, VLLM_NCCL_SO_PATH, "
    "SGLANG_NCCL_SO_PATH,\n"
    "ONEHOP_NCCL_REAL where NCCL is found beside the command's Python, and, if unset,\n"
    "TORCH_NCCL_USE_COMM_NONBLOCKING=0.\n"
    "  --print   print what would be set, and run nothing\n";

/* ---- files ----------------------------------------------------------------------------------- */

/* The first file that fits the pattern folder/tail, as a real path; false: none. */
static bool find(const char *folder, const char *tail, char *path_out) {
    char pattern[PATH_MAX + 128];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/%s", folder, tail);
    if (glob(pattern, 0, NULL, &found)) return false;
    const bool there = realpath(found.gl_pathv[0], path_out) && access(path_out, R_OK) == 0;
    globfree(&found);
    return there;
}

/* Cuts the last part of a path off. */
static void to_folder(char *path) {
    char *slash = strrchr(path, '/');
    if (slash) *slash = 0;
}

/* In the build tree, or installed. */
static bool find_shim(char *path_out) {
    static const char *const places[] = {"nccl/libnccl.so.2", "../lib*/onehop/libnccl.so.2",
                                         "../lib/*/onehop/libnccl.so.2"};
    char self[PATH_MAX];
    const ssize_t size = readlink("/proc/self/exe", self, sizeof self - 1);
    if (size < 0) return false;
    self[size] = 0;
    to_folder(self);
    for (size_t i = 0; i < OH_LENGTH(places); i++)
        if (find(self, places[i], path_out)) return true;
    return false;
}

/* The command as execvp would find it. */
static bool find_program(const char *name, char *path_out) {
    const char *at = oh_env_text(OH_ENV_PATH);
    if (strchr(name, '/')) {
        snprintf(path_out, PATH_MAX, "%s", name);
        return access(path_out, X_OK) == 0;
    }
    while (at && *at) {
        const size_t length = strcspn(at, ":");
        snprintf(path_out, PATH_MAX, "%.*s/%s", (int)length, at, name);
        if (access(path_out, X_OK) == 0) return true;
        at += length + (at[length] == ':');
    }
    return false;
}

/* ---- the real library ------------------------------------------------------------------------ */

/* Beside a Python, or a script of one, that lies in `folder`: in a virtual environment the folder
 * says more than the file that a link leads to. */
static bool find_wheel_at(char *program, char *path_out) {
    static const char *const places[] = {
        "../lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "../lib/python3*/dist-packages/nvidia/nccl/lib/libnccl.so.2",
        "../local/lib/python3*/dist-packages/nvidia/nccl/lib/libnccl.so.2",
        "../lib/python3/dist-packages/nvidia/nccl/lib/libnccl.so.2"};
    to_folder(program);
    for (size_t i = 0; i < OH_LENGTH(places); i++)
        if (find(program, places[i], path_out)) return true;
    return false;
}

static bool find_wheel_of(const char *name, char *path_out) {
    char program[PATH_MAX], real[PATH_MAX];
    if (!find_program(name, program)) return false;
    const bool resolved = realpath(program, real);
    return find_wheel_at(program, path_out) || (resolved && find_wheel_at(real, path_out));
}

static bool find_wheel(const char *command, char *path_out) {
    const char *home = oh_env_text(OH_ENV_HOME);
    return find_wheel_of(command, path_out) || find_wheel_of("python3", path_out) ||
           find_wheel_of("python", path_out) ||
           (home &&
            find(home, ".local/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2", path_out));
}

/* What the user has named stays; an engine's own variable names it, too. */
static const char *find_real(const char *command, const char *shim, char *path_out) {
    static const oh_env named[] = {OH_ENV_NCCL_REAL, OH_ENV_VLLM_NCCL, OH_ENV_SGLANG_NCCL};
    char real[PATH_MAX];
    for (size_t i = 0; i < OH_LENGTH(named); i++) {
        const char *text = oh_env_text(named[i]);
        if (text && (!realpath(text, real) || strcmp(real, shim))) return text;
    }
    return find_wheel(command, path_out) ? path_out : NULL;
}

/* ---- the command ----------------------------------------------------------------------------- */

static void set(const char *name, const char *value, bool print) {
    if (print)
        printf("%s=%s\n", name, value);
    else
        setenv(name, value, 1);
}

static int set_all(const char *command, bool print) {
    char shim[PATH_MAX], wheel[PATH_MAX], preload[2 * PATH_MAX];
    const char *before = oh_env_text(OH_ENV_PRELOAD);
    if (!find_shim(shim))
        return cli_fail("run", CLI_UNSUPPORTED,
                        "found no NCCL shim beside this command: expected nccl/libnccl.so.2 in its "
                        "folder, or ../lib/onehop/libnccl.so.2 (is it built, or installed?)");
    if (strpbrk(shim, ": "))
        return cli_fail("run", CLI_UNSUPPORTED,
                        "the loader cannot preload %s: the path has a colon or a space", shim);
    const char *real = find_real(command, shim, wheel);
    snprintf(preload, sizeof preload, "%s%s%s", shim, before ? ":" : "", before ? before : "");
    if (before && !strncmp(before, shim, strlen(shim)))
        snprintf(preload, sizeof preload, "%s", before);
    set("LD_PRELOAD", preload, print);
    set("VLLM_NCCL_SO_PATH", shim, print);
    set("SGLANG_NCCL_SO_PATH", shim, print);
    if (real) set("ONEHOP_NCCL_REAL", real, print);
    /* PyTorch makes communicators non-blocking where a device is given at once: those are
     * NCCL's. */
    if (!print) setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "0", 0);
    return CLI_OK;
}

int cli_run(int argc, char **argv) {
    int at = 1;
    bool print = false;
    for (; at < argc && argv[at][0] == '-' && strcmp(argv[at], "--"); at++) {
        if (!strcmp(argv[at], "--help") || !strcmp(argv[at], "-h")) {
            fputs(usage, stdout);
            return CLI_OK;
        }
        if (strcmp(argv[at], "--print"))
            return cli_fail("run", CLI_USAGE, "unknown flag '%s'; --help lists them", argv[at]);
        print = true;
    }
    if (at < argc && !strcmp(argv[at], "--")) at++;
    if (at == argc && !print) return cli_fail("run", CLI_USAGE, "expected -- COMMAND");
    const int code = set_all(at < argc ? argv[at] : "python3", print);
    if (code != CLI_OK || print) return code;
    execvp(argv[at], &argv[at]);
    return cli_fail("run", errno == ENOENT ? 127 : 126, "cannot run %s: %s", argv[at],
                    strerror(errno));
}
