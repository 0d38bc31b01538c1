"""A page of measurements: `python -m onehop.report RUN.json [MORE.json ...] -o report.html`.

Reads what `onehop perf -J`, bench/compare*.py and examples/tp_decode.py write. The page is one file with tables and
pictures in it: machine and command of every run, times of ours and of the peers side by side, ratios (a peer's time
over ours), bus bandwidth, wrong results in red. Needs matplotlib. Exit status 2: a file is no such JSON; 3: no
matplotlib, or the page could not be written.
"""

from __future__ import annotations

import argparse
import html
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from onehop import _results
from onehop._output import Output
from onehop._results import OURS, Group, Row, Run, System, Unreadable

DECODE = "onehop-decode/1"
ABOUT = ("machine", "cpu", "gpu", "driver", "clocks", "device", "layout", "mode", "early_trigger", "rotate", "model",
         "dtype", "ranks", "prompt", "tokens", "nccl", "torch", "version", "commit", "time", "complete",
         "args")  # fmt: skip
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: .6em 0 1.4em; font-variant-numeric: tabular-nums }
th, td { padding: .15em .7em; text-align: right; border-bottom: 1px solid #e2e2e2 }
th { font-weight: 600; vertical-align: bottom } td.text { text-align: left; font-family: ui-monospace, monospace }
td.ours { font-weight: 600; color: #0b6e4f } td.wrong, p.wrong { color: #b00020; font-weight: 600 }
small { color: #777 } svg { max-width: 100%; height: auto }
"""

# ---- pieces of a page ------------------------------------------------------------------------------------------------


def escape(value: object) -> str:
    """As text of a page; lists and switches as a reader wants them."""
    if isinstance(value, list):
        return " ".join(map(escape, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return html.escape(str(value))


def cell(text: str, kind: str = "") -> str:
    """One of a row; `text` is HTML."""
    return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Heads are HTML; rows are of cells."""
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f"<table>{head and f'<tr>{head}</tr>'}\n" + "".join(f"<tr>{''.join(row)}</tr>\n" for row in rows) + "</table>\n"
    )


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "n/a"
    return f"{value:.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


def geomean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def svg(figure: Any) -> str:
    """As an element of a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    _results.pyplot().close(figure)
    return "<svg" + text.getvalue().partition("<svg")[2]


# ---- all-reduces -----------------------------------------------------------------------------------------------------


def ratio(run: Run, peer: System, row: Row) -> float | None:
    """A peer's time over ours."""
    theirs, ours = row.figures.get(peer), row.figures.get(run.beside[peer])
    return theirs.us / ours.us if theirs and ours and theirs.us and ours.us else None


def figure_cell(system: System, row: Row) -> str:
    """Median and 99th percentile; wrong results in red."""
    figure = row.figures.get(system)
    if figure is None:
        return cell("n/a")
    text = number(figure.us)
    if figure.p99 is not None:
        text += f" <small>{number(figure.p99)}</small>"
    if figure.wrong:
        return cell(f"{text} {figure.wrong} wrong", "wrong")
    return cell(text, "ours" if system.name == OURS else "")


def ratio_cell(run: Run, peer: System, row: Row) -> str:
    """Of one size."""
    return cell(number(ratio(run, peer, row)))


def bandwidth_cell(system: System, row: Row) -> str:
    """Bus bandwidth."""
    figure = row.figures.get(system)
    return cell(number(_results.bus_bandwidth(row.ranks, row.size, figure.us) if figure and figure.us else None))


def systems_of(run: Run, rows: Sequence[Row]) -> list[System]:
    """Ours, each followed by the peers beside it."""
    known = {system for row in rows for system, figure in row.figures.items() if figure.us is not None}
    ours = sorted(system for system in known if system.name == OURS)
    beside = {mine: sorted(peer for peer in known if run.beside.get(peer) == mine) for mine in ours}
    return [system for mine in ours for system in (mine, *beside[mine])]


def sizes_table(run: Run, rows: Sequence[Row]) -> str:
    """A line for each size of one run."""
    systems = systems_of(run, rows)
    ours = [system for system in systems if system.name == OURS]
    heads, columns = ["size"], list[Callable[[Row], str]]()
    for system in systems:
        heads.append(f"{escape(system.label())}<br><small>us, p99</small>")
        columns.append(partial(figure_cell, system))
        if system in run.beside:
            heads.append("ratio")
            columns.append(partial(ratio_cell, run, system))
    for system in ours:
        heads.append(f"{escape(system.label())}<br><small>busbw GB/s</small>")
        columns.append(partial(bandwidth_cell, system))
    heads.append("floor<br><small>us</small>")
    columns.append(lambda row: cell(number(row.floor_us)))
    body = [[cell(_results.size_label(row.size)), *(column(row) for column in columns)] for row in rows]
    return table(heads, [*body, *mean_row(run, rows, systems, len(columns))])


def mean_row(run: Run, rows: Sequence[Row], systems: Sequence[System], width: int) -> list[list[str]]:
    """The geometric means of the ratios, if there are any."""
    cells = [cell("<small>geometric mean</small>")]
    for system in systems:
        cells.append(cell(""))
        if system in run.beside:
            found = [ratio(run, system, row) for row in rows]
            cells.append(cell(f"<b>{number(geomean([value for value in found if value]))}</b>"))
    if not set(systems) & set(run.beside):
        return []
    return [cells + [cell("")] * (width + 1 - len(cells))]


def group_picture(ranks: int, dtype: str, runs: Sequence[tuple[Run, Sequence[Row]]]) -> str:
    """All runs in one; a system that several have measured is told apart by the file."""
    owners: dict[str, set[str]] = {}
    for run, rows in runs:
        for system in systems_of(run, rows):
            owners.setdefault(system.label(), set()).add(run.path)
    group: Group = {}
    for run, rows in runs:
        for row in rows:
            for system in systems_of(run, [row]):
                label = system.label()
                if len(owners[label]) > 1:
                    label += f" ({os.path.basename(run.path)})"
                group.setdefault(label, {})[row.size] = row.figures[system].us or math.nan
            if row.floor_us is not None:
                group.setdefault("floor", {})[row.size] = row.floor_us
    return svg(_results.draw({(ranks, dtype): group}, None, None))


def all_reduce_sections(runs: Sequence[Run]) -> str:
    """One for each number of ranks and type."""
    text = ""
    for ranks, dtype in sorted({(row.ranks, row.dtype) for run in runs for row in run.rows}):
        found = [(run, [row for row in run.rows if (row.ranks, row.dtype) == (ranks, dtype)]) for run in runs]
        having = [(run, rows) for run, rows in found if rows]
        text += f"<h2>All-reduce, {ranks} ranks, {escape(dtype)}</h2>\n{group_picture(ranks, dtype, having)}\n"
        for run, rows in having:
            if len(runs) > 1:
                text += f"<h3>{escape(run.path)}</h3>\n"
            text += sizes_table(run, rows)
    return text


def wrong_of(run: Run) -> int:
    """Elements, and guard bytes around them."""
    outside: int = sum(int(row.get("out_of_bounds") or 0) for row in run.data["results"])
    return outside + sum(figure.wrong for row in run.rows for figure in row.figures.values())


# ---- decoding --------------------------------------------------------------------------------------------------------


def decode_section(path: str, data: dict[str, Any], several: bool) -> str:
    """Time per token of a model, by all-reduce and batch."""
    try:
        kinds = sorted({row["all_reduce"] for row in data["results"]}, key=_results.ours_first)
        found = {(row["batch"], row["all_reduce"]): row for row in data["results"]}
        batches = sorted({row["batch"] for row in data["results"]})
        heads = ["sequences"]
        for kind in kinds:
            heads.append(f"{escape(_results.LEGIBLE.get(kind, kind))}<br><small>us per step</small>")
            heads.append("<small>tokens/s</small>")
            if kind != OURS and OURS in kinds:
                heads.append("ratio")
        body = [decode_row(batch, kinds, found) for batch in batches]
        title = f"<h2>Decoding, {escape(data['model'])}, {escape(data['ranks'])} ranks, {escape(data['dtype'])}</h2>\n"
        picture = svg(decode_picture(kinds, batches, found))
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{path}: not a whole {DECODE}: {type(error).__name__}: {error}") from error
    return title + (f"<h3>{escape(path)}</h3>\n" if several else "") + picture + table(heads, body)


def decode_row(batch: int, kinds: Sequence[str], found: dict[tuple[int, str], dict[str, Any]]) -> list[str]:
    """One of the table."""
    cells = [cell(str(batch))]
    for kind in kinds:
        row = found.get((batch, kind))
        cells.append(cell(number(row["us_per_step"]) if row else "n/a", "ours" if kind == OURS else ""))
        cells.append(cell(number(row["tokens_per_s"]) if row else "n/a"))
        if kind != OURS and OURS in kinds:
            cells.append(cell(number(row["ratio"]) if row else "n/a"))
    return cells


def decode_picture(kinds: Sequence[str], batches: Sequence[int], found: dict[tuple[int, str], dict[str, Any]]) -> Any:
    """Bars of the time per step."""
    figure, axis = _results.pyplot().subplots(figsize=(6, 3.6), layout="constrained")
    for index, kind in enumerate(kinds):
        heights = [found[batch, kind]["us_per_step"] if (batch, kind) in found else math.nan for batch in batches]
        places = [place + index / (len(kinds) + 1) for place in range(len(batches))]
        axis.bar(places, heights, 1 / (len(kinds) + 1), color=_results.COLOURS[index % len(_results.COLOURS)],
                 label=_results.LEGIBLE.get(kind, kind))  # fmt: skip
    axis.set_xticks([place + (len(kinds) - 1) / 2 / (len(kinds) + 1) for place in range(len(batches))], batches)
    axis.set_xlabel("sequences at a time")
    axis.set_ylabel("us per step")
    axis.legend(fontsize=8, frameon=False)
    return figure


# ---- the page --------------------------------------------------------------------------------------------------------


def about(path: str, data: dict[str, Any], wrong: int | None) -> str:
    """Where, how and by what a run was made."""
    rows = [(key, escape(data[key])) for key in ABOUT if data.get(key) not in (None, "")]
    devices = data.get("devices")
    if isinstance(devices, list):
        rows.append(("devices", "<br>".join(escape(f"{one.get('rank')}: {one.get('device')}") for one in devices)))
    rows += [(f"version of {escape(name)}", escape(value)) for name, value in (data.get("versions") or {}).items()]
    rows += [("note", escape(note)) for note in data.get("notes") or ()]
    body = [[cell(name, "text"), cell(value, "text")] for name, value in rows]
    text = f"<h3>{escape(path)}</h3>\n{table((), body)}"
    for name, why in (data.get("skipped") or {}).items():
        text += f'<p class="wrong">skipped: {escape(name)}: {escape(why)}</p>\n'
    if wrong is not None:
        text += f'<p class="wrong">{wrong} wrong</p>\n' if wrong else "<p>0 wrong: every output was verified.</p>\n"
    return text


def page(paths: Sequence[str], title: str) -> str:
    """The whole HTML. Raises Unreadable."""
    loaded = [(path, _results.load(path, (*_results.READERS, DECODE))) for path in paths]
    runs = [_results.run_of(path, data) for path, data in loaded if data["schema"] != DECODE]
    decodes = [(path, data) for path, data in loaded if data["schema"] == DECODE]
    text = all_reduce_sections(runs)
    text += "".join(decode_section(path, data, len(decodes) > 1) for path, data in decodes)
    text += "<h2>Runs</h2>\n"
    text += "".join(about(run.path, run.data, wrong_of(run)) for run in runs)
    text += "".join(about(path, data, None) for path, data in decodes)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        "<p>Times are medians in microseconds, the largest of all ranks; in small print the 99th percentile, where the"
        " run has it. Ratio: the peer's time over ours, each beside ours of its kind, in place or out of place.</p>\n"
        f"{text}</body></html>\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m onehop.report", description="A page with tables and pictures of measurements."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON of perf -J, bench/compare*.py, tp_decode.py")
    parser.add_argument("-o", "--output", type=Output, default="report.html", metavar="FILE", help="default %(default)s")
    parser.add_argument("--title", default="onehop: measurements")
    given = parser.parse_args(arguments)
    try:
        text = page(given.files, given.title)
    except Unreadable as error:
        parser.error(str(error))
    except ImportError as error:
        print(f"onehop.report: matplotlib is needed: {error}", file=sys.stderr)
        return 3
    try:
        given.output.write(text)
    except OSError as error:
        print(f"onehop.report: {given.output} could not be written: {error.strerror}", file=sys.stderr)
        return 3
    print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
