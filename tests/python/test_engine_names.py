"""Names that pinned versions of vLLM and SGLang use, held against our classes.

engine_names.json is what tools/engine_names.py has read from their wheels. With ONEHOP_WHEELS=1 that is done anew, by
pip; with a folder instead of 1 from wheels that lie there.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import onehop.sglang  # noqa: E402
import onehop.vllm  # noqa: E402
from onehop import _fit, _hook_sglang, _hook_vllm  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "tests" / "python" / "engine_names.json").read_text())
KINDS = {"vllm": onehop.vllm.CustomAllreduce, "sglang": onehop.sglang.CustomAllReduceV2}
VERSIONS = [(engine, version) for engine in KINDS for version in RECORD[engine]]


def recorded(engine, version):
    facts = RECORD[engine][version]
    use = _fit.Use(set(facts["keywords"]), facts["positional"], set(facts["attributes"]), set(facts["optional"]))
    return facts, _fit.Parameters(**facts["constructor"]), use


@pytest.mark.parametrize(("engine", "version"), VERSIONS)
def test_our_class_has_what_is_used(engine, version):
    kind = KINDS[engine]
    facts, theirs, use = recorded(engine, version)
    ours = _fit.signature(kind)
    assert not _fit.misfits(kind, ours, theirs, use)
    assert ours == theirs, "the same arguments, by place and by name"
    assert facts["lazy"], "the class is imported when an object is made"
    for name in ("disabled", "should_custom_ar", "custom_all_reduce", "capture"):
        assert _fit.has(kind, name) and name in {*use.attributes, *use.optional}


@pytest.mark.parametrize(("engine", "version"), VERSIONS)
def test_what_is_missing_is_found(engine, version):
    """That the test above can fail."""

    class Bare:
        pass

    _, theirs, use = recorded(engine, version)
    wrong = _fit.misfits(Bare, _fit.Parameters(["group"], []), theirs, use)
    assert "Bare has no argument device" in wrong and "Bare.capture is used" in wrong


@pytest.mark.parametrize("version", RECORD["vllm"])
def test_cpus_of_vllm(version):
    facts = RECORD["vllm"][version]
    assert {"cpu_group", "device_group", "unique_name"} <= set(facts["cpu_constructor"]["positional"])
    assert set(facts["cpu_calls"]) >= _hook_vllm.CPU_CALLS


@pytest.mark.parametrize("version", RECORD["sglang"])
def test_hooks_of_sglang(version):
    facts = RECORD["sglang"][version]
    assert facts["dispatch"] == {"positional": ["group", "device"], "named": []}
    assert facts["register"]["positional"] == ["target", "hook", "hook_type"]
    for name, begins in _hook_sglang.CPU_CALLS.items():
        assert facts[name]["positional"][: len(begins)] == begins
    # Fused ways that ask for these names must not find them.
    for name in facts["optional"]:
        if name.startswith(("fused", "custom_fused", "all_gather_", "should_custom_ag", "reduce_scatter")):
            assert not hasattr(onehop.sglang.CustomAllReduceV2, name)
    assert not onehop.sglang.CustomAllReduceV2.has_multicast


def test_the_wheels_say_so():
    given = os.environ.get("ONEHOP_WHEELS", "")
    if not given:
        pytest.skip("ONEHOP_WHEELS=1 fetches the wheels of vLLM and SGLang, 0.8 GB, and reads them anew")
    folder = [] if given == "1" else ["--folder", given]
    command = [sys.executable, ROOT / "tools" / "engine_names.py", "--check", *folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    if "No matching distribution" in done.stderr or "ConnectionError" in done.stderr:
        pytest.skip(f"no network: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
