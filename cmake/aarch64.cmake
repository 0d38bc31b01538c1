# Toolchain for a cross build on Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross. nvcc makes code for GPUs
# only, so the kernels are built by the nvcc of the machine that builds.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
