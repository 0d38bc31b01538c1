#!/usr/bin/env python3
"""Property: captured pull calls over PyTorch's memory give exact sums at every replay, and change nothing beside the
outputs, with each of PyTorch's allocators (the default one, expandable segments, cudaMallocAsync).

    torch_memory.py LIBONEHOP [--share-gpu]

Two processes have a GPU each, or share the first one, where the driver gives them turns unless MPS is on: milliseconds a
call, so there are fewer. For each allocator a torch.cuda.CUDAGraph is captured of calls on tensors that were there
before: small and large, on 16 bytes and off, off on one rank only, in place and out of place; and another of calls on
tensors made during the capture. Each graph is replayed over inputs that change. Said for each: how many calls were
registered directly and how many go over the workspace. Exit status 77 where this machine cannot.
"""

import collections
import faulthandler
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import onehop_ctypes as onehop  # noqa: E402

RANKS = 2
SHARE = "--share-gpu"
SHARED = SHARE in sys.argv
ARGUMENTS = [one for one in sys.argv[1:] if one != SHARE]
REPLAYS = 4 if SHARED else 20
SKIPPED = 77
ALLOCATORS = {"default": "", "expandable segments": "expandable_segments:True", "cudaMallocAsync":
              "backend:cudaMallocAsync"}
PATIENCE_S = 60  # of the parent for two ranks; importing torch may take most of the first
LIMIT_S = 30     # of a rank from its turn on
LARGE = 16 << 20  # floats: 64 MiB, several chunks of expandable segments

# Offsets in elements, by rank.
Call = collections.namedtuple("Call", "algorithm dtype count given got aligned")
PULL1, PULL2 = onehop.ONEHOP_1SHOT_PULL, onehop.ONEHOP_2SHOT_PULL
KEPT = [
    Call(PULL1, "bfloat16", 1000, (8, 8), (16, 8), True),
    Call(PULL2, "float16", 1003, (8, 24), (0, 8), True),
    Call(PULL2, "bfloat16", 1000, (8, 16), None, True),
    Call(PULL1, "float16", 1001, (1, 2), (3, 3), False),
    Call(PULL2, "float32", 999, (5, 2), (2, 1), False),
    Call(PULL2, "bfloat16", 777, (3, 3), None, False),
    Call(PULL2, "bfloat16", 4096, (8, 1), (8, 8), False),
    Call(PULL1, "float32", LARGE, (0, 0), (0, 4), True),
    Call(PULL2, "float32", LARGE, (4, 0), (0, 0), True),
    Call(PULL2, "float32", LARGE, (4, 8), None, True),
]
MADE = [
    Call(PULL1, "bfloat16", 4099, (0, 0), (0, 0), True),
    Call(PULL2, "float32", LARGE, (0, 0), (0, 0), True),
]
ROOM = 32  # elements around


def gpu_of(rank):
    return 0 if SHARED else rank


# ---- one rank -----------------------------------------------------------------------------------------------------

