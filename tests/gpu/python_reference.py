#!/usr/bin/env python3
"""Property: the matrix of the reference system's own test, through onehop.sglang.CustomAllReduceV2 between two processes,
gives what torch.distributed.all_reduce makes of the same inputs with NCCL, without NVLink multicast.

Ten lengths from 16 elements to 4 million, three types, three algorithms, eager and in graphs: 180 combinations. Each
makes 16 loops of 4 calls over integers 0..15, other ones in each loop; a graph holds the 4 calls and is replayed. A
captured 2shot_pull works in place and returns its argument, everything else returns a new tensor. Once with PyTorch's
default allocator, once with expandable segments, each in processes of its own.

    python_reference.py              two GPUs; exit status 77 where this machine cannot
    python_reference.py --share-gpu  both processes on one GPU, which NCCL refuses: beside sums of integers, with 2 loops
    python_reference.py --cpu        the same on the host device beside gloo, shorter and without graphs: 18 combinations
"""

import argparse
import faulthandler
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import time

RANKS, CALLS, SKIPPED = 2, 4, 77
LIMIT_S = 100  # of a rank; importing torch may take some of it
ALGORITHMS = ("1shot_push", "1shot_pull", "2shot_pull")
DTYPES = ("float32", "float16", "bfloat16")
COUNTS = {"cuda": (16, 32, 512, 1024, 1040, 4096, 32768, 262144, 2097152, 4194304), "cpu": (16, 1040)}
LOOPS = {"cuda": 16, "cpu": 2}
SHARED_LOOPS = 2
MODES = {"cuda": ("eager", "graph"), "cpu": ("eager",)}
ALLOCATORS = {
    "cuda": {"default allocator": "", "expandable segments": "expandable_segments:True"},
    "cpu": {"no allocator of CUDA": ""},
}
# By anybody; before CUDA or NCCL is loaded.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def combinations(device):
    return list(itertools.product(DTYPES, COUNTS[device], ALGORITHMS, MODES[device]))


# ---- one rank ------------------------------------------------------------------------------------------------------


