"""The hooks that put onehop into vLLM and SGLang, in stand-ins for these: see standins.py."""

import importlib
import logging
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import onehop  # noqa: E402
import onehop.engines  # noqa: E402
import ranks  # noqa: E402
import standins  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
CAR = "distributed/device_communicators/custom_all_reduce"
CUDA = "distributed/device_communicators/cuda_communicator"
CPU = "distributed/device_communicators/cpu_communicator"
DISPATCH = "srt/distributed/device_communicators/custom_all_reduce"
STATE = "srt/distributed/parallel_state"
HOOKS = "srt/plugins/hook_registry"


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def hear():
    heard = Heard()
    for name in ("onehop", "vllm.onehop"):
        logging.getLogger(name).addHandler(heard)
        logging.getLogger(name).setLevel(logging.INFO)
    return heard


def use(folder):
    sys.path.insert(0, folder)
    os.environ["ONEHOP_ENGINES"] = "1"
    return hear()


# ---- in a group ------------------------------------------------------------------------------------------------------


def in_vllm(rank, world, folder):
    heard = use(folder)
    onehop.engines.vllm()
    onehop.engines.vllm()
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    group = dist.new_group(backend="gloo")
    communicator = CudaCommunicator(group, "cpu")
    out = communicator.all_reduce(torch.full((5,), rank + 1.0))
    assert torch.equal(out, torch.full((5,), world * (world + 1) / 2))
    assert isinstance(communicator.ca_comm, onehop.vllm.CustomAllreduce) and not communicator.ca_comm.registers
    part = communicator.custom_reduce_scatter(torch.ones(world, 4))
    assert torch.equal(part, torch.full((1, 4), float(world)))
    # A group that onehop cannot serve gets the engine's own object.
    alone = [dist.new_group([one], backend="gloo") for one in range(world)][rank]
    theirs = CudaCommunicator(alone, "cpu").ca_comm
    assert type(theirs) is custom_all_reduce.CustomAllreduce._onehop and theirs.disabled
    communicator.ca_comm.close()
    return heard.lines


def in_sglang(rank, world, folder):
    heard = use(folder)
    torch.cuda.is_available = lambda: True
    onehop.engines.sglang()
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    group = dist.new_group(backend="gloo")
    coordinator = GroupCoordinator(group, "cpu")
    comm = coordinator.ca_comm
    assert isinstance(comm, onehop.sglang.CustomAllReduceV2) and not isinstance(comm, CustomAllReduceV2)
    out = coordinator.all_reduce(torch.full((5,), rank + 1.0))
    assert torch.equal(out, torch.full((5,), world * (world + 1) / 2)) and coordinator.fused(out) is None
    alone = [dist.new_group([one], backend="gloo") for one in range(world)][rank]
    assert isinstance(GroupCoordinator(alone, "cpu").ca_comm, CustomAllReduceV2)
    comm.close()
    return heard.lines


