# labels: serial timeout=300
"""Property: the command line does what its help says, as a user meets it: flags, tables, JSON, exit codes, lost ranks,
Ctrl-C."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

BUILD = os.environ.get(
    "ONEHOP_BUILD_DIR", os.path.join(os.path.dirname(__file__), "..", "build", "release")
)
TOOL = os.path.join(BUILD, "onehop")
SMALL = ["--device", "host", "-g", "2", "-b", "1K", "-e", "64K"]
# A run that lasts until somebody ends it.
ENDLESS = [
    "--device",
    "host",
    "-g",
    "3",
    "-b",
    "1K",
    "-e",
    "4K",
    "-f",
    "2",
    "-n",
    "50000",
    "-w",
    "1000000",
]
LIMIT = 120

CLEAN_ENV = {
    key: value
    for key, value in os.environ.items()
    if key
    not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    and not key.startswith(("ONEHOP_", "OMPI_", "PMI", "SLURM_"))
    or key in ("ONEHOP_BUILD_DIR", "ONEHOP_SOURCE_DIR")
}


def run(*args, env=None, limit=LIMIT):
    return subprocess.run(
        [TOOL, *args],
        capture_output=True,
        text=True,
        timeout=limit,
        env={**CLEAN_ENV, **(env or {})},
    )


def start(*args, env=None):
    return subprocess.Popen(
        [TOOL, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**CLEAN_ENV, **(env or {})},
    )


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def has_gpu():
    return "cuda 0" in run("info").stdout


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def rows(table):
    return [
        line.split() for line in table.splitlines() if line.strip() and not line.startswith("#")
    ]


class Flags(unittest.TestCase):
    def refused(self, args, *words):
        done = run("perf", *args)
        self.assertEqual(done.returncode, 2, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        self.assertEqual(done.stdout, "")

    def test_bad_values_are_refused_by_name(self):
        for args, words in (
            (["-b", "1X"], ["-b", "1X"]),
            (["-b", "1KB"], ["-b", "1KB"]),
            (["-b", "-1"], ["-b", "-1"]),
            (["-b", " 1"], ["-b"]),
            (["-b", "0x10"], ["-b", "0x10"]),
            (["-b", "1.5K"], ["-b", "1.5K"]),
            (["-b", "0"], ["-b", "0"]),
            (["-e", "99999999999999999999"], ["-e", "99999999999999999999"]),
            (["-e"], ["-e", "value"]),
            (["-f", "1"], ["-f", "1"]),
            (["-g", "17"], ["-g", "17"]),
            (["-g", "0"], ["-g", "0"]),
            (["-g", "2K"], ["-g", "2K"]),
            (["-n", "many"], ["-n", "many"]),
            (["-c", "2"], ["-c", "2"]),
            (["-d", "int8"], ["-d", "int8", "bfloat16"]),
            (["-o", "max"], ["-o", "max", "sum", "reduce_scatter", "all_gather"]),
            (["--device", "host", "-g", "3", "-o", "all_gather", "-b", "8"], ["-b", "each rank", "12 bytes"]),
            (["--device", "tpu"], ["--device", "tpu"]),
            (["--layout=ring"], ["--layout", "ring"]),
            (["--source", "disk"], ["--source", "disk", "multicast"]),
            (["--compare", "gloo"], ["--compare", "gloo", "nccl-symm"]),
            (["--compare", "nccl,gloo"], ["--compare", "gloo"]),
            (["--compare", "nccl,"], ["--compare"]),
            (["--eager=1"], ["--eager"]),
            (["--bogus"], ["--bogus"]),
            (["-z"], ["-z"]),
            (["stray"], ["stray"]),
            (["--device", "host", "--algo", "ring"], ["--algo", "ring", "1shot_push"]),
            (["--device", "host", "-b", "4K", "-e", "1K"], ["-b", "-e"]),
            (["--device", "host", "--layout", "single", "--pin"], ["--pin"]),
            (["--device", "host", "-b", "2"], ["-b", "element"]),
            (["--device", "host", "--eager", "-G", "3"], ["--eager", "-G"]),
            (["--device", "host", "--ranks-per-device", "2"], ["--ranks-per-device"]),
            (["--device", "host", "-J", "/nonexistent/x.json"], ["-J", "/nonexistent/x.json"]),
        ):
            with self.subTest(args=args):
                self.refused(args, *words)

    def test_bad_environment_is_refused_by_name(self):
        for env, word in (
            ({"RANK": "0"}, "WORLD_SIZE"),
            ({"WORLD_SIZE": "2"}, "RANK"),
            ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
            ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
            ({"RANK": "0", "WORLD_SIZE": "17"}, "WORLD_SIZE"),
            ({"ONEHOP_DEVICE": "tpu"}, "ONEHOP_DEVICE"),
            ({"ONEHOP_TIMEOUT_MS": "soon"}, "ONEHOP_TIMEOUT_MS"),
            ({"ONEHOP_ISA": "mmx"}, "ONEHOP_ISA"),
        ):
            with self.subTest(env=env):
                args = [] if "ONEHOP_DEVICE" in env else ["--device", "host"]
                done = run("perf", *args, "-e", "1K", env=env)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(word, done.stderr)

    def test_commands(self):
        self.assertEqual(run().returncode, 2)
        self.assertEqual(run("dance").returncode, 2)
        for args in (
            ["help"],
            ["--help"],
            ["version"],
            ["help", "perf"],
            ["perf", "-h"],
            ["info", "--help"],
        ):
            with self.subTest(args=args):
                done = run(*args)
                self.assertEqual(done.returncode, 0)
                self.assertTrue(done.stdout)
        self.assertIn("--rotate", run("perf", "--help").stdout)

    def test_sizes(self):
        done = run(
            "perf",
            "--device=host",
            "-g2",
            "-b3k",
            "--maxbytes",
            "48K",
            "-f",
            "16",
            "-n",
            "20",
            "-d",
            "half",
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(
            [(row[0], row[1]) for row in rows(done.stdout)], [("3072", "1536"), ("49152", "24576")]
        )


class Perf(unittest.TestCase):
    def good(self, *args, env=None):
        done = run("perf", *args, env=env)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^# 0 wrong\n\Z")
        self.assertIn("# Out of bounds values : 0 OK", done.stdout)
        self.assertRegex(done.stdout, r"# Avg bus bandwidth +: \d")
        return done.stdout

    def test_table(self):
        table = self.good(*SMALL)
        for word in (
            "size",
            "count",
            "type",
            "redop",
            "root",
            "algbw",
            "busbw",
            "#wrong",
            "p50",
            "p99",
            "%floor",
        ):
            self.assertIn(word, table)
        lines = rows(table)
        self.assertEqual([line[0] for line in lines], ["1024", "4096", "16384", "65536"])
        for line in lines:
            self.assertEqual(line[2:5], ["float32", "sum", "-1"])
            self.assertEqual((line[8], line[15]), ("0", "0"))
            self.assertGreater(float(line[5]), 0)
            self.assertLessEqual(float(line[9]), float(line[10]))

    def test_collectives_in_parts(self):
        for name, redop, layout in (("reduce_scatter", "sum", "process"), ("all_gather", "none", "thread"),
                                    ("reduce_scatter", "sum", "single"), ("all_gather", "none", "single")):
            with self.subTest(name=name, layout=layout):
                table = self.good("--device", "host", "-g", "3", "-o", name, "--layout", layout, "-b", "100",
                                  "-e", "300K", "-f", "50", "-d", "bfloat16", "-n", "20")
                self.assertIn(f"Collective test concluded: {name}", table)
                lines = rows(table)
                self.assertEqual([line[0] for line in lines], ["96", "4998", "249996"])
                for line in lines:
                    self.assertEqual(line[2:5], ["bfloat16", redop, "-1"])
                    self.assertEqual((line[8], line[15]), ("0", "0"))
                    self.assertTrue(line[-1].startswith("host_"))

    def test_layouts_and_types(self):
        for layout in ("process", "thread", "single"):
            for dtype in ("float", "half", "bfloat16"):
                with self.subTest(layout=layout, dtype=dtype):
                    self.good(
                        "--device",
                        "host",
                        "-g",
                        "3",
                        "-b",
                        "1K",
                        "-e",
                        "256K",
                        "-f",
                        "16",
                        "-n",
                        "20",
                        "--layout",
                        layout,
                        "-d",
                        dtype,
                    )

    def test_graphs(self):
        for layout in ("process", "thread", "single"):
            with self.subTest(layout=layout):
                table = self.good(*SMALL, "-G", "4", "-n", "7", "--layout", layout)
                self.assertIn("graph: 4", table)

    def test_one_rank(self):
        self.good("--device", "host", "-g", "1", "-e", "64K", "-n", "20")

    def test_options(self):
        self.good(*SMALL, "-n", "20", "--rotate")
        self.good(*SMALL, "-n", "20", "--pin")
        self.good(*SMALL, "-n", "20", "--algo", "1shot_push")
        table = self.good(*SMALL, "-n", "20", "--algo", "1shot_pull", "--source", "workspace")
        self.assertIn("# source: workspace", table)
        done = run("perf", *SMALL, "-n", "20", "-c", "0")
        self.assertEqual(done.returncode, 0)
        self.assertIn("N/A", done.stdout)

    def test_json(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.json")
            self.good(*SMALL, "-n", "20", "-J", path)
            self.assertEqual(os.listdir(folder), ["out.json"])
            with open(path) as file:
                data = json.load(file)
        self.assertEqual(data["schema"], "onehop-perf/1")
        self.assertIs(data["complete"], True)
        self.assertEqual(data["ranks"], 2)
        for key in (
            "machine",
            "cpu",
            "driver",
            "clocks",
            "version",
            "commit",
            "args",
            "devices",
            "time",
        ):
            self.assertIn(key, data)
        self.assertEqual([row["size"] for row in data["results"]], [1024, 4096, 16384, 65536])
        for row in data["results"]:
            for side in ("out_of_place", "in_place"):
                self.assertEqual(row[side]["wrong"], 0)
                for key in ("time_us", "p50", "p99", "algbw", "busbw", "percent_of_floor"):
                    self.assertGreater(row[side][key], 0, key)

    def test_torchrun(self):
        env = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(os.getpid()),
        }
        ranks = [
            start(
                "perf",
                "--device",
                "host",
                "-e",
                "16K",
                "-n",
                "20",
                env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
            )
            for r in range(2)
        ]
        outputs = [rank.communicate(timeout=LIMIT) for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0, 0], outputs)
        self.assertIn("# 0 wrong", outputs[0][0])
        self.assertEqual(outputs[1][0], "")

    def test_launchers(self):
        """Variables of mpirun's and srun's ranks, set by hand; mpirun itself where there is one."""
        job = str(os.getpid())
        small = ("perf", "--device", "host", "-e", "4K", "-n", "20")
        for rank, fixed in (
            ("OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": job}),
            ("PMI_RANK", {"PMI_SIZE": "2", "SLURM_JOB_ID": job}),
            ("SLURM_PROCID", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}),
        ):
            ranks = [start(*small, env={**fixed, rank: str(r)}) for r in range(2)]
            outputs = [one.communicate(timeout=LIMIT) for one in ranks]
            self.assertEqual([one.returncode for one in ranks], [0, 0], outputs)
            self.assertIn("# 0 wrong", outputs[0][0])
            self.assertEqual(outputs[1][0], "")
            done = run(*small, "-g", "3", env={**fixed, rank: "0"})
            self.assertEqual(done.returncode, 2)
            self.assertIn("=2", done.stderr)
            for command in ("check", "tune"):
                done = run(command, env={**fixed, rank: "0"})
                self.assertEqual(done.returncode, 2)
                self.assertIn("run it once", done.stderr)
        # A shell that srun or sbatch started is no rank.
        for env in ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}):
            done = run(*small, "-g", "2", env=env)
            self.assertEqual(done.returncode, 0, done.stderr)
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        for mpirun in ("mpirun.openmpi", "mpirun.mpich"):
            if not shutil.which(mpirun):
                continue
            spare = ["--oversubscribe"] if mpirun == "mpirun.openmpi" else []
            done = subprocess.run(
                [mpirun, *spare, "-np", "2", TOOL, *small],
                capture_output=True,
                text=True,
                timeout=LIMIT,
                env={**CLEAN_ENV, **root},
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout.count("# 0 wrong"), 1, done.stdout)

    def test_unsupported(self):
        for peers in ("nccl", "nccl-symm", "nccl,nccl-symm"):
            done = run("perf", "--device", "host", "--compare", peers)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("--compare", done.stderr)
        # What the library refuses, in its words.
        for algorithm, source in (("1shot_push", "workspace"), ("2shot_pull", "multicast")):
            done = run("perf", *SMALL, "--algo", algorithm, "--source", source)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(source, done.stderr)
        if has_gpu():
            self.skipTest("there is a GPU")
        done = run("perf", "--device", "cuda")
        self.assertEqual(done.returncode, 3)
        self.assertIn("--device cuda", done.stderr)

    def test_info(self):
        done = run("info")
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in (
            "devices",
            "host:",
            "instruction set",
            "memory per rank",
            "oldest driver",
            "ONEHOP_TIMEOUT_MS",
            "multicast: emulated; off: ONEHOP_MULTICAST is not 1",
        ):
            self.assertIn(word, done.stdout)

    def test_info_json(self):
        """Text of the environment that JSON could not hold is replaced, not passed on."""
        odd = {"MASTER_ADDR": b'"\\\n\xff\xed\xa0\x80\xc3\xa9', "WORLD_SIZE": b"2"}
        env = {os.fsencode(key): os.fsencode(value) for key, value in CLEAN_ENV.items()}
        env.update((key.encode(), value) for key, value in odd.items())
        done = subprocess.run([TOOL, "info", "--json"], capture_output=True, timeout=LIMIT, env=env)
        self.assertEqual(done.returncode, 0, done.stderr)
        data = json.loads(done.stdout.decode())
        keys = "schema version commit oldest_driver devices no_gpu links memory environment"
        self.assertEqual(list(data), keys.split())
        self.assertEqual(data["schema"], "onehop-info/1")
        host = data["devices"][0]
        keys = "kind ordinal refusal usable name bus_id instruction_set capability cores memory_bytes handle_types multicast"
        self.assertEqual(list(host), keys.split())
        self.assertEqual((host["kind"], host["usable"], host["handle_types"]), ("host", True, ["descriptor"]))
        self.assertEqual(host["multicast"], {"support": "emulated", "refusal": "ONEHOP_MULTICAST is not 1", "on": False})
        self.assertEqual([row["ranks"] for row in data["memory"]], list(range(2, 9)))
        for row in data["memory"]:
            self.assertGreater(row["host"]["symmetric_bytes"], 0)
            self.assertGreater(row["cuda"]["symmetric_bytes"], 0)
        self.assertEqual(bool(data["no_gpu"]), len(data["devices"]) == 1)
        values = {row["name"]: row["value"] for row in data["environment"]}
        self.assertEqual(values["WORLD_SIZE"], "2")
        self.assertIsNone(values["RANK"])
        self.assertEqual(values["MASTER_ADDR"], '"\\\n' + "\ufffd" * 4 + "\xe9")
        text = run("info").stdout
        for name in values:
            self.assertIn(name, text)
        done = run("info", "--json", env={"ONEHOP_ISA": "mmx"})
        self.assertEqual(done.returncode, 2)
        self.assertIn("ONEHOP_ISA", json.loads(done.stdout)["devices"][0]["refusal"])

    def test_multicast(self):
        if has_gpu():
            self.skipTest("there is a GPU, on which nothing may switch it on")
        on = {"ONEHOP_MULTICAST": "1", "NCCL_NVLS_ENABLE": "", "TORCH_SYMM_MEM_DISABLE_MULTICAST": ""}
        call = ("perf", *SMALL, "--algo", "2shot_pull", "--source", "multicast")
        done = run(*call, env=on)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("# source: multicast", done.stdout)
        self.assertIn("# 0 wrong", done.stdout)
        self.assertIn("multicast: emulated; on", run("info", env=on).stdout)
        for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
            off = {**on, name: value}
            self.assertIn(f"emulated; off: {name} is", run("info", env=off).stdout)
            done = run(*call, env=off)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn(f"source multicast is off: {name} is", done.stderr)
        done = run(*call, env={"ONEHOP_MULTICAST": "2"})
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("ONEHOP_MULTICAST", done.stderr)


class Check(unittest.TestCase):
    QUICK = ["check", "--device", "host", "--quick"]

    def report(self, *args):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.json")
            done = run(*self.QUICK, "--json", path, *args)
            with open(path) as file:
                return done, json.load(file)

    def test_three_ranks(self):
        done, data = self.report("-g", "3")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^# 0 wrong\n\Z")
        self.assertEqual(done.stderr, "")  # no progress into a pipe
        self.assertEqual(data["schema"], "onehop-check/1")
        self.assertEqual((data["wrong"], data["out_of_bounds"], data["not_reached"]), (0, 0, 0))
        cells = data["cells"]
        self.assertEqual(len(cells), data["ran"] + data["skipped"])
        self.assertEqual(data["outputs"], sum(cell["outputs"] for cell in cells))
        ok = [cell for cell in cells if cell["state"] == "ok"]
        self.assertEqual({cell["type"] for cell in ok}, {"float32", "float16", "bfloat16"})
        self.assertEqual({cell["mode"] for cell in ok}, {"eager", "graph"})
        for name in ("auto", "1shot_push", "1shot_pull", "2shot_pull", "host_1shot", "host_2shot", "scatter_push",
                     "gather_ll", "gather_push", "host_scatter", "host_gather"):
            self.assertIn(name, {cell["algorithm"] for cell in ok})
        for cell in cells:
            self.assertEqual(cell["ranks"], 3)
            self.assertTrue(cell["outputs"] or cell["refused"], cell)
        rows = [line for line in done.stdout.splitlines() if re.match(r"(#| ) \w+ +\w+ +(mode|eager|graph) ", line)]
        self.assertGreater(len(rows), 20)
        self.assertEqual({len(row) for row in rows}, {len(rows[0])}, "columns stand below each other")
        why = {cell["refused"] for cell in cells if cell["source"] == "multicast"}
        self.assertTrue(why and all(reason.endswith("on hardware") for reason in why), "whole reasons")

    def test_finds_one_wrong_bit(self):
        done, data = self.report("-g", "2", "--corrupt", "77")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        wrong = [cell for cell in data["cells"] if cell["state"] == "wrong"]
        # Once in each of the two runs.
        self.assertEqual([cell["wrong"] for cell in wrong], [1, 1])
        self.assertRegex(done.stdout, r"(?m)^# 2 wrong\n\Z")
        self.assertIn(f"WRONG: {wrong[0]['algorithm']}, ", done.stdout)

    def test_flags(self):
        for args, word in ((["-g", "17"], "-g"), (["--json", "/nonexistent/x"], "-J"), (["stray"], "stray")):
            done = run("check", *args)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(word, done.stderr)
        self.assertNotIn("corrupt", run("check", "--help").stdout)

    def test_lost_rank(self):
        process = start(*self.QUICK, "-g", "4")
        try:
            deadline = time.monotonic() + LIMIT
            while len(children(process.pid)) < 4:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            os.kill(children(process.pid)[2], signal.SIGKILL)
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
            process.wait()
        self.assertEqual(process.returncode, 4, out + err)
        self.assertIn("rank 2", err)
        self.assertIn("ENDED EARLY: 4 ranks (process), 1 of 2 runs", out)
        self.assertIn("runs ended early", out)


class Tune(unittest.TestCase):
    QUICK = ["tune", "--device", "host", "-g", "3", "--quick", "-e", "64K"]

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(self.folder, "my.table")

    def test_writes_a_table_that_is_used(self):
        done = run(*self.QUICK, "-b", "4K", "--noise", "10000", "-o", self.path)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("used and verified", done.stdout)
        self.assertIn("# graph, 65536 bytes: host_", done.stderr)
        self.assertEqual(os.listdir(self.folder), ["my.table"])
        with open(self.path) as file:
            text = file.read()
        self.assertTrue(text.startswith("onehop-tuning 1\n"))
        for part in ("# Measured on 20", "3 ranks", "rank 2: host", "device host", "differ by 10000 %"):
            self.assertIn(part, text)
        table = [line.split("#")[0].split() for line in text.splitlines() if re.match(r" +3 ", line)]
        for mode in ("eager", "graph"):
            rows_of_mode = [row for row in table if row[1] == mode]
            self.assertEqual(rows_of_mode[-1][2], "any")
        for row in table:
            self.assertRegex(" ".join(row[3:]), r"^host_[12]shot - 1 1$")
        done = run("perf", "--device", "host", "-g", "3", "-e", "16K", "-n", "20", env={"ONEHOP_TUNING": self.path})
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_refuses_noise(self):
        done = run(*self.QUICK, "--noise", "0", "-o", self.path)
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertRegex(done.stderr, r"host_[12]shot at \d+ bytes, (eager|graph): medians of .* nothing was written")
        self.assertEqual(os.listdir(self.folder), [])

    def test_refusals(self):
        for args, code, word in (
            (["-o", "/nonexistent/x.table"], 2, "/nonexistent/x.table"),
            (["-o", ""], 2, "-o ''"),
            (["-b", "2K", "-e", "1K"], 2, "-b 2048"),
            (["-g", "1"], 2, "-g"),
            (["--nccl-handover"], 3, "NCCL needs GPUs"),
        ):
            with self.subTest(args=args):
                done = run("tune", "--device", "host", *args)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertIn(word, done.stderr)

    def test_perf_with_a_table(self):
        perf = ["perf", "--device", "host", "-g", "3", "-b", "1K", "-e", "4K", "-n", "20"]
        with open(self.path, "w") as file:
            file.write("onehop-tuning 1\ndevice host\n3 any 2K 1shot_push - 3 1\n3 any any host_2shot - 1 1\n")
        done = run(*perf, env={"ONEHOP_TUNING": self.path})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([row[-1] for row in rows(done.stdout)], ["1shot_push", "host_2shot"])
        with open(self.path, "a") as file:
            file.write("3 any any ring - 1 1\n")
        done = run(*perf, env={"ONEHOP_TUNING": self.path})
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("my.table:5: expected an algorithm", done.stderr)

    def test_hand_over_on_the_host(self):
        for args, env in ((["--nccl-handover"], {}), ([], {"ONEHOP_NCCL": "1"})):
            done = run("perf", *SMALL, *args, env=env)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("NCCL needs GPUs", done.stderr)


class Which(unittest.TestCase):
    """The rule that chooses, those passed over and why; for GPUs too, without one."""

    GPU = ["--device", "cuda", "--sm", "90", "--max-blocks", "132"]

    def good(self, *args, env=None):
        done = run("which", *args, env=env)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        first, *told, last = done.stdout.splitlines()
        return first, [re.split("  +", line.strip()) for line in told], last

    def test_gpus(self):
        first, told, last = self.good("64K", "-d", "bf16", "-g", "2", *self.GPU)
        self.assertEqual(first, "all_reduce of 65536 bytes, bfloat16, 2 ranks, sm_90, grids to 132 blocks, eager")
        self.assertEqual([why for _, _, why in told], ["the message is longer"] * (len(told) - 1) + ["chosen"])
        self.assertEqual(told[-1][1], "2 any 64K 1shot_push - 33 128")
        self.assertEqual(last, f"runs 1shot_push, grid 33 x 128, 1 chunk, by {told[-1][0]}")
        table, line = told[-1][0].split(":")
        with open(os.path.join(os.path.dirname(__file__), "..", "src", "plan", "tables", table)) as file:
            self.assertEqual(file.read().splitlines()[int(line) - 1].split(), told[-1][1].split())

    def test_reasons(self):
        _, told, _ = self.good("1M", "-g", "8", "--graph", *self.GPU)
        why = {text: reason for _, text, reason in told}
        self.assertEqual(why["8-16 graph 512K-128M 2shot_pull multicast 17 max"], "multicast is off")
        self.assertEqual(why["8-16 eager 128M 2shot_pull multicast 17 max"], "it is for eager calls")
        self.assertEqual(why["8-16 any 128M-any nccl - - -"], "the message is shorter")
        self.assertIn("nccl is off", {reason for *_, reason in self.good("256M", "-g", "8", *self.GPU)[1]})
        self.assertTrue(self.good("256M", "-g", "8", "--nccl", *self.GPU)[2].startswith("runs nccl"))
        self.assertIn("over multicast", self.good("1M", "-g", "8", "--multicast", *self.GPU)[2])

    def test_operations(self):
        for op, size, runs in (("reduce_scatter", "1M", "scatter_push"), ("all_gather", "1K", "gather_ll"),
                               ("all_reduce_norm", "1M", "2shot_push"), ("tp_qknorm", "800", "1shot_push")):
            first, told, last = self.good(size, "-g", "4", "-o", op, *self.GPU)
            self.assertTrue(first.startswith(op + " of "), first)
            self.assertEqual((told[-1][2], told[-1][1].split()[3]), ("chosen", runs))
            self.assertTrue(last.startswith("runs " + runs), last)
        _, told, _ = self.good("96K", "-g", "4", "-o", "all_reduce_norm", "--row", "32K", *self.GPU)
        self.assertIn("the message is shorter", [why for *_, why in told])
        _, told, _ = self.good("480K", "-g", "16", "-o", "all_reduce_norm", "--row", "32K", *self.GPU)
        self.assertIn("there are fewer rows than ranks", [why for *_, why in told])

    def test_named(self):
        last = self.good("32", "-g", "4", "--algo", "2shot_push", *self.GPU)[2]
        self.assertTrue(last.startswith("runs 1shot_push instead of 2shot_push, which cannot serve it, "), last)
        _, told, last = self.good("1M", "-g", "2", "--algo", "1shot_pull", "--graph", *self.GPU)
        self.assertTrue(last.startswith("runs 1shot_pull over graph, grid 129 x 256"), last)
        self.assertIn("another algorithm was named", [why for *_, why in told])

    def test_here_and_files(self):
        self.assertRegex(self.good("4K", "--device", "host", "-g", "3")[2], r"^runs host_1shot, .* by host\.table:\d+$")
        self.assertEqual(self.good("4K", "-g", "1", "--device", "host")[1:], ([], "runs local_copy, 1 chunk, by no rule"))
        with tempfile.NamedTemporaryFile("w", suffix=".table") as file:
            file.write("onehop-tuning 1\ndevice host\n\n3 any 8K host_2shot - 1 1\n")
            file.flush()
            last = self.good("4K", "--device", "host", "-g", "3", env={"ONEHOP_TUNING": file.name})[2]
            self.assertEqual(last, f"runs host_2shot, grid 1 x 1, 1 chunk, by {file.name}:4")

    def test_refusals(self):
        for args, code, word in (([], 2, "SIZE is missing"), (["1X"], 2, "'1X'"), (["6", "-g", "2"], 2, "whole elements"),
                                 (["4K", "--algo", "ring"], 2, "expected one of auto, 1shot_push"),
                                 (["100", "-o", "all_reduce_norm"], 2, "whole rows of 8192"),
                                 (["4K", "--device", "host", "--algo", "nccl"], 3, "not available on the host"),
                                 (["4K", "-g", "99"], 2, "'99'")):
            done = run("which", *args)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(word, done.stderr)


class Faults(unittest.TestCase):
    def read_header(self, process):
        for line in process.stdout:
            if re.match(r"# +\(B\)", line):
                return
        self.fail("no header: " + process.stderr.read())

    def started(self, env=None):
        """A run that is past its header: all ranks are up."""
        process = start("perf", *ENDLESS, env=env)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.read_header(process)
        ranks = children(process.pid)
        self.assertEqual(len(ranks), 3)
        time.sleep(0.2)
        return process, ranks

    def gone(self, pids, within):
        deadline = time.monotonic() + within
        while any(alive(pid) for pid in pids):
            self.assertLess(time.monotonic(), deadline, "processes are left")
            time.sleep(0.01)

    def test_killed_rank(self):
        for victim in range(3):
            with self.subTest(victim=victim):
                process, ranks = self.started()
                began = time.monotonic()
                os.kill(ranks[victim], signal.SIGKILL)
                self.assertEqual(process.wait(timeout=LIMIT), 4)
                self.assertLess(time.monotonic() - began, 2)
                self.assertIn(f"rank {victim} ", process.stderr.read())
                self.gone(ranks, 1)

    def test_interrupt_and_terminate(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(signal=number):
                process, ranks = self.started()
                process.send_signal(number)
                self.assertEqual(process.wait(timeout=LIMIT), -number)
                self.gone(ranks, 1)

    def test_killed_parent(self):
        process, ranks = self.started()
        process.kill()
        process.wait()
        self.gone(ranks, 1)

    def test_killed_rank_under_torchrun(self):
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "lost", "MASTER_PORT": str(os.getpid())}
        args = [arg for arg in ENDLESS if arg not in ("-g", "3")]
        ranks = [start("perf", *args, env={**env, "RANK": str(r)}) for r in range(2)]
        try:
            self.read_header(ranks[0])
            time.sleep(0.2)
            ranks[1].kill()
            self.assertEqual(ranks[0].wait(timeout=LIMIT), 4)
            self.assertIn("rank 1", ranks[0].stderr.read())
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()

    def test_silent_rank(self):
        process, ranks = self.started(env={"ONEHOP_TIMEOUT_MS": "1000"})
        os.kill(ranks[1], signal.SIGSTOP)
        self.assertEqual(process.wait(timeout=LIMIT), 4)
        self.assertIn("rank 1", process.stderr.read())
        self.gone(ranks, 1)


if __name__ == "__main__":
    unittest.main()
