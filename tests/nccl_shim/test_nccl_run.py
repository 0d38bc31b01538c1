#!/usr/bin/env python3
"""Property: `onehop run` sets what programs need to get the NCCL shim, keeps what the user set, and says why it cannot."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

BUILD = os.environ["ONEHOP_BUILD_DIR"]
ONEHOP = f"{BUILD}/onehop"
SHIM = os.path.realpath(f"{BUILD}/nccl/libnccl.so.2")
STAND_IN = os.path.realpath(f"{BUILD}/tests/nccl_shim/libnccl.so.2")
SET = ("LD_PRELOAD", "VLLM_NCCL_SO_PATH", "SGLANG_NCCL_SO_PATH", "ONEHOP_NCCL_REAL", "TORCH_NCCL_USE_COMM_NONBLOCKING")


def run(*arguments, onehop=ONEHOP, **variables):
    environment = {key: value for key, value in os.environ.items() if key not in SET} | variables
    return subprocess.run([onehop, "run", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False)


def found(text):
    return dict(line.split("=", 1) for line in text.splitlines() if line.split("=", 1)[0] in SET)


class Run(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="onehop-run-")
        self.addCleanup(shutil.rmtree, self.folder)

    def test_variables(self):
        done = run("--", "env", HOME=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual({key: value for key, value in found(done.stdout).items() if key != "ONEHOP_NCCL_REAL"},
                         {"LD_PRELOAD": SHIM, "VLLM_NCCL_SO_PATH": SHIM, "SGLANG_NCCL_SO_PATH": SHIM, "TORCH_NCCL_USE_COMM_NONBLOCKING": "0"})

    def test_what_was_set_stays(self):
        done = run("env", LD_PRELOAD="libm.so.6", VLLM_NCCL_SO_PATH=STAND_IN, TORCH_NCCL_USE_COMM_NONBLOCKING="1")
        self.assertEqual(found(done.stdout), {"LD_PRELOAD": f"{SHIM}:libm.so.6", "VLLM_NCCL_SO_PATH": SHIM, "SGLANG_NCCL_SO_PATH": SHIM,
                                              "ONEHOP_NCCL_REAL": STAND_IN, "TORCH_NCCL_USE_COMM_NONBLOCKING": "1"})
        again = run("--", ONEHOP, "run", "--", "env", ONEHOP_NCCL_REAL=STAND_IN)
        self.assertEqual(found(again.stdout)["LD_PRELOAD"], SHIM)
        self.assertEqual(found(again.stdout)["ONEHOP_NCCL_REAL"], STAND_IN)

    def test_wheel_of_an_environment(self):
        wheel = f"{self.folder}/lib/python3.99/site-packages/nvidia/nccl/lib/libnccl.so.2"
        os.makedirs(os.path.dirname(wheel))
        os.makedirs(f"{self.folder}/bin")
        shutil.copy(STAND_IN, wheel)
        os.symlink(sys.executable, f"{self.folder}/bin/python3")
        os.symlink("/usr/bin/env", f"{self.folder}/bin/engine")
        for command in f"{self.folder}/bin/python3", f"{self.folder}/bin/engine":
            self.assertEqual(found(run("--print", "--", command).stdout)["ONEHOP_NCCL_REAL"], wheel)
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        self.assertEqual(found(run("--print", PATH=path).stdout)["ONEHOP_NCCL_REAL"], wheel)

    def test_a_program_gets_it(self):
        script = "import ctypes; n = ctypes.CDLL('libnccl.so.2'); v = ctypes.c_int(); n.ncclGetVersion(ctypes.byref(v)); " \
                 "print(v.value, hasattr(n, 'ncclOnehopShim'))"
        done = run("--", sys.executable, "-c", script, ONEHOP_NCCL_REAL=STAND_IN)
        self.assertEqual(done.stdout, "23007 True\n", done.stderr)

    def test_exit_codes(self):
        self.assertEqual(run("--", "sh", "-c", "exit 42").returncode, 42)
        for arguments, code, word in (((), 2, "expected -- COMMAND"), (("--",), 2, "expected -- COMMAND"), (("--loud", "--", "env"), 2, "unknown flag"),
                                      (("--", "/nowhere/command"), 127, "cannot run"), (("--", self.folder), 126, "cannot run")):
            done = run(*arguments)
            self.assertEqual((done.returncode, word in done.stderr), (code, True), done)
        self.assertEqual(run("--help").returncode, 0)

    def test_no_shim(self):
        shutil.copy(ONEHOP, f"{self.folder}/onehop")
        done = run("--", "env", onehop=f"{self.folder}/onehop")
        self.assertEqual((done.returncode, "found no NCCL shim" in done.stderr), (3, True), done)


if __name__ == "__main__":
    unittest.main()
