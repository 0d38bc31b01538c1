#!/usr/bin/env bash
# bench/record.sh FILE COMMAND...: appends a command and its output to FILE, under a heading with date, machine, driver and
# commit if the file is new. What README and docs quote comes from such files (bench/results/).
# ONEHOP_COMMIT names the commit where git does not know it. Exit status: the command's.
set -euo pipefail
file=$1
shift
if [ -L "$file" ] || { [ -e "$file" ] && [ ! -f "$file" ]; }; then
    echo "record.sh: $file is not a regular file" >&2
    exit 2
fi
[ -e "$file" ] || (set -o noclobber && : >"$file") # made anew: no link that comes meanwhile is followed
if [ ! -s "$file" ]; then
    {
        echo "date: $(date -u +%Y-%m-%d)"
        echo "commit: ${ONEHOP_COMMIT:-$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)}"
        echo "cpu: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
        if command -v nvidia-smi >/dev/null; then
            nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed 's/^/gpu: /'
        fi
    } >>"$file"
fi
{
    echo
    echo "\$ $*"
    code=0
    "$@" 2>&1 || code=$?
    [ $code = 0 ] || echo "(exit $code)"
    exit $code
} | tee -a "$file"
