#!/usr/bin/env bash
# bench/many_gpus.sh [PART...]: measures and proves on all GPUs of this machine, in parts that each end within 6 minutes:
#   tests     the matrix, replays, lost ranks and places (tests/gpu), onehop check
#   perf      onehop beside NCCL with and without windows, 1 KB to 256 MB in graphs, 1 KB to 16 MB eagerly; every number of GPUs
#             from 2 on for the short ones
#   torch     PyTorch's symmetric memory beside both
#   tune      a table for this machine, and perf with it
# Without arguments all of them. Results, text and JSON, in $ONEHOP_RESULTS (default build/many-gpus); the build tree is
# $ONEHOP_BUILD_DIR (default build/release). Nothing here uses NVLink multicast. Exit status: 0, 1 if a part failed, 77
# where there are fewer than 2 GPUs.
set -uo pipefail
cd "$(dirname "$0")/.."

build=${ONEHOP_BUILD_DIR:-build/release}
onehop=$build/onehop
results=${ONEHOP_RESULTS:-build/many-gpus}
limit=350 # seconds a part
status=0
unset ONEHOP_MULTICAST
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

if [ $# = 0 ]; then set -- tests perf torch tune; fi
for part in "$@"; do
    case $part in
    tests | perf | torch | tune) ;;
    *)
        echo "unknown part '$part': expected some of tests, perf, torch, tune"
        exit 1
        ;;
    esac
done

gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | wc -l)
if [ "$gpus" -lt 2 ]; then
    echo "SKIPPED: needs 2 GPUs at least, found $gpus"
    exit 77
fi
if [ ! -x "$onehop" ]; then
    echo "$onehop is missing: build first (make build)"
    exit 1
fi
mkdir -p "$results" || exit 1

# The NCCL of PyTorch's wheels, if it is there and nothing else is named.
if [ -z "${ONEHOP_NCCL_LIB:-}" ]; then
    wheel=$(python3 -c 'import nvidia.nccl as n, os; print(os.path.join(list(n.__path__)[0], "lib", "libnccl.so.2"))' 2>/dev/null)
    if [ -f "$wheel" ]; then export ONEHOP_NCCL_LIB=$wheel; fi
fi

# record FILE COMMAND...: within what is left of the part's time.
record() {
    local file=$results/$1 left=$((limit - (SECONDS - began)))
    shift
    if [ $left -le 0 ]; then
        echo "NO TIME LEFT for: $*" | tee -a "$file"
        status=1
        return
    fi
    timeout -k 5 $left bash bench/record.sh "$file" "$@" || status=1
}

tests() {
    ONEHOP_GPU_LOG=$results/test-gpu.txt timeout -k 5 $((limit - 60)) bash tests/gpu/run.sh test_gpu_matrix test_gpu_graph \
        test_gpu_gather test_gpu_norm test_gpu_reference test_gpu_lost test_gpu_places || status=1
    record check.txt "$onehop" check --quick --device cuda -J "$results/check.json"
}

perf() {
    local n common=(-d bfloat16 --early-trigger --compare nccl,nccl-symm)
    record perf.txt "$onehop" perf --device cuda -g "$gpus" "${common[@]}" -e 256M -J "$results/perf-$gpus.json"
    record perf.txt "$onehop" perf --device cuda -g "$gpus" -d bfloat16 --compare nccl --eager -e 16M \
        -J "$results/perf-$gpus-eager.json"
    for ((n = 2; n < gpus; n++)); do
        record perf.txt "$onehop" perf --device cuda -g $n "${common[@]}" -e 4M -J "$results/perf-$n.json"
    done
}

torch() {
    record torch.txt python3 bench/compare_torch.py --onehop "$onehop" -g "$gpus" --early-trigger --compare nccl --repeat 1 \
        -e 16M -J "$results/torch-$gpus.json"
}

tune() {
    record tune.txt "$onehop" tune --device cuda -g "$gpus" --early-trigger -e 64M -o "$results/$gpus-gpus.table"
    if [ -f "$results/$gpus-gpus.table" ]; then
        record tune.txt env ONEHOP_TUNING="$results/$gpus-gpus.table" "$onehop" perf --device cuda -g "$gpus" \
            -d bfloat16 --early-trigger -e 64M
    fi
}

for part in "$@"; do
    began=$SECONDS
    echo "== $part, $gpus GPUs"
    "$part"
    echo "== $part took $((SECONDS - began)) s"
done
echo "Results: $results"
exit $status
