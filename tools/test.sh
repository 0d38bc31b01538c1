#!/usr/bin/env bash
# [TORCH=1] tools/test.sh [PRESET [CTEST-ARGUMENT...]]: builds a preset and runs its tests; asan and tsan run those
# labelled quick. Many have deadlines: only tests that mostly wait run beside each other, two at a time, unless
# CTEST_PARALLEL_LEVEL says otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:-release}
shift || true
mode=test
if [ "${TORCH:-0}" = 1 ]; then mode=torch; fi
if [ "$preset" != release ]; then mode=sanitize; fi
tools/bootstrap.sh $mode
if [ "$preset" = release ]; then
    echo "build: all programs, and if there is nvcc, GPU kernels for all architectures (make demo: only what it runs)"
fi
tools/build.sh "$preset"

run=()
# Some ThreadSanitizer runtimes cannot live with the kernel's address space randomisation.
if [ "$preset" = tsan ] && setarch "$(uname -m)" -R true 2>/dev/null; then run=(setarch "$(uname -m)" -R); fi
export CTEST_PARALLEL_LEVEL=${CTEST_PARALLEL_LEVEL:-2}
status=0
"${run[@]}" ctest --preset "$preset" "$@" || status=$?
# ctest names what was skipped, not why.
sed -n 's/^SKIPPED: tests\/python/== &/p' "build/$preset/Testing/Temporary/LastTest.log"
exit $status
