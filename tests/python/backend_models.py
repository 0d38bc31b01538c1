"""What is built on collectives, over the backend "onehop" and over gloo: checks of tests/python/backend_ranks.py.

Gradients are compared by the norm of their difference over their norm.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn


class Models:
    """Needs `rank`, `world`, the groups `group` and `gloo`, `calls` and `both`."""

    def model(self):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 4))

    def rows(self, rank=None):
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 + (self.rank if rank is None else rank)))

    def near(self, found, want, share, what):
        for one, other in zip(found, want, strict=True):
            off = float((one.double() - other.double()).norm() / other.double().norm())
            assert off <= share, f"{what}: off by {off:.2g}, expected {share:.2g}"

    def gradients(self, train):
        """`train(group)` gives gradients: by onehop, by gloo."""
        before = self.calls()
        found = train(self.group)
        assert self.calls() > before
        return found, train(self.gloo)

    def exact(self):
        """The gradients of all ranks' rows together, in float64."""
        model = self.model().double()
        torch.cat([model(self.rows(rank).double()) for rank in range(self.world)]).square().mean().backward()
        return [one.grad for one in model.parameters()]

    def ddp(self):
        def train(group):
            model = nn.parallel.DistributedDataParallel(self.model(), process_group=group)
            for _ in range(2):
                model.zero_grad()
                model(self.rows()).square().mean().backward()
            return [one.grad for one in model.parameters()]

        found, want = self.gradients(train)
        self.near(found, want, 1e-6, "DDP")  # both add in float32, in another order
        self.near(found, self.exact(), 1e-6, "DDP beside float64")

    def ddp_hook(self):
        """A hook that continues the future of a call."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        def train(group):
            model = nn.parallel.DistributedDataParallel(self.model(), process_group=group)
            model.register_comm_hook(group, fp16_compress_hook)
            model(self.rows()).square().mean().backward()
            return [one.grad for one in model.parameters()]

        found, want = self.gradients(train)
        self.near(found, want, 2.0**-10 * self.world, "DDP in float16")
        self.near(found, self.exact(), 2.0**-10, "DDP in float16 beside float64")  # rounded before the sum and after

    def sparse(self):
        """Gradients of embeddings: gloo's."""

        def train(group):
            torch.manual_seed(3)
            layer = nn.Embedding(20, 4, sparse=True)
            model = nn.parallel.DistributedDataParallel(layer, process_group=group)
            model(torch.tensor([self.rank, self.rank + 1, 7])).square().sum().backward()
            return [layer.weight.grad.to_dense()]

        self.near(train(self.group), train(self.gloo), 1e-6, "sparse gradients")

    def fsdp(self):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        for reduce_dtype, share in (None, 1e-6), (torch.bfloat16, 2.0**-7 * self.world):

            def train(group, reduce_dtype=reduce_dtype):
                mesh = dist.DeviceMesh.from_group(group, "cpu")
                model = self.model()
                for layer in (*[one for one in model if isinstance(one, nn.Linear)], model):
                    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
                model(self.rows()).square().mean().backward()
                return [one.grad.full_tensor() for one in model.parameters()]

            found, want = self.gradients(train)
            self.near(found, want, share, f"FSDP2, {reduce_dtype}")  # gloo rounds to bfloat16 after each addition
            exact = self.exact()
            self.near(found, exact, 1e-6 if reduce_dtype is None else 2.0**-8, f"FSDP2 beside float64, {reduce_dtype}")

    def tensor_parallel(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        def train(group):
            mesh = dist.DeviceMesh.from_group(group, "cpu")
            model = parallelize_module(self.model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            model(self.rows(0)).square().mean().backward()
            grads = [one.grad for one in model.parameters()]
            return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in grads]

        found, want = self.gradients(train)
        self.near(found, want, 1e-6, "tensor parallelism")

    def two_dimensions(self):
        """FSDP2 over tensor parallelism, or HSDP, on a mesh that makes groups of its own."""
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("replicate", "shard"))
        model = self.model()
        fully_shard(model, mesh=mesh)
        model(self.rows()).square().mean().backward()
        self.near([one.grad.full_tensor() for one in model.parameters()], self.exact(), 1e-6, "HSDP")

    def compiled(self):
        def body(group):
            def layer(x):
                y = functional.all_reduce(x * 2, "sum", group) + 1
                dist.all_reduce(y, group=group)
                whole = torch.empty(y.numel() * self.world)
                dist.all_gather_into_tensor(whole, y, group=group)
                return functional.reduce_scatter_tensor(whole, "sum", 0, group) + 0

            torch._dynamo.reset()
            return torch.compile(layer, backend="aot_eager", fullgraph=True)(self.values(777, torch.float32))

        self.both(body, True, "torch.compile")
