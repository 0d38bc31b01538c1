#!/usr/bin/env bash
# tools/deb.sh [FOLDER [ARGUMENT...]]: builds the Debian packages libonehop0, libonehop-dev and onehop, and their source, into
# build/deb or FOLDER, from what git tracks. ARGUMENTs go to dpkg-buildpackage (-us -uc; -b makes no source package). Needs
# dpkg-dev, debhelper, cmake, python3. ONEHOP_CMAKE_ARGS=-DONEHOP_CUDA=OFF leaves out the GPU kernels.
set -euo pipefail
cd "$(dirname "$0")/.."

out=$(realpath -m "${1:-build/deb}")
shift || true
for tool in dpkg-buildpackage dh; do
    command -v $tool >/dev/null || { echo "deb: no $tool (as root: apt-get install dpkg-dev debhelper)"; exit 77; }
done
version=$(dpkg-parsechangelog -l packaging/debian/changelog -S Version)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tree=$scratch/onehop-$version
mkdir -p "$tree" "$out"
git ls-files -z | xargs -0 cp --parents -t "$tree"
mv "$tree/packaging/debian" "$tree/debian"
# A build of the package is no place for what the shell of a developer sets.
(cd "$tree" && env -u CMAKE_GENERATOR dpkg-buildpackage -us -uc "$@")
find "$scratch" -maxdepth 1 -type f -exec mv -t "$out" {} +
command -v lintian >/dev/null && lintian --fail-on error "$out"/*.changes
ls "$out"
