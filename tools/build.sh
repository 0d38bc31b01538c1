#!/usr/bin/env bash
# tools/build.sh [PRESET [CMAKE-ARGUMENT...]]: configures and builds one preset of CMakePresets.json; demo and release
# share a folder.
# Takes Ninja if it is there; starts afresh when CC or the tree's place has changed since the last time.
# ONEHOP_CMAKE_ARGS holds more arguments for cmake.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:-release}
shift || true
cache=build/${preset/#demo/release}/CMakeCache.txt
cached() { sed -n "s|^$1:[A-Z]*=||p" "$cache"; }
real() { readlink -f "$(command -v "$1")"; }

fresh=()
if [ -f "$cache" ]; then
    unset CMAKE_GENERATOR # a build tree keeps its generator
    if [ "$(cached CMAKE_HOME_DIRECTORY)" != "$PWD" ] ||
        { [ -n "${CC:-}" ] && [ "$(real "${CC%% *}")" != "$(real "$(cached CMAKE_C_COMPILER)")" ]; }; then
        fresh=(--fresh)
    fi
fi
if [ ! -f "$cache" ] || [ ${#fresh[@]} -gt 0 ]; then
    if command -v ninja >/dev/null; then export CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja}; fi
fi

# shellcheck disable=SC2086
cmake --preset "$preset" "${fresh[@]}" ${ONEHOP_CMAKE_ARGS:-} "$@"
cmake --build --preset "$preset" --parallel "${ONEHOP_JOBS:-$(nproc)}"
