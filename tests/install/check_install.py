#!/usr/bin/env python3
"""Property: what the build installs works for a stranger, and the source tree leaks nothing into another project.

Installs the build into a scratch prefix: compiles the header as C99, C11, C++11 and C++17 with -Wall -Wextra -pedantic
-Werror, links through pkg-config and through find_package(onehop), runs what was linked, and looks at soname, exported
symbols and needed libraries. Then it takes the source tree into another project, by add_subdirectory and by
FetchContent, and looks for what leaks.

    check_install.py --build DIR [--cc CC] [--cmake CMAKE]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
# What the library may need at run time: the C library and its parts.
LIBC = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d+|ld-linux.*\.so\.\d+")


class Steps:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def check(self, name, problem):
        """Counts one step; `problem` is empty, or says what is wrong."""
        if problem:
            self.failed += 1
            print(f"  FAIL  {name}\n{problem}")
        else:
            self.passed += 1
            print(f"  ok    {name}")
        return not problem

    def run(self, name, command, **options):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        return self.check(name, "" if done.returncode == 0 else f"{' '.join(command)}\n{done.stdout}")

    def skip(self, name, why):
        self.skipped += 1
        print(f"  SKIP  {name}: {why}")


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def find_one(root, name):
    found = [os.path.join(d, name) for d, _, files in os.walk(root) if name in files]
    if len(found) != 1:
        sys.exit(f"{name}: {len(found)} found under {root}")
    return found[0]


def check_header(steps, cc, cxx, prefix):
    strict = ["-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{prefix}/include", "-fsyntax-only"]
    source = os.path.join(HERE, "consumer.c")
    for standard in "c99", "c11":
        steps.run(f"header as {standard}", [cc, f"-std={standard}", *strict, source])
    for standard in "c++11", "c++17":
        if cxx:
            steps.run(f"header as {standard}", [cxx, f"-std={standard}", *strict, "-x", "c++", source])
        else:
            steps.skip(f"header as {standard}", "no C++ compiler")


def declared_functions():
    with open(f"{TREE}/include/onehop.h", encoding="utf-8") as file:
        header = re.sub(r"/\*.*?\*/|^[ \t]*#(\\\n|[^\n])*$", "", file.read(), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"ONEHOP_API\s[^;]*?\b(onehop_\w+)\(", header))


def check_map(steps):
    with open(f"{TREE}/src/onehop.map", encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
    listed, declared = re.findall(r"^\s*([^\s;:]+);", text, re.MULTILINE), declared_functions()
    listed = {name for name in listed if name not in ("*", "}")}
    steps.check("onehop.map lists every function of onehop.h", " ".join(sorted(declared - listed)))
    steps.check("onehop.map lists nothing else", " ".join(sorted(listed - declared)))


def check_library(steps, prefix):
    library = find_one(prefix, "libonehop.so")
    if not shutil.which("readelf") or not shutil.which("nm"):
        steps.skip("soname and symbols", "no binutils")
        return
    dynamic = output("readelf", "-dW", library)
    soname = re.search(r"SONAME.*\[(.*)\]", dynamic)
    wrong = "" if soname and soname.group(1) == "libonehop.so.0" else "expected libonehop.so.0"
    steps.check("soname", wrong)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    steps.check("needs only the C library", " ".join(n for n in needed if not LIBC.fullmatch(n)))

    symbols = {line.split()[-1] for line in output("nm", "-D", "--defined-only", library).splitlines()}
    exported = {s.split("@")[0] for s in symbols} - {"ONEHOP_0"}
    steps.check("every symbol has its version", " ".join(s for s in symbols if "@" not in s and s != "ONEHOP_0"))
    declared = declared_functions()
    steps.check("every declared function is exported", " ".join(sorted(declared - exported)))
    steps.check("nothing else is exported", " ".join(sorted(exported - declared)))


def check_pkg_config(steps, cc, prefix, scratch):
    pkg_config = shutil.which("pkg-config") or shutil.which("pkgconf")
    if not pkg_config:
        steps.skip("pkg-config", "not installed")
        return
    pc = find_one(prefix, "onehop.pc")
    environment = dict(os.environ, PKG_CONFIG_PATH=os.path.dirname(pc))
    flags = subprocess.run([pkg_config, "--cflags", "--libs", "onehop"], env=environment, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if not steps.check("pkg-config finds onehop", flags.stdout if flags.returncode else ""):
        return
    program = f"{scratch}/by_pkg_config"
    command = [cc, "-std=c11", os.path.join(HERE, "consumer.c"), "-o", program, *flags.stdout.split()]
    if steps.run("link through pkg-config", command):
        libraries = os.path.dirname(find_one(prefix, "libonehop.so"))
        steps.run("run it", [program], env=dict(os.environ, LD_LIBRARY_PATH=libraries))

    alone = f"{scratch}/archive"  # where the linker finds no shared library
    os.mkdir(alone)
    os.symlink(find_one(prefix, "libonehop.a"), f"{alone}/libonehop.a")
    flags = subprocess.run([pkg_config, "--static", "--cflags", "--libs", "onehop"], env=environment, text=True,
                           stdout=subprocess.PIPE, check=True).stdout.split()
    program = f"{scratch}/by_pkg_config_static"
    command = [cc, "-std=c11", os.path.join(HERE, "consumer.c"), "-o", program, f"-L{alone}", *flags]
    if steps.run("link statically through pkg-config", command) and steps.run("run it", [program]):
        check_static(steps, program)


def check_static(steps, program):
    if shutil.which("readelf"):
        steps.check("it needs no libonehop.so", "it does" if "libonehop" in output("readelf", "-dW", program) else "")


def check_paths(steps, prefix, build):
    """No file that others build with names a place of this build: the prefix may be moved."""
    wrong = []
    for directory, _, files in os.walk(prefix):
        for name in files:
            if name.endswith((".pc", ".cmake", ".h")):
                with open(os.path.join(directory, name), encoding="utf-8") as file:
                    text = file.read()
                wrong += [f"{name}: {place}" for place in (TREE, os.path.abspath(build), "/usr/local") if place in text]
    steps.check("no place of the build in onehop.pc and the CMake package", "\n".join(wrong))



def check_package(steps, cc, cmake, prefix, scratch):
    build = f"{scratch}/by_package"
    configure = [cmake, "-S", HERE, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_C_COMPILER={cc}"]
    if steps.run("find_package(onehop)", configure) and steps.run("link through it", [cmake, "--build", build]):
        steps.run("run it", [f"{build}/consumer"])
        steps.run("run it, linked statically", [f"{build}/consumer_static"])
        check_static(steps, f"{build}/consumer_static")


def check_options(steps, cc, cmake, scratch):
    """What is off is not built, and what is on does not need the others."""
    programs = {"ONEHOP_CLI": "onehop_cli", "ONEHOP_EXAMPLES": "onehop_examples", "ONEHOP_TESTS": "test_base"}
    for on in None, *programs:
        build = f"{scratch}/options_{on}"
        configure = [cmake, "-S", TREE, "-B", build, f"-DCMAKE_C_COMPILER={cc}", "-DONEHOP_CUDA=OFF", "-DONEHOP_INSTALL=OFF",
                     "-DONEHOP_PYTHON_PACKAGE=OFF", *(f"-D{name}={'ON' if name == on else 'OFF'}" for name in programs)]
        if steps.run(f"{on} alone" if on else "all options off", configure):
            targets = set(re.findall(r"\w+", output(cmake, "--build", build, "--target", "help")))
            steps.check("its targets", " ".join(t for name, t in programs.items() if (name == on) != (t in targets)))
            done = subprocess.run([cmake, "--install", build, "--prefix", f"{build}/prefix"], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True)
            steps.check("nothing to install", "" if done.returncode == 0 and not os.path.exists(f"{build}/prefix") else done.stdout)


def check_parent(steps, cc, cmake, scratch):
    """Without optimization, with few kernels and the host device alone: it is about the build, not about the library."""
    for how, fetch in ("add_subdirectory", "OFF"), ("FetchContent", "ON"):
        build = f"{scratch}/parent_{how}"
        configure = [cmake, "-S", f"{HERE}/parent", "-B", build, f"-DONEHOP_TREE={TREE}", f"-DFETCH={fetch}",
                     f"-DCMAKE_C_COMPILER={cc}", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_C_FLAGS=-DOH_FEW_INSTANCES",
                     "-DONEHOP_CUDA=OFF"]
        if not steps.run(f"{how}: nothing leaks", configure) or fetch == "ON":
            continue
        if steps.run(f"{how}: all of it builds", [cmake, "--build", build, "--parallel", "2"]):
            steps.run("run it", [f"{build}/bin/consumer"])
            tests = output("ctest", "--test-dir", build, "-N")
            steps.check("no tests came along", "" if "Total Tests: 0" in tests else tests)
            steps.run("install it", [cmake, "--install", build, "--prefix", f"{build}/prefix"])
            steps.check("nothing was installed", " ".join(os.listdir(f"{build}/prefix"))
                        if os.path.exists(f"{build}/prefix") else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    parser.add_argument("--cmake", default="cmake")
    args = parser.parse_args()
    cxx = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)

    steps = Steps()
    check_map(steps)
    with tempfile.TemporaryDirectory(prefix="onehop-install-") as scratch:
        # Installed in one place and moved to another: nothing may depend on where it was put.
        first, prefix = f"{scratch}/first", f"{scratch}/prefix"
        if steps.run("cmake --install", [args.cmake, "--install", args.build, "--prefix", first]):
            os.rename(first, prefix)
            headers = [f for _, _, files in os.walk(f"{prefix}/include") for f in files]
            steps.check("one header", "" if headers == ["onehop.h"] else " ".join(headers))
            check_header(steps, args.cc, cxx, prefix)
            check_library(steps, prefix)
            check_pkg_config(steps, args.cc, prefix, scratch)
            check_paths(steps, prefix, args.build)
            check_package(steps, args.cc, args.cmake, prefix, scratch)
            check_options(steps, args.cc, args.cmake, scratch)
            check_parent(steps, args.cc, args.cmake, scratch)
            command = f"{prefix}/bin/onehop"
            if os.path.exists(command):
                steps.run("the installed command runs", [command, "--help"])
                find_one(prefix, "onehop.1")
                completion = f"{prefix}/share/bash-completion/completions/onehop"
                steps.check("its completion", "" if os.path.exists(completion) else f"no {completion}")
    print(f"{steps.passed} passed, {steps.failed} failed, {steps.skipped} skipped")
    return 1 if steps.failed else 0


if __name__ == "__main__":
    sys.exit(main())
