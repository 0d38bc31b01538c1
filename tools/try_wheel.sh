#!/usr/bin/env bash
# tools/try_wheel.sh [WHEEL]: installs the wheel (the newest in build/wheels) into a fresh environment of each Python from 3.10 to
# 3.13 that is found, and uses it as python/README.md says: the command, `python -m onehop`, arrays without PyTorch, and with PyTorch
# its example under torchrun.
#   PYTHONS  the versions (3.10 3.11 3.12 3.13)
#   TORCH=1  installs PyTorch by the extra [torch]; a version for which there is none goes without, and says so
#   FOLDER   where the environments are made, one after the other (a temporary folder)
set -euo pipefail
cd "$(dirname "$0")/.."

wheel=$(realpath "${1:-$(ls -t build/wheels/onehop-*.whl 2>/dev/null | head -1)}")
folder=$(mktemp -d ${FOLDER:+-p "$FOLDER"})
trap 'rm -rf "$folder"' EXIT
cat >"$folder/plain.py" <<'PY'
"""Without PyTorch: two ranks as processes, on arrays of ctypes."""
import ctypes, multiprocessing, os, onehop
def rank(number, name):
    data = (ctypes.c_float * 1000)(*(number + i for i in range(1000)))
    context = onehop.Context(number, 2, name, device=onehop.DeviceKind.HOST)
    context.all_reduce(ctypes.addressof(data), ctypes.addressof(data), 1000, onehop.DType.FLOAT32, 0)
    context.destroy()
    assert data[999] == 1999, data[999]
if __name__ == "__main__":
    ranks = [multiprocessing.Process(target=rank, args=(number, f"try-{os.getpid()}")) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    print(f"onehop {onehop.__version__}, without PyTorch: 999 + 1000 = 1999 on two ranks")
PY
# The example of the package's README, on the host where there is no GPU.
python3 - python/README.md >"$folder/example.py" <<'PY'
import re, sys
text = re.search(r"^```python\n(.*?)^```", open(sys.argv[1], encoding="utf-8").read(), re.MULTILINE | re.DOTALL)[1]
rank = "AllReduce(None, dist.get_rank())"
assert rank in text and "y = " in text, "python/README.md: the example is another one: change tools/try_wheel.sh"
print(text.replace(rank, 'AllReduce(None, dist.get_rank() if torch.cuda.is_available() else "cpu")'))
print('assert y.tolist() == [2.0] * 4096\nprint(f"rank {dist.get_rank()}, PyTorch {torch.__version__}: 1 + 1 = {y[0]}")')
PY

find_python() {
    if "python$1" --version >/dev/null 2>&1; then echo "python$1"; else ls -d ~/.pyenv/versions/"$1".*/bin/python 2>/dev/null | tail -1; fi
}

tried=0 failed=0
try() (
    local version=$1 python=$2 env="$folder/env"
    rm -rf "$env"
    "$python" -m venv "$env"
    cd "$folder" # nothing of the tree is in sight
    pip() { "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "$@" 2> >(grep -v 'is ignored' >&2 || true); }
    pip "$wheel"
    "$env/bin/onehop" version
    "$env/bin/python" -m onehop version >/dev/null
    "$env/bin/onehop" run --print -- true | grep -q '^LD_PRELOAD=.*/site-packages/onehop/bin/nccl/libnccl.so.2$' # the shim is there
    "$env/bin/onehop" perf --device host -g 2 -e 64K | sed -n '/^ *[0-9]/p;$p'
    "$env/bin/python" plain.py
    if [ "${TORCH:-0}" = 1 ] && ! pip "onehop[torch] @ file://$wheel"; then
        echo "Python $version: PyTorch could not be installed: its example is not run"
    elif [ "${TORCH:-0}" = 1 ]; then
        OMP_NUM_THREADS=1 "$env/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 example.py
    fi
)
for version in ${PYTHONS:-3.10 3.11 3.12 3.13}; do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "== Python $version: not found"
        continue
    fi
    echo "== Python $version ($("$python" --version))"
    tried=$((tried + 1))
    set +e # a function that is asked for its status would go on after a failure
    (set -e; try "$version" "$python")
    status=$?
    set -e
    if [ $status -ne 0 ]; then
        echo "== Python $version FAILED"
        failed=$((failed + 1))
    fi
done
echo "$((tried - failed)) passed, $failed failed"
[ $tried -gt 0 ] && [ $failed -eq 0 ]
