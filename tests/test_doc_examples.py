# labels: asan-off tsan-off timeout=300
"""Property: every Python program that docs/getting-started.md shows is right.

    test_doc_examples.py          compiles the Python programs, and runs those that need no GPU by torchrun, if there is
                                  PyTorch and the package was built. (CMake makes tests of the C programs.)
    test_doc_examples.py --gpu N  runs all Python programs on a machine with N GPUs, with two ranks, or with one; with one,
                                  those that need a peer are left out. (tests/gpu/doc_program.sh has the C program.)

Exit status 77 where nothing could be run; the last line says why.
"""

import glob
import os
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..")))
BUILD = os.path.abspath(os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release")))
PACKAGE = os.path.join(BUILD, "python")
PAGE = os.path.join(ROOT, "docs", "getting-started.md")
SKIPPED = 77
LIMIT_S = 140
sys.path.insert(0, os.path.join(ROOT, "tools"))

from doc_example import examples  # noqa: E402


def has_torch(python):
    found = subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=100, check=False)
    return found.returncode == 0


def python_with_torch():
    venv = os.path.join(ROOT, "build", "venv", "bin", "python")
    candidates = [venv, "python3"] if os.path.exists(venv) else ["python3"]
    return next((python for python in candidates if has_torch(python)), None)


def torchrun(python, example, ranks, folder):
    """The exit status of a Python program under torchrun; 0 is right."""
    path = os.path.join(folder, example.name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(example.text)
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
                   "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "cache")}
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), path]
    done = subprocess.run(command, env=environment, timeout=LIMIT_S, check=False)
    print(f"{example.name}: {ranks} ranks, exit status {done.returncode}", flush=True)
    return done.returncode


def skip(reason):
    print(f"SKIPPED: {reason}")
    return SKIPPED


def on_gpus(programs, gpus):
    if not has_torch(sys.executable) or not glob.glob(os.path.join(PACKAGE, "onehop", "_onehop*.so")):
        return skip(f"{sys.executable} has no PyTorch, or the package was not built")
    import torch
    ranks = min(2, gpus, torch.cuda.device_count())
    if not ranks:
        return skip("PyTorch finds no GPU")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for program in programs:
            if not program.name.endswith(".py"):
                continue
            if ranks == 1 and "together" in program.words:
                print(f"{program.name}: left out, it needs two GPUs")
                continue
            failed.append(torchrun(sys.executable, program, ranks, folder))
    return any(failed)


def on_host(programs):
    programs = [program for program in programs if program.name.endswith(".py")]
    assert len(programs) >= 4, f"{PAGE}: {len(programs)} Python programs"
    for program in programs:
        compile("\n" * (program.line - 1) + program.text, PAGE, "exec")
    python = python_with_torch()
    if not python or not glob.glob(os.path.join(PACKAGE, "onehop", "_onehop*.so")):
        return skip("the programs are only compiled: there is no PyTorch, or the package was not built")
    with tempfile.TemporaryDirectory() as folder:
        return any([torchrun(python, program, 2, folder) for program in programs if "gpu" not in program.words])


def main():
    programs = examples(PAGE)
    if len(sys.argv) == 1:
        return on_host(programs)
    if len(sys.argv) != 3 or sys.argv[1] != "--gpu":
        sys.exit(__doc__)
    gpus = int(sys.argv[2])
    return on_gpus(programs, gpus) if gpus else skip("there is no GPU")


if __name__ == "__main__":
    sys.exit(main())
