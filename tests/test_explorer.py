# labels: timeout=300
"""Property: the library's protocols hold in every state that their models reach under weak store order, and variants with
one rule broken are caught (tests/explorer).

Builds the explorer with CC (default cc) and runs its table. `test_explorer.py --long` adds models that take minutes;
further arguments go to the explorer (`--only TEXT`, `--trace`). Skipped (77) without a C compiler.
"""

import glob
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), ".."))
SOURCES = sorted(glob.glob(os.path.join(ROOT, "tests", "explorer", "*.c")))
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
QUICK_LIMIT_S = 240


def main(arguments):
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not shutil.which(compiler[0]):
        print(f"no C compiler: {compiler[0]}")
        return 77
    with tempfile.TemporaryDirectory(prefix="onehop-explorer-") as directory:
        program = os.path.join(directory, "explore")
        subprocess.run([*compiler, *FLAGS, "-o", program, *SOURCES], check=True)
        limit = None if "--long" in arguments else QUICK_LIMIT_S
        return subprocess.run([program, *arguments], check=False, timeout=limit).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
