/* Images that were compiled at run time, kept on disk for later processes.
 *
 * One file an image, in ONEHOP_CACHE_DIR, else $XDG_CACHE_HOME/onehop, else ~/.cache/onehop; may be
 * deleted at any time. What is run is trusted like a library, so nothing is read that others could
 * have written: directory and file belong to this user or to root, are no symbolic links and can be
 * written by their owner alone (both are made private). A file's header holds the whole key and a
 * digest of the image; what does not agree to the last byte is not there.
 *
 * A file appears whole, by renaming, so any number of processes may write and read at a time; who
 * renames last wins, with the same content. A failure costs a compilation, never a call: it is
 * logged once. */
#ifndef OH_JIT_CACHE_H
#define OH_JIT_CACHE_H

#include "base/base.h"
#include "base/sha256.h"

/* An image in memory, from malloc(). */
typedef struct oh_jit_image {
    void *bytes;
    size_t size;
} oh_jit_image;

/* False: there is no image under this key, or none to be trusted. */
bool oh_jit_cache_read(const oh_digest *key, oh_jit_image *image_out);

/* Best effort. */
void oh_jit_cache_write(const oh_digest *key, const oh_jit_image *image);

#endif
