"""What the comparisons share: `onehop perf` as a child, groups of peer processes that wait for orders, table, JSON.

Nothing runs beside what is timed: a peer's processes are started once, since that takes seconds, and sleep in a read of
their socket while others are measured. Each order goes to all ranks of a group, each rank answers.
"""

import argparse
import importlib.util
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PATIENCE_S = 300
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def package_file(name):
    """A module of the package, by its path: here nothing need be built or installed."""
    spec = importlib.util.spec_from_file_location(f"onehop{name}", os.path.join(ROOT, "python", "onehop", f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Output = package_file("_output").Output


class Failure(Exception):
    """A sentence for the user; the comparison cannot go on."""


def write_json(output, data):
    try:
        output.write(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise Failure(f"{output} could not be written: {error.strerror}") from error


def parse_size(text):
    units = {"K": 10, "M": 20, "G": 30}
    shift = units.get(text[-1:].upper(), 0)
    digits = text[:-1] if shift else text
    if not digits.isdigit() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: digits and an optional K, M or G")
    return int(digits) << shift


def integer(low, high):
    def parse(text):
        if not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}': expected an integer from {low} to {high}")
        return int(text)
    return parse


def size_name(size):
    for shift, letter in ((30, "G"), (20, "M"), (10, "K")):
        if size % (1 << shift) == 0:
            return f"{size >> shift}{letter}"
    return str(size)


def sizes_between(low, high, factor):
    """low, low * factor, ... and high."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return [*sizes, high]


def parser(description, high, dtypes):
    result = argparse.ArgumentParser(description=description)
    build = os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release"))
    result.add_argument("-b", "--minbytes", type=parse_size, default=1024, metavar="SIZE", help="default 1K")
    result.add_argument("-e", "--maxbytes", type=parse_size, default=high, metavar="SIZE",
                        help=f"default {size_name(high)}")
    result.add_argument("-f", "--factor", type=integer(2, 1024), default=4, metavar="N", help="default 4")
    result.add_argument("-d", "--types", default=",".join(dtypes), help="default %(default)s")
    result.add_argument("--repeat", type=integer(1, 100), default=3, metavar="N",
                        help="rounds for each size, default 3; the median of their medians is shown")
    result.add_argument("-J", "--json", type=Output, metavar="FILE")
    result.add_argument("--onehop", default=os.path.join(build, "onehop"), metavar="PATH", help="the command")
    result.add_argument("--worker", help=argparse.SUPPRESS)
    result.add_argument("--connect", help=argparse.SUPPRESS)
    return result


def run(main):
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"{os.path.basename(sys.argv[0])}: {failure}", file=sys.stderr)
        sys.exit(3)


# ---- ours ----------------------------------------------------------------------------------------------------------

def run_onehop(tool, *flags):
    """The JSON of one `onehop perf`, which has verified its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "perf.json")
        command = [tool, "perf", *map(str, flags), "-J", path]
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        except OSError as error:
            raise Failure(f"{tool} cannot be run: {error.strerror}; build it or name it with --onehop") from error
        if done.returncode:
            raise Failure(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-800:]}{done.stderr}")
        with open(path, encoding="utf-8") as file:
            return json.load(file)


# ---- peers: the side of the script -----------------------------------------------------------------------------------

class Group:
    """`world_size` processes that obey. `start(path)` starts them and returns a list of Popen; each of them calls
    `serve(path, rank, ...)`."""

    def __init__(self, name, world_size, start):
        self.name = name
        self.children, self.links = [], []
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "orders")
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(path)
            listener.listen(world_size)
            listener.settimeout(1)
            self.children = start(path)
            self.links = [None] * world_size
            self.gather(listener, time.monotonic() + PATIENCE_S)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def gather(self, listener, deadline):
        while not all(self.links):
            try:
                link, _ = listener.accept()
            except socket.timeout:
                self.look_at_children()
                if time.monotonic() > deadline:
                    raise Failure(f"{self.name}: not all ranks came") from None
                continue
            link.settimeout(PATIENCE_S)
            stream = link.makefile("rw", encoding="utf-8")
            link.close()
            self.links[self.answer(stream)["rank"]] = stream

    def look_at_children(self):
        for child in self.children:
            if child.poll() is not None:
                raise Failure(f"{self.name}: a process ended with status {child.returncode}\n{self.complaints()}")

    def complaints(self):
        """What the processes said on stderr."""
        said = []
        for child in self.children:
            child.kill()
            said.append(child.communicate()[1] or "")
        return "".join(said)[-2000:]

    def answer(self, stream):
        try:
            line = stream.readline()
        except socket.timeout:
            raise Failure(f"{self.name}: a rank said nothing for {PATIENCE_S} s\n{self.complaints()}") from None
        if not line:
            raise Failure(f"{self.name}: a rank is gone\n{self.complaints()}")
        answer = json.loads(line)
        if "failure" in answer:
            raise Failure(f"{self.name}: {answer['failure']}")
        return answer

    def ask(self, **order):
        """Sends an order to all ranks; their answers, in rank order."""
        for link in self.links:
            link.write(json.dumps(order) + "\n")
            link.flush()
        return [self.answer(link) for link in self.links]

    def close(self):
        for link in self.links:
            if link:
                link.close()
        for child in self.children:
            try:
                child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def start_process(command, **environment):
    """In a process group of its own, which a Group ends if it does not end by itself."""
    return subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True, start_new_session=True,
                            env={**os.environ, **environment})


