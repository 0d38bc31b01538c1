/* Property: the tuner takes a median for good once the last three are alike, wherever they
 * begin. */
/* labels: quick */
#include "cli/tune.h"

#include "harness.h"

#include <math.h>

static void medians_that_settle(void) {
    const double inf = INFINITY, seen[] = {4.3, 4.9, 4.676, 4.678, 4.7}, never[] = {inf, inf, inf},
                 mixed[] = {inf, 4.7, 4.7};
    double us[TUNE_REPEATS];
    CHECK(!tune_settled(seen, 2, 0.05, us));
    CHECK(!tune_settled(seen, 3, 0.05, us) && !tune_settled(seen, 4, 0.0, us));
    CHECK(us[0] == 4.676 && us[1] == 4.678 && us[2] == 4.9);
    CHECK(tune_settled(seen, 5, 0.05, us));
    CHECK(us[TUNE_REPEATS / 2] == 4.678);
    CHECK(tune_settled(never, 3, 0.05, us) && isinf(us[TUNE_REPEATS / 2]));
    CHECK(!tune_settled(mixed, 3, 0.05, us));
}

int main(void) {
    watchdog(20);
    medians_that_settle();
    return 0;
}
