/* The functions of functions.def that the shim hands on without knowing their arguments. A stub jumps
 * through a table of addresses of the real library, with all argument registers and the stack as the
 * caller left them. The table is filled by oh_shim_target, at the first use of each entry; stubs of
 * class WORK ask it every time, since a group may hold calls back that come before.
 *
 * Vector registers: arguments are passed in the first eight; what lies above 128 bits of them is no
 * argument of a C function of NCCL. */

#if defined(__x86_64__)

    .hidden oh_shim_targets
    .hidden oh_shim_target

    .text
    .p2align 4
    .type oh_shim_ask, @function
/* r11d: index. Asks for the address, and jumps there. */
oh_shim_ask:
    .cfi_startproc
    pushq %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    movq %rsp, %rbp
    .cfi_def_cfa_register %rbp
    andq $-16, %rsp
    subq $192, %rsp
    movq %rdi, 0(%rsp)
    movq %rsi, 8(%rsp)
    movq %rdx, 16(%rsp)
    movq %rcx, 24(%rsp)
    movq %r8, 32(%rsp)
    movq %r9, 40(%rsp)
    movq %rax, 48(%rsp)
    movq %r10, 56(%rsp)
    movaps %xmm0, 64(%rsp)
    movaps %xmm1, 80(%rsp)
    movaps %xmm2, 96(%rsp)
    movaps %xmm3, 112(%rsp)
    movaps %xmm4, 128(%rsp)
    movaps %xmm5, 144(%rsp)
    movaps %xmm6, 160(%rsp)
    movaps %xmm7, 176(%rsp)
    movl %r11d, %edi
    movq 8(%rbp), %rsi
    call oh_shim_target
    movq %rax, %r11
    movq 0(%rsp), %rdi
    movq 8(%rsp), %rsi
    movq 16(%rsp), %rdx
    movq 24(%rsp), %rcx
    movq 32(%rsp), %r8
    movq 40(%rsp), %r9
    movq 48(%rsp), %rax
    movq 56(%rsp), %r10
    movaps 64(%rsp), %xmm0
    movaps 80(%rsp), %xmm1
    movaps 96(%rsp), %xmm2
    movaps 112(%rsp), %xmm3
    movaps 128(%rsp), %xmm4
    movaps 144(%rsp), %xmm5
    movaps 160(%rsp), %xmm6
    movaps 176(%rsp), %xmm7
    leave
    .cfi_def_cfa %rsp, 8
    .cfi_restore %rbp
    jmp *%r11
    .cfi_endproc
    .size oh_shim_ask, . - oh_shim_ask

    .macro STUB name, index, work
    .globl \name
    .globl p\name
    .type \name, @function
    .type p\name, @function
    .p2align 4
\name:
p\name:
    .cfi_startproc
    endbr64
    .if \work == 0
    movq oh_shim_targets + 8 * \index(%rip), %r11
    testq %r11, %r11
    jz 1f
    jmp *%r11
1:
    .endif
    movl $\index, %r11d
    jmp oh_shim_ask
    .cfi_endproc
    .size \name, . - \name
    .size p\name, . - p\name
    .endm

#elif defined(__aarch64__)

    .hidden oh_shim_targets
    .hidden oh_shim_target

    .text
    .p2align 4
    .type oh_shim_ask, %function
/* w16: index. Asks for the address, and jumps there. x8 is where a struct is returned. */
oh_shim_ask:
    .cfi_startproc
    stp x29, x30, [sp, #-224]!
    .cfi_def_cfa_offset 224
    .cfi_offset 29, -224
    .cfi_offset 30, -216
    mov x29, sp
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    str x8, [sp, #80]
    stp q0, q1, [sp, #96]
    stp q2, q3, [sp, #128]
    stp q4, q5, [sp, #160]
    stp q6, q7, [sp, #192]
    mov w0, w16
    mov x1, x30
    bl oh_shim_target
    mov x16, x0
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldr x8, [sp, #80]
    ldp q0, q1, [sp, #96]
    ldp q2, q3, [sp, #128]
    ldp q4, q5, [sp, #160]
    ldp q6, q7, [sp, #192]
    ldp x29, x30, [sp], #224
    .cfi_def_cfa_offset 0
    .cfi_restore 29
    .cfi_restore 30
    br x16
    .cfi_endproc
    .size oh_shim_ask, . - oh_shim_ask

    .macro STUB name, index, work
    .globl \name
    .globl p\name
    .type \name, %function
    .type p\name, %function
    .p2align 4
\name:
p\name:
    .cfi_startproc
    hint #34 /* bti c */
    .if \work == 0
    adrp x16, oh_shim_targets + 8 * \index
    ldr x16, [x16, #:lo12:oh_shim_targets + 8 * \index]
    cbz x16, 1f
    br x16
1:
    .endif
    mov w16, #\index
    b oh_shim_ask
    .cfi_endproc
    .size \name, . - \name
    .size p\name, . - p\name
    .endm

#else
#error "nccl_stubs.S knows x86-64 and aarch64"
#endif

    .set oh_at, 0
    .altmacro
    .macro NEXT name, work
    STUB \name, %oh_at, \work
    .set oh_at, oh_at + 1
    .endm

#define NCCL_FUNCTION(name, since, class) NCCL_##class(name)
#define NCCL_FORWARD(name) NEXT name, 0
#define NCCL_COMM(name) NEXT name, 0
#define NCCL_WORK(name) NEXT name, 1
#define NCCL_OURS(name) .set oh_at, oh_at + 1
#include "nccl_shim/functions.def"

    .section .note.GNU-stack, "", %progbits