def in_vllm_on_cpus(rank, world, folder):
    heard = use(folder)
    onehop.engines.vllm()
    onehop.engines.vllm()
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    group = dist.new_group(backend="gloo")
    other = CpuCommunicator(group, device_group=group, unique_name="pp:0")
    assert other.dist_module is torch.distributed
    communicator = CpuCommunicator(group, device_group=group, unique_name="tp:0")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):  # the last one is gloo's
        given = torch.full((2, 3), rank + 1, dtype=dtype)
        assert communicator.all_reduce(given) is given
        assert torch.equal(given, torch.full((2, 3), world * (world + 1) // 2, dtype=dtype))
        wanted = torch.arange(world).repeat_interleave(2).to(dtype)[:, None].expand(2 * world, 3)
        assert torch.equal(communicator.all_gather(torch.full((2, 3), rank, dtype=dtype)), wanted)
    stats = communicator.dist_module._ar.stats()
    assert stats.calls == 5, "two sums and three all-gathers are ours"
    assert communicator.dist_module.get_world_size(group) == world, "the rest goes on"
    return heard.lines


def in_sglang_on_cpus(rank, world, folder):
    heard = use(folder)
    onehop.engines.sglang()
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    coordinator = GroupCoordinator(dist.new_group(backend="gloo"), "cpu")
    for dtype in (torch.float32, torch.float16, torch.int64):
        given = torch.full((2, 3), rank + 1, dtype=dtype)
        assert coordinator.all_reduce(given) is given
        assert torch.equal(given, torch.full((2, 3), world * (world + 1) // 2, dtype=dtype))
        parts = [torch.full((2, 3), peer, dtype=dtype) for peer in range(world)]
        for dim in (0, -1):
            assert torch.equal(coordinator.all_gather(parts[rank], dim), torch.cat(parts, dim))
    assert coordinator._onehop.stats().calls == 6
    return heard.lines


def told(found, *expected):
    """Rank 0 says each, and nobody warns."""
    for lines in found:
        assert not [line for line in lines if not line.startswith("INFO")], lines
    for one in expected:
        assert any(one in line for line in found[0]), (one, found[0])


def test_vllm(tmp_path):
    (tmp_path / "flashinfer.py").write_text("")
    found = ranks.run(2, in_vllm, standins.lay(tmp_path, "vllm", standins.VLLM))
    told(
        found,
        "onehop is vLLM's custom all-reduce: 2 ranks, on cpu",
        "VLLM_ALLREDUCE_USE_FLASHINFER=0",
        "VLLM_USE_NCCL_SYMM_MEM=0",
        '{"pass_config": {"fuse_allreduce_rms": false}}',
    )


def test_sglang(tmp_path):
    found = ranks.run(2, in_sglang, standins.lay(tmp_path, "sglang", standins.SGLANG))
    told(
        found,
        "onehop is SGLang's custom all-reduce: 2 ranks, on cpu",
        "--enforce-disable-flashinfer-allreduce-fusion",
        "--enable-mscclpp",
    )


def test_vllm_on_cpus(tmp_path):
    changes = [("platforms", 'name = "cuda"', 'name = "cpu"')]
    told(
        ranks.run(2, in_vllm_on_cpus, standins.lay(tmp_path, "vllm", standins.VLLM, changes)),
        "onehop sums in group tp:0: rank 0 of 2, on CPUs",
    )


def test_sglang_on_cpus(tmp_path):
    told(
        ranks.run(2, in_sglang_on_cpus, standins.lay(tmp_path, "sglang", standins.SGLANG)),
        "onehop sums in group tp:0: rank 0 of 2, on CPUs",
    )


# ---- versions that do not fit ----------------------------------------------------------------------------------------


def starting(rank, world, folder, engine, cuda):
    """Loads the plugin as the engine does; what was said, and whether the engine is as it was."""
    heard = use(folder)
    torch.cuda.is_available = lambda: cuda
    getattr(onehop.engines, engine)()
    if engine == "vllm":
        from vllm.distributed.device_communicators import custom_all_reduce, cpu_communicator

        kind = getattr(custom_all_reduce, "CustomAllreduce", None)
        begin = getattr(cpu_communicator, "CpuCommunicator", type(None)).__init__
        return heard.lines, not (hasattr(kind, "_onehop") or hasattr(begin, "_onehop"))
    from sglang.srt.plugins.hook_registry import HookRegistry

    return heard.lines, not HookRegistry.hooks


def expect_misfit(folder, engine, says, cuda=True):
    """One line, and nothing was done."""
    ((lines, own),) = ranks.run(1, starting, folder, engine, cuda)
    assert len(lines) == 1 and own, lines
    assert lines[0].startswith("WARNING onehop is not used in this ") and says in lines[0], lines


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("platforms", 'name = "cuda"', 'name = "tpu"', "neither on GPUs of NVIDIA nor on CPUs"),
        (CAR, "max_size=8192", "chunk=1, max_size=8192", "has no argument chunk"),
        (CAR, "def __init__", "def begin", "there is no CustomAllreduce"),
        (CUDA, "group=cpu_group, device=device", "device, cpu_group", "CustomAllreduce is made with arguments in another"),
        (CUDA, "symm_mem_enabled=True", "tiers=True", "is made with tiers="),
        (CUDA, "ca_comm.should_custom_ar(", "ca_comm.takes(", "CustomAllreduce.takes is used"),
        (CUDA, "\nclass", "\nfrom .custom_all_reduce import CustomAllreduce\nclass", "does not import CustomAllreduce when"),
        ("distributed/parallel_state", "ca_comm.capture()", "ca_comm.record()", "CustomAllreduce.record is used"),
    ],
)  # fmt: skip
def test_a_vllm_that_does_not_fit(tmp_path, name, old, new, says):
    changes = [(name, old, new)]
    if new == "device, cpu_group":
        changes.append((CAR, "group, device,", "device, group,"))
    expect_misfit(standins.lay(tmp_path, "vllm", standins.VLLM, changes), "vllm", says)


def test_a_vllm_without_the_variables(tmp_path):
    folder = standins.lay(tmp_path, "vllm", standins.VLLM, [("envs", "VLLM", "THINGS")])
    assert ranks.run(1, starting, folder, "vllm", True) == [([], False)]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("class CpuCommunicator", "class Other", "there is no CpuCommunicator"),
        ("self.dist_module.all_reduce", "self.kernels.all_reduce", "does not call dist_module.all_reduce"),
    ],
)
def test_a_vllm_whose_cpu_communicator_does_not_fit(tmp_path, old, new, says):
    changes = [("platforms", 'name = "cuda"', 'name = "cpu"'), (CPU, old, new)]
    expect_misfit(standins.lay(tmp_path, "vllm", standins.VLLM, changes), "vllm", says)


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        (DISPATCH, "(group, device)", "(group, device, tier)", "is not a function of"),
        (STATE, "CAClass(group=group,", "CAClass(tier=1, group=group,", "is made with tier="),
        (STATE, "self.ca_comm.should_custom_ar(", "self.ca_comm.takes(", "CustomAllReduceV2.takes is used"),
        (HOOKS, "register(cls, target, hook, hook_type)", "register(cls, target)", "TypeError"),
        (HOOKS, 'AROUND = "around"', 'AFTER = "after"', "AttributeError"),
    ],
)
def test_an_sglang_that_does_not_fit(tmp_path, name, old, new, says):
    expect_misfit(standins.lay(tmp_path, "sglang", standins.SGLANG, [(name, old, new)]), "sglang", says)


