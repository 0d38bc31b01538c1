"""Property: the lane tests notice each alteration of the protocols that mutants.py makes.

run.py [--cc CC] [--repeat N] [--only TEXT] [--share N] [--keep DIR]

A mutant is killed when its program, built against the altered sources, exits with an error, by a wrong result, a
deadline or a signal, or does not end within its time. The unaltered sources must pass the same programs first. Sources
are found through the environment variable ONEHOP_SOURCE_DIR or the place of this file; nothing outside a temporary
directory is written.
"""
import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from mutants import DIRECTS, FUSED, LANES, MUTANTS, PARTS, PATHS, PULLS  # noqa: E402

ROOT = pathlib.Path(os.environ.get("ONEHOP_SOURCE_DIR") or pathlib.Path(__file__).resolve().parents[2])
# Protocol errors show at a deadline of this many milliseconds; an honest run waits for no peer that long.
DEADLINE_MS, PERCENT, LIMIT_S = 4000, 30, 100
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-DLANES_FEW_BODIES", "-Og", "-ffp-contract=off", "-pthread", "-w"]
# What the programs need besides the protocol sources, which they include; compiled once for all mutants.
SHARED = ["src/base/*.c", "src/protocol/algorithms.c", "src/device/host/host_run.c", "src/device/host/vector.c", "tests/support/reference.c",
          "tests/support/norm_reference.c"]


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def number_of_tree():
    """Of the commit, or where there is no git of the sources: the same tree tries the same mutants everywhere."""
    try:
        head = run(["git", "-C", ROOT, "rev-parse", "HEAD"])
        if head.returncode == 0:
            return int(head.stdout, 16)
    except OSError:
        pass
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "src").rglob("*.[ch]")))
    return int(hashlib.sha256(text).hexdigest(), 16)


def compile_or_stop(command):
    done = run(command)
    if done.returncode:
        sys.exit(f"cannot build: {' '.join(map(str, command))}\n{done.stdout}")


def includes(source):
    return [f"-I{source}", f"-I{ROOT}/include", f"-I{ROOT}/tests", f"-I{ROOT}/tests/support"]


def build_shared(cc, work):
    objects = []
    sources = [path for pattern in SHARED for path in sorted(ROOT.glob(pattern))]
    isas = [("vector_baseline", [])]
    if os.uname().machine == "x86_64":
        isas += [("vector_avx2", ["-mavx2", "-mf16c", "-mfma"]),
                 ("vector_avx512", ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mf16c", "-mfma"])]
    else:
        isas.append(("vector_neon", []))
    jobs = [(path, path.stem, []) for path in sources]
    jobs += [(ROOT / "src/device/host/vector_kernels.c", name, extra + [f"-DOH_ISA={name.split('_')[1]}"])
             for name, extra in isas]
    for path, name, extra in jobs:
        target = work / f"{name}.o"
        compile_or_stop([cc, *FLAGS, *extra, *includes(ROOT / "src"), "-c", path, "-o", target])
        objects.append(target)
    return objects


def build(cc, program, source, objects, target):
    compile_or_stop([cc, *FLAGS, *includes(source), ROOT / f"tests/{program}.c", *objects, "-o", target, "-lm"])
    return target


def pattern_of(old):
    """`old` wherever its lines are broken: tokens, with any white space between them."""
    tokens = re.findall(r"\w+|[^\w\s]", old)
    return re.compile(r"\s*".join([r"\b" * tokens[0][0].isalnum() + re.escape(tokens[0])] +
                                  [re.escape(token) for token in tokens[1:]]))


def alter(row, work):
    """A copy of src/kernels with the one edit; the rest of src is reached by a second include path."""
    name, _, file, old, new, _ = row
    source = work / "src"
    shutil.copytree(ROOT / "src/kernels", source / "kernels")
    for layer in ("base", "device", "protocol"):
        (source / layer).symlink_to(ROOT / "src" / layer)
    path = source / file
    text = path.read_text()
    found = list(pattern_of(old).finditer(text))
    if len(found) != 1:
        sys.exit(f"mutant '{name}': its text is found {len(found)} times in src/{file}, expected once; "
                 f"bring tests/mutants/mutants.py up to date:\n{old}")
    path.write_text(text[:found[0].start()] + new + text[found[0].end():])
    return source


def execute(binary):
    """(failed, how)"""
    try:
        done = run([binary, str(DEADLINE_MS), str(PERCENT)], timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True, f"no end within {LIMIT_S} s"
    last = (done.stdout.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.returncode != 0, last[last.find(": ") + 2:]


def try_mutant(number, row, cc, work, objects, repeat):
    place = work / f"mutant{number}"
    place.mkdir()
    binary = build(cc, row[1], alter(row, place), objects, place / row[1])
    began = time.monotonic()
    results = [execute(binary) for _ in range(repeat)]
    killed = sum(failed for failed, _ in results)
    print(f"{'killed' if killed == repeat else 'ALIVE '} {killed}/{repeat} {time.monotonic() - began:5.1f} s  "
          f"{row[0]}: {results[0][1][:110]}", flush=True)
    return killed == repeat


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cc", default=os.environ.get("CC", "cc"))
    options.add_argument("--repeat", type=int, default=1)
    options.add_argument("--only", default="")
    options.add_argument("--keep", default="")
    options.add_argument("--share", type=int, default=1, help="one row of so many, which the commit chooses: for time")
    given = options.parse_args()
    work = pathlib.Path(given.keep or tempfile.mkdtemp(prefix="onehop-mutants-"))
    try:
        began = time.monotonic()
        objects = build_shared(given.cc, work)
        rows = [row for row in MUTANTS if given.only in row[0]]
        if given.share > 1:
            rows = rows[number_of_tree() % given.share::given.share]
        for program in (program for program in (LANES, PATHS, PULLS, PARTS, FUSED, DIRECTS) if program in {row[1] for row in rows}):
            binary = build(given.cc, program, ROOT / "src", objects, work / program)
            for _ in range(given.repeat):
                started = time.monotonic()
                failed, how = execute(binary)
                if failed:
                    sys.exit(f"{program} fails on the unaltered sources: {how}")
                print(f"passes {time.monotonic() - started:5.1f} s  {program} on the unaltered sources", flush=True)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(try_mutant, number, row, given.cc, work, objects, given.repeat)
                    for number, row in enumerate(rows)]
            killed = sum(job.result() for job in jobs)
        print(f"{killed} of {len(rows)} mutants killed, {time.monotonic() - began:.0f} s")
        return killed != len(rows)
    finally:
        if not given.keep:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
