#!/usr/bin/env python3
"""One picture of results: latency and bus bandwidth against message size, ours, the peers and the floor.

    plot.py [--title TEXT] [--floor US,GB/s] [--in-place] [-o NAME] FILE...

FILE: JSON of `onehop perf -J`, or of a comparison of this folder; all are drawn together, a row of panels for each number of
ranks and type. Times are medians, the largest of all ranks. The floor is the one in the files; --floor gives latency and
bandwidth where the files know none (GPUs). Writes NAME.png and NAME.svg (default: the first file's name). Needs matplotlib.
"""

import argparse
import json
import os
import sys

OURS = "onehop"
COLOURS = ["#0b6e4f", "#c8553d", "#3c6e9f", "#8d6a9f", "#b58900", "#586e75"]  # ours first
LEGIBLE = {"nccl": "NCCL", "nccl-symm": "NCCL, symmetric window", "gloo": "gloo", "mpi": "Open MPI",
           "one_shot": "torch symm_mem one_shot", "two_shot": "torch symm_mem two_shot"}


class Unreadable(Exception):
    pass


def points_of_perf(data, in_place):
    side = "in_place" if in_place else "out_of_place"
    for row in data["results"]:
        systems = {OURS: row[side]["p50"]}
        for key, value in row.items():
            if key.endswith("_" + side):
                systems[key[: -len(side) - 1]] = value["p50"]
        yield data["ranks"], row["type"], row["size"], systems, row["floor_us"]


def points_of_comparison(data, in_place):
    ours = "in-place" if in_place else "out-of-place"
    for row in data["results"]:
        systems = {name: found["p50_us"] for name, found in row["systems"].items() if name in data["peers"]}
        systems[OURS] = row["systems"][ours]["p50_us"]
        yield row["ranks"], row["type"], row["size"], systems, row["floor_us"]


READERS = {"onehop-perf/1": points_of_perf, "onehop-compare/1": points_of_comparison}


def read(paths, in_place):
    """(ranks, type) -> system -> {size: us}; the floor is a system named "floor"."""
    groups = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema not in READERS:
            raise Unreadable(f"{path}: schema {schema}, expected one of {', '.join(READERS)}")
        for ranks, dtype, size, systems, floor_us in READERS[schema](data, in_place):
            group = groups.setdefault((ranks, dtype), {})
            for name, us in {**systems, "floor": floor_us}.items():
                if us is not None:
                    group.setdefault(name, {})[size] = us
    if not groups:
        raise Unreadable("no results in these files")
    return groups


def size_label(size, _=None):
    for shift, letter in ((30, "G"), (20, "M"), (10, "K")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):g}{letter}"
    return f"{size:g}"


def busbw(ranks, size, us):
    return size / us / 1000 * 2 * (ranks - 1) / ranks


def draw_group(axes, ranks, dtype, group, floor):
    left, right = axes
    names = [OURS, *sorted(name for name in group if name not in (OURS, "floor"))]
    if floor:
        latency, bandwidth = floor
        group = {**group, "floor": {size: latency + size / bandwidth / 1000 for size in group[OURS]}}
    for name, colour in zip(names, COLOURS * len(names)):
        line = sorted(group.get(name, {}).items())
        style = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 2.2 if name == OURS else 1.4}
        sizes = [size for size, _ in line]
        left.plot(sizes, [us for _, us in line], label=LEGIBLE.get(name, name), **style)
        right.plot(sizes, [busbw(ranks, size, us) for size, us in line], label=LEGIBLE.get(name, name), **style)
    line = sorted(group.get("floor", {}).items())
    if line:
        style = {"color": "#888888", "linestyle": "--", "linewidth": 1.2, "label": "floor"}
        left.plot([size for size, _ in line], [us for _, us in line], **style)
        right.plot([size for size, _ in line], [busbw(ranks, size, us) for size, us in line], **style)
    left.set_ylabel("us per all-reduce")
    right.set_ylabel("bus bandwidth, GB/s")
    left.set_yscale("log")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(size_label)
        axis.set_xlabel("message, bytes per rank")
        axis.set_title(f"{ranks} ranks, {dtype}", fontsize=10)
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    right.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)


def draw(groups, title, floor):
    import matplotlib
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "onehop"  # the same file from the same numbers
    from matplotlib import pyplot
    figure, grid = pyplot.subplots(len(groups), 2, figsize=(10, 3.6 * len(groups) + 0.4), squeeze=False,
                                   layout="constrained")
    for axes, ((ranks, dtype), group) in zip(grid, sorted(groups.items())):
        draw_group(axes, ranks, dtype, group, floor)
    if title:
        figure.suptitle(title)
    return figure


def floor_of(text):
    try:
        latency, bandwidth = map(float, text.split(","))
        if latency >= 0 and bandwidth > 0:
            return latency, bandwidth
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}': expected microseconds, a comma, GB/s, as 1.16,363")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("-o", "--output", metavar="NAME")
    parser.add_argument("--title")
    parser.add_argument("--floor", type=floor_of, metavar="US,GB/s")
    parser.add_argument("--in-place", action="store_true", help="our calls in place (default: out of place)")
    arguments = parser.parse_args()
    try:
        groups = read(arguments.files, arguments.in_place)
    except (Unreadable, OSError, json.JSONDecodeError) as error:
        parser.error(str(error))
    try:
        figure = draw(groups, arguments.title, arguments.floor)
    except ImportError as error:
        print(f"plot.py: matplotlib is needed: {error}", file=sys.stderr)
        return 3
    name = arguments.output or os.path.splitext(arguments.files[0])[0]
    figure.savefig(f"{name}.png", dpi=150)
    figure.savefig(f"{name}.svg", metadata={"Date": None})
    print(f"{name}.png {name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
