#!/usr/bin/env python3
"""GPUs: onehop beside PyTorch's symmetric memory, one_shot_all_reduce and two_shot_all_reduce, a process per GPU, in one run.

bfloat16, in CUDA graphs of as many calls as `onehop perf` takes (100, above 1 MB 20), each call behind the one before it in
stream order, 20 replays timed by events; a rank's figure is the median of the replays, shown is the largest of all ranks.
Size by size in turn: ours as a child process `onehop perf`, then torch's, and so on for some rounds; all outputs are verified
in the same run. one_shot works out of place and stands beside ours out of place, two_shot in place beside ours in place.
--compare nccl,nccl-symm adds NCCL, timed by onehop perf.

NVLink multicast is off for everyone, always. Exit status: 1 wrong data, 2 usage, 3 nothing to compare with or no onehop.
"""

import os
import sys

# Before anything loads CUDA or NCCL; children inherit it.
MULTICAST_OFF = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
os.environ.update(MULTICAST_OFF)

import glob  # noqa: E402
import importlib.util  # noqa: E402
import socket  # noqa: E402
import statistics  # noqa: E402

import compare  # noqa: E402

SMALL_BYTES, SMALL_CALLS, LARGE_CALLS, REPLAYS = 1 << 20, 100, 20, 20
OURS = {"out-of-place": "out_of_place", "in-place": "in_place"}
TORCH = {"one_shot": "out-of-place", "two_shot": "in-place"}
NCCL = {"nccl": "out-of-place", "nccl-symm": "out-of-place"}


def flags():
    parser = compare.parser(__doc__.splitlines()[0], 64 << 20, ("bfloat16",))
    parser.add_argument("-g", "--ranks", type=compare.integer(2, 16), metavar="N", help="GPUs, default all")
    parser.add_argument("--early-trigger", action="store_true", help="ours with the promise of this flag of perf")
    parser.add_argument("--compare", default="", metavar="LIST", help="nccl, nccl-symm: also, by onehop perf")
    parser.add_argument("--nccl-lib", metavar="PATH", help="default: the one of PyTorch's wheels, if there is one")
    parser.add_argument("--rank", type=int, help=compare.argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=compare.argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=compare.argparse.SUPPRESS)
    result = parser.parse_args()
    result.nccl = [word for word in result.compare.split(",") if word]
    if not set(result.nccl) <= set(NCCL):
        parser.error(f"--compare {result.compare}: expected some of {', '.join(NCCL)}")
    if result.types != "bfloat16":
        parser.error(f"-d {result.types}: only bfloat16 is compared here")
    return result


# ---- torch's processes -----------------------------------------------------------------------------------------------

