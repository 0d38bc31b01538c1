/* Property: grids of several communicators on a GPU leave each other room, or creation fails and
 * says the rule (residency.h). This is the arithmetic and the list, without a GPU;
 * tests/gpu/test_gpu_two_comms.c has the calls. */
/* labels: quick */
#include "harness.h"

#include "communicator/residency.h"

#define SMS 132

/* What follows one communicator after the other, of `ranks` on the GPU, with grids left open. */
static void expect_shares(uint32_t ranks, const uint32_t *expected, int count) {
    oh_grids there = {0, 0};
    for (int i = 0; i < count; i++) {
        const uint32_t blocks = oh_residency_share(&there, SMS, ranks);
        CHECK_INT(expected[i], blocks);
        there.blocks += (uint64_t)ranks * blocks;
        if (blocks > there.largest) there.largest = blocks;
        if (blocks) CHECK(there.blocks - there.largest < SMS);
    }
}

static void shares(void) {
    static const uint32_t one[] = {132, 65, 33, 16, 8, 4, 2, 2, 0};
    static const uint32_t two[] = {66, 16, 8, 4, 2, 2, 0};
    static const uint32_t four[] = {33, 4, 2, 2, 0};
    static const uint32_t sixteen[] = {8, 0};
    expect_shares(1, one, 9);
    expect_shares(2, two, 7);
    expect_shares(4, four, 5);
    expect_shares(16, sixteen, 2);
}

/* Fits or not, by counting: one block of each grid but the largest finds an empty
 * multiprocessor. */
static void rule(void) {
    const oh_grids none = {0, 0}, small = {16, 16}, whole = {132, 132}, pair = {132, 66};
    CHECK(oh_residency_fits(&none, SMS, 1, 132));
    CHECK(oh_residency_fits(&none, SMS, 2, 66));
    CHECK(oh_residency_fits(&small, SMS, 1, 132));
    CHECK_INT(132, oh_residency_share(&small, SMS, 1));
    CHECK(oh_residency_fits(&whole, SMS, 1, 131));
    CHECK(!oh_residency_fits(&whole, SMS, 1, 132));
    CHECK(oh_residency_fits(&pair, SMS, 2, 32));
    CHECK(!oh_residency_fits(&pair, SMS, 2, 33));
    for (uint32_t blocks = 2; blocks < 66; blocks++) /* fewer fit where more do */
        if (oh_residency_fits(&pair, SMS, 2, blocks))
            CHECK(oh_residency_fits(&pair, SMS, 2, blocks - 1));
}

static oh_residency *claim(int gpu, uint32_t ranks, uint32_t blocks, uint64_t communicator,
                           uint32_t expected) {
    const oh_claim c = {gpu, SMS, ranks, blocks, communicator};
    oh_residency *r = NULL;
    CHECK_OK(oh_residency_claim(&c, &r));
    CHECK_INT(expected, oh_residency_blocks(r));
    return r;
}

static void refused(uint32_t blocks, const char *part) {
    const oh_claim c = {0, SMS, 1, blocks, 0};
    oh_residency *r = NULL;
    CHECK_RESULT(blocks ? ONEHOP_ERR_ARGUMENT : ONEHOP_ERR_UNSUPPORTED, oh_residency_claim(&c, &r));
    CHECK(!r);
    CHECK_CONTAINS(part, onehop_last_error());
    CHECK_CONTAINS("ONEHOP_FLAG_ORDERED", onehop_last_error());
}

static void list(void) {
    oh_residency *a0 = claim(0, 2, 0, 7, 66), *a1 = claim(0, 2, 0, 7, 66);
    oh_residency *elsewhere = claim(1, 1, 0, 7, 132);
    CHECK(a0 == a1);
    oh_residency *b = claim(0, 2, 0, 8, 16);
    refused(66, "GPU 0: no room for grids of 66 blocks of 1 rank. 2 other communicators");
    oh_residency_shrink(b, 10); /* a peer had less */
    oh_residency_shrink(b, 12);
    CHECK_INT(10, oh_residency_blocks(b));
    oh_residency *c = claim(0, 1, 45, 0, 45), *d; /* 131 beside the largest */
    refused(0, "grids of 2 or more blocks");
    refused(2, "fewer than its 132 multiprocessors");
    oh_residency_release(b);
    d = claim(0, 1, 0, 0, 10);
    oh_residency_release(a0);
    oh_residency_release(d);
    d = claim(0, 1, 0, 0, 10); /* a1 is still there */
    oh_residency_release(d);
    oh_residency_release(a1);
    oh_residency_release(c);
    oh_residency_release(NULL);
    oh_residency_release(claim(0, 1, 0, 0, 132)); /* nothing is left */
    oh_residency_release(elsewhere);
}

/* Two threads that create at once never get more together than fits. */
static void *claim_and_release(void *argument) {
    for (int i = 0; i < 2000; i++) {
        const oh_claim c = {3, SMS, 1, 0, 0};
        oh_residency *mine = NULL;
        CHECK_OK(oh_residency_claim(&c, &mine));
        const uint32_t blocks = oh_residency_blocks(mine);
        CHECK(blocks == 132 || blocks == 65);
        oh_residency_release(mine);
    }
    return argument;
}

int main(void) {
    pthread_t other;
    watchdog(60);
    rule();
    shares();
    list();
    CHECK(pthread_create(&other, NULL, claim_and_release, NULL) == 0);
    claim_and_release(NULL);
    CHECK(pthread_join(other, NULL) == 0);
    printf("grids on a GPU leave each other room\n");
    return 0;
}
