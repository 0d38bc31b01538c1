# The kernels: src/kernels/kernels.c, cut into units (OH_UNIT) that compilers work on beside each other. The C compiler
# makes kernels_objects of them, nvcc a fatbin each, which both libraries carry: C sees
#   extern const void *const oh_kernel_images[];    ended by NULL, empty without nvcc
# Sets kernels_objects (which include these images), kernels_fatbins and ONEHOP_NVCC_WORKS.
# Beside kernels/UNIT/kernels.fatbin lie, for tools/check_kernels.py, what the compilers said (kernels.fatbin.log) and
# the PTX.
set(kernels_units 1 2 3 4 5 6)
set(kernels_source ${PROJECT_SOURCE_DIR}/src/kernels/kernels.c)
set(ONEHOP_FATBIN "" CACHE STRING "All kernels.fatbin of another build tree, instead of running nvcc")
set(ONEHOP_CUDA_ARCHITECTURES native CACHE STRING
    "GPUs to build kernels for: native (those of this machine), all (for packages), or a list such as 90;100")

# ---- for the host ---------------------------------------------------------------------------------
# A hundred instances, which the host device runs by name only, for tests: at -O3 they take a minute to compile, and two
# under a sanitizer, even at -Og.
set(kernels_objects "")
foreach(unit IN LISTS kernels_units)
  add_library(onehop_kernels_${unit} OBJECT ${kernels_source})
  target_include_directories(onehop_kernels_${unit} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_definitions(onehop_kernels_${unit} PRIVATE OH_UNIT=${unit})
  target_compile_options(onehop_kernels_${unit} PRIVATE $<IF:$<BOOL:${ONEHOP_SANITIZE}>,-Og,$<$<CONFIG:Release>:-O1>>)
  target_link_libraries(onehop_kernels_${unit} PRIVATE onehop_flags)
  list(APPEND kernels_objects $<TARGET_OBJECTS:onehop_kernels_${unit}>)
endforeach()

# ---- for GPUs -------------------------------------------------------------------------------------
# onehop_cuda_targets(): sets targets to what nvcc shall make, as in 90 (code) and 90p (PTX); empty without a GPU.
macro(onehop_cuda_targets)
  set(targets ${ONEHOP_CUDA_ARCHITECTURES})
  if(targets STREQUAL all)
    set(targets 80 90 100 120 80p 90p)
  elseif(targets STREQUAL native)
    set(targets "")
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE targets ERROR_QUIET RESULT_VARIABLE failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" targets "${targets}")
    list(TRANSFORM targets REPLACE "\\." "")
    list(REMOVE_DUPLICATES targets)
  endif()
endmacro()

# onehop_nvcc_flags(): sets nvcc_flags, by targets.
macro(onehop_nvcc_flags)
  set(nvcc_flags -x cu -fatbin --compress-mode=size -O3 --fmad=false -std=c++17)
  foreach(target IN LISTS targets)
    string(REGEX MATCH "^[0-9]+" arch ${target})
    string(REGEX REPLACE "^([0-9]+)p$" "compute_\\1" code ${target})
    string(REGEX REPLACE "^([0-9]+)$" "sm_\\1" code ${code})
    list(APPEND nvcc_flags -gencode arch=compute_${arch},code=${code})
  endforeach()
endmacro()

# onehop_find_nvcc(): sets ONEHOP_NVCC_WORKS to an nvcc that can make `nvcc_flags`. PATH first, then CUDA_HOME, then the
# wheel that tools/bootstrap.sh puts into build/venv.
macro(onehop_find_nvcc)
  file(GLOB wheel_nvcc ${PROJECT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/nvidia/cu13/bin)
  find_program(ONEHOP_NVCC nvcc PATHS ENV CUDA_HOME /usr/local/cuda ${wheel_nvcc} PATH_SUFFIXES bin)
  mark_as_advanced(ONEHOP_NVCC)
  # A compiler that cannot make all targets is no compiler for us (too old, or no C++ preprocessor).
  if(ONEHOP_NVCC AND NOT ONEHOP_NVCC_TRIED STREQUAL "${ONEHOP_NVCC} ${nvcc_flags}")
    set(trial ${PROJECT_BINARY_DIR}/nvcc_trial)
    file(WRITE ${trial}.cu "extern \"C\" __global__ void trial(int *p) { *p = 1; }\n")
    execute_process(COMMAND ${ONEHOP_NVCC} ${nvcc_flags} -o ${trial}.fatbin ${trial}.cu
                    RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(failed)
      string(REGEX REPLACE "\n.*" "" output "${output}")
      message(STATUS "${ONEHOP_NVCC} cannot build the kernels (${output})")
    else()
      set(ONEHOP_NVCC_TRIED "${ONEHOP_NVCC} ${nvcc_flags}" CACHE INTERNAL "the nvcc that passed the trial")
    endif()
  endif()
  if(ONEHOP_NVCC AND ONEHOP_NVCC_TRIED STREQUAL "${ONEHOP_NVCC} ${nvcc_flags}")
    set(ONEHOP_NVCC_WORKS ${ONEHOP_NVCC})
  endif()
endmacro()

# onehop_build_fatbins(): sets kernels_fatbins, built by ONEHOP_NVCC_WORKS.
macro(onehop_build_fatbins)
  foreach(unit IN LISTS kernels_units)
    set(kept ${PROJECT_BINARY_DIR}/kernels/${unit})
    set(fatbin ${kept}/kernels.fatbin)
    file(MAKE_DIRECTORY ${kept})
    add_custom_command(
      OUTPUT ${fatbin}
      COMMAND sh -c [["$@" >"$0" 2>&1 || ! cat "$0"]] ${fatbin}.log
              ${ONEHOP_NVCC} ${nvcc_flags} -Xptxas -v --keep --keep-dir ${kept} -DOH_UNIT=${unit}
              -MD -MF ${fatbin}.d -MT ${fatbin} -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/include
              -o ${fatbin} ${kernels_source}
      DEPENDS ${kernels_source}
      DEPFILE ${fatbin}.d
      COMMENT "Building GPU kernels, unit ${unit}" VERBATIM)
    list(APPEND kernels_fatbins ${fatbin})
  endforeach()
endmacro()

set(ONEHOP_NVCC_WORKS "")
set(kernels_fatbins "")
if(ONEHOP_CUDA STREQUAL OFF)
  message(STATUS "ONEHOP_CUDA=OFF: only the host device is built")
elseif(ONEHOP_FATBIN)
  message(STATUS "GPU kernels are taken from ${ONEHOP_FATBIN}")
  set(kernels_fatbins ${ONEHOP_FATBIN})
else()
  onehop_cuda_targets()
  onehop_nvcc_flags()
  if(targets)
    onehop_find_nvcc()
  endif()
  if(ONEHOP_NVCC_WORKS)
    onehop_build_fatbins()
    list(FILTER targets EXCLUDE REGEX p)
    list(JOIN targets ", sm_" listed)
    message(STATUS "GPU kernels for sm_${listed} are built with ${ONEHOP_NVCC}")
  elseif(ONEHOP_CUDA STREQUAL ON AND targets)
    message(FATAL_ERROR "ONEHOP_CUDA=ON, but no nvcc (13.0 or later) that works was found")
  elseif(ONEHOP_CUDA STREQUAL ON)
    message(FATAL_ERROR "ONEHOP_CUDA=ON, but nvidia-smi shows no GPU: say ONEHOP_CUDA_ARCHITECTURES=all, or for which")
  elseif(targets)
    message(STATUS "no nvcc: only the host device is built")
  else()
    message(STATUS "no GPU: GPU kernels are not built (ONEHOP_CUDA_ARCHITECTURES=all builds them)")
  endif()
endif()

# ---- the images, in read-only memory of the library ------------------------------------------------
set(images "")
set(list "")
set(number 0)
foreach(fatbin IN LISTS kernels_fatbins)
  math(EXPR number "${number} + 1")
  string(APPEND images "    .balign 64\nimage${number}:\n    .incbin \"${fatbin}\"\n")
  string(APPEND list "    .quad image${number}\n")
endforeach()
set(image_source ${PROJECT_BINARY_DIR}/kernels_image.S)
file(CONFIGURE OUTPUT ${image_source} CONTENT [[/* The GPU kernels as nvcc made them; see cmake/kernels.cmake. */
    .section .rodata
@images@
    .section .data.rel.ro, "aw"
    .balign 8
    .globl oh_kernel_images
    .hidden oh_kernel_images
    .type oh_kernel_images, %object
oh_kernel_images:
@list@    .quad 0
    .size oh_kernel_images, . - oh_kernel_images
    .section .note.GNU-stack, "", %progbits
]] @ONLY)
set_source_files_properties(${image_source} PROPERTIES OBJECT_DEPENDS "${kernels_fatbins}")
add_library(onehop_kernels_image OBJECT ${image_source})
list(APPEND kernels_objects $<TARGET_OBJECTS:onehop_kernels_image>)
