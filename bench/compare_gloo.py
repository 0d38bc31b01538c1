#!/usr/bin/env python3
"""From PyTorch, on this machine's CPU: AllReduce.all_reduce_ beside torch.distributed.all_reduce over gloo, in one run.

Both in place, called alike from Python in processes of the same kind, each rank on a processor of its own, the same ones
(--no-pin: nobody is pinned). Size by size in turn, for some rounds; a rank's figure is the median of its samples, shown is
the largest of all ranks. Outputs are verified in the same run. The package is that of the build tree, or the installed one.

Exit status: 1 wrong data, 2 usage, 3 something is missing.
"""

import importlib.util
import os
import sys

import compare
import compare_cpu

SYSTEMS = ("onehop", "gloo")


def flags():
    parser = compare.parser(__doc__.splitlines()[0], 32 << 20, compare_cpu.TYPES)
    parser.set_defaults(minbytes=4096, factor=16)
    parser.add_argument("-g", "--ranks", type=compare.integer(2, 16), default=2, metavar="N", help="default 2")
    parser.add_argument("-n", "--iters", type=compare.integer(1, compare_cpu.MAX_SAMPLES), metavar="N",
                        help="samples; default: as many as take 0.2 s")
    parser.add_argument("--no-pin", action="store_true", help="leave all processes to the scheduler")
    parser.add_argument("--rank", type=int, help=compare.argparse.SUPPRESS)
    result = parser.parse_args()
    result.dtypes = result.types.split(",")
    if not set(result.dtypes) <= set(compare_cpu.TYPES):
        parser.error(f"-d {result.types}: expected some of {', '.join(compare_cpu.TYPES)}")
    return result


def find_package(tool):
    """Adds the package that lies beside the command to the path, if there is one. The reason why there is none, or None."""
    beside = os.path.join(os.path.dirname(os.path.abspath(tool)), "python")
    if os.path.isdir(os.path.join(beside, "onehop")):
        sys.path.insert(0, beside)
    lacks = [f"module {name}" for name in ("numpy", "torch", "onehop") if importlib.util.find_spec(name) is None]
    return "there is no " + ", no ".join(lacks) if lacks else None


def work(arguments):
    if not arguments.no_pin:
        compare_cpu.pin(arguments.rank)
    find_package(arguments.onehop)
    import onehop
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.connect}.gloo", rank=arguments.rank,
                            world_size=arguments.ranks)
    ar = onehop.AllReduce(None, "cpu") if arguments.worker == "onehop" else None

    def prepare(dtype, count):
        source = torch.from_numpy(compare.exact_input(arguments.rank, count)).to(getattr(torch, dtype))
        work = torch.empty_like(source)
        call = (lambda: ar.all_reduce_(work)) if ar else (lambda: dist.all_reduce(work))
        return call, (lambda: work.copy_(source)), (lambda: work.float().numpy())

    timer = compare_cpu.Timer(arguments.rank, arguments.ranks, prepare)
    version = f"onehop {onehop.__version__}" if ar else f"torch {torch.__version__}"
    with torch.inference_mode():
        compare.serve(arguments.connect, arguments.rank, timer.orders({"version": version}))
    if ar:
        ar.close()
    dist.destroy_process_group()


def start(arguments, system):
    more = ["--no-pin"] if arguments.no_pin else []
    return lambda path: [
        compare.start_process([sys.executable, os.path.abspath(__file__), "--worker", system, "--connect", path, "--rank",
                               rank, "-g", arguments.ranks, "--onehop", arguments.onehop, *more],
                              OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") for rank in range(arguments.ranks)]


def measure(arguments, report, groups):
    for dtype in arguments.dtypes:
        report.header(arguments.ranks, dtype)
        for size in compare.sizes_between(arguments.minbytes, arguments.maxbytes, arguments.factor):
            rounds = {system: [] for system in SYSTEMS}
            for _ in range(arguments.repeat):
                for system in SYSTEMS:
                    count = size // (4 if dtype == "float32" else 2)
                    rounds[system].append(compare_cpu.measure_peer(arguments, groups[system], dtype, count))
            report.add(arguments.ranks, dtype, size, rounds, None)


def main():
    arguments = flags()
    if arguments.worker:
        return work(arguments)
    pinning = "nobody is pinned" if arguments.no_pin else "each rank on a processor of its own, the same for both"
    report = compare.Report(arguments, SYSTEMS, {"gloo": "onehop"}, [pinning])
    print(f"# onehop's AllReduce.all_reduce_ beside gloo, from Python; {pinning}")
    reason = find_package(arguments.onehop)
    if reason:
        report.skip("gloo", reason)
        return report.finish()
    groups = {}
    try:
        for system in SYSTEMS:
            groups[system] = compare.Group(system, arguments.ranks, start(arguments, system))
            report.versions[system] = groups[system].ask(do="version")[0]["version"]
        measure(arguments, report, groups)
    finally:
        for group in groups.values():
            group.close()
    for name, version in report.versions.items():
        print(f"# {name}: {version}")
    return report.finish()


if __name__ == "__main__":
    compare.run(main)
