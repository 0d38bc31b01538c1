#!/usr/bin/env bash
# tests/gpu/doc_program.sh BUILD GPUS: the program for GPUs of docs/getting-started.md, built as a reader would, prints
# what the page says. A rank for each GPU, two at most.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$1 gpus=$2
if ! nvcc=$(command -v nvcc); then
    echo "SKIPPED: no nvcc on PATH, so no CUDA to build with"
    exit 77
fi
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 tools/doc_example.py docs/getting-started.md gpus.c "$folder/gpus.c"
"${CC:-cc}" -o "$folder/gpus" "$folder/gpus.c" -Iinclude -I"$cuda/include" -L"$build" -lonehop -L"$cuda/lib64" -lcudart \
    -Wl,-rpath,"$PWD/$build:$cuda/lib64"
if [ "$gpus" -gt 1 ]; then
    RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 ONEHOP_NAME="doc $$" "$folder/gpus" &
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ONEHOP_NAME="doc $$" "$folder/gpus" | grep -x 'rank 0: 8'
    wait $!
else
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 "$folder/gpus" | grep -x 'rank 0: 1'
fi