class TorchRank:
    def __init__(self, rank, world_size, port, max_bytes):
        import torch
        import torch.distributed as distributed
        import torch.distributed._symmetric_memory as symmetric
        for name, value in MULTICAST_OFF.items():
            assert os.environ[name] == value
        self.torch, self.rank, self.world_size = torch, rank, world_size
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        self.group = distributed.group.WORLD.group_name
        # The longest message; shorter ones are its front part.
        self.shared = symmetric.empty(max_bytes // 2, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(self.shared, self.group)
        self.private = torch.empty_like(self.shared)
        self.source = torch.from_numpy(compare.exact_input(rank, max_bytes // 2)).to(device, torch.bfloat16)
        self.stream = torch.cuda.Stream()

    def version(self):
        return {"version": f"torch {self.torch.__version__}, {self.torch.cuda.get_device_name()}"}

    def call(self, system, count):
        operations = self.torch.ops.symm_mem
        if system == "one_shot":
            operations.one_shot_all_reduce_out(self.shared[:count], "sum", self.group, self.private[:count])
        else:
            operations.two_shot_all_reduce_(self.shared[:count], "sum", self.group)

    def restore(self, count):
        """In stream order. Nobody reads a peer's memory then: each call ends with a barrier of all ranks."""
        self.shared[:count].copy_(self.source[:count])

    def captured(self, system, count, calls):
        graph = self.torch.cuda.CUDAGraph()
        # Not "global": a thread of torch may look at events meanwhile.
        with self.torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                self.call(system, count)
        return graph

    def wrong(self, system, count):
        found = (self.private if system == "one_shot" else self.shared)[:count].float().cpu().numpy()
        return int((found != compare.exact_sum(self.world_size, count)).sum())

    def measure(self, system, count, calls):
        cuda = self.torch.cuda
        with cuda.stream(self.stream):
            self.restore(count)
            self.call(system, count)
            self.stream.synchronize()
            graph = self.captured(system, count, calls)
            events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
            graph.replay()
            self.restore(count)
            self.call(system, count)  # aligns the ranks
            for begin, end in events:
                self.restore(count)
                begin.record()
                graph.replay()
                end.record()
            self.stream.synchronize()
        times = [begin.elapsed_time(end) * 1000 / calls for begin, end in events]
        return {"p50_us": statistics.median(times), "calls": calls * REPLAYS}

    def verify(self, system, count):
        """What the timed calls left, where that is a sum of the inputs; then a call onto fresh outputs."""
        with self.torch.cuda.stream(self.stream):
            wrong = self.wrong(system, count) if system == "one_shot" else 0
            graph = self.captured(system, count, 1)
            self.restore(count)
            self.private.fill_(-1)
            graph.replay()
            self.stream.synchronize()
            return {"wrong": wrong + self.wrong(system, count)}


def work(arguments):
    rank = TorchRank(arguments.rank, arguments.world, arguments.port, arguments.maxbytes)
    compare.serve(arguments.connect, arguments.rank,
                  {"version": rank.version, "measure": rank.measure, "verify": rank.verify})
    rank.torch.distributed.destroy_process_group()


# ---- the script ------------------------------------------------------------------------------------------------------

def start_torch(arguments, world_size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return lambda path: [
        compare.start_process([sys.executable, os.path.abspath(__file__), "--worker", "torch", "--connect", path,
                               "--rank", rank, "--world", world_size, "--port", port, "-e", arguments.maxbytes])
        for rank in range(world_size)]


def measure_torch(group, system, size):
    count, calls = size // 2, SMALL_CALLS if size <= SMALL_BYTES else LARGE_CALLS
    timed = group.ask(do="measure", system=system, count=count, calls=calls)
    return {"p50_us": max(answer["p50_us"] for answer in timed), "calls": timed[0]["calls"],
            "wrong": sum(answer["wrong"] for answer in group.ask(do="verify", system=system, count=count))}


def nccl_library():
    """PyTorch's wheels bring it; None leaves the search to the system."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for path in glob.glob(os.path.join(folder, "nccl", "lib", "libnccl.so.2")):
            return path
    return None


def side_of(result, key):
    side = result[key]
    return {"p50_us": side["p50"], "wrong": side["wrong"], "calls": side["calls"], "algorithm": side["algorithm"]}


def measure_onehop(arguments, report, world_size, size):
    more = ["--early-trigger"] if arguments.early_trigger else []
    if arguments.nccl:
        library = arguments.nccl_lib or nccl_library()
        more += ["--compare", ",".join(arguments.nccl), *(["--nccl-lib", library] if library else [])]
    data = compare.run_onehop(arguments.onehop, "--device", "cuda", "-g", world_size, "-b", size, "-e", size,
                              "-d", "bfloat16", "-G", REPLAYS, *more)
    report.machine = data
    if arguments.nccl:
        report.versions["nccl"] = data["nccl"]
    result = data["results"][0]
    sides = {name: side_of(result, key) for name, key in OURS.items()}
    sides.update({name: side_of(result, f"{name}_out_of_place") for name in arguments.nccl})
    return sides, result["floor_us"]


def one_size(arguments, report, group, world_size, size):
    rounds, floor_us = {}, None
    for _ in range(arguments.repeat):
        sides, floor_us = measure_onehop(arguments, report, world_size, size)
        for name, found in sides.items():
            rounds.setdefault(name, []).append(found)
        for system in TORCH if group else ():
            rounds.setdefault(system, []).append(measure_torch(group, system, size))
    report.add(world_size, "bfloat16", size, rounds, floor_us)


def find_gpus():
    """Their number and why torch cannot be used, or None."""
    if importlib.util.find_spec("torch") is None:
        return 0, "there is no module torch"
    import torch
    if not torch.cuda.is_available():
        return 0, "torch sees no GPU"
    return torch.cuda.device_count(), None


def main():
    arguments = flags()
    if arguments.worker:
        return work(arguments)
    gpus, reason = find_gpus()
    world_size = arguments.ranks or gpus or 2
    peers = {**TORCH, **{name: NCCL[name] for name in arguments.nccl}}
    notes = [f"{name}={value}" for name, value in MULTICAST_OFF.items()]
    report = compare.Report(arguments, [*OURS, *peers], peers, notes)
    print(f"# onehop (out-of-place, in-place) beside {', '.join(peers)}; CUDA graphs; {', '.join(notes)}")
    group = None
    try:
        if reason:
            for system in TORCH:
                report.skip(system, reason)
        else:
            group = compare.Group("torch", world_size, start_torch(arguments, world_size))
            report.versions["torch"] = group.ask(do="version")[0]["version"]
        report.header(world_size, "bfloat16")
        for size in compare.sizes_between(arguments.minbytes, arguments.maxbytes, arguments.factor):
            one_size(arguments, report, group, world_size, size)
    finally:
        if group:
            group.close()
    for name, version in report.versions.items():
        print(f"# {name}: {version}")
    return report.finish()


if __name__ == "__main__":
    compare.run(main)