class Rank:
    """One of the processes."""

    def __init__(self, device, rank, shared):
        import onehop.sglang

        self.loops = SHARED_LOOPS if shared else LOOPS[device]
        self.rank, self.shared = rank, shared
        self.device = torch.device(device, 0 if shared else rank) if device == "cuda" else torch.device(device)
        self.group = torch.distributed.new_group(backend="gloo")
        if shared:  # no engine asks for that
            onehop.AllReduce = functools.partial(onehop.AllReduce, share_gpu=True)
        self.comm = onehop.sglang.CustomAllReduceV2(self.group, self.device, max_size=16 << 20)
        if self.comm.disabled:
            raise SystemExit("CustomAllReduceV2 is disabled")
        self.comm.uncap_pull_thresholds()
        self.generators = [torch.Generator(self.device).manual_seed(one) for one in range(RANKS)]

    def barrier(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier(self.group)

    def integers(self, count, dtype):
        """Of all ranks."""
        return [torch.randint(16, (count,), generator=one, device=self.device).to(dtype) for one in self.generators]

    def reference(self, everyone):
        if self.shared:
            return sum(everyone)
        torch.distributed.all_reduce(everyone[self.rank])
        return everyone[self.rank]

    def all_reduce(self, algorithm, given):
        """The calls, and what is wrong with what they return."""
        self.comm.override_algo = algorithm
        if not all(self.comm.should_custom_ar(one) for one in given):
            return given, "should_custom_ar says no"
        got = [self.comm.custom_all_reduce(one) for one in given]
        in_place = algorithm == "2shot_pull" and self.capturing()
        for one, other in zip(given, got, strict=True):
            if (one is other) != in_place or (one.data_ptr() == other.data_ptr()) != in_place:
                return got, "it should return its argument" if in_place else "it should return a new tensor"
        return got, ""

    def capturing(self):
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def capture(self, algorithm, given):
        """Replay, outputs, complaint, and what must live as long."""
        graph = torch.cuda.CUDAGraph()
        # Not "global": a thread of torch may look at events meanwhile.
        with self.comm.capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            got, complaint = self.all_reduce(algorithm, given)
        return graph.replay, got, complaint, graph

    def run(self, dtype_name, count, algorithm, mode):
        """Empty, or what went wrong."""
        dtype = getattr(torch, dtype_name)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        held = [torch.empty(count, dtype=dtype, device=self.device) for _ in range(CALLS)]
        replay, got, complaint, graph = None, held, "", None
        if mode == "graph":
            replay, got, complaint, graph = self.capture(algorithm, held)
        for _ in range(self.loops):
            inputs = [self.integers(count, dtype) for _ in range(CALLS)]
            for one, new in zip(held, inputs, strict=True):
                one.copy_(new[self.rank])
            if replay:
                replay()
            elif not complaint:
                got, complaint = self.all_reduce(algorithm, held)
            for out, everyone in zip(got, inputs, strict=True):
                wrong += (out != self.reference(everyone)).sum()
        self.barrier()  # the peer's graph may read this one's memory until here
        del graph, replay
        found = int(wrong)
        return complaint or (f"{found} of {self.loops * CALLS * count} elements are wrong" if found else "")


def rank_main(device, rank, shared):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if device == "cuda":
        torch.cuda.set_device(0 if shared else rank)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" and not shared else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=RANKS)
    me = Rank(device, rank, shared)
    bad = {}
    for combination in combinations(device):
        said = me.run(*combination)
        if said:
            bad[" ".join(map(str, combination))] = said
    stats = me.comm.obj.stats()
    print("ANSWER", json.dumps({"bad": bad, "direct": stats.registrations_direct, "staged": stats.registrations_staged}), flush=True)
    me.barrier()
    me.comm.close()
    torch.distributed.destroy_process_group()


# ---- the parent ----------------------------------------------------------------------------------------------------


def start(device, allocator, shared):
    environment = {**os.environ, **MULTICAST_OFF, "MASTER_ADDR": "127.0.0.1"}
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        environment.pop(variable, None)
    if allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    mode = ["--share-gpu"] * shared
    command = [sys.executable, os.path.abspath(__file__), *mode, "--device", device, "--rank"]
    return [
        subprocess.Popen([*command, str(rank)], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for rank in range(RANKS)
    ]  # fmt: skip


def wait_for(children):
    """Until all have ended, or one has failed and the others had time to say so too."""
    end = time.monotonic() + LIMIT_S + 10
    while time.monotonic() < end and any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            end = min(end, time.monotonic() + 10)
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
    return [child.communicate()[0] for child in children]


def judge(device, peer, name, children):
    begun = time.monotonic()
    outputs = wait_for(children)
    answers = [json.loads(line.removeprefix("ANSWER ")) for output in outputs for line in output.splitlines()
               if line.startswith("ANSWER ")]  # fmt: skip
    for rank, (child, output) in enumerate(zip(children, outputs, strict=True)):
        if child.returncode or len(answers) < RANKS:
            print(f"  rank {rank}, exit status {child.returncode}:")
            print("".join(f"    {line}\n" for line in output.splitlines()[-25:]), end="")
    if len(answers) < RANKS or any(child.returncode for child in children):
        print(f"{name}: FAILED")
        return 1
    bad = {}
    for rank, answer in enumerate(answers):
        for combination, said in answer["bad"].items():
            bad.setdefault(combination, f"rank {rank}: {said}")
    for combination, said in bad.items():
        print(f"  {combination}: {said}")
    whole = len(combinations(device))
    print(
        f"{whole - len(bad)}/{whole} at W={RANKS} against {peer}, {name}; captured pull calls: "
        f"{answers[0]['direct']} direct, {answers[0]['staged']} staged; {time.monotonic() - begun:.1f} s",
        flush=True,
    )
    return int(bool(bad))


def cannot(needed):
    """Why there are not as many GPUs, or None."""
    probe = subprocess.run([sys.executable, "-c", "import torch, onehop; print(torch.cuda.device_count())"],
                           capture_output=True, text=True, timeout=60)  # fmt: skip
    if probe.returncode:
        return f"{sys.executable} cannot import torch and onehop: {(probe.stderr.splitlines() or ['?'])[-1]}"
    found = int(probe.stdout.split()[-1])
    return f"needs {needed} GPUs, PyTorch finds {found}" if found < needed else None


def main(device, shared):
    reason = cannot(1 if shared else RANKS) if device == "cuda" else None
    if reason:
        print(f"SKIPPED: {reason}")
        return SKIPPED
    peer = "sums of integers" if shared else "NCCL" if device == "cuda" else "gloo"
    return max([judge(device, peer, name, start(device, conf, shared)) for name, conf in ALLOCATORS[device].items()])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_const", dest="device", const="cpu", default="cuda")
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is None:
        sys.exit(main(given.device, given.share_gpu))
    import torch  # takes seconds
    import torch.distributed

    rank_main(given.device, given.rank, given.share_gpu)
