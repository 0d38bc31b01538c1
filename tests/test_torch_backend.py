# labels: asan-off tsan-off timeout=240
"""Property: torch.distributed's backend "onehop" is right under torchrun, among 2 and 4 processes on the CPU;
tests/python/backend_ranks.py has the checks. Skipped, and said so, without PyTorch or without the package; `make test TORCH=1` installs both."""

import glob
import os
import re
import signal
import subprocess
import sys

ROOT = os.path.abspath(os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..")))
BUILD = os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release"))
PACKAGE = os.path.join(BUILD, "python")
RANKS = os.path.join(ROOT, "tests", "python", "backend_ranks.py")
SKIPPED = 77


def skip(reason):
    print(f"SKIPPED: tests/python: the backend of torch.distributed: {reason}; `make test TORCH=1` installs it")
    sys.exit(SKIPPED)


def find_python():
    for python in os.path.join(ROOT, "build", "venv", "bin", "python"), "python3":
        try:
            done = subprocess.run([python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"],
                                  capture_output=True, timeout=100, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return skip("there is no torch with gloo")


def torchrun(python, world, *checks):
    """Exit status and output of all ranks; none is left behind."""
    dropped = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ONEHOP_NAME"
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment.update(PYTHONPATH=PACKAGE, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), RANKS, *checks]
    run = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output = run.communicate(timeout=110)[0]
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        output = run.communicate()[0] + "\nno end after its time limit"
    return run.returncode, output


def main():
    if not glob.glob(os.path.join(PACKAGE, "onehop", "_onehop*.so")):
        skip("the package was not built, there are no headers of Python 3.10 or later")
    python, failed = find_python(), 0
    for world in 2, 4:
        status, output = torchrun(python, world)
        good = status == 0 and output.count("DONE") == world
        print(*(line for line in output.splitlines() if not good or ": right" in line), sep="\n", flush=True)
        failed += not good
    status, output = torchrun(python, 4, "lost")
    found = sorted(re.findall(r"rank (\d): rank 1 was lost, noticed after [0-4]\.", output))
    print(f"4 ranks, lost: noticed by {', '.join(found)}")
    if status == 0 or found != ["0", "2", "3"]:
        print(output)
        failed += 1
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