def test_an_sglang_whose_cpu_groups_do_not_fit(tmp_path):
    changes = [(STATE, "def all_gather(self, input_, dim=-1", "def all_gather(self, tensors, dim=-1")]
    folder = standins.lay(tmp_path, "sglang", standins.SGLANG, changes)
    expect_misfit(folder, "sglang", "GroupCoordinator.all_gather does not begin with input_, dim", cuda=False)


def test_no_engine_at_all():
    program = "import onehop.engines as e; e.vllm(); e.sglang(); print('on')"
    environment = {**os.environ, "ONEHOP_ENGINES": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50)
    assert done.stdout == "on\n" and done.stderr.count("onehop is not used in this") == 2, done.stderr


# ---- entry points ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_switch_nothing_is_done(tmp_path, value):
    folder = standins.lay(tmp_path, "vllm", standins.VLLM)
    standins.lay(tmp_path, "sglang", standins.SGLANG)
    program = (
        "import sys, onehop.engines; onehop.engines.vllm(); onehop.engines.sglang();"
        "print([one for one in sys.modules if one.split('.')[0] in ('torch', 'vllm', 'sglang') or 'hook' in one])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    environment.pop("ONEHOP_ENGINES", None)
    if value is not None:
        environment["ONEHOP_ENGINES"] = value
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=50)
    assert done.stdout == "[]\n" and not done.stderr, done.stderr


def test_entry_points():
    toml = pytest.importorskip("tomllib")
    groups = toml.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, name in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        module, _, attribute = groups[group]["onehop"].partition(":")
        assert getattr(importlib.import_module(module), attribute) is getattr(onehop.engines, name)
