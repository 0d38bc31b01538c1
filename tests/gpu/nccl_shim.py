#!/usr/bin/env python3
"""Property: with the NCCL shim over the real NCCL, PyTorch and a pynccl get the bits that they get without it, on ONE GPU
that all ranks share.

    nccl_shim.py BUILD [--ranks 2,4] [--all-reduce-perf PATH] [--limit SECONDS]

NCCL takes several ranks on a GPU where NCCL_HOSTID differs in each process; it then goes over loopback sockets. The
processes run under MPS: under the daemon that CUDA_MPS_PIPE_DIRECTORY names, else under one that is started and ended
here. Each number of ranks runs twice, plain and by `onehop run`; results must have the same bits (all are sums of small
integers), and the shim's own counts must show what was taken. Then times in graphs, with and without. Exit status 77: no
GPU, no PyTorch or no NCCL.
"""

import argparse
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
TIMED = (4096, 16384, 65536, 262144)  # bytes


# ---- a rank --------------------------------------------------------------------------------------------------------------

class Ranks:
    """What a rank finds, as digests by name."""

    def __init__(self, rank, world):
        import torch
        import torch.distributed as dist
        self.torch, self.dist = torch, dist
        self.rank, self.world = rank, world
        self.found = {}

    def note(self, name, *tensors):
        self.torch.cuda.synchronize()
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().cpu().view(self.torch.uint8).numpy().tobytes())
        assert name not in self.found, name
        self.found[name] = digest.hexdigest()[:16]

    def values(self, count, dtype, salt=0):
        torch = self.torch
        return ((torch.arange(count, device="cuda") * 7 + 5 * self.rank + salt) % 23 + 1).to(dtype)

    def eager(self):
        torch, dist = self.torch, self.dist
        for dtype in torch.float32, torch.float16, torch.bfloat16, torch.int64:
            for count in 1, 7, 1000, 65536, 1 << 20:
                data = self.values(count, dtype)
                dist.all_reduce(data)
                expected = sum(((torch.arange(count, device="cuda") * 7 + 5 * r) % 23 + 1).to(dtype) for r in range(self.world))
                assert torch.equal(data, expected), f"wrong sum: {dtype}, {count}"
                self.note(f"all_reduce {dtype} {count}", data)
        for op in dist.ReduceOp.MAX, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT:
            data = self.values(1000, torch.float32)
            dist.all_reduce(data, op=op)
            self.note(f"all_reduce {op}", data)
        data = self.values(1001, torch.bfloat16)[1:]  # aligned to its element only
        dist.all_reduce(data)
        self.note("all_reduce unaligned", data)

    def asynchronous(self, groups):
        torch, dist = self.torch, self.dist
        data = [self.values(5000 + i, torch.float32, i) for i in range(24)]
        works = [dist.all_reduce(one, group=groups[i % len(groups)], async_op=True) for i, one in enumerate(data)]
        for work in works:
            work.wait()
        self.note(f"async_op on {len(groups)} groups", *data)

    def parts(self, group=None, name="world"):
        torch, dist = self.torch, self.dist
        world = dist.get_world_size(group)
        for dtype in torch.float32, torch.bfloat16:
            for count in 3, 4096, 100003:
                out = torch.zeros(count * world, dtype=dtype, device="cuda")
                dist.all_gather_into_tensor(out, self.values(count, dtype), group=group)
                part = torch.zeros(count, dtype=dtype, device="cuda")
                dist.reduce_scatter_tensor(part, self.values(count * world, dtype), group=group)
                self.note(f"parts of {count} {dtype} in {name}", out, part)

    def others(self):
        torch, dist = self.torch, self.dist
        data = self.values(100, torch.float32)
        dist.broadcast(data, 1)
        gathered = [torch.zeros(50, device="cuda") for _ in range(self.world)]
        dist.all_gather(gathered, self.values(50, torch.float32))
        swapped = torch.zeros(8 * self.world, device="cuda")
        dist.all_to_all_single(swapped, self.values(8 * self.world, torch.float32))
        got = torch.zeros(10, device="cuda")
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, self.values(10, torch.float32), (self.rank + 1) % self.world),
                dist.P2POp(dist.irecv, got, (self.rank - 1) % self.world)]):
            work.wait()
        self.note("broadcast, all_gather, all_to_all, send and receive", data, *gathered, swapped, got)
        many = [self.values(100 + i, torch.float32, i) for i in range(3)]
        with dist._coalescing_manager(device=torch.device("cuda", 0)):
            for one in many:
                dist.all_reduce(one)
        self.note("coalesced", *many)
        dist.barrier()

    def graphs(self, group=None):
        torch, dist = self.torch, self.dist
        for count in 8, 2048, 131072:
            given = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
            kept = []
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                data = given + 0
                dist.all_reduce(data, group=group)
                gathered = torch.zeros(count * self.world, dtype=torch.bfloat16, device="cuda")
                dist.all_gather_into_tensor(gathered, data, group=group)
                part = torch.zeros(count // self.world, dtype=torch.bfloat16, device="cuda")
                dist.reduce_scatter_tensor(part, given, group=group)
            for turn in range(5):
                given.copy_(self.values(count, torch.bfloat16, turn))
                graph.replay()
                kept += [data.clone(), gathered.clone(), part.clone()]
                if turn == 2:  # an eager call between replays
                    between = self.values(300, torch.float32)
                    dist.all_reduce(between, group=group)
                    kept.append(between)
            self.note(f"graph {count}", *kept)
            del graph

    def ddp(self):
        """Integers all the way: sums have the same bits in any order."""
        torch = self.torch
        model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.ReLU(), torch.nn.Linear(128, 16, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((torch.arange(parameter.numel()) * 3 % 5 - 2).reshape(parameter.shape))
        wrapped = torch.nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[0])
        optimiser = torch.optim.SGD(wrapped.parameters(), lr=0.25)
        for step in range(2):
            optimiser.zero_grad()
            batch = self.values(4 * 64, torch.float32, step).reshape(4, 64) % 3
            wrapped(batch).sum().backward()
            self.note(f"ddp gradients {step}", *[p.grad for p in wrapped.parameters()])
            if step == 0:
                optimiser.step()
                self.note("ddp step", *wrapped.parameters())

    def sub_groups(self):
        dist = self.dist
        pairs = [dist.new_group([first, first + 1]) for first in range(0, self.world, 2)]
        mine = pairs[self.rank // 2]
        data = self.values(3000, self.torch.float32)
        dist.all_reduce(data, group=mine)
        self.note("sub-group", data)
        self.parts(mine, "a sub-group")

    def timed_graphs(self):
        """Median time of a call in a graph of 20, in us, by bytes."""
        torch, dist = self.torch, self.dist
        times = {}
        for size in TIMED:
            data = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(20):
                    dist.all_reduce(data)
            took = []
            for turn in range(15):
                data.fill_(2.0 ** -40 if turn % 2 else -(2.0 ** -41))
                dist.barrier()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                took.append(begin.elapsed_time(end) * 1000 / 20)
            times[size] = sorted(took[3:])[len(took[3:]) // 2]
            del graph
        return times


class UniqueId:
    """ncclUniqueId for ctypes, by value."""

    @staticmethod
    def type():
        import ctypes
        return type("ncclUniqueId", (ctypes.Structure,), {"_fields_": [("internal", ctypes.c_byte * 128)]})


def connect(ranks, path):
    """A function that calls NCCL, and a communicator of all ranks."""
    import ctypes
    nccl = ctypes.CDLL(path)
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    unique_type = UniqueId.type()
    unique, comm = unique_type(), ctypes.c_void_p()

    def call(name, *arguments):
        result = getattr(nccl, name)(*arguments)
        assert result == 0, f"{name}: {nccl.ncclGetErrorString(result).decode()}"

    if ranks.rank == 0:
        call("ncclGetUniqueId", ctypes.byref(unique))
    shared = [bytes(unique)]
    ranks.dist.broadcast_object_list(shared, 0)
    unique = unique_type.from_buffer_copy(shared[0])
    call("ncclCommInitRank", ctypes.byref(comm), ranks.world, unique, ranks.rank)
    return call, comm


def aborted(ranks, path):
    """Rank 0 makes a call that no other rank makes, and aborts: the call ends, and the abort with it."""
    import ctypes
    torch = ranks.torch
    call, comm = connect(ranks, path)
    data, stream = ranks.values(1000, torch.float32), torch.cuda.Stream()
    at, handle = ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
    torch.cuda.synchronize()
    call("ncclAllReduce", at, at, ctypes.c_size_t(1000), 7, 0, comm, handle)  # by all
    stream.synchronize()
    if ranks.rank == 0:
        call("ncclAllReduce", at, at, ctypes.c_size_t(1000), 7, 0, comm, handle)
        time.sleep(0.3)
    begun = time.monotonic()
    call("ncclCommAbort", comm)
    stream.synchronize()
    took = time.monotonic() - begun
    assert took < 10, f"the abort took {took:.1f} s"
    ranks.dist.barrier()


def pynccl(ranks, path):
    """As vLLM uses NCCL: CDLL of a path or of the name, functions by ctypes, its own communicator."""
    import ctypes
    torch, dist = ranks.torch, ranks.dist
    call, comm = connect(ranks, path)
    version = ctypes.c_int()
    call("ncclGetVersion", ctypes.byref(version))
    stream = torch.cuda.Stream()
    size, world = ctypes.c_size_t, ranks.world

    def at(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    handle = ctypes.c_void_p(stream.cuda_stream)
    with torch.cuda.stream(stream):
        for count, kind, dtype in (512, 9, torch.bfloat16), (4099, 7, torch.float32), (40000, 6, torch.float16):
            source = ranks.values(count, dtype)
            target = torch.empty_like(source)
            call("ncclAllReduce", at(source), at(target), size(count), kind, 0, comm, handle)
            gathered = torch.empty(count * world, dtype=dtype, device="cuda")
            call("ncclAllGather", at(source), at(gathered), size(count), kind, comm, handle)
            whole, part = ranks.values(count * world, dtype), torch.empty(count, dtype=dtype, device="cuda")
            call("ncclReduceScatter", at(whole), at(part), size(count), kind, 0, comm, handle)
            ranks.note(f"pynccl {dtype}", target, gathered, part)
        call("ncclBroadcast", at(source), at(target), size(100), kind, 0, comm, handle)
        call("ncclGroupStart")
        call("ncclSend", at(source), size(100), kind, (ranks.rank + 1) % world, comm, handle)
        call("ncclRecv", at(target), size(100), kind, (ranks.rank - 1) % world, comm, handle)
        call("ncclGroupEnd")
        ranks.note("pynccl send and receive", target)
        data = ranks.values(4096, torch.bfloat16)
        out = torch.empty_like(data)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call("ncclAllReduce", at(data), at(out), size(4096), 9, 0, comm, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        for turn in range(3):
            data.copy_(ranks.values(4096, torch.bfloat16, turn))
            graph.replay()
            ranks.note(f"pynccl graph {turn}", out)
    torch.cuda.synchronize()
    del graph
    dist.barrier()
    call("ncclCommDestroy", comm)
    return version.value


def run_rank(rank, world, path, answer):
    ranks = Ranks(rank, world)
    torch, dist = ranks.torch, ranks.dist
    torch.cuda.set_device(0)
    begun = time.monotonic()

    def say(what):
        print(f"rank {rank}: {what} ({time.monotonic() - begun:.1f} s)", file=sys.stderr, flush=True)

    dist.init_process_group("nccl", rank=rank, world_size=world)
    ranks.eager()
    say("eager")
    second = dist.new_group(list(range(world)))
    ranks.asynchronous([None])
    ranks.asynchronous([None, second])
    say("async")
    ranks.parts()
    ranks.sub_groups()
    ranks.others()
    say("parts, sub-groups, others")
    ranks.graphs()
    say("graphs")
    ranks.ddp()
    say("ddp")
    version = pynccl(ranks, path)
    say("pynccl")
    aborted(ranks, path)
    say("aborted")
    times = ranks.timed_graphs()
    say("timed graphs")
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()
    with open(answer, "w", encoding="utf-8") as file:
        json.dump({"found": ranks.found, "times": times, "version": version, "torch": torch.__version__}, file)


# ---- the parent ----------------------------------------------------------------------------------------------------------

def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Mps:
    """The daemon: the caller's, or one of our own."""

    def __init__(self):
        self.folder = None
        self.environment = {}
        if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or not shutil.which("nvidia-cuda-mps-control"):
            return
        self.folder = tempfile.mkdtemp(prefix="onehop-mps.", dir="/tmp")
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{self.folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{self.folder}/log"}
        for path in self.environment.values():
            os.mkdir(path)
        start = os.environ | self.environment
        start.pop("CUDA_VISIBLE_DEVICES", None)
        if subprocess.run(["nvidia-cuda-mps-control", "-d"], env=start, stdin=subprocess.DEVNULL, timeout=20, check=False).returncode:
            print("the MPS daemon could not be started: ranks take turns on the GPU")
            shutil.rmtree(self.folder)
            self.folder, self.environment = None, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.folder:
            subprocess.run(["nvidia-cuda-mps-control"], env=os.environ | self.environment, input=b"quit\n", timeout=20, check=False,
                           stdout=subprocess.DEVNULL)
            shutil.rmtree(self.folder, ignore_errors=True)


def wheel():
    import importlib.util
    spec = importlib.util.find_spec("nvidia")
    found = [path for folder in spec.submodule_search_locations for path in glob.glob(f"{folder}/nccl/lib/libnccl.so.2")] if spec else []
    return found[0] if found else None


def start(arguments, world, shim, real, environment, folder, port):
    processes = []
    for rank in range(world):
        variables = os.environ | SAFE | environment | {
            "NCCL_HOSTID": f"shim-test-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "ONEHOP_NCCL_STATS": "1", "ONEHOP_LOG": os.environ.get("ONEHOP_LOG", "info"),
            "ONEHOP_TIMEOUT_MS": "30000", "ONEHOP_INIT_TIMEOUT_MS": "30000", "VLLM_NCCL_SO_PATH": real}
        for name in "LD_PRELOAD", "ONEHOP_NCCL_REAL", "ONEHOP_NCCL":
            variables.pop(name, None)
        before = ["timeout", "-k", "5", str(arguments.limit)]
        if shim:
            before += [f"{arguments.build}/onehop", "run", "--"]
        errors = open(f"{folder}/{rank}.err", "w", encoding="utf-8")  # noqa: SIM115
        processes.append(subprocess.Popen([*before, sys.executable, os.path.abspath(__file__), "--rank", str(rank), str(world),
                                           f"{folder}/{rank}.json"], env=variables, stderr=errors, stdout=errors,
                                          stdin=subprocess.DEVNULL))
        errors.close()
    return processes


def run(arguments, world, shim, real, environment):
    """The answers of all ranks, and the lines of rank 0 about what was taken."""
    with tempfile.TemporaryDirectory(prefix="onehop-nccl-") as folder:
        processes = start(arguments, world, shim, real, environment, folder, free_port())
        failed = []
        while any(process.poll() is None for process in processes):
            failed = [process for process in processes if process.poll()]
            if failed:  # the others would wait for it
                time.sleep(3)
                for process in processes:
                    if process.poll() is None:
                        process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.05)
        for process in processes:
            process.wait()
        texts = []
        for rank in range(world):
            with open(f"{folder}/{rank}.err", encoding="utf-8", errors="replace") as file:
                texts.append(file.read())
        if any(process.returncode for process in processes):
            for rank, process in enumerate(processes):
                print(f"---- rank {rank} of {world}, {'with' if shim else 'without'} the shim, ended with {process.returncode}")
                print(texts[rank][-3000:])
            return None, ""
        answers = []
        for rank in range(world):
            with open(f"{folder}/{rank}.json", encoding="utf-8") as file:
                answers.append(json.load(file))
        said = "\n".join(line for line in texts[0].split("\n") if "NCCL shim" in line)
        return answers, said


def taken_of(said):
    """(communicators taken, calls taken, calls handed on) of the line at the end."""
    found = re.search(r"communicators (\d+) taken, \d+ not; calls (\d+) taken.*?, (\d+) to NCCL", said)
    return tuple(int(text) for text in found.groups()) if found else (0, 0, 0)


def compare(world, without, with_shim):
    wrong = []
    for rank in range(world):
        a, b = without[rank]["found"], with_shim[rank]["found"]
        wrong += [f"rank {rank}: {name}" for name in sorted(a | b) if a.get(name) != b.get(name)]
    print(f"{world} ranks: {len(without[0]['found'])} results of each rank, {len(wrong)} differ {wrong[:10] or ''}")
    return not wrong


def print_times(world, without, with_shim):
    print(f"{world} ranks: all_reduce of bfloat16 in a graph of 20, us a call (median of 12, longest over ranks)")
    print(f"{'bytes':>10} {'NCCL':>9} {'shim':>9} {'ratio':>7}")
    enough = True
    for size in map(str, TIMED):
        plain, ours = (max(one["times"][size] for one in answers) for answers in (without, with_shim))
        print(f"{size:>10} {plain:9.2f} {ours:9.2f} {plain / ours:7.1f}")
        enough &= plain >= 3 * ours
    return enough


def all_reduce_perf(path, arguments, environment):
    """NCCL's own test, one rank: the shim passes it through."""
    if not path:
        print("SKIPPED all_reduce_perf: no path was given")
        return True
    variables = os.environ | SAFE | environment
    answer = subprocess.run(["timeout", "-k", "5", "60", f"{arguments.build}/onehop", "run", "--", path, "-b", "4K", "-e", "256K", "-f", "2",
                             "-g", "1", "-n", "20", "-c", "1"], env=variables, capture_output=True, text=True, check=False)
    good = answer.returncode == 0 and "Out of bounds values : 0 OK" in answer.stdout
    print(f"all_reduce_perf, one rank: {'ok' if good else answer.stdout[-1500:] + answer.stderr[-500:]}")
    return good


def main():
    if sys.argv[1:2] == ["--rank"]:
        real = os.environ.get("VLLM_NCCL_SO_PATH") or "libnccl.so.2"
        return run_rank(int(sys.argv[2]), int(sys.argv[3]), real, sys.argv[4])
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--all-reduce-perf", default=os.environ.get("ALL_REDUCE_PERF", ""))
    parser.add_argument("--limit", type=int, default=45, help="seconds for each of the runs")
    arguments = parser.parse_args()
    arguments.build = os.path.abspath(arguments.build)
    try:
        probe = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True,
                               timeout=60, check=False)
    except subprocess.TimeoutExpired:
        probe = None
    real = wheel()
    if not probe or probe.stdout.strip() in ("", "0") or not real or not os.path.exists(f"{arguments.build}/nccl/libnccl.so.2"):
        print("SKIPPED: no GPU, no PyTorch, no wheel of NCCL, or no shim in the build")
        return 77
    good = True
    with Mps() as mps:
        for world in map(int, arguments.ranks.split(",")):
            begun = time.monotonic()
            without, _ = run(arguments, world, False, real, mps.environment)
            with_shim, said = run(arguments, world, True, real, mps.environment) if without else (None, "")
            if not with_shim:
                good = False
                continue
            print(f"NCCL {without[0]['version']}, with the shim {with_shim[0]['version']}, PyTorch {without[0]['torch']}")
            print("rank 0: " + said.replace("\n", "\n        "))
            comms, ours, theirs = taken_of(said)
            good &= compare(world, without, with_shim)
            good &= comms >= 3 and ours >= 50 and theirs >= 10
            fast = print_times(world, without, with_shim)
            print(f"{world} ranks: {comms} communicators and {ours} calls taken, {theirs} handed on; "
                  f"{'at least' if fast else 'NOT'} 3 times as fast ({time.monotonic() - begun:.0f} s)", flush=True)
            good &= fast
        good &= all_reduce_perf(arguments.all_reduce_perf, arguments, mps.environment)
    print("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
