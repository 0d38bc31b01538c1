#!/usr/bin/env bash
# tests/gpu/run.sh [PROGRAM...]: everything that runs on GPUs, one after the other: the programs of this
# folder, `onehop check --quick`, short runs of `onehop perf`; where python3 has PyTorch its memory, the Python package,
# the matrix through the stand-in for SGLang's class and a decoder; where there is compute-sanitizer a small matrix under
# it. With one GPU the ranks of the Python scripts share it, and there is no decoder. `make test-gpu`.
#   ONEHOP_GPU_PARTS    some of: programs python command sanitizers (default: all)
#   ONEHOP_BUILD_DIR    what was built, default build/release
#   ONEHOP_GPU_LOG      the log of it all, default build/test-gpu.log
#   ONEHOP_NCCL_LIB     the NCCL to compare with, default the one of PyTorch's wheels, else the system's
# Nothing here uses NVLink multicast.
# Last line: N passed, N failed, N skipped. Fails if anything failed; without a GPU all is skipped.
set -uo pipefail
cd "$(dirname "$0")/../.."

parts=" ${ONEHOP_GPU_PARTS:-programs python command sanitizers} "
if [ $# -gt 0 ]; then parts=""; fi
build=${ONEHOP_BUILD_DIR:-build/release}
log=${ONEHOP_GPU_LOG:-build/test-gpu.log}
programs=$build/tests/gpu
onehop=$build/onehop
passed=0 failed=0 skipped=0
unset ONEHOP_TIMEOUT_MS ONEHOP_DEVICE ONEHOP_NAME RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
# Multicast is never used here, by anybody.
unset ONEHOP_MULTICAST
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
has() { [[ $parts == *" $1 "* ]]; }

mkdir -p "$(dirname "$log")"
: >"$log" || exit 1
say() { echo "$*" | tee -a "$log"; }

header() {
    local gpus driver commit
    gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | sed 's/^ *//' | paste -sd, -)
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    commit=$(git rev-parse --short=12 HEAD 2>/dev/null)$(git diff --quiet HEAD 2>/dev/null || echo ' and changes')
    say "# GPU tests of onehop, $(date -u '+%Y-%m-%d %H:%M UTC')"
    say "# GPUs: ${gpus:-none found by nvidia-smi}; driver ${driver:-unknown}"
    say "# $(nvcc --version 2>/dev/null | grep release || echo 'no nvcc on PATH'); $("${CC:-cc}" --version | head -n 1)"
    say "# commit ${commit:-unknown}; $(nproc) cores, $(uname -sr)"
}

# verdict NAME STATUS SECONDS FILE: files the output, counts, prints a line.
verdict() {
    local name=$1 status=$2 seconds=$3 output=$4 why
    {
        echo "== $name: exit status $status, $seconds s"
        cat "$output"
    } >>"$log"
    case $status in
    0)
        passed=$((passed + 1))
        say "ok    $name ($seconds s)"
        ;;
    77)
        skipped=$((skipped + 1))
        why=$(grep -m1 -h SKIPPED "$output" || tail -n 1 "$output")
        say "SKIP  $name: ${why#SKIPPED: }"
        ;;
    *)
        failed=$((failed + 1))
        why="exit status $status"
        if [ "$status" = 124 ] || [ "$status" = 137 ]; then why="no end after its time limit"; fi
        say "FAIL  $name ($seconds s): $why"
        tail -n 12 "$output" | sed 's/^/        /'
        ;;
    esac
    case $name:$status in # what they found, not only that it was right
    test_gpu_two_comms:0 | test_gpu_reference:0 | test_gpu_reference:77 | torch_memory:0 | python_gpu:0 | torch_symmetric:0 | \
        python_reference:0 | tp_decode:0) grep -v '^SKIPPED' "$output" | sed 's/^/        /' ;;
    esac
}

# run NAME LIMIT COMMAND...
run() {
    local name=$1 limit=$2 status start=$SECONDS output
    shift 2
    output=$(mktemp)
    timeout -k 5 "$limit" "$@" >"$output" 2>&1 </dev/null
    status=$?
    verdict "$name" $status $((SECONDS - start)) "$output"
    rm -f "$output"
}

# command_of NAME ARGUMENTS: onehop NAME; exit status 3 means that this machine cannot.
command_of() {
    local name=$1 status start=$SECONDS output
    shift
    output=$(mktemp)
    timeout -k 5 120 "$onehop" "$name" --device cuda "$@" >"$output" 2>&1 </dev/null
    status=$?
    if [ "$name" = perf ] && [ $status = 0 ] && ! grep -q '^# 0 wrong' "$output"; then status=1; fi
    if [ $status = 3 ]; then status=77; fi
    verdict "$name $*" $status $((SECONDS - start)) "$output"
    rm -f "$output"
}
perf() { command_of perf "$@"; }

