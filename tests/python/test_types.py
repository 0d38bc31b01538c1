"""What a checker of types says of programs that use the package: mypy, if it is there."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import typing

import pytest

from onehop import _onehop, _types

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"
GOOD = """
import torch
import onehop

def use(x: torch.Tensor) -> torch.Tensor:
    with onehop.AllReduce() as ar:
        ar.all_reduce(x, algorithm="1shot_push", source="workspace")
        return ar.all_reduce_(x, algorithm=onehop.Algorithm.TWOSHOT_PULL)
"""
WRONG = [
    ("onehop.AllReduce()", "onehop.AllReduc()", 'Module has no attribute "AllReduc"'),
    ('"1shot_push"', '"1shot_pus"', 'Argument "algorithm" to "all_reduce"'),
    ('"workspace"', '"work"', 'Argument "source" to "all_reduce"'),
    ("Algorithm.TWOSHOT_PULL", "Algorithm.TWOSHOT", 'has no attribute "TWOSHOT"'),
    ("ar.all_reduce_(", "ar.al_reduce_(", 'has no attribute "al_reduce_"'),
]


def test_names_are_those_of_the_library():
    assert list(typing.get_args(_types.AlgorithmName)) == [_onehop.algorithm_name(one) for one in _types.Algorithm]
    assert list(typing.get_args(_types.SourceName)) == [_onehop.source_name(one) for one in _types.Source]


def test_an_unknown_name_raises():
    import onehop

    with pytest.raises(AttributeError, match="AllReduc"):
        _ = onehop.AllReduc


def test_mypy(tmp_path):
    for module in ("mypy", "torch"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"there is no {module}: `pip install {module}` in the environment of the tests")
    programs = {"good": GOOD, **{f"wrong{i}": GOOD.replace(old, new) for i, (old, new, _) in enumerate(WRONG)}}
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull]
    done = subprocess.run(
        [*command, "--follow-imports=silent", "--cache-dir", tmp_path / "cache", *(f"{name}.py" for name in programs)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        timeout=55,
    )
    said = done.stdout.splitlines()
    assert not [line for line in said if line.startswith("good.py")], done.stdout + done.stderr
    for i, (_, _, message) in enumerate(WRONG):
        assert [line for line in said if line.startswith(f"wrong{i}.py") and message in line], (message, said)
