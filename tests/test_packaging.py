# labels: asan-off tsan-off timeout=100
"""Property: what is packaged beside the library is that of the command: the manual page and the completion have every flag,
the description for PyPI links to nothing relative, one version stands everywhere, `python -m onehop` is the command."""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..")))
BUILD = os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release"))
TOOL = os.path.join(BUILD, "onehop")
PAGE = os.path.join(ROOT, "packaging", "onehop.1")
COMPLETION = os.path.join(ROOT, "packaging", "onehop.bash")


def run(*command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


class Manual(unittest.TestCase):
    def test_every_flag(self):
        done = run(sys.executable, os.path.join(ROOT, "tools", "man.py"), "--check", "--tool", TOOL)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + "\ntools/man.py writes the page")

    def test_it_is_read_without_a_warning(self):
        if shutil.which("mandoc"):
            done = run("mandoc", "-Tlint", "-Wwarning", PAGE)
            # The page has no date: it would change with every build.
            said = [line for line in done.stdout.splitlines() if "missing date" not in line]
            self.assertEqual(said, [])
        elif shutil.which("man"):
            done = run("man", "--warnings", "-l", PAGE, env={**os.environ, "MANPAGER": "cat", "LC_ALL": "C"})
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("--minbytes", done.stdout)
        else:
            self.skipTest("neither mandoc nor man")


@unittest.skipUnless(shutil.which("bash"), "no bash")
class Completion(unittest.TestCase):
    def complete(self, *words):
        script = f'. {COMPLETION}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _onehop; printf "%s\\n" "${{COMPREPLY[@]}}"'
        done = run("bash", "-c", script, "bash", *words)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.split()

    def test_commands_and_flags(self):
        self.assertEqual(self.complete("onehop", ""), re.findall(r"^  (\w+) ", run(TOOL, "help").stdout, re.MULTILINE))
        self.assertEqual(self.complete("onehop", "t"), ["tune"])
        self.assertEqual(self.complete("onehop", "perf", "--ran"), ["--ranks", "--ranks-per-device"])
        self.assertEqual(self.complete("onehop", "info", "-"), ["--json", "--help"])
        self.assertEqual(self.complete("onehop", "help", "wh"), ["which"])

    def test_values_are_those_that_the_command_takes(self):
        for command, flag in (("perf", "--device"), ("perf", "-d"), ("perf", "-o"), ("perf", "--layout"), ("perf", "--source"),
                              ("perf", "--compare"), ("check", "--device"), ("tune", "-d"), ("which", "-o")):  # fmt: skip
            refusal = run(TOOL, command, flag, "?").stderr
            taken = re.search(r"expected one of (.*)$", refusal)[1].split(", ")
            offered = self.complete("onehop", command, flag, "")
            self.assertEqual([value for value in offered if value not in taken], [], f"{command} {flag}")
            self.assertGreater(len(offered), 1)
        self.assertIn("README.md", self.complete_files("onehop", "perf", "-J", "READ"))

    def complete_files(self, *words):
        before = os.getcwd()
        os.chdir(ROOT)
        try:
            return self.complete(*words)
        finally:
            os.chdir(before)


class Description(unittest.TestCase):
    def test_no_relative_link(self):
        """Relative links lead nowhere on PyPI."""
        with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
            readme = re.search(r'^readme = "(.*?)"', file.read(), re.MULTILINE)[1]
        with open(os.path.join(ROOT, readme), encoding="utf-8") as file:
            links = re.findall(r"\]\(([^)\s]*)", file.read())
        self.assertEqual([link for link in links if not link.startswith(("https://", "#"))], [])


class Version(unittest.TestCase):
    def test_one_version(self):
        def find(path, pattern):
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                return ".".join(re.search(pattern, file.read(), re.MULTILINE).groups())

        version = find("CMakeLists.txt", r"^project\(onehop VERSION ([0-9.]+)")
        parts = r"MAJOR (\d+)\n#define ONEHOP_VERSION_MINOR (\d+)\n#define ONEHOP_VERSION_PATCH (\d+)"
        self.assertEqual(find("include/onehop.h", parts), version)
        self.assertEqual(find("pyproject.toml", r'^version = "(.*)"'), version)
        self.assertEqual(find("packaging/debian/changelog", r"^onehop \(([0-9.]+)\)"), version)
        self.assertEqual(find("CHANGELOG.md", r"^## ([0-9.]+)"), version)


class Types(unittest.TestCase):
    def test_a_typo_is_seen(self):
        python = next((p for p in (os.path.join(ROOT, "build", "venv", "bin", "python"), sys.executable)
                       if os.path.exists(p) and run(p, "-c", "import mypy").returncode == 0), None)  # fmt: skip
        if not python:
            self.skipTest("no mypy")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "typo.py")
            with open(path, "w", encoding="utf-8") as file:
                file.write("import onehop\nonehop.AllReduce\nonehop.AllReduc\n")
            done = run(python, "-m", "mypy", "--cache-dir", folder, path, env={**os.environ, "MYPYPATH": os.path.join(ROOT, "python")})
        found = [line for line in done.stdout.splitlines() if "typo.py:" in line]
        self.assertEqual(len(found), 1, done.stdout + done.stderr)
        self.assertIn('typo.py:3: error: Module has no attribute "AllReduc"', found[0])


class Module(unittest.TestCase):
    def test_python_m_onehop(self):
        if not glob.glob(os.path.join(BUILD, "python", "onehop", "_onehop*.so")):
            self.skipTest("the Python package was not built")
        environment = {**os.environ, "PYTHONPATH": os.path.join(BUILD, "python")}
        done = run(sys.executable, "-m", "onehop", "version", env=environment)
        self.assertEqual((done.returncode, done.stdout), (0, run(TOOL, "version").stdout), done.stderr)
        self.assertEqual(run(sys.executable, "-m", "onehop", "none", env=environment).returncode, 2)


if __name__ == "__main__":
    unittest.main()