# ---- peers: the side of their processes ------------------------------------------------------------------------------

def serve(path, rank, orders):
    """Answers until the script closes the connection. `orders`: name -> function(**arguments) -> dict."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    stream = link.makefile("rw", encoding="utf-8")

    def say(**answer):
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    say(rank=rank)
    for line in stream:
        order = json.loads(line)
        try:
            answer = orders[order.pop("do")](**order)
        except Exception as error:  # told to the script, which ends the comparison
            answer = {"failure": f"rank {rank}: {type(error).__name__}: {error}"}
        say(**answer)


def exact_input(rank, count):
    """Small integers whose sum over 16 ranks is exact in every type and order."""
    import numpy
    return ((numpy.arange(count, dtype=numpy.int64) * 7 + rank * 5) % 15 - 7).astype(numpy.float32)


def exact_sum(world_size, count):
    return sum(exact_input(rank, count) for rank in range(world_size))


# ---- results ---------------------------------------------------------------------------------------------------------

class Report:
    """Rows of (ranks, type, size), each with the systems' times; the first system is ours."""

    def __init__(self, arguments, systems, peers, notes):
        self.arguments, self.systems, self.peers, self.notes = arguments, systems, peers, notes
        self.rows, self.skipped, self.versions = [], {}, {}
        self.machine = None

    def skip(self, system, why):
        """Loudly: a column that is missing must not look like a choice."""
        self.skipped[system] = why
        print(f"SKIPPED: {system}: {why}", file=sys.stderr, flush=True)

    def header(self, ranks, dtype):
        print(f"#\n# {ranks} ranks, {dtype}; us per all-reduce: median of calls, largest of all ranks")
        columns = "".join(f" {system:>14}" for system in self.systems)
        ratios = "".join(f" {peer + '/' + ours:>26}" for peer, ours in self.peers.items())
        print(f"# {'size':>6}{columns}{ratios}", flush=True)

    def add(self, ranks, dtype, size, rounds, floor_us):
        """`rounds`: system -> list of {"p50_us", "wrong", ...}, one for each round."""
        systems = {}
        for system, list_of in rounds.items():
            systems[system] = {"p50_us": statistics.median(one["p50_us"] for one in list_of),
                               "wrong": sum(one["wrong"] for one in list_of), "rounds": list_of}
        for peer, ours in self.peers.items():
            if peer in systems and ours in systems:
                systems[peer]["ratio"] = systems[peer]["p50_us"] / systems[ours]["p50_us"]
        self.rows.append({"ranks": ranks, "type": dtype, "size": size, "floor_us": floor_us, "systems": systems})
        line = f"  {size_name(size):>6}"
        for system in self.systems:
            line += f" {systems[system]['p50_us']:14.2f}" if system in systems else f" {'n/a':>14}"
        for peer in self.peers:
            line += f" {systems[peer]['ratio']:25.2f}x" if peer in systems else f" {'n/a':>26}"
        wrong = [f"{name}: {found['wrong']} wrong" for name, found in systems.items() if found["wrong"]]
        print(line + "".join(f"  {text}" for text in wrong), flush=True)

    def wrong(self):
        return sum(found["wrong"] for row in self.rows for found in row["systems"].values())

    def geomeans(self):
        found = {}
        for peer in self.peers:
            ratios = [row["systems"][peer]["ratio"] for row in self.rows if "ratio" in row["systems"].get(peer, {})]
            if ratios:
                found[peer] = math.exp(sum(map(math.log, ratios)) / len(ratios))
        return found

    def finish(self):
        """Prints the last lines, writes the file; the exit status."""
        print("#")
        for peer, ratio in self.geomeans().items():
            print(f"# Time of {peer} over {self.peers[peer]}, geometric mean : {ratio:.2f}")
        for system, why in self.skipped.items():
            print(f"# SKIPPED: {system}: {why}")
        print(f"# {self.wrong()} wrong", flush=True)
        if self.arguments.json:
            self.write(self.arguments.json)
        if self.wrong():
            return 1
        return 3 if all(peer in self.skipped for peer in self.peers) else 0

    def write(self, output):
        machine = self.machine or {}
        data = {"schema": "onehop-compare/1",
                **{key: machine.get(key, "") for key in ("machine", "cpu", "driver", "clocks", "version", "commit")},
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(),
                "args": sys.argv, "notes": self.notes, "versions": self.versions, "peers": self.peers,
                "skipped": self.skipped, "wrong": self.wrong(), "geomean_ratio": self.geomeans(), "results": self.rows}
        write_json(output, data)
