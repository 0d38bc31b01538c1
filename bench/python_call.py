#!/usr/bin/env python3
"""GPUs: what a call of 4 KB costs from Python, a process per GPU, in one run.

Eager, wall time per call: onehop's methods and operator, NCCL (torch.distributed.all_reduce) and PyTorch's symmetric memory
(one_shot_all_reduce). A sample is 50 calls one behind the other: `issue` is until the last call has returned, `done` until
the GPU has finished; both over 50, after a call that aligned the ranks. Shown are medians, the larger of all ranks; system
by system in turn, for some rounds, each in new processes.

Graph, GPU time per call: a torch.cuda.graph of 100 calls of AllReduce, each with memory of its own, timed by events,
beside `onehop perf` as a child process, which does the same from C.

Outputs are verified in the same run. NVLink multicast is off for everyone. Exit status: 1 wrong data, 2 usage, 3 something
is missing.
"""

import os
import sys

# Before anything loads CUDA or NCCL; children inherit it.
SWITCHES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(SWITCHES)

import importlib.util  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import compare  # noqa: E402

CALLS, SAMPLES, GRAPH_CALLS, REPLAYS = 50, 60, 100, 40
# name -> what it is
EAGER = {
    "all_reduce": "AllReduce.all_reduce, a new tensor",
    "all_reduce_out": "AllReduce.all_reduce into out",
    "all_reduce_": "AllReduce.all_reduce_, in place",
    "extension": "the extension alone, addresses at hand",
    "operator": "torch.ops.onehop.all_reduce",
    "empty_like": "torch.empty_like alone",
    "nccl": "torch.distributed.all_reduce, in place",
    "symm_mem": "torch.ops.symm_mem.one_shot_all_reduce, a new tensor",
}
GRAPH = {"graph": "AllReduce.all_reduce, a new tensor each", "graph_in_place": "AllReduce.all_reduce_"}
NOT_SUMMED = {"empty_like"}


def flags():
    parser = compare.argparse.ArgumentParser(description=__doc__.splitlines()[0])
    build = os.environ.get("ONEHOP_BUILD_DIR", os.path.join(compare.ROOT, "build", "release"))
    parser.add_argument("-b", "--bytes", type=compare.parse_size, default=4096, metavar="SIZE", help="default 4K")
    parser.add_argument("-g", "--ranks", type=compare.integer(2, 16), default=2, metavar="N", help="GPUs, default 2")
    parser.add_argument("--repeat", type=compare.integer(1, 100), default=5, metavar="N", help="rounds, default 5")
    parser.add_argument("--early-trigger", action="store_true", help="the promise of this flag of perf, for both")
    parser.add_argument("-J", "--json", type=compare.Output, metavar="FILE")
    parser.add_argument("--onehop", default=os.path.join(build, "onehop"), metavar="PATH", help="the command")
    parser.add_argument("--worker", help=compare.argparse.SUPPRESS)
    parser.add_argument("--connect", help=compare.argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=compare.argparse.SUPPRESS)
    parser.add_argument("--max-bytes", type=int, help=compare.argparse.SUPPRESS)
    return parser.parse_args()


def find_package(tool):
    beside = os.path.join(os.path.dirname(os.path.abspath(tool)), "python")
    if os.path.isdir(os.path.join(beside, "onehop")):
        sys.path.insert(0, beside)
    lacks = [f"module {name}" for name in ("numpy", "torch", "onehop") if importlib.util.find_spec(name) is None]
    return "there is no " + ", no ".join(lacks) if lacks else None


# ---- a rank ----------------------------------------------------------------------------------------------------------

