/* SHA-256 (FIPS 180-4), for what is kept on disk and must be what was put there. */
#ifndef OH_SHA256_H
#define OH_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct oh_digest {
    uint8_t bytes[32];
} oh_digest;

typedef struct oh_sha256 {
    uint32_t state[8];
    uint64_t count; /* bytes added so far */
    uint8_t block[64];
} oh_sha256;

void oh_sha256_begin(oh_sha256 *hash);
void oh_sha256_add(oh_sha256 *hash, const void *bytes, size_t count);
oh_digest oh_sha256_end(oh_sha256 *hash);

#endif
