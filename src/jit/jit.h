/* Kernels built at run time: program to image by NVRTC or from the cache (jit_cache.h), image to
 * function. Never on the launch path. */
#ifndef OH_JIT_H
#define OH_JIT_H

#include "jit/nvrtc.h"

/* What names a compilation: the program with all it may include, options, architecture, versions of
 * compiler and driver (0: none). */
oh_digest oh_jit_key(const oh_program *program, uint32_t arch, uint32_t compiler, uint32_t driver);

/* The same with the compiler that is here. UNSUPPORTED if ONEHOP_JIT is off or there is none. */
onehop_result oh_jit_name(const oh_program *program, uint32_t arch, uint32_t driver,
                          oh_digest *key_out);

/* The image under that key: from the cache, else compiled for sm_<arch> and put there. Needs no
 * GPU. To be freed by the caller. */
onehop_result oh_jit_get(const oh_program *program, uint32_t arch, const oh_digest *key,
                         oh_jit_image *image_out);

/* One kernel for exactly this device: loaded, found where an earlier compilation left it, or
 * compiled. What it loads stays loaded. UNSUPPORTED without a compiler, and on the host. */
onehop_result oh_jit_build(oh_device *device, const oh_program *program, const oh_kernel *kernel,
                           oh_function *out);

/* Compiles for that architecture (90 for sm_90), to see whether it can be done. Needs no GPU. */
onehop_result oh_jit_try(const oh_program *program, uint32_t arch);

/* OK unless ONEHOP_JIT is off. */
onehop_result oh_jit_allowed(void);

#endif
