#!/usr/bin/env bash
# tests/gpu/run.sh [PROGRAM...]: everything that runs on GPUs, one after the other: the programs of this
# folder, `onehop check --quick`, short runs of `onehop perf`; where python3 has PyTorch its memory, the Python package,
# the matrix through the stand-in for SGLang's class and a decoder; where there is compute-sanitizer a small matrix under
# it. `make test-gpu`.
# With one GPU all ranks share it. What has a process per rank then runs under the driver's MPS daemon, which this script
# starts (nvidia-cuda-mps-control, in a folder of its own) and ends; nothing else sees the daemon. Two parts do without:
# test_gpu_lost, which kills processes, and the sanitizers. Where the daemon cannot be started, the GPU serves processes
# in turn, milliseconds a call: the programs leave such parts out or are skipped, and perf runs threads.
#   ONEHOP_GPU_PARTS    some of: programs python command sanitizers (default: all)
#   ONEHOP_BUILD_DIR    what was built, default build/release
#   ONEHOP_GPU_LOG      the log of it all, default build/test-gpu.log
#   ONEHOP_NCCL_LIB     the NCCL to compare with, default the one of PyTorch's wheels, else the system's
# Nothing here uses NVLink multicast.
# Last line: N passed, N failed, N skipped. Fails if anything failed; without a GPU all is skipped.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

