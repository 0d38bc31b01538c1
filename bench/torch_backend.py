#!/usr/bin/env python3
"""torch.distributed's backend "onehop" on the CPU: microseconds of dist.all_reduce by it, by gloo, and of AllReduce.all_reduce_.

    torchrun --standalone --nproc-per-node 2 bench/torch_backend.py

Under torchrun, since gloo takes shared memory only where LOCAL_WORLD_SIZE is set. In place, float32, each rank on a
processor of its own; ways and sizes in turn for some rounds. A figure is the smallest of the rounds' medians, of the rank
where that is largest. Results are verified in the same run. The package is the installed one, or that of PYTHONPATH.
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

import onehop.distributed

SIZES = (4 << 10, 64 << 10, 1 << 20)
ROUNDS, SAMPLES = 7, 300


def median_us(call):
    found = []
    for _ in range(SAMPLES):
        start = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - start)
    return statistics.median(found) / 1000


def main():
    places = sorted(os.sched_getaffinity(0))
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {places[rank % len(places)]})
    torch.set_num_threads(1)
    dist.init_process_group("onehop")
    world, gloo = dist.get_world_size(), dist.new_group(backend="gloo")
    ar = onehop.AllReduce(gloo, "cpu")
    ways = {
        "backend onehop": lambda one: dist.all_reduce(one),
        "async, waited for": lambda one: dist.all_reduce(one, async_op=True).wait(),
        "backend gloo": lambda one: dist.all_reduce(one, group=gloo),
        "AllReduce": ar.all_reduce_,
    }
    if rank == 0:
        print(f"# {world} ranks, PyTorch {torch.__version__}, onehop {onehop.__version__}, {time.strftime('%Y-%m-%d')}; us a call")
        print(f"{'bytes':>8}", *(f"{name:>18}" for name in ways), f"{'gloo / onehop':>14}")
    for size in SIZES:
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                given = torch.ones(size // 4)
                way(given)
                assert bool((given == world).all()), name
                given.zero_()
                dist.barrier(gloo)
                found = torch.tensor(median_us(lambda way=way, given=given: way(given)))
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=gloo)
                best[name] = min(best[name], float(found))
        if rank == 0:
            ratio = best["backend gloo"] / best["backend onehop"]
            print(f"{size:8}", *(f"{us:18.1f}" for us in best.values()), f"{ratio:14.1f}", flush=True)
    ar.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
