#!/usr/bin/env python3
"""The host device beside gloo (torch.distributed) and Open MPI (mpi4py), on this machine, in one run.

For each number of ranks, type and size in turn: ours as a child process `onehop perf`, then each peer, and so on for some
rounds. Every rank of everyone stays on a processor of its own, the same ones (--no-pin: nobody is pinned). Outputs are
verified in the same run. A sample is a call, or a batch of calls that together take 5 us; a rank's figure is the median of
its samples, shown is the largest of all ranks. Python's part in a peer's call is measured with it: under 1 us for mpi4py.

Open MPI has no bfloat16; gloo reduces in place and stands beside ours in place, Open MPI beside ours out of place. A peer
whose modules are missing is skipped, loudly. Exit status: 1 wrong data, 2 usage, 3 nothing to compare with or no onehop.
"""

import math
import os
import shutil
import statistics
import sys
import time

import compare

TYPES = ("float32", "bfloat16")
SAMPLE_US, SIDE_US, WARM_UP, MIN_SAMPLES, MAX_SAMPLES = 5, 200_000, 5, 20, 20_000
# Values grow in place; an fp32 or bf16 number near 7 stays finite over so many doublings.
DOUBLINGS = 120


def flags():
    parser = compare.parser(__doc__.splitlines()[0], 32 << 20, TYPES)
    parser.add_argument("-g", "--ranks", default="2,4,8,16", help="default %(default)s")
    parser.add_argument("--peers", default="gloo,mpi", help="default %(default)s")
    parser.add_argument("-n", "--iters", type=compare.integer(1, MAX_SAMPLES), metavar="N",
                        help="samples of everyone; default: as many as take 0.2 s")
    parser.add_argument("--no-pin", action="store_true", help="leave all processes to the scheduler")
    parser.add_argument("--rank", type=int, help=compare.argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=compare.argparse.SUPPRESS)
    result = parser.parse_args()
    result.rank_counts = [int(word) for word in result.ranks.split(",") if word.isdigit()]
    if not result.rank_counts or not all(2 <= count <= 16 for count in result.rank_counts):
        parser.error(f"-g {result.ranks}: numbers from 2 to 16")
    result.dtypes = result.types.split(",")
    result.peer_names = result.peers.split(",")
    for given, known in (result.dtypes, TYPES), (result.peer_names, STARTERS):
        if not set(given) <= set(known):
            parser.error(f"'{','.join(given)}': expected some of {', '.join(known)}")
    return result


# ---- the peers' processes --------------------------------------------------------------------------------------------

def pin(rank):
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[rank % len(allowed)]})


class Timer:
    """The same for all peers. `prepare(dtype, count)` makes buffers and returns (call, restore, found): one all-reduce,
    outputs set back as before the first call, the output as float32."""

    def __init__(self, rank, world_size, prepare):
        self.rank, self.world_size, self.prepare = rank, world_size, prepare

    def buffers(self, dtype, count):
        self.count = count
        self.call, self.restore, self.found = self.prepare(dtype, count)
        self.restore()
        start = time.perf_counter_ns()
        for _ in range(WARM_UP):
            self.call()
        return {"us": (time.perf_counter_ns() - start) / 1000 / WARM_UP}

    def time(self, batch, samples):
        """Restores outputs before they overflow, outside what is timed; then one call aligns the ranks."""
        call, clock = self.call, time.perf_counter_ns
        most = max(1, int(DOUBLINGS / math.log2(self.world_size)) // batch)
        taken = []
        while len(taken) < samples:
            self.restore()
            call()
            for _ in range(min(most, samples - len(taken))):
                start = clock()
                for _ in range(batch):
                    call()
                taken.append((clock() - start) / 1000 / batch)
        return {"p50_us": statistics.median(taken), "calls": batch * samples}

    def verify(self):
        self.restore()
        self.call()
        wrong = self.found() != compare.exact_sum(self.world_size, self.count)
        return {"wrong": int(wrong.sum())}

    def orders(self, version):
        return {"buffers": self.buffers, "time": self.time, "verify": self.verify, "version": lambda: version}


def gloo_worker(path, rank, world_size):
    import torch
    import torch.distributed
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}.gloo", rank=rank, world_size=world_size)

    def prepare(dtype, count):
        source = torch.from_numpy(compare.exact_input(rank, count)).to(getattr(torch, dtype))
        work = torch.empty_like(source)
        return (lambda: torch.distributed.all_reduce(work)), (lambda: work.copy_(source)), (lambda: work.float().numpy())

    timer = Timer(rank, world_size, prepare)
    compare.serve(path, rank, timer.orders({"version": f"torch {torch.__version__}"}))
    torch.distributed.destroy_process_group()


def mpi_worker(path):
    import numpy
    from mpi4py import MPI
    world = MPI.COMM_WORLD

    def prepare(dtype, count):
        source = compare.exact_input(world.rank, count)
        sums = numpy.empty_like(source)
        send, receive = [source, count, MPI.FLOAT], [sums, count, MPI.FLOAT]
        return (lambda: world.Allreduce(send, receive, MPI.SUM)), (lambda: sums.fill(-1)), (lambda: sums)

    timer = Timer(world.rank, world.size, prepare)
    version = MPI.Get_library_version().split(",")[0].strip("\0 ")
    compare.serve(path, world.rank, timer.orders({"version": version}))


