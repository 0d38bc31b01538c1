#!/usr/bin/env bash
# Installs what is missing to build, and nothing else; what is there is used as it is, without any network.
#   tools/bootstrap.sh          for building: C compiler, cmake, ninja, python3; nvcc if there is a GPU
#   tools/bootstrap.sh test     the same, and NVRTC where nvcc is
#   tools/bootstrap.sh torch    as test, and for the tests of the Python package headers of Python, and where they cannot be
#                               imported PyTorch, numpy and pytest
#   tools/bootstrap.sh sanitize C compiler with its sanitizers, cmake, ninja, python3
#   tools/bootstrap.sh aarch64  the cross compiler for AArch64; ends with 77 if it is missing and cannot be installed
#   tools/bootstrap.sh format   clang-format
#   tools/bootstrap.sh docs     doxygen, Sphinx and its extensions; ends with 77 if they are missing and cannot be installed
# Debian packages are installed only as root, Python packages only into build/venv. CC is respected.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-build}
venv=build/venv
cuda_version='13.0.*'
clang_format_version=19.1.7
torch_version=2.13.0
docs_packages=(sphinx==9.0.4 myst-parser==5.2.0 breathe==5.1.0 furo==2025.12.19)

say() { echo "bootstrap: $*"; }
fail() { echo "bootstrap: $*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

can_install() { [ "$(id -u)" = 0 ] && have apt-get; }

# install_packages WHY PACKAGE...
install_packages() {
    local why=$1
    shift
    say "$why: installing Debian packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# ---- Debian packages -----------------------------------------------------------------------------
# A compiler counts only if it finds the C library's headers and links.
compiles() {
    local out
    out=$(mktemp) || return 1
    echo '#include <stdio.h>
int main(void) { return puts("") < 0; }' | "$@" -x c -o "$out" - 2>/dev/null
    local result=$?
    rm -f "$out"
    return $result
}

missing=()
if [ -n "${CC:-}" ]; then
    # shellcheck disable=SC2086
    if ! compiles $CC; then
        case $(basename "${CC%% *}") in
        gcc | gcc-[0-9]* | clang | clang-[0-9]*) missing+=("$(basename "${CC%% *}")" libc6-dev) ;;
        *) fail "CC='$CC' does not compile and link a C program" ;;
        esac
    fi
elif ! compiles cc && ! compiles gcc && ! compiles clang; then
    missing+=(gcc libc6-dev)
fi
have cmake || missing+=(cmake)
have python3 || missing+=(python3)
# make would do as well as ninja: no reason to fail.
if ! have ninja && { can_install || ! have make; }; then missing+=(ninja-build); fi

if [ ${#missing[@]} -gt 0 ]; then
    can_install || fail "missing: ${missing[*]} (as root: apt-get install ${missing[*]})"
    install_packages "missing" "${missing[@]}"
fi

# Debian has clang's sanitizers in a package of their own; gcc brings them.
if [ "$mode" = sanitize ] && ! compiles ${CC:-cc} -fsanitize=address; then
    major=$(${CC:-cc} -dumpversion | cut -d. -f1)
    can_install || fail "${CC:-cc} has no sanitizers (as root, for clang: apt-get install libclang-rt-$major-dev)"
    install_packages "missing" "libclang-rt-$major-dev"
fi

if [ "$mode" = aarch64 ] && ! compiles aarch64-linux-gnu-gcc; then
    cross=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    if ! can_install || ! install_packages "missing" "${cross[@]}" || ! compiles aarch64-linux-gnu-gcc; then
        say "no aarch64-linux-gnu-gcc that compiles and links (as root: apt-get install ${cross[*]})"
        exit 77
    fi
fi

read -r _ _ cmake_version < <(cmake --version)
[ "$(printf '%s\n' 3.25 "$cmake_version" | sort -V | head -1)" = 3.25 ] ||
    fail "cmake $cmake_version is too old: 3.25 or later is needed"

# ---- Python packages, in build/venv --------------------------------------------------------------
# venv_install PACKAGE...: fails quietly but for its message if there is no network.
venv_install() {
    if [ ! -x $venv/bin/pip ]; then
        if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
            if ! can_install || ! install_packages "missing" python3-venv; then
                say "python3 has no venv module (as root: apt-get install python3-venv)"
                return 1
            fi
        fi
        python3 -m venv $venv || return 1
    fi
    say "installing into $venv: $*"
    $venv/bin/pip install --quiet --disable-pip-version-check --retries 1 --timeout 30 "$@"
}

if [ "$mode" = sanitize ] || [ "$mode" = aarch64 ]; then exit 0; fi
if [ "$mode" = format ]; then
    if [ "$($venv/bin/clang-format --version 2>/dev/null | grep -o '[0-9.]*' | head -1)" != $clang_format_version ]; then
        venv_install "clang-format==$clang_format_version"
    fi
    exit 0
fi

if [ "$mode" = docs ]; then
    if ! have doxygen && { ! can_install || ! install_packages "missing" doxygen; }; then
        say "no doxygen (as root: apt-get install doxygen)"
        exit 77
    fi
    if ! $venv/bin/python -c 'import sphinx, myst_parser, breathe, furo' 2>/dev/null && ! venv_install "${docs_packages[@]}"; then
        say "Sphinx could not be installed"
        exit 77
    fi
    exit 0
fi

# ---- nvcc: from PATH, CUDA_HOME or the usual place, else for a machine with a GPU from wheels ------
find_nvcc() {
    local candidate
    for candidate in "$(command -v nvcc)" "${CUDA_HOME:-}/bin/nvcc" /usr/local/cuda/bin/nvcc \
        $venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
        if [ -x "$candidate" ]; then return 0; fi
    done
    return 1
}
has_gpu() { [ -e /dev/nvidia0 ] || { have nvidia-smi && nvidia-smi -L >/dev/null 2>&1; }; }

if ! find_nvcc && has_gpu; then
    if ! have c++ && can_install; then
        install_packages "nvcc needs a C++ preprocessor" g++ || say "no g++"
    fi
    venv_install "nvidia-cuda-nvcc==$cuda_version" "nvidia-cuda-crt==$cuda_version" \
        "nvidia-nvvm==$cuda_version" "nvidia-cuda-runtime==$cuda_version" ||
        say "nvcc could not be installed"
fi
if [ "$mode" = torch ]; then
    if ! printf '#include <Python.h>\n' | ${CC:-cc} -E "-I$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
        - >/dev/null 2>&1; then
        { can_install && install_packages "headers of Python" libpython3-dev; } ||
            say "no headers of Python (as root: apt-get install libpython3-dev): its package is not built"
    fi
    has_all() { [ -n "$(command -v "$1")" ] && "$1" -c 'import numpy, pytest, torch' 2>/dev/null; }
    if ! has_all $venv/bin/python && ! has_all python3; then
        venv_install matplotlib numpy pytest safetensors "torch==$torch_version" ||
            say "PyTorch could not be installed: its tests are skipped"
    fi
    mode=test
fi
if ! find_nvcc; then
    say "no nvcc: only the host device is built"
elif [ "$mode" = test ] && ! python3 tools/check_kernels.py --find-nvrtc >/dev/null; then
    venv_install "nvidia-cuda-nvrtc==$cuda_version" || say "NVRTC could not be installed: its checks are skipped"
fi
