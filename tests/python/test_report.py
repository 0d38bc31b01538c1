"""Property: python -m onehop.report makes its page from measurements, and says of other files that they are none.

From a real run of the command on the host device, from a comparison with peers, from several files.
"""

import json
import os
import pathlib
import re
import subprocess
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from onehop import report

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ONEHOP_BUILD_DIR", ROOT / "build" / "release"))


def page_of(folder, *names):
    path = folder / "page.html"
    assert report.main([*(str(folder / name) for name in names), "-o", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    Balanced().feed(text)
    assert not re.search(r'(src|href)="(?!#|data:)', text), "the page needs another file"
    return text


def refusal_of(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        report.main(list(map(str, args)))
    assert ended.value.code == 2
    return capsys.readouterr().err


class Balanced(HTMLParser):
    """Tables and what is in them are opened and closed in turn, and all rows of a table have as many cells."""

    WATCHED = ("html", "body", "table", "tr", "td", "th", "svg", "h2", "p")

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.widths = [], 0, set()

    def handle_starttag(self, tag, attrs):
        if tag not in self.WATCHED:
            return
        self.open.append(tag)
        if tag == "table":
            self.widths = set()
        elif tag == "tr":
            self.cells = 0
        elif tag in ("td", "th"):
            self.cells += 1

    def handle_endtag(self, tag):
        if tag not in self.WATCHED:
            return
        assert self.open.pop() == tag
        if tag == "tr" and self.cells:
            self.widths.add(self.cells)
        elif tag == "table":
            assert len(self.widths) == 1, self.widths


def rows_of(text, after):
    """The cells of the first table behind a heading."""
    table = text.partition(after)[2].partition("<table>")[2].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>") if "<td" in row]


def comparison(**changes):
    rows = [
        {
            "ranks": 2,
            "type": "float32",
            "size": size,
            "floor_us": 0.5,
            "systems": {
                "out-of-place": {"p50_us": 2.0, "wrong": 0},
                "in-place": {"p50_us": 4.0, "wrong": 0},
                "gloo": {"p50_us": gloo, "wrong": 0},
            },
        }
        for size, gloo in ((1024, 8.0), (4096, 32.0))
    ]
    data = {
        "schema": "onehop-compare/1",
        "machine": "a <machine>",
        "peers": {"gloo": "in-place", "mpi": "out-of-place"},
        "skipped": {"mpi": "there is no module mpi4py"},
        "results": rows,
    }
    return {**data, **changes}


def write(path, data):
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_run_of_perf(tmp_path):
    command = BUILD / "onehop"
    assert command.exists(), f"{command}: build first, or set ONEHOP_BUILD_DIR"
    flags = ["--device", "host", "-g", "2", "-b", "1K", "-e", "16K", "-n", "20"]
    subprocess.run(
        [command, "perf", *flags, "-J", tmp_path / "a.json"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    text = page_of(tmp_path, "a.json")
    assert "All-reduce, 2 ranks, float32" in text
    rows = rows_of(text, "All-reduce, 2 ranks, float32")
    assert [row[0] for row in rows] == ["1K", "4K", "16K"]
    data = json.loads((tmp_path / "a.json").read_text())
    assert float(rows[0][1].split()[0]) == pytest.approx(data["results"][0]["out_of_place"]["p50"], rel=0.01)
    assert data["cpu"] in text and data["args"] in text
    assert "0 wrong: every output was verified" in text
    assert "<svg" in text and "bus bandwidth" in text
    (tmp_path / "b.json").write_text(json.dumps({**data, "complete": False, "results": data["results"][:1]}))
    assert re.search(r">complete<[^>]*><[^>]*>off<", page_of(tmp_path, "b.json")), "a run that was ended early is told"


def test_ratios_stand_beside_ours_of_their_kind(tmp_path):
    write(tmp_path / "a.json", comparison())
    text = page_of(tmp_path, "a.json")
    rows = rows_of(text, "All-reduce, 2 ranks, float32")
    # size, ours, ours in place, gloo, its ratio, ...
    assert [row[:5] for row in rows[:2]] == [
        ["1K", "2.00", "4.00", "8.00", "2.00"],
        ["4K", "2.00", "4.00", "32.0", "8.00"],
    ]
    assert rows[2][4] == "<b>4.00</b>"
    assert "skipped: mpi: there is no module mpi4py" in text
    assert "a &lt;machine&gt;" in text


def test_wrong_results_are_seen(tmp_path):
    data = comparison()
    data["results"][0]["systems"]["gloo"]["wrong"] = 3
    write(tmp_path / "a.json", data)
    text = page_of(tmp_path, "a.json")
    assert '<td class="wrong">8.00 3 wrong</td>' in text
    assert '<p class="wrong">3 wrong</p>' in text
    assert "0 wrong" not in text


def test_several_runs_are_told_apart(tmp_path):
    write(tmp_path / "old.json", comparison())
    slow = comparison()
    for row in slow["results"]:
        row["systems"]["in-place"]["p50_us"] = 8.0
    write(tmp_path / "new.json", slow)
    text = page_of(tmp_path, "old.json", "new.json")
    assert text.count("<h2>All-reduce, 2 ranks, float32</h2>") == 1
    assert [rows_of(text, f"{name}.json</h3>")[0][4] for name in ("old", "new")] == ["2.00", "1.00"]
    legend = re.findall(r"<!-- (.*?) -->", text)
    assert {"onehop (old.json)", "onehop (new.json)", "gloo, in place (old.json)"} <= set(legend)


def test_decoding(tmp_path, capsys):
    rows = [
        {"batch": batch, "all_reduce": kind, "us_per_step": us, "tokens_per_s": batch * 1e6 / us, "ratio": us / 100}
        for kind, us in (("nccl", 150.0), ("onehop", 100.0))
        for batch in (1, 8)
    ]
    data = {"schema": "onehop-decode/1", "model": "tiny", "ranks": 2, "dtype": "bfloat16", "results": rows}
    write(tmp_path / "a.json", data)
    text = page_of(tmp_path, "a.json")
    assert rows_of(text, "Decoding, tiny, 2 ranks, bfloat16") == [
        ["1", "100", "10000", "150", "6667", "1.50"],
        ["8", "100", "80000", "150", "53333", "1.50"],
    ]
    del rows[0]["us_per_step"]
    write(tmp_path / "a.json", data)
    assert "not a whole onehop-decode/1" in refusal_of(capsys, tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# 2 ranks\n", "Expecting value"),
        ("[]", "schema None, expected one of onehop-perf/1"),
        ('{"schema": "onehop-check/1"}', "schema onehop-check/1, expected one of"),
        ('{"schema": "onehop-perf/1", "ranks": 2}', "not a whole onehop-perf/1: KeyError: 'results'"),
        ('{"schema": "onehop-perf/1", "ranks": 2, "results": [3]}', "not a whole onehop-perf/1"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, content, said):
    (tmp_path / "bad.json").write_text(content)
    text = refusal_of(capsys, tmp_path / "bad.json", "-o", tmp_path / "page.html")
    assert "bad.json" in text and said in text
    assert not (tmp_path / "page.html").exists()


def test_no_such_file(tmp_path, capsys):
    assert "none.json" in refusal_of(capsys, tmp_path / "none.json")
