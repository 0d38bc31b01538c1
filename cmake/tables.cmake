# The tuning tables under src/plan/tables become text in both libraries, read when a context is made.
# Sets tables_image to the object.
set(tables ${CMAKE_CURRENT_SOURCE_DIR}/src/plan/tables)
set(image_source ${CMAKE_CURRENT_SOURCE_DIR}/cmake/tables_image.S)
file(GLOB table_files CONFIGURE_DEPENDS ${tables}/*.table)
set_source_files_properties(${image_source} PROPERTIES OBJECT_DEPENDS "${table_files}")
add_library(onehop_tables_image OBJECT ${image_source})
target_compile_options(onehop_tables_image PRIVATE -Wa,-I${tables})
set(tables_image $<TARGET_OBJECTS:onehop_tables_image>)
