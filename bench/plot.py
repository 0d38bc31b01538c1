#!/usr/bin/env python3
"""One picture of results: latency and bus bandwidth against message size, ours, the peers and the floor.

    plot.py [--title TEXT] [--floor US,GB/s] [--in-place] [-o NAME] FILE...

FILE: JSON of `onehop perf -J`, or of a comparison of this folder; all are drawn together, a row of panels for each
number of ranks and type. Times are medians, the largest of all ranks. The floor is the one in the files; --floor gives
latency and bandwidth where the files know none (GPUs). Writes NAME.png and NAME.svg (default: the first file's name).
Needs matplotlib.
Pages with tables: python -m onehop.report.
"""

import argparse
import io
import os
import sys

import compare

results = compare.package_file("_results")
read = results.read


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
    name = arguments.output or os.path.splitext(arguments.files[0])[0]
    try:
        outputs = {kind: compare.Output(f"{name}.{kind}") for kind in ("png", "svg")}
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    try:
        groups = read(arguments.files, arguments.in_place)
    except results.Unreadable as error:
        parser.error(str(error))
    try:
        figure = results.draw(groups, arguments.title, arguments.floor)
    except ImportError as error:
        print(f"plot.py: matplotlib is needed: {error}", file=sys.stderr)
        return 3
    for kind, more in ("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}}):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, **more)
        outputs[kind].write(picture.getvalue())
    print(f"{name}.png {name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
