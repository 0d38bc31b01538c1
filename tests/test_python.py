# labels: asan-off tsan-off timeout=300
"""Property: the Python package of the build tree passes tests/python, run by pytest. What is missing is said, loudly:
without PyTorch, or without pytest or Python's headers, `make test TORCH=1` installs it."""

import glob
import os
import subprocess
import sys

ROOT = os.path.abspath(os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..")))
BUILD = os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release"))
PACKAGE = os.path.join(BUILD, "python")
SKIPPED = 77


def skip(reason):
    print(f"SKIPPED: tests/python: {reason}; `make test TORCH=1` installs it in build/venv")
    sys.exit(SKIPPED)


def has(python, module):
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=100, check=False)
    return done.returncode == 0


def main():
    if not glob.glob(os.path.join(PACKAGE, "onehop", "_onehop*.so")):
        skip("the package was not built, there are no headers of Python 3.10 or later")
    candidates = [os.path.join(ROOT, "build", "venv", "bin", "python"), "python3"]
    pythons = [python for python in candidates if (python == "python3" or os.path.exists(python)) and has(python, "pytest")]
    if not pythons:
        skip("there is no pytest")
    complete = [python for python in pythons if has(python, "torch")]
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "PYTHONDONTWRITEBYTECODE": "1"}
    for name in "RANK", "WORLD_SIZE", "LOCAL_RANK", "ONEHOP_NAME":
        environment.pop(name, None)
    command = [*(complete or pythons)[:1], "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--durations=5",
               os.path.join(ROOT, "tests", "python")]
    status = subprocess.run(command, env=environment, timeout=280, check=False).returncode
    if status == 0 and not complete:
        skip("the tests without PyTorch passed, for the others there is no torch")
    return status


if __name__ == "__main__":
    sys.exit(main())
