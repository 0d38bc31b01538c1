/* NVRTC, the run-time compiler of CUDA, opened when it is needed and present: ONEHOP_NVRTC; else by
 * the loader, which knows the one that some other library of the process has opened; else in the
 * folders where pip puts it, beside any library of this process that lies in one; else
 * /usr/local/cuda. */
#ifndef OH_NVRTC_H
#define OH_NVRTC_H

#include "jit/jit_cache.h"
#include "jit/program.h"

/* What it is told besides the architecture, as X(option). */
#define OH_NVRTC_OPTIONS(X)     X("--fmad=false") X("-std=c++17")
#define OH_NVRTC_LISTED(option) option,
#define OH_NVRTC_JOINED(option) option " "

/* Opens it; once it has succeeded it costs nothing. UNSUPPORTED, with the reason. *version_out is
 * 13000 for 13.0. */
onehop_result oh_nvrtc_open(uint32_t *version_out);

/* Compiles for exactly sm_<arch>. What the compiler says of a program with somebody's own
 * expression is ARGUMENT and in the sentence, else INTERNAL. */
onehop_result oh_nvrtc_compile(const oh_program *program, uint32_t arch, oh_jit_image *image_out);

#endif
