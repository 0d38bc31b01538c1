# labels: serial timeout=120
"""Property: the comparison scripts of bench/, as far as they need no peer, say loudly what is missing, bring orders to all
ranks and failures back, report ratios and wrong data, and make pictures of both kinds of JSON."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import types
import unittest

ROOT = os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), ".."))
BENCH = os.path.join(os.path.abspath(ROOT), "bench")
sys.path.insert(0, BENCH)

import compare  # noqa: E402
import plot  # noqa: E402

PEER = f"""
import sys, os
sys.path.insert(0, {BENCH!r})
import compare
rank = int(sys.argv[2])
def double(value):
    if value < 0 and rank == 1: raise ValueError("negative")
    if value == 0: os._exit(9)
    return {{"value": value * 2 + rank}}
compare.serve(sys.argv[1], rank, {{"double": double}})
"""


def stub_group(world_size):
    return compare.Group("stub", world_size, lambda path: [
        compare.start_process([sys.executable, "-c", PEER, path, rank]) for rank in range(world_size)])


def script(name, *args):
    """Without site-packages: no peer is there."""
    return subprocess.run([sys.executable, "-S", os.path.join(BENCH, name), *args], capture_output=True, text=True,
                          timeout=100)


class Groups(unittest.TestCase):
    def test_orders_reach_all_ranks(self):
        with stub_group(3) as group:
            self.assertEqual([one["value"] for one in group.ask(do="double", value=5)], [10, 11, 12])
            self.assertEqual([one["value"] for one in group.ask(do="double", value=1)], [2, 3, 4])
        self.assertEqual([child.returncode for child in group.children], [0, 0, 0])

    def test_failures(self):
        with stub_group(2) as group, self.assertRaisesRegex(compare.Failure, "rank 1: ValueError: negative"):
            group.ask(do="double", value=-1)
        with stub_group(2) as group, self.assertRaisesRegex(compare.Failure, "gone"):
            group.ask(do="double", value=0)
        with self.assertRaisesRegex(compare.Failure, "(?s)status 1.*no such thing"):
            compare.Group("stub", 1, lambda path: [
                compare.start_process([sys.executable, "-c", "raise SystemExit('no such thing')"])])


class Reports(unittest.TestCase):
    def report(self, wrong):
        arguments = types.SimpleNamespace(json=None)
        report = compare.Report(arguments, ["onehop", "fast", "slow"], {"fast": "onehop", "slow": "onehop"}, [])
        for size in 1024, 4096:
            report.add(2, "float32", size, {
                "onehop": [{"p50_us": us, "wrong": 0} for us in (3.0, 1.0, 2.0)],
                "slow": [{"p50_us": 4.0 if size == 1024 else 16.0, "wrong": wrong}]}, 0.5)
        return report

    def test_ratios(self):
        report = self.report(0)
        self.assertEqual([row["systems"]["slow"]["ratio"] for row in report.rows], [2, 8])
        self.assertAlmostEqual(report.geomeans()["slow"], 4)
        self.assertNotIn("fast", report.geomeans())
        self.assertEqual(report.finish(), 0)

    def test_wrong_data_fails(self):
        self.assertEqual(self.report(1).finish(), 1)

    def test_sizes(self):
        self.assertEqual(compare.sizes_between(1024, 32768, 4), [1024, 4096, 16384, 32768])
        self.assertEqual([compare.parse_size(text) for text in ("3", "4K", "2m")], [3, 4096, 2 << 20])
        for text in "", "K", "1.5K", "-1", "0":
            with self.assertRaises(compare.argparse.ArgumentTypeError):
                compare.parse_size(text)


class Scripts(unittest.TestCase):
    def test_missing_peers_are_loud(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.json")
            done = script("compare_cpu.py", "-g", "2", "-b", "1K", "-e", "4K", "-n", "20", "--repeat", "1", "-J", path)
            self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
            for peer in "gloo", "mpi":
                self.assertIn(f"SKIPPED: {peer}: there is no module", done.stderr)
                self.assertIn(f"SKIPPED: {peer}", done.stdout)
            self.assertIn("# 0 wrong", done.stdout)
            with open(path) as file:
                data = json.load(file)
            self.assertEqual(set(data["skipped"]), {"gloo", "mpi"})
            self.assertEqual([(row["type"], row["size"]) for row in data["results"]],
                             [(dtype, size) for dtype in ("float32", "bfloat16") for size in (1024, 4096)])
            groups = plot.read([path], False)
            self.assertEqual(set(groups), {(2, "float32"), (2, "bfloat16")})
            self.assertEqual(set(groups[2, "float32"]["onehop"]), {1024, 4096})

    def test_torch_without_torch(self):
        done = script("compare_torch.py", "-e", "1K", "--repeat", "1")
        self.assertEqual(done.returncode, 3)
        self.assertIn("SKIPPED: one_shot: there is no module torch", done.stderr)

    def test_python_scripts_without_modules(self):
        for name in "compare_gloo.py", "python_call.py":
            done = script(name)
            self.assertEqual(done.returncode, 3, name)
            self.assertRegex(done.stderr, "SKIPPED: .*there is no module numpy, no module torch")

    def test_flags(self):
        for name, args in (("compare_cpu.py", ["-g", "1"]), ("compare_cpu.py", ["--peers", "nccl"]),
                           ("compare_cpu.py", ["-d", "int8"]), ("compare_torch.py", ["--compare", "gloo"]),
                           ("compare_torch.py", ["-b", "1.5K"]), ("plot.py", ["/nonexistent"]),
                           ("compare_gloo.py", ["-g", "1"]), ("compare_gloo.py", ["-d", "int8"]),
                           ("python_call.py", ["-b", "4Q"]),
                           ("plot.py", [])):
            self.assertEqual(script(name, *args).returncode, 2, (name, args))
        done = script("compare_cpu.py", "--onehop", "/nonexistent", "-e", "1K")
        self.assertEqual(done.returncode, 3)
        self.assertIn("/nonexistent", done.stderr)


class Pictures(unittest.TestCase):
    PERF = {"schema": "onehop-perf/1", "ranks": 2, "results": [
        {"type": "bfloat16", "size": size, "floor_us": None, "out_of_place": {"p50": us}, "in_place": {"p50": us * 2},
         "nccl-symm_out_of_place": {"p50": us * 3}, "nccl-symm_in_place": {"p50": None}}
        for size, us in ((1024, 2.0), (4096, 2.5))]}

    def test_reads_perf(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "perf.json")
            with open(path, "w") as file:
                json.dump(self.PERF, file)
            self.assertEqual(plot.read([path], False), {
                (2, "bfloat16"): {"onehop": {1024: 2.0, 4096: 2.5}, "nccl-symm": {1024: 6.0, 4096: 7.5}}})
            self.assertEqual(plot.read([path], True), {(2, "bfloat16"): {"onehop": {1024: 4.0, 4096: 5.0}}})

    @unittest.skipUnless(importlib.util.find_spec("matplotlib"), "no matplotlib")
    def test_draws(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "perf.json")
            with open(path, "w") as file:
                json.dump(self.PERF, file)
            subprocess.run([sys.executable, os.path.join(BENCH, "plot.py"), "--floor", "1.16,363", path], check=True,
                           capture_output=True, timeout=100)
            self.assertEqual(sorted(os.listdir(folder)), ["perf.json", "perf.png", "perf.svg"])


if __name__ == "__main__":
    unittest.main()