parts=" ${ONEHOP_GPU_PARTS:-programs python command sanitizers} "
if [ $# -gt 0 ]; then parts=""; fi
build=${ONEHOP_BUILD_DIR:-build/release}
log=${ONEHOP_GPU_LOG:-build/test-gpu.log}
programs=$build/tests/gpu
onehop=$build/onehop
passed=0 failed=0 skipped=0
unset ONEHOP_TIMEOUT_MS ONEHOP_DEVICE ONEHOP_NAME RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE
unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
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

# ---- MPS -----------------------------------------------------------------------------------------

mps=""       # the daemon's folder
under_mps=() # before a command: it is a client of the daemon, if there is one

start_mps() {
    if ! command -v nvidia-cuda-mps-control >/dev/null; then
        say "# one GPU, shared by all ranks; no nvidia-cuda-mps-control on PATH, so no MPS"
        return
    fi
    mps=$(mktemp -d /tmp/onehop-mps.XXXXXX) || return # a short name: sockets lie there
    mkdir "$mps/pipe" "$mps/log"
    under_mps=(env "CUDA_MPS_PIPE_DIRECTORY=$mps/pipe" "CUDA_MPS_LOG_DIRECTORY=$mps/log")
    # The daemon sees all GPUs: the variable would else count for it and for its clients, which number its GPUs anew.
    if timeout 20 "${under_mps[@]}" env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d >>"$log" 2>&1 </dev/null &&
        echo get_server_list | timeout 20 "${under_mps[@]}" nvidia-cuda-mps-control >>"$log" 2>&1; then
        say "# one GPU, shared by all ranks; processes under MPS"
    else
        say "# one GPU, shared by all ranks; the MPS daemon could not be started"
        stop_mps
    fi
}

stop_mps() {
    if [ -z "$mps" ]; then return; fi
    echo quit | timeout 20 "${under_mps[@]}" nvidia-cuda-mps-control >>"$log" 2>&1
    {
        echo "== the MPS daemon"
        tail -n 40 "$mps"/log/*.log
    } >>"$log" 2>&1
    rm -rf "$mps"
    mps="" under_mps=()
}

child="" # what runs now
trap stop_mps EXIT
trap 'kill $child 2>/dev/null; exit 1' INT TERM HUP

# ---- one part ------------------------------------------------------------------------------------

# limited SECONDS FILE COMMAND...: with its output in FILE. In the background, so that a signal is heard at once.
limited() {
    local limit=$1 output=$2 status
    shift 2
    timeout -k 5 "$limit" "$@" >"$output" 2>&1 </dev/null &
    child=$!
    wait "$child"
    status=$?
    child=""
    return $status
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
    test_gpu_eager:0 | test_gpu_two_comms:0 | test_gpu_reference:0 | test_gpu_reference:77 | torch_memory:0 | python_gpu:0 | torch_symmetric:0 | \
        torch_backend:0 | python_reference:0 | tp_decode:0 | nccl_shim:0) grep -v '^SKIPPED' "$output" | sed 's/^/        /' ;;
    esac
}

# run NAME LIMIT COMMAND...
run() {
    local name=$1 limit=$2 status start=$SECONDS output
    shift 2
    output=$(mktemp)
    limited "$limit" "$output" "$@"
    status=$?
    verdict "$name" $status $((SECONDS - start)) "$output"
    rm -f "$output"
}

# Programs with a part that has a process per rank.
processes=" test_gpu_calls test_gpu_cases test_gpu_eager test_gpu_gather test_gpu_graph test_gpu_jit test_gpu_matrix \
test_gpu_norm test_gpu_order test_gpu_places test_gpu_reference test_gpu_wrong "

# program NAME
program() {
    local how=()
    if [[ $processes == *" $1 "* ]]; then how=("${under_mps[@]}"); fi
    run "$1" 150 "${how[@]}" "$programs/$1"
}

# command_of NAME ARGUMENTS: onehop NAME; exit status 3 means that this machine cannot. `how` goes before the command.
how=()
command_of() {
    local name=$1 status start=$SECONDS output
    shift
    output=$(mktemp)
    limited 120 "$output" "${how[@]}" "$onehop" "$name" --device cuda "$@"
    status=$?
    if [ "$name" = perf ] && [ $status = 0 ] && ! grep -q '^# 0 wrong' "$output"; then status=1; fi
    if [ $status = 3 ]; then status=77; fi
    verdict "$name $*" $status $((SECONDS - start)) "$output"
    rm -f "$output"
}
perf() { command_of perf "$@"; }

# Two ranks: a GPU each, or threads that share one.
two=()
perf_two() { perf -g 2 "${two[@]}" "$@"; }

# Two ranks, a process each.
perf_two_processes() {
    local how=("${under_mps[@]}") layout=()
    if [ -n "$mps" ]; then layout=(--layout process); fi
    perf_two "${layout[@]}" "$@"
}

# sanitizer TOOL: two ranks, a process each, each under the tool.
sanitizer() {
    local tool=$1 name=gpu-sanitizer-$$-$1 start=$SECONDS status=0 rank output pids=()
    output=$(mktemp -d)
    # A trial of a handle kind that the machine refuses is an answer, not an error.
    local options=()
    if [ "$tool" = memcheck ]; then options=(--report-api-errors no); fi
    for rank in 0 1; do
        timeout -k 5 200 "$sanitize" --tool "$tool" "${options[@]}" --error-exitcode 9 "$programs/test_gpu_matrix" \
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
info=$(timeout -k 5 60 "$onehop" info 2>&1)
echo "$info" >>"$log"
gpus=$(grep -c '^  cuda [0-9]' <<<"$info")
share=() # of Python scripts
if [ "$gpus" = 1 ]; then
    share=(--share-gpu) two=(--ranks-per-device 2)
    start_mps
fi

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

for name in "$@"; do program "$name"; done
if has programs; then
    for path in "$programs"/test_*; do
        [ -x "$path" ] && program "$(basename "$path")"
    done
    run doc_program 90 bash tests/gpu/doc_program.sh "$build" "$gpus"
    if [ -n "$mps" ]; then
        run "test_gpu_captured_faults processes" 150 "${under_mps[@]}" "$programs/test_gpu_captured_faults" processes 4
    fi
fi
if has python; then
    package=(env PYTHONPATH="$build/python" python3)
    run torch_memory 150 "${under_mps[@]}" python3 tests/gpu/torch_memory.py "$build/libonehop.so" "${share[@]}"
    run python_gpu 150 "${under_mps[@]}" python3 tests/gpu/python_gpu.py "$build" "${share[@]}"
    run torch_symmetric 120 "${under_mps[@]}" python3 tests/gpu/torch_symmetric.py "$build" "${share[@]}"
    run torch_backend 120 "${under_mps[@]}" python3 tests/gpu/torch_backend.py "$build" "${share[@]}"
    run python_reference 240 "${under_mps[@]}" "${package[@]}" tests/gpu/python_reference.py "${share[@]}"
    run nccl_shim 175 "${under_mps[@]}" python3 tests/gpu/nccl_shim.py "$build"
    run doc_examples 400 env ONEHOP_BUILD_DIR="$build" python3 tests/test_doc_examples.py --gpu "$gpus"
    decode=(--device cuda --rounds 2 --fused --check)
    if [ "$gpus" = 1 ]; then
        decode+=(--share-gpu --tiny --prompt 200 --tokens 16 --batch "1,8" --limit 90)
    else
        decode+=(--tokens 32 --limit 120)
    fi
    found=$("${package[@]}" -c 'import onehop, torch; print(torch.cuda.device_count() > 0)' 2>/dev/null)
    if [ "$gpus" -gt 0 ] && [ "$found" = True ]; then
        run tp_decode 150 "${under_mps[@]}" "${package[@]}" examples/tp_decode.py "${decode[@]}"
    else
        skipped=$((skipped + 1))
        say "SKIP  tp_decode: python3 has no package onehop, or no PyTorch that finds a GPU"
    fi
fi
if has command; then
    command_of check --quick
    perf_two_processes -b 1K -e 1M -d bfloat16 -n 50 -G 5
    perf_two_processes -b 1K -e 1M -d bfloat16 -n 50 --eager
    perf_two -b 1K -e 64K -d half -n 50 -G 5 --early-trigger
    perf_two -b 16M -e 64M -d float -n 5 -G 2
    perf_two -o reduce_scatter -b 16M -e 64M -d float -n 5 -G 2
    perf_two -o all_gather -b 16M -e 64M -d float -n 5 -G 2
    perf_two --layout thread -b 4K -e 64K -n 20 -G 5
    perf_two --layout single -b 4K -e 64K -n 20 -G 5
    perf -g 4 --layout thread --ranks-per-device 4 -b 4K -e 64K -n 20 -G 5
    perf -g 8 --layout thread --ranks-per-device $((gpus == 1 ? 8 : 4)) -b 4K -e 64K -n 20 -G 5
fi

sanitize=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if has sanitizers; then
    if [ -n "$sanitize" ]; then
        sanitizer memcheck
        # On one H200 two processes that take turns on it did not end under these within 200 s.
        for tool in initcheck synccheck; do
            if [ "$gpus" = 1 ]; then
                skipped=$((skipped + 1))
                say "SKIP  compute-sanitizer $tool: under it, processes that take turns on one GPU do not get on"
            else
                sanitizer $tool
            fi
        done
    else
        skipped=$((skipped + 1))
        say "SKIP  compute-sanitizer: not found on PATH or in /usr/local/cuda/bin"
    fi
fi

if [ $((passed + failed)) = 0 ]; then say "No GPU could be used: nothing was tested."; fi
say "Log: $log"
say "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