# sanitizer TOOL: two ranks, a process per GPU, each under the tool.
sanitizer() {
    local tool=$1 name=gpu-sanitizer-$$-$1 start=$SECONDS status=0 rank output pids=()
    output=$(mktemp -d)
    # A trial of a handle kind that the machine refuses is an answer, not an error.
    local options=()
    if [ "$tool" = memcheck ]; then options=(--report-api-errors no); fi
    for rank in 0 1; do
        timeout -k 5 400 "$sanitize" --tool "$tool" "${options[@]}" --error-exitcode 9 "$programs/test_gpu_matrix" \
            --rank $rank --world 2 --name "$name" >"$output/$rank" 2>&1 </dev/null &
        pids+=($!)
    done
    for rank in 0 1; do
        wait "${pids[$rank]}"
        local one=$?
        if [ $one != 0 ] && { [ $status = 0 ] || [ $status = 77 ]; }; then status=$one; fi
    done
    cat "$output/0" "$output/1" >"$output/both"
    verdict "compute-sanitizer $tool" $status $((SECONDS - start)) "$output/both"
    rm -rf "$output"
}

header
if [ ! -d "$programs" ]; then
    say "$programs is missing: build first (make build)"
    exit 1
fi
"$onehop" info >>"$log" 2>&1

if [ -z "${ONEHOP_NCCL_LIB:-}" ]; then
    wheel=$(python3 - 2>/dev/null <<'END'
import glob
import importlib.util
spec = importlib.util.find_spec("nvidia")
print(*[path for folder in spec.submodule_search_locations for path in glob.glob(f"{folder}/nccl/lib/libnccl.so.2")])
END
    )
    if [ -f "$wheel" ]; then export ONEHOP_NCCL_LIB=$wheel; fi
fi

for name in "$@"; do run "$name" 150 "$programs/$name"; done
if has programs; then
    for program in "$programs"/test_*; do
        [ -x "$program" ] && run "$(basename "$program")" 150 "$program"
    done
fi
if has python; then
    share=() # on the only GPU there is
    if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null)" = 1 ]; then share=(--share-gpu); fi
    run torch_memory 150 python3 tests/gpu/torch_memory.py "$build/libonehop.so" "${share[@]}"
    run python_gpu 150 python3 tests/gpu/python_gpu.py "$build" "${share[@]}"
    run torch_symmetric 120 python3 tests/gpu/torch_symmetric.py "$build" "${share[@]}"
    package=(env PYTHONPATH="$build/python" python3)
    run python_reference 240 "${package[@]}" tests/gpu/python_reference.py "${share[@]}"
    if [ "$("${package[@]}" -c 'import onehop, torch; print(torch.cuda.device_count() > 1)' 2>/dev/null)" = True ]; then
        run tp_decode 150 "${package[@]}" examples/tp_decode.py --device cuda --tokens 32 --rounds 2 --fused --check --limit 120
    else
        skipped=$((skipped + 1))
        say "SKIP  tp_decode: python3 has no package onehop, or no PyTorch that finds 2 GPUs"
    fi
fi
if has command; then
    command_of check --quick
    perf -g 2 -b 1K -e 1M -d bfloat16 -n 50 -G 5
    perf -g 2 -b 1K -e 1M -d bfloat16 -n 50 --eager
    perf -g 2 -b 1K -e 64K -d half -n 50 -G 5 --early-trigger
    perf -g 2 -b 16M -e 64M -d float -n 5 -G 2
    perf -g 2 -o reduce_scatter -b 16M -e 64M -d float -n 5 -G 2
    perf -g 2 -o all_gather -b 16M -e 64M -d float -n 5 -G 2
    perf -g 2 --layout thread -b 4K -e 64K -n 20 -G 5
    perf -g 2 --layout single -b 4K -e 64K -n 20 -G 5
    perf -g 4 --layout thread --ranks-per-device 4 -b 4K -e 64K -n 20 -G 5
    perf -g 8 --layout thread --ranks-per-device 4 -b 4K -e 64K -n 20 -G 5
fi

sanitize=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if has sanitizers; then
    if [ -n "$sanitize" ]; then
        for tool in memcheck initcheck synccheck; do sanitizer $tool; done
    else
        skipped=$((skipped + 1))
        say "SKIP  compute-sanitizer: not found on PATH or in /usr/local/cuda/bin"
    fi
fi

if [ $((passed + failed)) = 0 ]; then say "No GPU could be used: nothing was tested."; fi
say "Log: $log"
say "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
