# The host device's vector functions: one file, compiled once per instruction set with OH_ISA saying
# which; the library picks at run time. Sets vector_objects.
set(vector_objects "")
set(vector_source ${CMAKE_CURRENT_SOURCE_DIR}/src/device/host/vector_kernels.c)
list(REMOVE_ITEM sources ${vector_source})
if(NOT EXISTS ${vector_source})
  return()
endif()

function(onehop_vector_isa isa)
  add_library(onehop_vector_${isa} OBJECT ${vector_source})
  target_include_directories(onehop_vector_${isa} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include
                                                          ${CMAKE_CURRENT_SOURCE_DIR}/src)
  target_compile_definitions(onehop_vector_${isa} PRIVATE OH_ISA=${isa})
  target_compile_options(onehop_vector_${isa} PRIVATE ${ARGN})
  target_link_libraries(onehop_vector_${isa} PRIVATE onehop_flags)
  set(vector_objects ${vector_objects} $<TARGET_OBJECTS:onehop_vector_${isa}> PARENT_SCOPE)
endfunction()

onehop_vector_isa(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  onehop_vector_isa(avx2 -mavx2 -mf16c -mfma)
  onehop_vector_isa(avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mf16c -mfma
                    -mprefer-vector-width=512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  onehop_vector_isa(neon) # part of the architecture: no flag
endif()
