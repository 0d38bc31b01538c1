/* Property: the processes that torchrun, mpirun or srun starts are the ranks of one job, and of one
 * only; what is wrong in the environment is named by its variable. */
/* All ranks are processes, of which ThreadSanitizer sees one at a time. */
/* labels: quick waits tsan-off */
#include "harness.h"

#include "base/base.h"

#define PIECES 9

/* Variables of one rank; "R" stands for its number. */
typedef struct job {
    const char *name;
    const char *variables[PIECES]; /* NAME=VALUE */
} job;

static void set_all(const job *j, int rank) {
    for (int i = 0; i < OH_ENV_COUNT; i++) unsetenv(oh_env_describe((oh_env)i)->name);
    for (int i = 0; i < PIECES && j->variables[i]; i++) {
        char name[64], digit[8];
        const char *value = strchr(j->variables[i], '=') + 1;
        snprintf(name, sizeof name, "%.*s", (int)(value - 1 - j->variables[i]), j->variables[i]);
        snprintf(digit, sizeof digit, "%d", rank);
        setenv(name, strcmp(value, "R") ? value : digit, 1);
    }
}

static onehop_result try_open(int rank, int world_size, const char *name,
                              onehop_group **group_out) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = rank;
    config.world_size = world_size;
    config.name = name;
    config.timeout_ms = 10000;
    return onehop_group_open(&config, group_out);
}

/* ---- who is what ----------------------------------------------------------------------------- */

static const job good[] = {
    {"torchrun", {"RANK=R", "WORLD_SIZE=2", "LOCAL_RANK=R", "MASTER_ADDR=here", "MASTER_PORT=1"}},
    {"Open MPI",
     {"OMPI_COMM_WORLD_RANK=R", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=R",
      "OMPI_COMM_WORLD_LOCAL_SIZE=2", "PMIX_NAMESPACE=77", "PMIX_RANK=R"}},
    {"MPICH", {"PMI_RANK=R", "PMI_SIZE=2", "MPI_LOCALRANKID=R", "MPI_LOCALNRANKS=2"}},
    {"srun",
     {"SLURM_PROCID=R", "SLURM_STEP_NUM_TASKS=2", "SLURM_LOCALID=R", "SLURM_JOB_ID=5",
      "SLURM_STEP_ID=0", "SLURM_STEP_NUM_NODES=1"}},
    {"mpirun in one task of srun's",
     {"OMPI_COMM_WORLD_RANK=R", "OMPI_COMM_WORLD_SIZE=2", "PMIX_NAMESPACE=77", "SLURM_PROCID=0",
      "SLURM_STEP_NUM_TASKS=1"}},
    {"torchrun's agents by srun",
     {"RANK=R", "WORLD_SIZE=2", "LOCAL_RANK=R", "MASTER_ADDR=here", "MASTER_PORT=1",
      "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_STEP_NUM_TASKS=1"}},
};

static void be_rank(int rank, int world_size, void *argument) {
    const job *j = argument;
    onehop_group *group;
    int64_t local = -1;
    set_all(j, rank);
    if (strstr(j->name, "MPICH")) /* says nothing of its job: this test may run beside itself */
        setenv("ONEHOP_NAME", own_name("MPICH"), 1);
    else
        setenv("SLURM_JOB_ID", own_name("job"), 1), setenv("MASTER_PORT", own_name("job"), 1),
            setenv("PMIX_NAMESPACE", own_name("job"), 1);
    CHECK_OK(try_open(0, 0, NULL, &group));
    CHECK_INT(rank, onehop_group_rank(group));
    CHECK_INT(world_size, onehop_group_size(group));
    CHECK_OK(oh_launcher_local_rank(rank, &local));
    CHECK_INT(rank, local);
    CHECK_OK(onehop_group_barrier(group));
    onehop_group_close(group);
}

typedef struct wrong {
    job j;
    onehop_result result;
    const char *part;
} wrong;

