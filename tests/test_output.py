# labels: serial timeout=180
"""Property: the command writes its files never through a link or over what is no file, refuses them before the work, and
takes output that does not arrive for an error."""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import unittest

BUILD = os.environ.get(
    "ONEHOP_BUILD_DIR", os.path.join(os.path.dirname(__file__), "..", "build", "release")
)
TOOL = os.path.join(BUILD, "onehop")
ROOT = os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), ".."))
BENCH = os.path.join(os.path.abspath(ROOT), "bench")
sys.path.insert(0, BENCH)

import compare  # noqa: E402

PERF = ["perf", "--device", "host", "-g", "2", "-b", "1K", "-e", "1K", "-n", "20"]
CHECK = ["check", "--device", "host", "-g", "2", "--quick"]
TUNE = ["tune", "--device", "host", "-g", "2", "--quick", "-b", "4K", "-e", "4K", "--noise", "10000"]
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}  # the process itself is the rank that writes
ENV = {key: value for key, value in os.environ.items()
       if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK") and not key.startswith("ONEHOP_")}  # fmt: skip


def run(*args, env=None, **more):
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run([TOOL, *args], text=True, timeout=60, env={**ENV, **(env or {})}, **more)


def shell(script, env=None):
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60,
                          env={**ENV, "TOOL": TOOL, **(env or {})})  # fmt: skip


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(self.folder, "out")

    def holds(self, *names):
        self.assertEqual(sorted(os.listdir(self.folder)), sorted(names))

    def node(self, name, minor):
        """A character device of our own: a wrong program may do as it likes with it."""
        path = os.path.join(self.folder, name)
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            with open(path, "wb", buffering=0):
                return path
        except OSError:  # not root, or no devices here; then nobody can harm the real one
            if os.geteuid() == 0:
                self.skipTest("no device nodes can be made here")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return f"/dev/{name}"

    def written(self, path=None):
        with open(path or self.path) as file:
            self.assertEqual(json.load(file)["schema"], "onehop-perf/1")

    def refused(self, *args, word):
        for command, flag in ((PERF, "-J"), (CHECK, "-J"), (TUNE, "-o")):
            with self.subTest(command=command, word=word):
                done = run(*command, flag, *args)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(f"{flag} '{args[0]}'", done.stderr)
                self.assertIn(word, done.stderr)
                self.assertEqual(done.stdout, "", "before the work")


class Planted(InFolder):
    """A link at every name that could be foreseen."""

    def setUp(self):
        super().setUp()
        self.private = os.path.join(self.folder, "private")
        with open(self.private, "w") as file:
            file.write("private")

    def untouched(self):
        with open(self.private) as file:
            self.assertEqual(file.read(), "private")

    def test_beside_json(self):
        done = shell(f"cd {self.folder}; ln -s private out.$$; exec $TOOL perf --device host -e 1K -n 20 -J out", ALONE)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.untouched()
        self.written()

    def test_beside_table(self):
        done = shell(f"cd {self.folder}; ln -s private out.untried.$$; ln -s private out.untried; ln -s private out.$$; "
                     f"exec $TOOL {' '.join(TUNE)} -o out")  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        self.untouched()
        self.assertEqual(len(os.listdir(self.folder)), 5, "the links are as they were")
        with open(self.path) as file:
            self.assertTrue(file.read().startswith("onehop-tuning 1\n"))

    def test_the_name_itself(self):
        os.symlink("private", self.path)
        self.refused(self.path, word="symbolic link")
        self.untouched()
        self.assertTrue(os.path.islink(self.path))

    def test_put_there_during_the_run(self):
        """What is no file when the work has been done is not replaced."""
        with subprocess.Popen([TOOL, *PERF[:-2], "-n", "50000", "-w", "100000", "-J", self.path], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV) as process:  # fmt: skip
            for line in process.stdout:
                if re.match(r"# +\(B\)", line):
                    break
            os.mkfifo(self.path)
            _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 3, err)
        self.assertIn("no longer a regular file", err)
        self.assertTrue(stat.S_ISFIFO(os.stat(self.path).st_mode))
        self.holds("out", "private")


