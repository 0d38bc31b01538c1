#!/usr/bin/env python3
# labels: timeout=300 waits
"""Property: src/nccl_shim/functions.def agrees with NCCL's own headers and libraries, from the wheels nvidia-nccl-cu12 and
-cu13, and with what the shim exports. Wheels are fetched by pip into build/nccl-wheels and kept there; only what is needed of
them is read, and nothing of them is run. Without network, or pip: skipped, but for the shim's own exports.

    test_nccl_functions.py [--all]      the newest version of WHEELS, or all of them
"""

import glob
import os
import re
import struct
import subprocess
import sys
import zipfile

SOURCE = os.environ.get("ONEHOP_SOURCE_DIR") or os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("ONEHOP_BUILD_DIR", f"{SOURCE}/build/release")
WHEELS_AT = f"{SOURCE}/build/nccl-wheels"
# Some 200 MB each: the last that the list is for is looked at always.
WHEELS = (("cu12", "2.18.3", False), ("cu12", "2.19.3", False), ("cu12", "2.22.3", False), ("cu12", "2.23.4", False), ("cu12", "2.24.3", False),
          ("cu12", "2.27.7", False), ("cu12", "2.28.3", False), ("cu13", "2.28.9", False), ("cu12", "2.29.2", False),
          ("cu13", "2.29.7", False), ("cu13", "2.30.3", False), ("cu13", "2.30.7", True))
# Exported by the real one, and nobody's business.
INTERNAL = {"ncclResetDebugInitInternal", "ncclParamEnvPluginGet", "ncclParamIsCacheDisabled", "ncclParamRegistryInstance"}


def listed():
    """name -> (version, class)"""
    with open(f"{SOURCE}/src/nccl_shim/functions.def", encoding="utf-8") as file:
        rows = re.findall(r"^NCCL_FUNCTION\((\w+), (\d+), (\w+)\)$", file.read(), re.MULTILINE)
    assert len(rows) == len({name for name, _, _ in rows}), "a name stands twice"
    return {name: (int(version), kind) for name, version, kind in rows}


def exported(image):
    """Names of the functions that a library (its bytes) exports, from its dynamic symbols."""
    offset, size, count = struct.unpack_from("<Q", image, 40)[0], *struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    names = set()
    for section in sections:
        if section[1] != 11:  # SHT_DYNSYM
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], section[9]):
            name, info, _, index = struct.unpack_from("<IBBH", image, at)
            if index and info & 15 == 2:  # defined, a function
                names.add(image[strings + name:image.index(b"\0", strings + name)].decode())
    return names


def declared(header):
    """name -> parameters, of the functions that nccl.h declares."""
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.DOTALL)
    found = re.findall(r"^[ \t]*(?:ncclResult_t|const char\s*\*|void|int)\s+(nccl\w+)\s*\(([^;{]*?)\)\s*;", plain, re.MULTILINE)
    return dict(found)


def wheel(package, version):
    """Path of the wheel, or None."""
    def found():
        paths = glob.glob(f"{WHEELS_AT}/nvidia_nccl_{package}-{version}-*.whl")
        return paths[0] if paths else None
    if not found():
        os.makedirs(WHEELS_AT, exist_ok=True)
        try:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "--timeout", "10", "-d", WHEELS_AT,
                            f"nvidia-nccl-{package}=={version}"], capture_output=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            return None
    return found()


def number(version):
    major, minor, patch = map(int, version.split(".")[:3])
    return major * 10000 + minor * 100 + patch


def check_wheel(path, version, functions, problems):
    with zipfile.ZipFile(path) as file:
        header = file.read("nvidia/nccl/include/nccl.h").decode()
        symbols = exported(file.read("nvidia/nccl/lib/libnccl.so.2"))
    parameters = declared(header)
    real = {name for name in symbols if name.startswith("nccl")} - INTERNAL
    for name in sorted((real | set(parameters)) - set(functions)):
        problems.append(f"{version}: {name} is not in the list")
    for name, (since, kind) in functions.items():
        there = name in real
        if there and since > number(version):
            problems.append(f"{version}: has {name}, which the list says came with {since}")
        if not there and since // 100 * 100 <= number(version) and since <= number(version):
            problems.append(f"{version}: lacks {name}, which the list says came with {since}")
        if there and f"p{name}" not in symbols:
            problems.append(f"{version}: lacks p{name}")
        if name not in parameters:
            continue
        if "cudaStream_t" in parameters[name] and kind not in ("WORK", "OURS"):
            problems.append(f"{name} takes a stream, and its class is {kind}")
        if "ncclComm_t" in parameters[name] and kind == "FORWARD":
            problems.append(f"{name} takes a communicator, and its class is FORWARD")
    return len(parameters)


def check_shim(functions, problems):
    path = f"{BUILD}/nccl/libnccl.so.2"
    if not os.path.exists(path):
        return False
    with open(path, "rb") as file:
        image = file.read()
    wanted = set(functions) | {f"p{name}" for name in functions}
    for name in sorted(exported(image) ^ wanted):
        problems.append(f"the shim {'exports' if name not in wanted else 'lacks'} {name}")
    return True


def main():
    functions, problems, looked = listed(), [], []
    shim = check_shim(functions, problems)
    for package, version, always in WHEELS:
        if not always and "--all" not in sys.argv:
            continue
        path = wheel(package, version)
        if path:
            looked.append(f"{version} ({package}, {check_wheel(path, version, functions, problems)} functions in its header)")
    for problem in problems:
        print(problem)
    print(f"{len(functions)} functions; {'the shim; ' if shim else ''}{', '.join(looked) or 'no wheel'}: {len(problems)} problems")
    if problems:
        return 1
    if not looked:
        print("SKIPPED: no wheel of NCCL could be fetched")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
