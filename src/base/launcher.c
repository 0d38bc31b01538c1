/* Launchers: who starts a job's processes, and how each is told its place.
 *
 * The order is that of trust. RANK and WORLD_SIZE are set on purpose, by torchrun or by hand.
 * mpirun comes before srun, since inside a Slurm job mpirun may start its ranks below one task of
 * srun's, and they inherit that task's number. Of PMIx there is no row: it says a rank but no size,
 * and those who speak it (Open MPI, srun) say both in variables of their own.
 *
 * SLURM_PROCID and SLURM_NTASKS are set in the shell of sbatch and salloc too, where one process
 * starts all; SLURM_STEP_NUM_TASKS only srun sets. */
#include "base/base.h"

#define NONE OH_ENV_COUNT

static const oh_launcher launchers[] = {
    {"torchrun",
     OH_ENV_RANK,
     OH_ENV_WORLD_SIZE,
     OH_ENV_LOCAL_RANK,
     OH_ENV_LOCAL_WORLD_SIZE,
     NONE,
     {OH_ENV_MASTER_ADDR, OH_ENV_MASTER_PORT, OH_ENV_TORCHELASTIC_RUN_ID, NONE}},
    {"Open MPI",
     OH_ENV_OMPI_RANK,
     OH_ENV_OMPI_SIZE,
     OH_ENV_OMPI_LOCAL_RANK,
     OH_ENV_OMPI_LOCAL_SIZE,
     NONE,
     {OH_ENV_PMIX_NAMESPACE, NONE}},
    {"PMI",
     OH_ENV_PMI_RANK,
     OH_ENV_PMI_SIZE,
     OH_ENV_MPI_LOCALRANKID,
     OH_ENV_MPI_LOCALNRANKS,
     NONE,
     {OH_ENV_SLURM_JOB_ID, OH_ENV_SLURM_STEP_ID, NONE}},
    {"Slurm",
     OH_ENV_SLURM_PROCID,
     OH_ENV_SLURM_TASKS,
     OH_ENV_SLURM_LOCALID,
     NONE,
     OH_ENV_SLURM_NODES,
     {OH_ENV_SLURM_JOB_ID, OH_ENV_SLURM_STEP_ID, NONE}},
};

const oh_launcher *oh_launcher_find(void) {
    for (size_t i = 0; i < OH_LENGTH(launchers); i++)
        if (oh_env_text(launchers[i].rank) && oh_env_text(launchers[i].size)) return &launchers[i];
    return NULL;
}

onehop_result oh_launcher_local_rank(int64_t fallback, int64_t *local_rank_out) {
    const oh_launcher *launcher = oh_launcher_find();
    /* LOCAL_RANK alone has a meaning of its own: the GPU of this process. */
    const oh_env from =
        launcher && !oh_env_text(OH_ENV_LOCAL_RANK) ? launcher->local_rank : OH_ENV_LOCAL_RANK;
    return oh_env_integer(from, 0, INT32_MAX, fallback, local_rank_out);
}