class Kinds(InFolder):
    def test_devices(self):
        for name, minor, code in (("null", 3, 0), ("full", 7, 3)):
            with self.subTest(name=name):
                path = self.node(name, minor)
                done = run(*PERF, "-J", path)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertTrue(stat.S_ISCHR(os.stat(path).st_mode))
                self.assertEqual("No space left" in done.stderr, name == "full", done.stderr)

    def test_fifo(self):
        os.mkfifo(self.path)
        self.refused(self.path, word="nobody reads")
        with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)) as reader:
            done = run(*PERF, "-J", self.path)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads(reader.read())["ranks"], 2)
        self.assertTrue(stat.S_ISFIFO(os.stat(self.path).st_mode))
        self.holds("out")

    def test_descriptors(self):
        ends = os.pipe()
        done = run(*PERF, "-J", f"/dev/fd/{ends[1]}", pass_fds=[ends[1]])
        os.close(ends[1])
        with open(ends[0]) as file:
            text = file.read()
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(text)["ranks"], 2)
        done = run(*PERF, "-J", "/proc/self/fd/1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn('"schema": "onehop-perf/1"', done.stdout)
        self.assertTrue(done.stdout.endswith("# 0 wrong\n"))
        with open(os.devnull) as file:
            done = run(*PERF, "-J", f"/dev/fd/{file.fileno()}", pass_fds=[file.fileno()])
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("not open for writing", done.stderr)

    def test_what_is_no_file(self):
        self.refused(self.folder, word="neither a file")
        self.refused(self.folder + "/", word="names no file")
        self.refused("", word="names no file")
        self.refused(os.path.join(self.folder, "none", "x"), word="No such file")
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(self.path)
            self.refused(self.path, word="neither a file")

    def test_not_allowed(self):
        if os.geteuid() == 0:
            self.skipTest("root may write anywhere")
        with open(self.path, "w"):
            os.chmod(self.path, 0o444)
        self.refused(self.path, word="denied")
        os.chmod(self.folder, 0o555)
        self.refused(os.path.join(self.folder, "other"), word="denied")
        os.chmod(self.folder, 0o755)

    def test_mode(self):
        self.assertEqual(run(*PERF, "-J", self.path, umask=0o027).returncode, 0)
        self.assertEqual(os.stat(self.path).st_mode & 0o7777, 0o640)
        os.chmod(self.path, 0o604)
        self.assertEqual(run(*PERF, "-J", self.path).returncode, 0)
        self.assertEqual(os.stat(self.path).st_mode & 0o7777, 0o604)
        self.written()
        self.holds("out")


class EndedEarly(InFolder):
    """perf that is ended at any moment leaves the file from before, or a whole one with what was measured."""

    SIZES = ["perf", "--device", "host", "-g", "2", "-b", "1K", "-e", "256K", "-f", "2", "-n", "300"]
    BEFORE = '{"from": "before"}'

    def ended(self, number, after, *more, group=False):
        """Returns what the file holds then."""
        with open(self.path, "w") as file:
            file.write(self.BEFORE)
        process = subprocess.Popen([TOOL, *self.SIZES, *more, "-J", self.path], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, env=ENV, start_new_session=True)  # fmt: skip
        time.sleep(after)
        (os.killpg if group else os.kill)(process.pid, number)
        process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):  # the ranks of a parent that was killed are ended by the kernel
            os.killpg(process.pid, signal.SIGKILL)
        with open(self.path) as file:
            text = file.read()
        data = json.loads(text)
        if data != json.loads(self.BEFORE):
            self.assertEqual(data["schema"], "onehop-perf/1")
            sizes = [1 << 10 + i for i in range(9)]
            found = [row["size"] for row in data["results"]]
            self.assertEqual(found, sizes[: len(found)])
            self.assertGreater(len(found), 0)
            self.assertEqual(data["complete"], len(found) == len(sizes))
        # A rank that is killed while it writes cannot take its file away.
        beside = [name for name in os.listdir(self.folder) if name != "out"]
        self.assertTrue(len(beside) <= 1 and all(name.startswith(".onehop-") for name in beside), beside)
        for name in beside:
            os.unlink(os.path.join(self.folder, name))
        return data

    def test_at_random_moments(self):
        began = time.monotonic()
        self.assertEqual(run(*self.SIZES).returncode, 0)
        whole = time.monotonic() - began
        partial = 0
        for i in range(24):
            number = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)[i % 3]
            layout = ("process", "thread", "single")[i // 3 % 3]
            after = random.uniform(0, 1.1 * whole)
            with self.subTest(number=number, layout=layout, after=after):
                data = self.ended(number, after, "--layout", layout, group=i % 2 == 0)
                partial += not data.get("complete", True)
        self.assertGreater(partial, 0, "at none of these moments a part had been measured")

    def test_lost_rank(self):
        """Also where a rank is lost, what was measured stays."""
        process = subprocess.Popen([TOOL, *self.SIZES[:-1], "20000", "-w", "20000", "-e", "1G", "-J", self.path],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV)  # fmt: skip
        with process:
            for line in process.stdout:
                if line.split()[:1] == ["2048"]:
                    break
            with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
                os.kill(int(file.read().split()[1]), signal.SIGKILL)
            process.communicate(timeout=60)
        self.assertEqual(process.returncode, 4)
        with open(self.path) as file:
            data = json.load(file)
        self.assertIs(data["complete"], False)
        self.assertGreaterEqual(len(data["results"]), 1)
        self.holds("out")


class Scripts(InFolder):
    """The Python programs, which share a writer of their own."""

    COMPARE = [sys.executable, "-S", os.path.join(BENCH, "compare_cpu.py"), "-g", "2", "-d", "float32", "-b", "1K", "-e",
               "1K", "-n", "20", "--repeat", "1", "--onehop", TOOL, "-J"]  # fmt: skip

    def test_planted(self):
        private = os.path.join(self.folder, "private")
        with open(private, "w") as file:
            file.write("private")
        done = shell(f"cd {self.folder}; ln -s private out.$$; exec {' '.join(self.COMPARE)} out")
        self.assertEqual(done.returncode, 3, "no peer is there: " + done.stderr)
        with open(private) as file:
            self.assertEqual(file.read(), "private")
        with open(self.path) as file:
            self.assertEqual(json.load(file)["schema"], "onehop-compare/1")

    def test_refused_before_the_work(self):
        os.symlink("private", self.path)
        for path, word in ((self.path, "symbolic link"), (self.folder, "neither"), ("", "no file"),
                           (os.path.join(self.folder, "none", "x"), "No such file")):  # fmt: skip
            done = subprocess.run([*self.COMPARE, path], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(word, done.stderr)
            self.assertEqual(done.stdout, "")
        self.holds("out")

    def test_kinds(self):
        full = compare.Output(self.node("full", 7))
        with self.assertRaisesRegex(OSError, "No space left"):
            full.write("x")
        os.mkfifo(self.path)
        with self.assertRaises(argparse.ArgumentTypeError):
            compare.Output(self.path)
        with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)) as reader:
            compare.Output(self.path).write("text")
            self.assertEqual(reader.read(), "text")
        ends = os.pipe()
        compare.Output(f"/dev/fd/{ends[1]}").write("text")
        os.close(ends[1])
        with open(ends[0]) as file:
            self.assertEqual(file.read(), "text")
        with open(os.devnull) as file, self.assertRaises(argparse.ArgumentTypeError):
            compare.Output(f"/dev/fd/{file.fileno()}")

    def test_files(self):
        before = os.umask(0o027)
        self.addCleanup(os.umask, before)
        compare.Output(self.path).write("one")
        self.assertEqual(os.stat(self.path).st_mode & 0o7777, 0o640)
        os.chmod(self.path, 0o604)
        compare.Output(self.path).write(b"two")
        self.assertEqual(os.stat(self.path).st_mode & 0o7777, 0o604)
        with open(self.path) as file:
            self.assertEqual(file.read(), "two")
        late = compare.Output(self.path)
        os.unlink(self.path)
        os.mkfifo(self.path)
        with self.assertRaisesRegex(OSError, "no longer"):
            late.write("three")
        self.assertTrue(stat.S_ISFIFO(os.stat(self.path).st_mode))
        self.assertEqual([name for name in os.listdir(self.folder) if name.startswith(".")], [])

    def test_record(self):
        record = os.path.join(BENCH, "record.sh")
        for _ in range(2):
            done = subprocess.run(["bash", record, self.path, "echo", "said"], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path) as file:
            self.assertEqual(file.read().count("\nsaid\n"), 2)
        link = os.path.join(self.folder, "link")
        os.symlink("elsewhere", link)
        done = subprocess.run(["bash", record, link, "echo", "said"], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.holds("link", "out")


class Standard(InFolder):
    def test_full(self):
        for args in (PERF, ["info"], ["version"], ["help"], ["perf", "--help"], [*PERF, "--layout", "thread"]):
            with self.subTest(args=args), open("/dev/full", "w") as full:
                done = run(*args, stdout=full)
                self.assertEqual(done.returncode, 3, done.stderr)
                self.assertIn("standard output could not be written: No space left", done.stderr)
        with open("/dev/full", "w") as full:
            self.assertEqual(run("perf", "--bogus", stdout=full).returncode, 2, "nothing was printed")

    def test_closed(self):
        perf = " ".join(PERF)
        done = shell(f"exec $TOOL {perf} >&-")
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("Bad file descriptor", done.stderr)
        self.assertEqual(shell(f"exec $TOOL {perf} <&-").returncode, 0)
        # What is printed lands in no file of ours.
        done = shell(f"exec $TOOL {perf} -J {self.path} <&- >&- 2>&-")
        self.assertEqual(done.returncode, 3)
        self.written()
        done = shell(f"exec $TOOL {' '.join(TUNE)} -o {self.path} <&- 2>&-")
        self.assertEqual(done.returncode, 0)
        with open(self.path) as file:
            self.assertTrue(file.read().startswith("onehop-tuning 1\n"))
        self.holds("out")


if __name__ == "__main__":
    unittest.main()
