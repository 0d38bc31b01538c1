# labels: asan-off tsan-off timeout=300
"""Property: every Python program that docs/getting-started.md shows is right. Each is compiled; those that need no GPU are
run by torchrun, if there is PyTorch and the package was built."""

import glob
import os
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..")))
BUILD = os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release"))
PACKAGE = os.path.join(BUILD, "python")
PAGE = os.path.join(ROOT, "docs", "getting-started.md")
SKIPPED = 77
sys.path.insert(0, os.path.join(ROOT, "tools"))

from doc_example import examples  # noqa: E402


def python_with_torch():
    for python in os.path.join(ROOT, "build", "venv", "bin", "python"), "python3":
        found = subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=100, check=False) if (
            python == "python3" or os.path.exists(python)) else None
        if found and found.returncode == 0:
            return python
    return None


def run(python, example, folder):
    """The exit status of a program under torchrun; 0 is right."""
    path = os.path.join(folder, example.name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(example.text)
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
                   "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "cache")}
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
    done = subprocess.run(command, env=environment, timeout=140, check=False)
    print(f"{example.name}: exit status {done.returncode}", flush=True)
    return done.returncode


def main():
    programs = [example for example in examples(PAGE) if example.name.endswith(".py")]
    assert len(programs) >= 4, f"{PAGE}: {len(programs)} Python programs"
    for example in programs:
        compile("\n" * (example.line - 1) + example.text, PAGE, "exec")
    python = python_with_torch()
    if not python or not glob.glob(os.path.join(PACKAGE, "onehop", "_onehop*.so")):
        print("SKIPPED: the programs are only compiled: there is no PyTorch, or the package was not built")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        return any([run(python, example, folder) for example in programs if "gpu" not in example.words])


if __name__ == "__main__":
    sys.exit(main())
