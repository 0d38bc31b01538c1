/* A tensor-parallel linear layer: y = x W with the rows of W split over 4 ranks.
 *
 * Rank r holds 256 of the 1024 rows of W and the matching columns of x. Its product is a partial
 * sum of all of y; one all-reduce adds the partial sums, and every rank has y. This is what an
 * inference engine does twice per transformer layer. Ranks are threads on the host here; processes
 * and GPUs use the same calls.
 *
 * The result is compared with the unsplit layer. They differ by rounding only, and by how much is
 * known: with u = 2^-24, g(n) = n u / (1 - n u) and A = sum of |x_k w_k|, a sum of n products in
 * fp32, in whatever order, is within g(n) A of the exact one. The unsplit sum has n = 1024; a term
 * of the split one passes through at most 256 + 3 roundings. So fp32: |split - unsplit| <= (g(1024)
 * + g(259)) A. In bfloat16, with v = 2^-8 and P = sum of |partial sums|, the partial sums are
 * rounded once (v P) and the result once (v (1 + v) P), and the fp32 additions between are lost in
 * the slack of bf16: |split - unsplit| <= (g(1024) + g(259)) A + 2 v (1 + 2^-7) P. */
#include <onehop.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    RANKS = 4,
    ROWS = 16,
    INNER = 1024,
    COLUMNS = 512,
    SHARE = INNER / RANKS
};
enum {
    OUTPUTS = ROWS * COLUMNS
};

typedef struct rank_state {
    int rank;
    onehop_group *group;
    pthread_t thread;
    float partial[OUTPUTS]; /* this rank's product */
    float fp32[OUTPUTS];    /* all-reduced */
    uint16_t bf16[OUTPUTS];
    int failed;
} rank_state;

static float x[ROWS][INNER], w[INNER][COLUMNS], unsplit[OUTPUTS];
static rank_state ranks[RANKS];

/* Real numbers between -1 and 1 from a linear congruential generator. */
static float next_real(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(*state >> 32) * 0x1p-31f;
}

/* Rows first..first+count-1 of W times the matching columns of x. */
static void multiply(float *y, int first, int count) {
    memset(y, 0, OUTPUTS * sizeof *y);
    for (int row = 0; row < ROWS; row++)
        for (int k = first; k < first + count; k++)
            for (int column = 0; column < COLUMNS; column++)
                y[row * COLUMNS + column] += x[row][k] * w[k][column];
}

/* Nearest bfloat16, ties to even; the values here are finite. */
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static onehop_result forward(rank_state *self, onehop_context *context) {
    multiply(self->partial, self->rank * SHARE, SHARE);
    for (int i = 0; i < OUTPUTS; i++) self->bf16[i] = to_bf16(self->partial[i]);
    onehop_result result = onehop_all_reduce(context, self->partial, self->fp32, OUTPUTS,
                                             ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL);
    if (result != ONEHOP_OK) return result;
    return onehop_all_reduce(context, self->bf16, self->bf16, OUTPUTS, ONEHOP_BFLOAT16, ONEHOP_SUM,
                             NULL, NULL);
}

static void *run_rank(void *argument) {
    rank_state *self = argument;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context = NULL;
    config.group = self->group;
    config.device.kind = ONEHOP_DEVICE_HOST;
    onehop_result result = onehop_create(&config, &context);
    if (result == ONEHOP_OK) result = forward(self, context);
    if (result != ONEHOP_OK) {
        fprintf(stderr, "rank %d: %s: %s\n", self->rank, onehop_result_name(result),
                onehop_last_error());
        self->failed = 1;
    }
    onehop_destroy(context);
    return NULL;
}

static double gamma_of(double roundings) {
    return roundings * 0x1p-24 / (1 - roundings * 0x1p-24);
}

/* A and P of the head comment for output i. */
static void magnitudes(int i, double *products, double *partials) {
    *products = *partials = 0;
    for (int k = 0; k < INNER; k++)
        *products += fabs((double)x[i / COLUMNS][k] * (double)w[k][i % COLUMNS]);
    for (int rank = 0; rank < RANKS; rank++) *partials += fabs((double)ranks[rank].partial[i]);
}

/* Largest error and largest part of its bound that an error takes. */
static int compare(const char *name, int is_bf16) {
    double largest = 0, part = 0;
    int equal = 1;
    for (int i = 0; i < OUTPUTS; i++) {
        double products, partials;
        magnitudes(i, &products, &partials);
        double bound = (gamma_of(INNER) + gamma_of(SHARE + RANKS - 1)) * products;
        if (is_bf16) bound += 2 * 0x1p-8 * (1 + 0x1p-7) * partials;
        float value = is_bf16 ? from_bf16(ranks[0].bf16[i]) : ranks[0].fp32[i];
        double error = fabs((double)value - (double)unsplit[i]);
        if (!(error <= largest)) largest = error; /* takes a NaN as well */
        if (!(error / bound <= part)) part = error / bound;
    }
    for (int rank = 1; rank < RANKS; rank++)
        equal &= is_bf16 ? !memcmp(ranks[rank].bf16, ranks[0].bf16, sizeof ranks[0].bf16)
                         : !memcmp(ranks[rank].fp32, ranks[0].fp32, sizeof ranks[0].fp32);
    int good = part <= 1 && equal;
    printf("  %s: largest difference from the unsplit layer %.2e, %.1f %% of its bound; "
           "same bits on all ranks: %s\n",
           name, largest, 100 * part, equal ? "yes" : "NO");
    return good;
}

int main(void) {
    onehop_group *groups[RANKS];
    uint64_t state = 42;
    for (int row = 0; row < ROWS; row++)
        for (int k = 0; k < INNER; k++) x[row][k] = next_real(&state);
    for (int k = 0; k < INNER; k++)
        for (int column = 0; column < COLUMNS; column++) w[k][column] = next_real(&state);
    multiply(unsplit, 0, INNER);

    printf("row_parallel: y = x W, x [%d, %d], W [%d, %d] split by rows over %d ranks\n", ROWS,
           INNER, INNER, COLUMNS, RANKS);
    if (onehop_group_open_local(RANKS, groups) != ONEHOP_OK) {
        fprintf(stderr, "row_parallel: %s\n", onehop_last_error());
        return 1;
    }
    for (int rank = 0; rank < RANKS; rank++) {
        ranks[rank].rank = rank;
        ranks[rank].group = groups[rank];
        if (pthread_create(&ranks[rank].thread, NULL, run_rank, &ranks[rank]) != 0) abort();
    }
    int good = 1;
    for (int rank = 0; rank < RANKS; rank++) {
        pthread_join(ranks[rank].thread, NULL);
        onehop_group_close(groups[rank]);
        good &= !ranks[rank].failed;
    }
    if (good) good = compare("fp32", 0) & compare("bf16", 1);
    printf("row_parallel: %s\n", good ? "ok" : "FAILED");
    return good ? 0 : 1;
}
