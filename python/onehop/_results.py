"""Measurements as numbers and pictures: reads the JSON of `onehop perf -J` and of bench/compare*.py.

report.py makes pages of them, bench/plot.py pictures. bench/plot.py loads this file by its path, from a tree in which
nothing has been built: hence it imports nothing of the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

OURS, IN_PLACE = "onehop", ", in place"
COLOURS = ["#0b6e4f", "#c8553d", "#3c6e9f", "#8d6a9f", "#b58900", "#586e75"]  # ours first
LEGIBLE = {
    "nccl": "NCCL",
    "nccl-symm": "NCCL, symmetric window",
    "gloo": "gloo",
    "mpi": "Open MPI",
    "symm_mem": "torch symm_mem",
    "one_shot": "torch symm_mem one_shot",
    "two_shot": "torch symm_mem two_shot",
}

Group = dict[str, dict[int, float]]
"""System -> message size -> microseconds; a system named "floor" is the floor."""


class Unreadable(Exception):
    """A sentence for the user: which file, and what it is not."""


class System(NamedTuple):
    name: str
    in_place: bool

    def label(self) -> str:
        """For people."""
        return LEGIBLE.get(self.name, self.name) + (IN_PLACE if self.in_place else "")


class Figure(NamedTuple):
    us: float | None
    p99: float | None
    wrong: int


class Row(NamedTuple):
    ranks: int
    dtype: str
    size: int
    floor_us: float | None
    figures: dict[System, Figure]


class Run(NamedTuple):
    """One file. `beside`: peer -> ours that it is compared with."""

    path: str
    data: dict[str, Any]
    rows: list[Row]
    beside: dict[System, System]


# ---- reading ---------------------------------------------------------------------------------------------------------

SIDES = {"out_of_place": False, "in_place": True}


def _perf_figure(side: dict[str, Any]) -> Figure:
    return Figure(side["p50"], side.get("p99"), int(side.get("wrong") or 0))


def _read_perf(path: str, data: dict[str, Any]) -> Run:
    rows, beside = [], {}
    for row in data["results"]:
        figures = {}
        for suffix, in_place in SIDES.items():
            ours = System(OURS, in_place)
            figures[ours] = _perf_figure(row[suffix])
            for key in row:
                if key.endswith("_" + suffix):
                    peer = System(key[: -len(suffix) - 1], in_place)
                    figures[peer] = _perf_figure(row[key])
                    beside[peer] = ours
        rows.append(Row(data["ranks"], row["type"], row["size"], row["floor_us"], figures))
    return Run(path, data, rows, beside)


def _read_comparison(path: str, data: dict[str, Any]) -> Run:
    ours = {"out-of-place": System(OURS, False), "in-place": System(OURS, True)}
    peers = {name: System(name, ours[side].in_place) for name, side in data["peers"].items()}
    rows = []
    for row in data["results"]:
        figures = {
            {**ours, **peers}[name]: Figure(found["p50_us"], None, int(found.get("wrong") or 0))
            for name, found in row["systems"].items()
        }
        rows.append(Row(row["ranks"], row["type"], row["size"], row["floor_us"], figures))
    return Run(path, data, rows, {peers[name]: ours[side] for name, side in data["peers"].items()})


READERS = {"onehop-perf/1": _read_perf, "onehop-compare/1": _read_comparison}


def load(path: str, schemas: tuple[str, ...]) -> dict[str, Any]:
    """The object in a file whose schema is one of those."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Unreadable(f"{path}: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in schemas:
        raise Unreadable(f"{path}: schema {schema}, expected one of {', '.join(schemas)}")
    return dict(data)


def run_of(path: str, data: dict[str, Any]) -> Run:
    try:
        return READERS[data["schema"]](path, data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unreadable(f"{path}: not a whole {data['schema']}: {type(error).__name__}: {error}") from error


def read(paths: list[str], in_place: bool) -> dict[tuple[int, str], Group]:
    """(ranks, type) -> system -> {size: us}: ours of one side, peers of that side or of their only one."""
    groups: dict[tuple[int, str], Group] = {}
    for path in paths:
        for row in run_of(path, load(path, tuple(READERS))).rows:
            group = groups.setdefault((row.ranks, row.dtype), {})
            for system, figure in row.figures.items():
                wanted = system.in_place == in_place or System(system.name, in_place) not in row.figures
                if wanted and figure.us is not None:
                    group.setdefault(system.name, {})[row.size] = figure.us
            if row.floor_us is not None:
                group.setdefault("floor", {})[row.size] = row.floor_us
    if not groups:
        raise Unreadable("no results in these files")
    return groups


# ---- pictures --------------------------------------------------------------------------------------------------------


def size_label(size: float, _: object = None) -> str:
    for shift, letter in ((30, "G"), (20, "M"), (10, "K")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):g}{letter}"
    return f"{size:g}"


def bus_bandwidth(ranks: int, size: int, us: float) -> float:
    return size / us / 1000 * 2 * (ranks - 1) / ranks


def ours_first(name: str) -> tuple[bool, str]:
    return not name.startswith(OURS), name


def _lines(group: Group) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names with the look of their line, dotted in place; the floor last."""
    names = sorted((name for name in group if name != "floor"), key=ours_first)
    systems = list(dict.fromkeys(name.replace(IN_PLACE, "") for name in names))
    for name in names:
        colour = COLOURS[systems.index(name.replace(IN_PLACE, "")) % len(COLOURS)]
        width, style = 2.2 if name.startswith(OURS) else 1.4, ":" if IN_PLACE in name else "-"
        yield name, {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": width, "linestyle": style}
    if "floor" in group:
        yield "floor", {"color": "#888888", "linestyle": "--", "linewidth": 1.2}


def _draw_group(axes: Any, ranks: int, dtype: str, group: Group) -> None:
    from matplotlib import ticker

    left, right = axes
    for name, style in _lines(group):
        line = sorted(group[name].items())
        sizes = [size for size, _ in line]
        left.plot(sizes, [us for _, us in line], label=LEGIBLE.get(name, name), **style)
        right.plot(sizes, [bus_bandwidth(ranks, size, us) for size, us in line], **style)
    left.set_ylabel("us per all-reduce")
    right.set_ylabel("bus bandwidth, GB/s")
    left.set_yscale("log")
    left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_minor_locator(ticker.NullLocator())
    left.yaxis.set_major_formatter("{x:g}")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(size_label)
        axis.set_xlabel("message, bytes per rank")
        axis.set_title(f"{ranks} ranks, {dtype}", fontsize=10)
        axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    right.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)


def pyplot() -> Any:
    """Of matplotlib, without a display, and with the same file from the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "onehop"
    from matplotlib import pyplot

    return pyplot


def draw(groups: dict[tuple[int, str], Group], title: str | None, floor: tuple[float, float] | None) -> Any:
    """A row of panels for each group. `floor`: microseconds and GB/s, where the files know none."""
    figure, grid = pyplot().subplots(
        len(groups), 2, figsize=(10, 3.6 * len(groups) + 0.4), squeeze=False, layout="constrained"
    )
    for axes, ((ranks, dtype), group) in zip(grid, sorted(groups.items()), strict=True):
        if floor:
            sizes = {size for line in group.values() for size in line}
            group = {**group, "floor": {size: floor[0] + size / floor[1] / 1000 for size in sizes}}
        _draw_group(axes, ranks, dtype, group)
    if title:
        figure.suptitle(title)
    return figure
