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

# A program is compiled against what the packages hold, and the command runs; nothing is installed here.
root=$scratch/root
for package in "$out"/*_"${version}"_*.deb; do dpkg-deb -x "$package" "$root"; done
libraries=$(dirname "$(find "$root/usr/lib" -name 'libonehop.so.0')")
if command -v pkg-config >/dev/null; then
    flags=$(PKG_CONFIG_PATH=$libraries/pkgconfig pkg-config --cflags --libs onehop)
    # shellcheck disable=SC2086
    ${CC:-cc} tests/install/consumer.c -o "$scratch/consumer" $flags
    LD_LIBRARY_PATH=$libraries "$scratch/consumer"
fi
"$root/usr/bin/onehop" version
"$root/usr/bin/onehop" run --print -- true | grep -q "^LD_PRELOAD=.*/onehop/libnccl.so.2"
if command -v lintian >/dev/null; then lintian --fail-on error "$out"/*.changes; fi
ls "$out"
