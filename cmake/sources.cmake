# The sources of the GPU kernels become text in both libraries, for the compiler at run time: kernels.c, and every header
# of src/kernels and src/protocol that is not for the host alone. Sets sources_image to the object.
set(kernel_sources kernels/kernels.c)
file(GLOB_RECURSE kernel_headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/src
     ${CMAKE_CURRENT_SOURCE_DIR}/src/kernels/*.h ${CMAKE_CURRENT_SOURCE_DIR}/src/kernels/*.def
     ${CMAKE_CURRENT_SOURCE_DIR}/src/protocol/*.h)
list(FILTER kernel_headers EXCLUDE REGEX "^kernels/(host/|prim/prim_host\\.h|kernels\\.h)|^protocol/(algorithms|layout)\\.h$")
list(APPEND kernel_sources ${kernel_headers})

set(lines "")
foreach(name IN LISTS kernel_sources)
  string(APPEND lines "    source ${name}\n")
endforeach()
set(image_source ${CMAKE_CURRENT_BINARY_DIR}/sources_image.S)
file(CONFIGURE OUTPUT ${image_source} CONTENT [[/* Sources of the GPU kernels: pairs of strings, name and text, ended by an empty name. */
    .macro source name
    .asciz "\name"
    .incbin "\name"
    .byte 0
    .endm

    .section .rodata
    .globl oh_sources_image
    .hidden oh_sources_image
    .type oh_sources_image, %object
oh_sources_image:
@lines@    .byte 0
    .size oh_sources_image, . - oh_sources_image
    .section .note.GNU-stack, "", %progbits
]] @ONLY)
set(files ${kernel_sources})
list(TRANSFORM files PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/src/)
set_source_files_properties(${image_source} PROPERTIES OBJECT_DEPENDS "${files}")
add_library(onehop_sources_image OBJECT ${image_source})
target_compile_options(onehop_sources_image PRIVATE -Wa,-I${CMAKE_CURRENT_SOURCE_DIR}/src)
set(sources_image $<TARGET_OBJECTS:onehop_sources_image>)