static const wrong bad[] = {
    {{"nobody", {NULL}}, ONEHOP_ERR_ENVIRONMENT, "RANK is not set: expected RANK and WORLD_SIZE"},
    {{"half", {"RANK=0"}}, ONEHOP_ERR_ENVIRONMENT, "WORLD_SIZE is not set"},
    {{"a shell of sbatch", {"SLURM_PROCID=0", "SLURM_NTASKS=4", "SLURM_JOB_ID=5"}},
     ONEHOP_ERR_ENVIRONMENT,
     "RANK is not set"},
    {{"rank", {"RANK=2", "WORLD_SIZE=2"}},
     ONEHOP_ERR_RANK,
     "RANK is 2: expected 0 to 1, since WORLD_SIZE is 2"},
    {{"rank", {"OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=2"}},
     ONEHOP_ERR_RANK,
     "OMPI_COMM_WORLD_RANK is 2: expected 0 to 1, since OMPI_COMM_WORLD_SIZE is 2"},
    {{"size", {"PMI_RANK=0", "PMI_SIZE=17"}},
     ONEHOP_ERR_WORLD_SIZE,
     "PMI_SIZE is 17: expected 1 to 16"},
    {{"text", {"SLURM_PROCID=x", "SLURM_STEP_NUM_TASKS=2"}},
     ONEHOP_ERR_ENVIRONMENT,
     "SLURM_PROCID"},
    {{"hosts", {"SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NUM_NODES=2"}},
     ONEHOP_ERR_SEVERAL_HOSTS,
     "SLURM_STEP_NUM_NODES is 2"},
    {{"hosts",
      {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_SIZE=2"}},
     ONEHOP_ERR_SEVERAL_HOSTS,
     "OMPI_COMM_WORLD_SIZE is 4 and OMPI_COMM_WORLD_LOCAL_SIZE is 2"},
    {{"no name", {"RANK=0", "WORLD_SIZE=2"}}, ONEHOP_ERR_ENVIRONMENT, "no name"},
};

static void wrong_environments(void) {
    onehop_group *group;
    for (size_t i = 0; i < OH_LENGTH(bad); i++) {
        set_all(&bad[i].j, 0);
        CHECK_RESULT(bad[i].result, try_open(0, 0, NULL, &group));
        CHECK_CONTAINS(bad[i].part, onehop_last_error());
    }
}

/* ---- two jobs at once ------------------------------------------------------------------------ */

static void set_job(int rank, int number) {
    static const job mpi = {"Open MPI", {"OMPI_COMM_WORLD_RANK=R", "OMPI_COMM_WORLD_SIZE=2"}};
    char text[160];
    set_all(&mpi, rank);
    snprintf(text, sizeof text, "%s, number %d", own_name("job"), number);
    setenv("PMIX_NAMESPACE", text, 1);
}

/* Processes 0 to 3 are ranks 0, 1 of one mpirun and 0, 1 of another. */
static void by_default(int place, int world_size, void *argument) {
    (void)world_size, (void)argument;
    int all[2], mine = place / 2;
    onehop_group *group;
    set_job(place % 2, mine);
    CHECK_OK(try_open(0, 0, NULL, &group));
    CHECK_OK(onehop_group_allgather(group, &mine, all, sizeof mine));
    CHECK(all[0] == mine && all[1] == mine);
    onehop_group_close(group);
}

/* Rank 0 is of one job, rank 1 of another, and the program has written a name. */
static void under_one_name(int rank, int world_size, void *argument) {
    (void)argument;
    onehop_group *group;
    set_job(rank, rank);
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, try_open(rank, world_size, own_name("mine"), &group));
    CHECK_CONTAINS("ranks 0 and 1 of group", onehop_last_error());
    CHECK_CONTAINS("different jobs", onehop_last_error());
}

int main(void) {
    watchdog(60);
    wrong_environments();
    for (size_t i = 0; i < OH_LENGTH(good); i++) run_ranks(2, be_rank, (void *)&good[i]);
    for (int i = 0; i < 5; i++) run_ranks(4, by_default, NULL);
    run_ranks(2, under_one_name, NULL);
    return 0;
}