class Rank:
    def __init__(self, torch, library, rank, name):
        self.torch, self.library, self.rank = torch, library, rank
        self.types = {"float32": (torch.float32, onehop.ONEHOP_FLOAT32),
                      "float16": (torch.float16, onehop.ONEHOP_FLOAT16),
                      "bfloat16": (torch.bfloat16, onehop.ONEHOP_BFLOAT16)}
        self.stream = torch.cuda.Stream()
        self.alive = []  # what the graphs use, the peer's too
        self.context = onehop.c_void_p()
        library.onehop_create(onehop.configured(
            onehop.onehop_config, rank=rank, world_size=RANKS, name=name.encode(), timeout_ms=10000,
            init_timeout_ms=20000, device=onehop.onehop_device(onehop.ONEHOP_DEVICE_CUDA, gpu_of(rank)),
            flags=onehop.ONEHOP_FLAG_SHARE_GPU if SHARED else 0), self.context)

    def all_reduce(self, call, given, got):
        how = onehop.configured(onehop.onehop_call, algorithm=call.algorithm, source=onehop.ONEHOP_SOURCE_GRAPH)
        self.library.onehop_all_reduce(self.context, given.data_ptr(), got.data_ptr(), call.count,
                                       self.types[call.dtype][1], onehop.ONEHOP_SUM, how,
                                       self.stream.cuda_stream)

    def rows(self):
        stats = onehop.onehop_stats()
        self.library.onehop_get_stats(self.context, stats)
        return stats.registrations_direct, stats.registrations_staged

    def capture(self, body):
        """The graph of what body does, and how its calls were registered."""
        direct, staged = self.rows()
        graph = self.torch.cuda.CUDAGraph()
        self.library.onehop_capture_begin(self.context)
        with self.torch.cuda.graph(graph, stream=self.stream):
            body()
        self.library.onehop_capture_end(self.context)
        now = self.rows()
        return graph, [now[0] - direct, now[1] - staged]

    def integers(self, call, rank, index, replay):
        """0..15: sums of two and one more are exact in all types."""
        i = self.torch.arange(call.count, dtype=self.torch.int32, device="cuda")
        return (i * 7 + i // 16 * 3 + rank * 5 + index * 11 + replay * 3) % 16

    def expect(self, call, index, replay, found, more, what):
        torch = self.torch
        want = sum(self.integers(call, rank, index, replay) + more for rank in range(RANKS))
        want = want.to(self.types[call.dtype][0])
        if torch.equal(found, want):
            return
        wrong = (found != want).nonzero().flatten()
        at = int(wrong[0])
        raise SystemExit(f"rank {self.rank}, {what}, call {index} {call}, replay {replay}: {len(wrong)} of "
                         f"{call.count} elements are wrong, first {at}: expected {float(want[at])}, found "
                         f"{float(found[at])}")

    def room(self, call):
        return self.torch.full((call.count + 2 * ROOM,), -1, dtype=self.types[call.dtype][0], device="cuda")

    def replay(self, graph):
        graph.replay()
        self.library.onehop_synchronize(self.context, self.stream.cuda_stream)

    def kept(self):
        """Tensors that were there before the capture."""
        places = []
        for call in KEPT:
            given = self.room(call)
            got = given if call.got is None else self.room(call)
            at, to = call.given[self.rank], (call.got or call.given)[self.rank]
            places.append((call, given[at:at + call.count], got[to:to + call.count], got, to))
        graph, rows = self.capture(lambda: [self.all_reduce(call, given, got) for call, given, got, _, _ in places])
        for replay in range(REPLAYS):
            for index, (call, given, _, _, _) in enumerate(places):
                given.copy_(self.integers(call, self.rank, index, replay))
            self.replay(graph)
            for index, (call, _, got, around, to) in enumerate(places):
                self.expect(call, index, replay, got, 0, "kept")
                if not bool((around[:to] == -1).all() & (around[to + call.count:] == -1).all()):
                    raise SystemExit(f"rank {self.rank}, kept, call {index} {call}: written beside its output")
        self.alive.append((graph, places))
        return rows

    def made(self):
        """Tensors of the graph itself."""
        type_of = [self.types[call.dtype][0] for call in MADE]
        sources = [self.torch.zeros(call.count, dtype=dtype, device="cuda") for call, dtype in zip(MADE, type_of)]
        results = [self.torch.zeros_like(source) for source in sources]

        def body():
            for call, source, result in zip(MADE, sources, results):
                given = source + 1
                got = self.torch.empty_like(given)
                self.all_reduce(call, given, got)
                result.copy_(got)
                self.alive.append((given, got))

        graph, rows = self.capture(body)
        for replay in range(REPLAYS):
            for index, (call, source) in enumerate(zip(MADE, sources)):
                source.copy_(self.integers(call, self.rank, index, replay))
            self.replay(graph)
            for index, (call, result) in enumerate(zip(MADE, results)):
                self.expect(call, index, replay, result, 1, "made in the capture")
        self.alive.append((graph, sources, results))
        return rows

    def close(self):
        """After a last call, so that no rank leaves while the other still needs it."""
        last = self.torch.ones(64, device="cuda")
        self.library.onehop_all_reduce(self.context, last.data_ptr(), last.data_ptr(), 64, onehop.ONEHOP_FLOAT32,
                                       onehop.ONEHOP_SUM, None, self.stream.cuda_stream)
        self.library.onehop_synchronize(self.context, self.stream.cuda_stream)
        self.library.onehop_destroy(self.context)


def why_not(torch, allocator):
    """None if the allocator is the one that was asked for."""
    backend = torch.cuda.get_allocator_backend()
    if backend != ("cudaMallocAsync" if allocator == "cudaMallocAsync" else "native"):
        return f"PyTorch {torch.__version__} took the backend {backend}"
    if backend == "native":
        expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
        if expandable != (allocator == "expandable segments"):
            return f"PyTorch {torch.__version__} made segments that are {'' if expandable else 'not '}expandable"
    return None


def rank_main(path, rank, allocator, name):
    import torch
    if sys.stdin.readline() != "go\n":
        raise SystemExit("the parent is gone")
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.cuda.set_device(gpu_of(rank))
    member = Rank(torch, onehop.load(path), rank, name)
    with torch.cuda.stream(member.stream):
        first = torch.zeros(1 << 20, device="cuda")
        answer = {"absent": why_not(torch, allocator), "torch": torch.__version__}
        if not answer["absent"]:
            answer["kept"] = member.kept()
            answer["made"] = member.made()
        member.close()
    del first
    print("ANSWER " + json.dumps(answer), flush=True)


# ---- the parent ---------------------------------------------------------------------------------------------------

def start(path, rank, allocator):
    environment = dict(os.environ)
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        environment.pop(variable, None)
    if ALLOCATORS[allocator]:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ALLOCATORS[allocator]
    name = f"torch memory {os.getpid()} {allocator}"
    command = [sys.executable, os.path.abspath(__file__), path, "--rank", str(rank), allocator, name, *[SHARE] * SHARED]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def wait_for(children):
    """Until all have ended, or one has failed and the others had time to say so too."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            end = min(end, time.monotonic() + 15)
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
    return [child.communicate()[0] for child in children]


def judge(allocator, children):
    """Prints how it went: 0, 1 or SKIPPED."""
    for child in children:
        try:
            child.stdin.write("go\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # its output says why
    begun = time.monotonic()
    outputs = wait_for(children)
    answers = [json.loads(line[len("ANSWER "):]) for output in outputs for line in output.splitlines()
               if line.startswith("ANSWER ")]
    if any(child.returncode for child in children) or len(answers) != RANKS:
        for rank, (child, output) in enumerate(zip(children, outputs)):
            print(f"  rank {rank}, exit status {child.returncode}:")
            print("".join(f"    {line}\n" for line in output.splitlines()[-25:]), end="")
        print(f"{allocator}: FAILED")
        return 1
    if answers[0]["absent"]:
        print(f"{allocator}: SKIPPED: {answers[0]['absent']}")
        return SKIPPED
    said, wrong = [], answers[0] != answers[1]
    for part, calls in (("kept", KEPT), ("made", MADE)):
        direct, staged = answers[0][part]
        unaligned = sum(not call.aligned for call in calls)
        wrong |= direct + staged != len(calls) or staged < unaligned
        said.append(f"{direct} direct, {staged} staged" + (f" ({unaligned} unaligned)" if unaligned else ""))
    print(f"{allocator}: PyTorch {answers[0]['torch']}, {REPLAYS} replays exact on {RANKS} ranks; tensors made before: "
          f"{said[0]}; made in the capture: {said[1]}; {time.monotonic() - begun:.1f} s")
    if wrong:
        print(f"{allocator}: FAILED: ranks or counts of registered calls differ: {answers}")
    return int(wrong)


def skip(reason):
    print(f"SKIPPED: {reason}")
    return SKIPPED


def main(path):
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    probe = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
                           capture_output=True, text=True, timeout=PATIENCE_S)
    if probe.returncode:
        return skip(f"{sys.executable} cannot import torch: {(probe.stderr.splitlines() or ['?'])[-1]}")
    needed = 1 if SHARED else RANKS
    if int(probe.stdout.split()[-1]) < needed:
        return skip(f"needs {needed} GPUs, PyTorch finds {probe.stdout.split()[-1]}")
    groups = {allocator: [start(path, rank, allocator) for rank in range(RANKS)] for allocator in ALLOCATORS}
    results = [judge(allocator, children) for allocator, children in groups.items()]
    return 1 if 1 in results else max(results)


if __name__ == "__main__":
    if len(ARGUMENTS) == 5 and ARGUMENTS[1] == "--rank":
        rank_main(ARGUMENTS[0], int(ARGUMENTS[2]), ARGUMENTS[3], ARGUMENTS[4])
    elif len(ARGUMENTS) == 1:
        sys.exit(main(os.path.abspath(ARGUMENTS[0])))
    else:
        sys.exit(__doc__)