class Rank:
    def __init__(self, arguments):
        import onehop
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric
        self.torch, self.onehop, self.dist = torch, onehop, dist
        self.rank, self.world_size, count = arguments.rank, arguments.ranks, arguments.bytes // 2
        torch.cuda.set_device(self.rank)
        device = torch.device("cuda", self.rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{arguments.connect}.store", rank=self.rank,
                                world_size=self.world_size)
        self.ar = onehop.AllReduce(None, device, max_bytes=arguments.max_bytes, timeout=30,
                                   early_trigger=arguments.early_trigger)
        self.source = torch.from_numpy(compare.exact_input(self.rank, count)).to(device, torch.bfloat16)
        self.sum = compare.exact_sum(self.world_size, count)
        self.given, self.out = self.source.clone(), torch.empty_like(self.source)
        self.shared = symmetric.empty(count, dtype=torch.bfloat16, device=device)
        group = dist.group.WORLD.group_name
        symmetric.rendezvous(self.shared, group)
        self.shared.copy_(self.source)
        place = self.given.data_ptr(), self.out.data_ptr(), count, onehop.DType.BFLOAT16, self.stream()
        context, ar, handle = self.ar.context, self.ar, self.ar.handle
        one_shot, operator = torch.ops.symm_mem.one_shot_all_reduce, onehop.ops.all_reduce
        # Each returns where its sum is.
        self.calls = {
            "all_reduce": lambda: ar.all_reduce(self.given),
            "all_reduce_out": lambda: ar.all_reduce(self.given, out=self.out),
            "all_reduce_": lambda: ar.all_reduce_(self.given),
            "extension": lambda: context.all_reduce(*place) or self.out,
            "operator": lambda: operator(self.given, handle),
            "empty_like": lambda: torch.empty_like(self.given),
            "nccl": lambda: dist.all_reduce(self.given) or self.given,
            "symm_mem": lambda: one_shot(self.shared, "sum", group),
        }
        self.bodies = {"graph": ar.all_reduce, "graph_in_place": ar.all_reduce_}

    def stream(self):
        return self.torch.cuda.current_stream().cuda_stream

    def version(self):
        torch = self.torch
        return {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                "python": sys.version.split()[0], "onehop": self.onehop.__version__,
                "gpu": torch.cuda.get_device_name()}

    def wrong(self, found):
        return int((found.float().cpu().numpy() != self.sum).sum())

    def eager(self, system):
        """`issue` and `done` in us per call, medians of the samples."""
        call, clock, wait = self.calls[system], time.perf_counter_ns, self.torch.cuda.synchronize
        issue, done = [], []
        for sample in range(SAMPLES + 5):
            self.given.copy_(self.source)
            call()  # aligns the ranks
            wait()
            start = clock()
            for _ in range(CALLS):
                call()
            issued = clock()
            wait()
            if sample >= 5:
                done.append((clock() - start) / 1000 / CALLS)
                issue.append((issued - start) / 1000 / CALLS)
        self.given.copy_(self.source)
        self.out.fill_(-1)
        wrong = 0 if system in NOT_SUMMED else self.wrong(call())
        return {"issue_us": statistics.median(issue), "done_us": statistics.median(done), "wrong": wrong}

    def graph(self, system):
        torch, body = self.torch, self.bodies[system]
        given = self.source.repeat(GRAPH_CALLS, 1)  # as perf --rotate has an input and an output for each call
        graph = torch.cuda.CUDAGraph()
        # NCCL has a thread that looks at events meanwhile.
        with self.ar.capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = [body(row) for row in given]  # kept, so that each has memory of its own
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
        graph.replay()
        self.ar.all_reduce(self.given)  # aligns the ranks
        for begin, end in events:
            given.copy_(self.source)
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = [begin.elapsed_time(end) * 1000 / GRAPH_CALLS for begin, end in events]
        wrong = sum(self.wrong(found) for found in made[::33])
        self.dist.barrier()  # the peers may read the captured memory
        return {"done_us": statistics.median(times), "wrong": wrong}


def work(arguments):
    find_package(arguments.onehop)
    member = Rank(arguments)
    with member.torch.inference_mode():
        compare.serve(arguments.connect, arguments.rank,
                      {"version": member.version, "eager": member.eager, "graph": member.graph})
    member.ar.close()
    member.dist.destroy_process_group()


# ---- the script ------------------------------------------------------------------------------------------------------

def start(arguments, max_bytes):
    more = ["--early-trigger"] if arguments.early_trigger else []
    return lambda path: [
        compare.start_process([sys.executable, os.path.abspath(__file__), "--worker", "python", "--connect", path, "--rank",
                               rank, "-g", arguments.ranks, "-b", arguments.bytes, "--max-bytes", max_bytes, "--onehop",
                               arguments.onehop, *more])
        for rank in range(arguments.ranks)]


