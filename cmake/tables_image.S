/* The tuning tables compiled in, in read-only memory of the library: C sees
 *   extern const char oh_tables_image[];
 * pairs of strings, name and text, ended by an empty name. In the order in which rows are tried. */
    .macro table name
    .asciz "\name"
    .incbin "\name"
    .byte 0
    .endm

    .section .rodata
    .globl oh_tables_image
    .hidden oh_tables_image
    .type oh_tables_image, %object
oh_tables_image:
    table sm_90.table
    table sm_100.table
    table default.table
    table host.table
    .byte 0
    .size oh_tables_image, . - oh_tables_image
    .section .note.GNU-stack, "", %progbits
