"""Small packages `vllm` and `sglang` of our own, shaped as the engines are where onehop's hooks meet them."""

import pathlib

VLLM = {
    "envs": """
VLLM_BATCH_INVARIANT = False
VLLM_ALLREDUCE_USE_FLASHINFER = True
VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC = False
VLLM_USE_NCCL_SYMM_MEM = True
""",
    "platforms": """
class Platform:
    name = "cuda"
    def is_cuda(self):
        return self.name == "cuda"
    def is_cpu(self):
        return self.name == "cpu"
current_platform = Platform()
""",
    "config": """
import types
def get_current_vllm_config_or_none():
    passes = types.SimpleNamespace(fuse_allreduce_rms=True)
    return types.SimpleNamespace(compilation_config=types.SimpleNamespace(pass_config=passes))
""",
    "distributed/parallel_state": """
from contextlib import nullcontext
class GroupCoordinator:
    def graph_capture(self):
        ca_comm = self.device_communicator.ca_comm
        return nullcontext() if ca_comm is None else ca_comm.capture()
""",
    "distributed/device_communicators/custom_all_reduce": """
class CustomAllreduce:
    def __init__(self, group, device, max_size=8192 * 1024, symm_mem_enabled=False, *, register_graph_buffers=True):
        self.disabled = True
""",
    "distributed/device_communicators/cuda_communicator": """
class CudaCommunicator:
    def __init__(self, cpu_group, device):
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
        self.ca_comm = CustomAllreduce(group=cpu_group, device=device, symm_mem_enabled=True, register_graph_buffers=False)
    def all_reduce(self, input_):
        ca_comm = self.ca_comm
        if ca_comm is not None and not ca_comm.disabled and ca_comm.should_custom_ar(input_):
            return ca_comm.custom_all_reduce(input_)
        return None
    def custom_reduce_scatter(self, input_):
        return self.ca_comm.custom_reduce_scatter(input_)
""",
    "distributed/device_communicators/cpu_communicator": """
import torch.distributed
class CpuCommunicator:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.device_group, self.unique_name = device_group, unique_name
        self.dist_module = torch.distributed
    def all_reduce(self, input_):
        self.dist_module.all_reduce(input_, group=self.device_group)
        return input_
    def all_gather(self, input_):
        out = input_.new_empty((input_.shape[0] * torch.distributed.get_world_size(self.device_group), *input_.shape[1:]))
        self.dist_module.all_gather_into_tensor(out, input_, group=self.device_group)
        return out
""",
}

SGLANG = {
    "srt/plugins/hook_registry": """
import enum, functools, importlib, pkgutil
class HookType(enum.Enum):
    AROUND = "around"
class HookRegistry:
    hooks = {}
    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks[target] = hook
    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks.items():
            path, name = target.rsplit(".", 1)
            place = pkgutil.resolve_name(path)
            original = getattr(place, name)
            def wrapped(*args, _hook=hook, _original=original, **kwargs):
                return _hook(_original, *args, **kwargs)
            setattr(place, name, functools.wraps(original)(wrapped))
""",
    "srt/runtime_context": """
import types
def get_exec():
    return types.SimpleNamespace(
        comm=types.SimpleNamespace(flashinfer_allreduce_fusion_backend="auto", enable_mscclpp=True)
    )
""",
    "srt/distributed/device_communicators/custom_all_reduce_v2": """
class CustomAllReduceV2:
    def __init__(self, group, device):
        self.disabled = True
""",
    "srt/distributed/device_communicators/custom_all_reduce": """
def dispatch_custom_allreduce(group, device):
    from .custom_all_reduce_v2 import CustomAllReduceV2
    return CustomAllReduceV2
""",
    "srt/distributed/parallel_state": """
import torch
class GroupCoordinator:
    def __init__(self, group, device):
        from sglang.srt.distributed.device_communicators.custom_all_reduce import dispatch_custom_allreduce
        self.device_group, self.unique_name = group, "tp:0"
        self.world_size = torch.distributed.get_world_size(group)
        CAClass = dispatch_custom_allreduce(group=group, device=device)
        self.ca_comm = CAClass(group=group, device=device)
    def all_reduce(self, input_):
        if not self.ca_comm.disabled and self.ca_comm.should_custom_ar(input_):
            return self.ca_comm.custom_all_reduce(input_)
        torch.distributed.all_reduce(input_, group=self.device_group)
        return input_
    def all_gather(self, input_, dim=-1, output_tensor_list=None):
        parts = [torch.empty_like(input_) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, input_.contiguous(), group=self.device_group)
        return torch.cat(parts, dim)
    def fused(self, x):
        ca_comm = self.ca_comm
        return ca_comm.fused_allreduce_rmsnorm(x) if hasattr(ca_comm, "fused_allreduce_rmsnorm") else None
""",
}


def lay(folder, package, files, changes=()):
    """Writes a package; `changes`: (file, text, its replacement)."""
    files = dict(files)
    for name, old, new in changes:
        assert old in files[name], f"{old!r} is not in {name}"
        files[name] = files[name].replace(old, new)
    for name, text in files.items():
        path = pathlib.Path(folder, package, f"{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_dir() and not (path / "__init__.py").exists():
            (path / "__init__.py").write_text("")
    return str(folder)