def worst(answers):
    """Of all ranks: the larger time, the sum of what is wrong."""
    return {key: (sum if key == "wrong" else max)(answer[key] for answer in answers) for key in answers[0]}


def median_of(rounds):
    return {key: sum(one[key] for one in rounds) if key == "wrong" else statistics.median(one[key] for one in rounds)
            for key in rounds[0]}


def measure_tool(arguments, max_bytes):
    """`perf` makes its communicator for the largest message: that is measured too, and left."""
    more = ["--early-trigger"] if arguments.early_trigger else []
    data = compare.run_onehop(arguments.onehop, "--device", "cuda", "-g", arguments.ranks, "-b", arguments.bytes, "-e",
                              max_bytes, "-f", max(2, max_bytes // arguments.bytes), "-d", "bfloat16", "--rotate", "-n",
                              GRAPH_CALLS, "-G", REPLAYS, *more)
    result = data["results"][0]
    sides = {"graph": "out_of_place", "graph_in_place": "in_place"}
    return {name: {"done_us": result[side]["p50"], "wrong": result[side]["wrong"]} for name, side in sides.items()}, data


def measure(arguments):
    """Which half of a GPU's cache a buffer falls to makes some percent, so in each round memory lies elsewhere: it has
    processes of its own and makes its communicators for longer messages."""
    rounds, machine, versions = {}, None, None
    for turn in range(arguments.repeat):
        max_bytes = arguments.bytes << 3 * (turn % 5)
        tool, machine = measure_tool(arguments, max_bytes)
        with compare.Group("ranks", arguments.ranks, start(arguments, max_bytes)) as group:
            if not versions:
                versions = group.ask(do="version")[0]
                print("# " + ", ".join(f"{name} {value}" for name, value in versions.items()), flush=True)
            for name in GRAPH:
                rounds.setdefault(f"perf_{name}", []).append(tool[name])
                rounds.setdefault(name, []).append(worst(group.ask(do="graph", system=name)))
            for name in EAGER:
                rounds.setdefault(name, []).append(worst(group.ask(do="eager", system=name)))
    return {name: {**median_of(found), "rounds": found} for name, found in rounds.items()}, machine, versions


def report(found):
    print(f"#\n# {'eager, us of wall time per call':<52} {'issue':>8} {'done':>8}")
    for name, what in EAGER.items():
        print(f"  {what:<52} {found[name]['issue_us']:8.2f} {found[name]['done_us']:8.2f}")
    print(f"#\n# {'graph, us of GPU time per call':<52} {'Python':>8} {'perf':>8}  ratio")
    for name, what in GRAPH.items():
        python, tool = found[name]["done_us"], found[f"perf_{name}"]["done_us"]
        print(f"  {what:<52} {python:8.2f} {tool:8.2f}  {python / tool:.3f}")


def gpus():
    import torch
    return torch.cuda.device_count()


def main():
    arguments = flags()
    if arguments.worker:
        return work(arguments)
    if arguments.bytes % 2:
        raise compare.Failure(f"-b {arguments.bytes}: expected an even number of bytes")
    reason = find_package(arguments.onehop)
    if not reason and gpus() < arguments.ranks:
        reason = f"PyTorch sees {gpus()} GPUs, {arguments.ranks} are needed"
    if reason:
        print(f"SKIPPED: {reason}", file=sys.stderr)
        return 3
    print(f"# {compare.size_name(arguments.bytes)}, bfloat16, {arguments.ranks} ranks; "
          + ", ".join(f"{name}={value}" for name, value in SWITCHES.items()))
    found, machine, versions = measure(arguments)
    report(found)
    wrong = sum(one["wrong"] for one in found.values())
    print(f"# {wrong} wrong")
    if arguments.json:
        data = {"schema": "onehop-python-call/1", "bytes": arguments.bytes, "ranks": arguments.ranks, "wrong": wrong,
                **{key: machine.get(key, "") for key in ("machine", "driver", "clocks", "version", "commit")},
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "args": sys.argv, "versions": versions,
                "switches": SWITCHES, "results": found}
        compare.write_json(arguments.json, data)
    return int(wrong > 0)


if __name__ == "__main__":
    compare.run(main)
