/* Entry of the executable: finds the subcommand. */
#include "cli/shared/cli.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int command_version(int argc, char **argv) {
    if (argc > 1) return cli_fail("version", CLI_USAGE, "unexpected argument '%s'", argv[1]);
    printf("onehop %s (commit %s)\n", cli_version(), ONEHOP_COMMIT);
    return CLI_OK;
}

static int command_help(int argc, char **argv);

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"perf", cli_perf, "time and verify all-reduce on this machine"},
    {"check", cli_check, "compare all that this machine can do with a scalar reference"},
    {"tune", cli_tune, "measure this machine and write a tuning table"},
    {"which", cli_which, "which rule of the tuning tables chooses for a message, and why"},
    {"run", cli_run, "run a program with the NCCL shim in NCCL's place"},
    {"info", cli_info, "devices, links, memory, environment variables"},
    {"version", command_version, "version of the tool and its library"},
    {"help", command_help, "this text; `onehop perf --help` for the flags of perf"},
};

static void print_commands(FILE *to) {
    fprintf(to, "usage: onehop COMMAND [FLAGS]\n\ncommands:\n");
    for (size_t i = 0; i < OH_LENGTH(commands); i++)
        fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].summary);
    fprintf(
        to,
        "\nexit codes: 0 ok, 1 wrong data, 2 usage, 3 unsupported, 4 timeout or lost peer, 5 too "
        "much noise\n");
}

static const struct command *find_command(const char *name) {
    for (size_t i = 0; i < OH_LENGTH(commands); i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

static int command_help(int argc, char **argv) {
    if (argc <= 1) {
        print_commands(stdout);
        return CLI_OK;
    }
    const struct command *command = find_command(argv[1]);
    if (!command) return cli_fail("help", CLI_USAGE, "no command '%s'", argv[1]);
    if (command->run == command_version || command->run == command_help) {
        printf("onehop %s: %s\n", command->name, command->summary);
        return CLI_OK;
    }
    char help_flag[] = "--help";
    char *help_argv[] = {argv[1], help_flag, NULL};
    return command->run(2, help_argv);
}

/* Descriptors 0 to 2 that are closed would be given to files and sockets, and what is printed would
 * land in them. Opened the wrong way round, they keep failing as a closed descriptor does. */
static void hold_standard_descriptors(void) {
    int file;
    while ((file = open("/dev/null", O_RDWR)) >= 0 && file <= STDERR_FILENO) {
        close(file);
        file = open("/dev/null", file == STDIN_FILENO ? O_WRONLY : O_RDONLY);
        if (file < 0) return;
    }
    if (file >= 0) close(file);
}

int main(int argc, char **argv) {
    hold_standard_descriptors();
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error of its write */
    if (argc < 2) {
        print_commands(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) name = "help";
    if (strcmp(name, "--version") == 0) name = "version";
    const struct command *command = find_command(name);
    if (!command) {
        fprintf(stderr, "onehop: no command '%s'\n", name);
        print_commands(stderr);
        return CLI_USAGE;
    }
    cli_command = command->name;
    int code = command->run(argc - 1, argv + 1);
    const char *reason = cli_close_output();
    if (!reason) return code;
    cli_fail(name, 0, "standard output could not be written: %s", reason);
    return code == CLI_OK ? CLI_UNSUPPORTED : code;
}
