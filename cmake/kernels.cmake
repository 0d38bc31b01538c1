# GPU kernels: src/kernels/kernels.c, which the C compiler builds for the host, goes through nvcc as CUDA
# and becomes one byte array, oh_kernels_fatbin..oh_kernels_fatbin_end, in both libraries.
# Sets ONEHOP_HAVE_FATBIN to 0 or 1 and kernels_image to the object (empty without nvcc).
# Beside kernels.fatbin lie, for tools/check_kernels.py, what the compilers said (kernels.fatbin.log) and
# the PTX (kernels/).
set(ONEHOP_HAVE_FATBIN 0)
set(kernels_image "")
set(kernels_source ${CMAKE_CURRENT_SOURCE_DIR}/src/kernels/kernels.c)
set(ONEHOP_FATBIN "" CACHE FILEPATH "kernels.fatbin of another build tree, instead of running nvcc")

# onehop_embed_kernels(FATBIN): makes kernels_image of it.
macro(onehop_embed_kernels fatbin)
  set(ONEHOP_HAVE_FATBIN 1)
  set(image_source ${CMAKE_CURRENT_SOURCE_DIR}/cmake/kernels_image.S)
  set_source_files_properties(${image_source} PROPERTIES OBJECT_DEPENDS ${fatbin})
  add_library(onehop_kernels_image OBJECT ${image_source})
  target_compile_definitions(onehop_kernels_image PRIVATE OH_FATBIN_FILE="${fatbin}")
  set(kernels_image $<TARGET_OBJECTS:onehop_kernels_image>)
endmacro()

if(ONEHOP_CUDA STREQUAL OFF)
  message(STATUS "ONEHOP_CUDA=OFF: only the host device is built")
  return()
endif()
if(ONEHOP_FATBIN)
  message(STATUS "GPU kernels are taken from ${ONEHOP_FATBIN}")
  onehop_embed_kernels(${ONEHOP_FATBIN})
  return()
endif()

# PATH first, then CUDA_HOME, then the wheel that tools/bootstrap.sh puts into build/venv.
file(GLOB wheel_nvcc ${CMAKE_CURRENT_SOURCE_DIR}/build/venv/lib/python3*/site-packages/nvidia/cu13/bin)
find_program(ONEHOP_NVCC nvcc PATHS ENV CUDA_HOME /usr/local/cuda ${wheel_nvcc} PATH_SUFFIXES bin)
mark_as_advanced(ONEHOP_NVCC)

set(nvcc_flags -x cu -fatbin --compress-mode=size -O3 --fmad=false -std=c++17)
foreach(arch 80 90 100 120)
  list(APPEND nvcc_flags -gencode arch=compute_${arch},code=sm_${arch})
endforeach()
foreach(arch 80 90)
  list(APPEND nvcc_flags -gencode arch=compute_${arch},code=compute_${arch})
endforeach()

# A compiler that cannot make all targets is no compiler for us (too old, or no C++ preprocessor).
if(ONEHOP_NVCC AND NOT ONEHOP_NVCC_WORKS STREQUAL ONEHOP_NVCC)
  set(trial ${CMAKE_BINARY_DIR}/nvcc_trial)
  file(WRITE ${trial}.cu "extern \"C\" __global__ void trial(int *p) { *p = 1; }\n")
  execute_process(COMMAND ${ONEHOP_NVCC} ${nvcc_flags} -o ${trial}.fatbin ${trial}.cu
                  RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed)
    string(REGEX REPLACE "\n.*" "" output "${output}")
    message(STATUS "${ONEHOP_NVCC} cannot build the kernels (${output})")
  else()
    set(ONEHOP_NVCC_WORKS ${ONEHOP_NVCC} CACHE INTERNAL "the nvcc that passed the trial")
  endif()
endif()

if(NOT ONEHOP_NVCC OR NOT ONEHOP_NVCC_WORKS STREQUAL ONEHOP_NVCC)
  if(ONEHOP_CUDA STREQUAL ON)
    message(FATAL_ERROR "ONEHOP_CUDA=ON, but no nvcc (13.0 or later) that works was found")
  endif()
  message(STATUS "no nvcc: only the host device is built")
  return()
endif()
if(NOT EXISTS ${kernels_source})
  message(STATUS "no src/kernels/kernels.c: only the host device is built")
  return()
endif()

message(STATUS "GPU kernels are built with ${ONEHOP_NVCC}")
set(kernels_fatbin ${CMAKE_CURRENT_BINARY_DIR}/kernels.fatbin)
set(kept ${CMAKE_CURRENT_BINARY_DIR}/kernels)
file(MAKE_DIRECTORY ${kept})
set(logged sh -c [["$@" >"$0" 2>&1 || ! cat "$0"]] ${kernels_fatbin}.log)
add_custom_command(
  OUTPUT ${kernels_fatbin}
  COMMAND ${logged} ${ONEHOP_NVCC} ${nvcc_flags} -t 0 -Xptxas -v --keep --keep-dir ${kept}
          -MD -MF ${kernels_fatbin}.d -MT ${kernels_fatbin}
          -I${CMAKE_CURRENT_SOURCE_DIR}/src -I${CMAKE_CURRENT_SOURCE_DIR}/include
          -o ${kernels_fatbin} ${kernels_source}
  DEPENDS ${kernels_source}
  DEPFILE ${kernels_fatbin}.d
  COMMENT "Building GPU kernels" VERBATIM)
add_custom_target(onehop_kernels_fatbin DEPENDS ${kernels_fatbin})
onehop_embed_kernels(${kernels_fatbin})
add_dependencies(onehop_kernels_image onehop_kernels_fatbin)