def work(arguments):
    rank = arguments.rank
    if rank is None:  # mpirun tells it
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    if not arguments.no_pin:
        pin(rank)
    if arguments.worker == "mpi":
        mpi_worker(arguments.connect)
    else:
        gloo_worker(arguments.connect, rank, arguments.world)


# ---- the script ------------------------------------------------------------------------------------------------------

def worker_command(name, path, pinned, *more):
    return [sys.executable, os.path.abspath(__file__), "--worker", name, "--connect", path, *more,
            *([] if pinned else ["--no-pin"])]


def start_gloo(world_size, pinned):
    # One thread each, and the loopback device: the ranks are on one machine.
    return lambda path: [
        compare.start_process(worker_command("gloo", path, pinned, "--rank", rank, "--world", world_size),
                              OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") for rank in range(world_size)]


def start_mpi(world_size, pinned):
    launch = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", world_size]
    return lambda path: [
        compare.start_process([*launch, *worker_command("mpi", path, pinned)], OMP_NUM_THREADS="1",
                              OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")]


# name -> (starter, modules it needs, programs, types, the side of ours that does the same)
STARTERS = {
    "mpi": (start_mpi, ("numpy", "mpi4py"), ("mpirun",), ("float32",), "out-of-place"),
    "gloo": (start_gloo, ("numpy", "torch"), (), TYPES, "in-place"),
}
OURS = {"out-of-place": "out_of_place", "in-place": "in_place"}


def missing(name):
    import importlib.util
    _, modules, programs, _, _ = STARTERS[name]
    lacks = [f"module {module}" for module in modules if importlib.util.find_spec(module) is None]
    lacks += [f"program {program}" for program in programs if not shutil.which(program)]
    return "there is no " + ", no ".join(lacks) if lacks else None


def measure_peer(arguments, group, dtype, count):
    guess = max(answer["us"] for answer in group.ask(do="buffers", dtype=dtype, count=count))
    batch = min(32, max(1, math.ceil(SAMPLE_US / guess)))
    samples = arguments.iters or int(min(MAX_SAMPLES, max(MIN_SAMPLES, SIDE_US / (guess * batch))))
    timed = group.ask(do="time", batch=batch, samples=samples)
    return {"p50_us": max(answer["p50_us"] for answer in timed), "calls": timed[0]["calls"],
            "wrong": sum(answer["wrong"] for answer in group.ask(do="verify"))}


def measure_ours(arguments, report, world_size, dtype, size):
    more = [] if arguments.no_pin else ["--pin"]
    if arguments.iters:
        more += ["-n", arguments.iters]
    data = compare.run_onehop(arguments.onehop, "--device", "host", "-g", world_size, "-b", size, "-e", size, "-d",
                              {"float32": "float"}.get(dtype, dtype), *more)
    report.machine = data
    result = data["results"][0]
    sides = {name: {"p50_us": result[key]["p50"], "wrong": result[key]["wrong"], "calls": result[key]["calls"],
                    "algorithm": result[key]["algorithm"]} for name, key in OURS.items()}
    return sides, result["floor_us"]


def one_size(arguments, report, groups, world_size, dtype, size):
    rounds, floors = {}, []
    for _ in range(arguments.repeat):
        sides, floor_us = measure_ours(arguments, report, world_size, dtype, size)
        floors.append(floor_us)
        for name, found in sides.items():
            rounds.setdefault(name, []).append(found)
        for name, group in groups.items():
            if dtype in STARTERS[name][3]:
                count = size // (4 if dtype == "float32" else 2)
                rounds.setdefault(name, []).append(measure_peer(arguments, group, dtype, count))
    known = [floor for floor in floors if floor is not None]
    report.add(world_size, dtype, size, rounds, statistics.median(known) if known else None)


def all_sizes(arguments, report, groups, world_size):
    for dtype in arguments.dtypes:
        report.header(world_size, dtype)
        for size in compare.sizes_between(arguments.minbytes, arguments.maxbytes, arguments.factor):
            one_size(arguments, report, groups, world_size, dtype, size)


def open_groups(arguments, report, world_size):
    groups = {}
    for name in arguments.peer_names:
        if name in report.skipped:
            continue
        try:
            groups[name] = compare.Group(name, world_size, STARTERS[name][0](world_size, not arguments.no_pin))
        except compare.Failure as failure:
            report.skip(name, str(failure))
            continue
        report.versions[name] = groups[name].ask(do="version")[0]["version"]
    return groups


def main():
    arguments = flags()
    if arguments.worker:
        return work(arguments)
    peers = {name: STARTERS[name][4] for name in arguments.peer_names}
    pinning = "nobody is pinned" if arguments.no_pin else "each rank on a processor of its own, the same for all"
    report = compare.Report(arguments, [*OURS, *peers], peers, [pinning])
    for name in peers:
        if missing(name):
            report.skip(name, missing(name))
    print(f"# onehop's host device (out-of-place, in-place) beside {', '.join(peers)}; {pinning}")
    for world_size in arguments.rank_counts:
        groups = open_groups(arguments, report, world_size)
        try:
            all_sizes(arguments, report, groups, world_size)
        finally:
            for group in groups.values():
                group.close()
    for name, version in report.versions.items():
        print(f"# {name}: {version}")
    return report.finish()


if __name__ == "__main__":
    compare.run(main)
