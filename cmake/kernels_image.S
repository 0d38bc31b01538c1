/* The GPU kernels as nvcc made them, in read-only memory of the library: C sees
 *   extern const unsigned char oh_kernels_fatbin[], oh_kernels_fatbin_end[];
 * Built only with nvcc; OH_HAVE_FATBIN tells the C side. */
    .section .rodata
    .balign 64
    .globl oh_kernels_fatbin
    .hidden oh_kernels_fatbin
    .type oh_kernels_fatbin, %object
oh_kernels_fatbin:
    .incbin OH_FATBIN_FILE
    .globl oh_kernels_fatbin_end
    .hidden oh_kernels_fatbin_end
    .type oh_kernels_fatbin_end, %object
oh_kernels_fatbin_end:
    .byte 0
    .size oh_kernels_fatbin, oh_kernels_fatbin_end - oh_kernels_fatbin
    .section .note.GNU-stack, "", %progbits
