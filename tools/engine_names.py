#!/usr/bin/env python3
"""What pinned versions of vLLM and SGLang ask of the object for their custom all-reduce: names, read from the wheels.

tools/engine_names.py            writes tests/python/engine_names.json
tools/engine_names.py --check    compares with it; 1 if the wheels say something else

Wheels come by `pip download`, 0.4 GB in all for each version of vLLM, into --folder (default: a temporary one), where
they are taken from if they are there. No engine is imported. tests/python/test_engine_names.py holds the names against
our classes.
"""

import argparse
import datetime
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECORD = os.path.join(ROOT, "tests", "python", "engine_names.json")
# The newest and one older.
VERSIONS = {"vllm": ["0.33.0", "0.32.0"], "sglang": ["0.5.23", "0.5.22"]}
DEVICES = {
    "vllm": "vllm/distributed/device_communicators/",
    "sglang": "sglang/srt/distributed/device_communicators/",
}
MAKERS = {"vllm": ["CustomAllreduce"], "sglang": ["dispatch_custom_allreduce"]}
# There the object is another class's: AITER's, on GPUs of AMD.
OTHERS = ["vllm/compilation/passes/fusion/allreduce_rms_fusion.py"]
TESTS = ["*/test/*", "*/tests/*"]


def load_fit():
    """onehop._fit, from the tree, in which nothing need have been built."""
    spec = importlib.util.spec_from_file_location("_fit", os.path.join(ROOT, "python", "onehop", "_fit.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["_fit"] = module
    spec.loader.exec_module(module)
    return module


fit = load_fit()


def wheel(engine, version, folder):
    """The path of the wheel."""
    for _ in range(2):
        found = sorted(fnmatch.filter(os.listdir(folder), f"{engine}-{version}-*.whl"))
        if found:
            return os.path.join(folder, found[0])
        print(f"pip download {engine}=={version}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", folder]
        target = ["--python-version", "3.11", "--platform", "manylinux_2_34_x86_64", "--platform", "manylinux_2_28_x86_64"]
        subprocess.run([*command, *target, f"{engine}=={version}"], check=True, timeout=1200)
    sys.exit(f"pip has not brought a wheel of {engine} {version}")


def listed(parameters):
    """As JSON has it."""
    return parameters and {"positional": parameters.positional, "named": parameters.named}


def uses(archive, holder, makers):
    """Of all files but tests."""
    keywords, places, optional, positional = set(), {}, set(), 0
    for name in sorted(archive.namelist()):
        if not name.endswith(".py") or name in OTHERS or any(fnmatch.fnmatch(name, one) for one in TESTS):
            continue
        source = archive.read(name).decode()
        if holder not in source and not any(one in source for one in makers):
            continue
        found = fit.uses(source, holder, makers)
        keywords |= found.keywords
        optional |= found.optional
        positional = max(positional, found.positional)
        for one in found.attributes:
            places.setdefault(one, []).append(name)
    # What is used in one place without a question must be there, whoever asks elsewhere.
    return {
        "keywords": sorted(keywords),
        "positional": positional,
        "attributes": dict(sorted(places.items())),
        "optional": sorted(optional - set(places)),
    }


def facts(engine, path):
    """What the hooks rely on, of one wheel."""
    with zipfile.ZipFile(path) as archive:
        devices = DEVICES[engine]
        read = lambda name: archive.read(name).decode()  # noqa: E731
        found = uses(archive, "ca_comm", MAKERS[engine])
        if engine == "vllm":
            found["constructor"] = listed(
                fit.parameters(read(f"{devices}custom_all_reduce.py"), "__init__", "CustomAllreduce")
            )
            found["lazy"] = fit.imports_when_called(read(f"{devices}cuda_communicator.py"), "CustomAllreduce")
            cpu = read(f"{devices}cpu_communicator.py")
            found["cpu_constructor"] = listed(fit.parameters(cpu, "__init__", "CpuCommunicator"))
            found["cpu_calls"] = sorted(fit.uses(cpu, "dist_module").attributes)
        else:
            found["constructor"] = listed(
                fit.parameters(read(f"{devices}custom_all_reduce_v2.py"), "__init__", "CustomAllReduceV2")
            )
            state = read("sglang/srt/distributed/parallel_state.py")
            found["lazy"] = fit.imports_when_called(state, "dispatch_custom_allreduce")
            found["dispatch"] = listed(
                fit.parameters(read(f"{devices}custom_all_reduce.py"), "dispatch_custom_allreduce")
            )
            for name in ("all_reduce", "all_gather"):
                found[name] = listed(fit.parameters(state, name, "GroupCoordinator"))
            hooks = read("sglang/srt/plugins/hook_registry.py")
            found["register"] = listed(fit.parameters(hooks, "register", "HookRegistry"))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or made
        found = {
            engine: {version: facts(engine, wheel(engine, version, folder)) for version in versions}
            for engine, versions in VERSIONS.items()
        }
    if arguments.check:
        with open(RECORD, encoding="utf-8") as file:
            recorded = json.load(file)
        wrong = [
            f"{engine} {version}: the wheel says something else than {RECORD}: run tools/engine_names.py"
            for engine, versions in found.items()
            for version, facts_found in versions.items()
            if recorded.get(engine, {}).get(version) != facts_found
        ]
        print("\n".join(wrong) or "the wheels say what is recorded")
        return 1 if wrong else 0
    with open(RECORD, "w", encoding="utf-8") as file:
        json.dump({"read": datetime.date.today().isoformat(), **found}, file, indent=1)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
