#!/usr/bin/env python3
"""Property: onehop's communicator over PyTorch's symmetric memory is right, eager and captured; no memory of onehop's own is
between the ranks.

    torch_symmetric.py BUILD [--share-gpu]

Two processes have a GPU each, or share one (see python_gpu.py). Exit status 77 where this machine cannot.
"""

import faulthandler
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import python_gpu  # noqa: E402

PATIENCE_S, LIMIT_S = 100, 80


def rank_main(rank, store):
    import torch
    import torch.distributed as dist
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    device = torch.device("cuda", python_gpu.gpu_of(rank))
    torch.cuda.set_device(device)
    backend = "gloo" if python_gpu.SHARED else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=python_gpu.RANKS)
    import onehop
    member = python_gpu.Rank(torch, onehop, rank, device)
    options = {"push_bytes": 1 << 20, "pull_bytes": 1 << 20, "timeout": 20, "init_timeout": 30}
    with onehop.symmetric.SymmetricAllReduce.from_torch(None, device, **options) as ar:
        for dtype in member.types:
            for count in 1, 7, 2048, 100_003, 3_000_000:
                given, want = member.values(rank, count, dtype), member.sum(count, dtype)
                member.equal(ar.all_reduce(given), want, f"eager {dtype} {count}")
                member.equal(ar.all_reduce_(given), want, f"in place {dtype} {count}")
        for name in "1shot_push", "2shot_push", "1shot_pull", "2shot_pull":
            given = member.values(rank, 5000, torch.bfloat16)
            member.equal(ar.all_reduce(given, algorithm=name), member.sum(5000, torch.bfloat16), name)
        graph, given = torch.cuda.CUDAGraph(), torch.zeros(2048, dtype=torch.bfloat16, device="cuda")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that looks at events
            got = ar.all_reduce(given)
        for replay in range(python_gpu.REPLAYS):
            given.copy_(member.values(rank, 2048, torch.bfloat16, replay))
            graph.replay()
            member.equal(got, member.sum(2048, torch.bfloat16, replay), f"replay {replay}")
        torch.cuda.synchronize()
    if rank == 0:
        print(f"PyTorch {torch.__version__}: right over {ar.layout.symmetric_bytes >> 20} MiB of its symmetric memory")
    dist.destroy_process_group()
    print("DONE", flush=True)


if __name__ == "__main__":
    if python_gpu.SHARED:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # else PyTorch refuses
    python_gpu.run(rank_main, __file__, PATIENCE_S, __doc__)
