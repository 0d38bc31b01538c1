#!/usr/bin/env python3
"""Checks the layer law of docs/architecture.md: the rooms of src/ lie on floors.

    base < device < {protocol, rendezvous} < kernels < {jit, plan} < communicator < context < capture < call,
    with cli, nccl_shim, python, examples and tests on top

A file includes its own room and those below, and calls functions of no room above; rooms of one floor never include
each other. Files do not include each other in circles, where a source and its header of the same name are one; but for
base, device and rendezvous calls make no circle either. device/cuda, device/host and NCCL's functions are device's own,
but for the command; command, NCCL shim, Python module and examples know only onehop.h, what the table below names, and
their own files. CUDA headers appear only under src/device/cuda and in src/kernels/prim/prim_cuda.h; what becomes a GPU kernel
includes no system header; file names are unique; only src/base/env.c reads the environment; the library makes no
descriptor but through src/base/descriptor.h; only cuda_multicast.c calls the driver's multicast functions, and nothing
that runs on GPUs names the switch that allows them.

    check_layers.py [ROOT]         checks the tree (default: the one this script lies in)
    check_layers.py --self-test    plants violations in a scratch tree and wants each of them caught
"""

import os
import re
import sys
import tempfile

FLOORS = (("base",), ("device",), ("protocol", "rendezvous"), ("kernels",), ("jit", "plan"), ("communicator",),
          ("context",), ("capture",), ("call",))
LEVEL = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# They know onehop.h, their own files, and the rooms named here.
USERS = {"cli": ("base", "device", "protocol"), "nccl_shim": ("base",), "python": (), "examples": ()}
# Where calls may make circles, but includes may not: a table of functions and what they share, errors that are logged.
CALL_CIRCLES = ("base", "device", "rendezvous")
# What of a higher layer the command may include besides: `onehop which` reads the tables without a context.
LENT = {"src/plan/explain.h": ("cli",)}
TOP = "tests"  # may include anything
# What device keeps from the layers above it, and those that may include it all the same.
PRIVATE = {"src/device/cuda/": (), "src/device/host/": ("kernels",), "src/device/nccl/nccl_api.h": ()}
TREES = ("include", "src", "python", "examples", "tests")
CODE = (".c", ".h", ".def", ".cu", ".S")
SAME_NAME_OK = {"CMakeLists.txt", "README.md", "run.sh", "__init__.py", "conftest.py"}
CUDA = re.compile(r"(cuda|cu[A-Z]|nvrtc|nvml|nvtx|nccl|nv/|crt/|cooperative_groups|mma\.h|sm_\d|vector_types|"
                  r"driver_types|device_launch|math_constants|builtin_types)")
CUDA_ALLOWED = ("src/device/cuda/", "src/kernels/prim/prim_cuda.h", "tests/cuda/", "tests/gpu/")
COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"\n]+)"|<([^>\n]+)>|(\w+))', re.MULTILINE)


def without_comments(text):
    """Comments become blanks of the same number of lines; strings stay."""
    def blank(match):
        token = match.group()
        return token if token[0] == '"' else "\n" * token.count("\n") or " "
    return COMMENT_OR_STRING.sub(blank, text)


class Tree:
    def __init__(self, root):
        self.root = root
        self.problems = []
        self.text = {}  # path relative to root -> source without comments
        self.whole = {}  # and with them
        for tree in TREES:
            for folder, _, names in os.walk(os.path.join(root, tree)):
                for name in names:
                    if name.endswith(CODE):
                        path = os.path.join(folder, name)
                        with open(path, encoding="utf-8") as file:
                            text = file.read()
                        self.whole[os.path.relpath(path, root)] = text
                        self.text[os.path.relpath(path, root)] = without_comments(text)

    def complain(self, path, match, message):
        line = match.string.count("\n", 0, match.start()) + 1 if match else 1
        self.problems.append(f"{path}:{line}: {message}")

    def resolve(self, path, name):
        """The file of the tree that `#include "name"` in `path` means, or None."""
        for folder in os.path.dirname(path), "src", "include", "tests", "tests/support":
            found = os.path.normpath(os.path.join(folder, name))
            if found in self.text:
                return found
        return None

    def includes(self, path):
        """(match, name, quoted, target in the tree or None) of each include. `#include MACRO` names its macro's
        default, if the file defines one."""
        for match in INCLUDE.finditer(self.text[path]):
            quoted, system, macro = match.groups()
            if macro:
                default = re.search(rf'#\s*define\s+{macro}\s+"([^"\n]+)"', self.text[path])
                quoted = default.group(1) if default else None
                if not quoted:
                    continue
            name = quoted or system
            yield match, name, bool(quoted), self.resolve(path, name)


def layer(path):
    parts = path.split(os.sep)
    return parts[1] if parts[0] == "src" else parts[0]


def may_include(path, target):
    """Empty if the law allows it, else the reason why not."""
    here, there = layer(path), layer(target)
    if there == "include" or here == TOP:
        return ""
    if here in LENT.get(target, ()):
        return ""
    if here in USERS:
        own = here == there or there in USERS[here]
        return "" if own else f"{here} may include only {', '.join(('onehop.h', *USERS[here]))} and its own files"
    if here == there:
        return ""
    for room, others in PRIVATE.items():
        if target.startswith(room) and here not in others:
            return f"{room} is device's own"
    if there not in LEVEL:
        return f"{here} may not include {there}"
    if LEVEL[there] == LEVEL[here]:
        return f"{here} and {there} never include each other"
    return f"{here} is below {there}" if LEVEL[there] > LEVEL[here] else ""


def check_includes(tree):
    for path in sorted(tree.text):
        if path.startswith("src") and layer(path) not in LEVEL and layer(path) not in USERS:
            tree.complain(path, None, f"src/{layer(path)} is no layer")
            continue
        cuda_allowed = path.startswith(CUDA_ALLOWED)
        for match, name, quoted, target in tree.includes(path):
            if target:
                reason = may_include(path, target)
                if reason:
                    tree.complain(path, match, f"includes {name}: {reason}")
            elif CUDA.match(os.path.basename(name)) or CUDA.match(name):
                if not cuda_allowed:
                    tree.complain(path, match, f"CUDA header {name} outside src/device/cuda")
            elif quoted:
                tree.complain(path, match, f"includes {name}, which is not in the tree")


def without_strings(text):
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


# A function that other files may call, and what a table of functions or of data begins with.
DEFINED = re.compile(r"^(?!static|typedef|extern|#)[A-Za-z_][\w *]*?\b(\w+)"
                     r"(?:\s*\([^;{}]*\)\s*\{|(?:\[[^\]]*\])*\s*=)", re.MULTILINE)


def calls(tree):
    """path -> {path of the source that defines it: name} of the names that a source takes from others."""
    sources = {path: without_strings(text) for path, text in tree.text.items()
               if path.endswith(".c") and path.startswith(("src", "python"))}
    owner = {}
    for path, text in sorted(sources.items()):
        for match in DEFINED.finditer(text):
            if "_" in match.group(1):
                owner.setdefault(match.group(1), path)
    taken = {}
    for path, text in sources.items():
        names = set(re.findall(r"(?<![.>\w])\w+", text))
        taken[path] = {owner[name]: name for name in sorted(names) if owner.get(name, path) != path}
    return taken


def check_calls(tree):
    """Through a header of its own room a file may call what a room above defines: that is a call upwards too."""
    for path, others in sorted(calls(tree).items()):
        for target, name in sorted(others.items()):
            here, there = layer(path), layer(target)
            if here in LEVEL and there in LEVEL and here != there and LEVEL[there] >= LEVEL[here]:
                match = re.search(rf"\b{name}\b", tree.text[path])
                tree.complain(path, match, f"calls {name} of {there}, which is not below {here}")


def circles(arrows):
    """Groups of names that reach each other: each as a path from its first name back to it."""
    found, done = [], set()
    for start in sorted(arrows):
        way, todo = {start: None}, [start]
        while todo and start not in done:
            at = todo.pop(0)
            for following in sorted(arrows.get(at, ())):
                if following == start:
                    circle = [at]
                    while way[circle[-1]]:
                        circle.append(way[circle[-1]])
                    found.append([*reversed(circle), start])
                    done.update(circle)
                    todo = []
                    break
                if following not in way:
                    way[following] = at
                    todo.append(following)
    return found


def check_circles(tree):
    """A source and its header of the same name are one file here."""
    arrows = {}
    taken = calls(tree)
    for path in tree.text:
        if not path.startswith(("src", "python")):
            continue
        ends = {target for _, _, _, target in tree.includes(path) if target}
        if layer(path) not in CALL_CIRCLES:
            ends |= set(taken.get(path, ()))
        here = os.path.splitext(path)[0]
        arrows.setdefault(here, set()).update(os.path.splitext(end)[0] for end in ends)
        arrows[here].discard(here)
    for circle in circles(arrows):
        path = next(path for path in sorted(tree.text) if os.path.splitext(path)[0] == circle[0])
        tree.complain(path, None, f"a circle: {' -> '.join(circle)}")


def check_kernel_sources(tree):
    """NVRTC has no system headers: nothing that kernels.c reaches includes one, but in the halves of prim.h."""
    start = "src/kernels/kernels.c"
    todo, seen = [start] if start in tree.text else [], set()
    while todo:
        path = todo.pop()
        if path in seen or re.search(r"/prim_(host|cuda)", path):
            continue
        seen.add(path)
        for match, name, _, target in tree.includes(path):
            if target:
                todo.append(target)
            else:
                tree.complain(path, match, f"kernel source includes {name}, which NVRTC does not have")


def check_names(tree):
    seen = {}
    for path in sorted(tree.text):
        name = os.path.basename(path)
        if layer(path) == "python":
            continue
        if name in seen and name not in SAME_NAME_OK:
            tree.complain(path, None, f"same name as {seen[name]}")
        seen[name] = path


def check_environment(tree):
    for path, text in sorted(tree.text.items()):
        if path == "src/base/env.c" or layer(path) == TOP:
            continue
        for match in re.finditer(r"\b(secure_getenv|getenv|environ)\b\s*[([;]|\b(setenv|putenv|unsetenv)\s*\(", text):
            reads = match.group(1)
            if not reads and layer(path) in USERS:
                continue  # the command may set the variables of the ranks it forks
            tree.complain(path, match, "only src/base/env.c reads the environment" if reads
                          else "the library never changes the environment")


# Whatever gives a new descriptor. The driver's has one caller, in cuda_handles.c.
MAKES_DESCRIPTOR = re.compile(
    r"(?<![\w.>])(?:open|open64|openat|openat2|creat|fopen|freopen|opendir|popen|tmpfile|mkstemp|mkostemp|shm_open|dup[23]?|"
    r"pipe2?|memfd_create|socket|socketpair|accept4?|eventfd|epoll_create1?|timerfd_create|signalfd|inotify_init1?|"
    r"pidfd_open)\s*\(|\bSYS_(?:pidfd|memfd|open|perf)\w*\s*,|\bF_DUPFD\w*|\bcuMemExportToShareableHandle\s*\(\s*[^,\s(*]")
MOVED_UP = re.compile(r"\boh_fd_high\(\s*(?:\(int\)\s*)?(?:syscall\(\s*)?$")
RECEIVES = re.compile(r"\b(?:recvmsg|recvmmsg)\s*\(|\bgetsockopt\s*\([^;]*SO_PEERPIDFD")


def check_descriptors(tree):
    for path, text in sorted(tree.text.items()):
        if layer(path) not in LEVEL or path == "src/base/descriptor.c":
            continue
        plain = re.sub(r'"(?:\\.|[^"\\\n])*"', lambda m: '"' * len(m.group()), text)
        for match in MAKES_DESCRIPTOR.finditer(plain):
            if "cuMemExport" in match.group() and path == "src/device/cuda/cuda_handles.c":
                continue
            if not MOVED_UP.search(plain[:match.start()]):
                tree.complain(path, match, "makes a descriptor without oh_fd_high: it may become 0, 1 or 2")
        for match in RECEIVES.finditer(plain):
            if "oh_fd_high(" not in plain:
                tree.complain(path, match, "receives a descriptor without oh_fd_high: it may become 0, 1 or 2")


def check_multicast(tree):
    for path, text in sorted(tree.text.items()):
        if path != "src/device/cuda/cuda_multicast.c":
            for match in re.finditer(r"\bcuMulticast\w+\s*\(\s*[^,\s(]", text):
                tree.complain(path, match, "only cuda_multicast.c calls the driver's multicast functions")
        if path.startswith("tests/gpu/"):
            for match in re.finditer(r"\b(ONEHOP|OH_ENV)_MULTICAST\b", text):
                tree.complain(path, match, "no test on a GPU switches multicast on")


WIDTH = 100
FREE_WIDTH = {"tests/explorer/explore.c"}  # its table of models has a line for each


def check_lines(tree):
    for path, text in sorted(tree.whole.items()):
        if not path.endswith((".c", ".h", ".def")) or path in FREE_WIDTH:
            continue
        for match in re.finditer(r"^[^\n]{%d,}$" % (WIDTH + 1), text, re.MULTILINE):
            tree.complain(path, match, f"the line has {len(match.group())} columns, at most {WIDTH}")
        for match in re.finditer(r"^[ ]*\*?[ ]*\*/$", text, re.MULTILINE):
            tree.complain(path, match, "the end of a comment stands alone on its line")


def check(root):
    tree = Tree(root)
    for rule in (check_includes, check_calls, check_circles, check_kernel_sources, check_names, check_environment,
                 check_descriptors, check_multicast, check_lines):
        rule(tree)
    return tree


# Each: what it plants, the file, its text, and a word of the complaint it must cause ("" for none).
PLANTED = (
    ("a long line", "src/base/w.c", "/* " + 98 * "x" + " */\n", "columns, at most"),
    ("a lone end of a comment", "src/base/v.c", "/* text\n */\n", "stands alone"),
    ("base reaches up", "src/base/a.c", '#include "device/device.h"\n', "base is below device"),
    ("device reaches communicator", "src/device/host/b.c", '#include "communicator/comm.h"\n', "device is below communicator"),
    ("by a relative path", "src/base/c.c", '#include "../call/ops.h"\n', "base is below call"),
    ("rooms of one floor", "src/jit/d.c", '#include "plan/explain.h"\n', "never include each other"),
    ("protocol and rendezvous", "src/protocol/e.c", '# include "rendezvous/rendezvous.h"\n', "never include"),
    ("command uses internals", "src/cli/f.c", '#include "communicator/comm.h"\n', "only onehop.h"),
    ("command reads the tables", "src/cli/ff.c", '#include "plan/explain.h"\n', ""),
    ("example uses internals", "examples/x/g.c", '#include "communicator/comm.h"\n', "only onehop.h"),
    ("library uses the command", "src/call/h.c", '#include "cli/shared/cli.h"\n', "may not include cli"),
    ("library uses tests", "src/call/i.c", '#include "tests/support/harness.h"\n', "not in the tree"),
    ("CUDA header in protocol", "src/protocol/j.c", "#include <cuda.h>\n", "CUDA header"),
    ("CUDA header in kernels", "src/kernels/k.h", "#include <cuda_bf16.h>\n", "CUDA header"),
    ("system header in a kernel", "src/kernels/kernels.c", "#include <stdint.h>\n", "NVRTC does not have"),
    ("missing file", "src/communicator/l.c", '#include "communicator/gone.h"\n', "not in the tree"),
    ("same name twice", "src/call/comm.h", "\n", "same name as src/call/comm.h"),
    ("getenv in communicator", "src/communicator/m.c", 'const char *s = getenv("ONEHOP_LOG");\n', "reads the environment"),
    ("setenv in call", "src/call/n.c", 'int x = setenv("A", "b", 1);\n', "never changes"),
    ("CUDA device in comm", "src/communicator/cc.c", '#include "device/cuda/inside.h"\n', "device's own"),
    ("host device in ops", "src/call/dd.c", '#include "device/host/lanes.h"\n', "device's own"),
    ("NCCL's functions in comm", "src/communicator/ee.c", '#include "device/nccl/nccl_api.h"\n', "device's own"),
    ("NCCL's interface in comm", "src/communicator/ff.c", '#include "device/nccl/nccl.h"\n', ""),
    ("host device in kernels", "src/kernels/gg.c", '#include "device/host/lanes.h"\n', ""),
    ("CUDA device in the command", "src/cli/hh.c", '#include "device/cuda/inside.h"\n', ""),
    ("unknown layer", "src/utils/o.c", "\n", "is no layer"),
    ("multicast elsewhere", "src/device/cuda/u.c", "int x = oh_cu.cuMulticastCreate(&o, &k);\n", "only cuda_multicast.c"),
    ("multicast on a GPU", "tests/gpu/v.c", 'int x = setenv("ONEHOP_MULTICAST", "1", 1);\n', "switches multicast on"),
    ("multicast where it may be", "src/device/cuda/cuda_multicast.c", "int x = oh_cu.cuMulticastCreate(&o, &k);\n", ""),
    ("a bare socket", "src/rendezvous/w.c", "int fd = socket(AF_UNIX, SOCK_STREAM, 0);\n", "without oh_fd_high"),
    ("a bare dup", "src/device/x.c", "int fd = fcntl(old, F_DUPFD_CLOEXEC, 0);\n", "without oh_fd_high"),
    ("a bare pidfd", "src/rendezvous/y.c", "int fd = syscall(SYS_pidfd_open, pid, 0);\n", "without oh_fd_high"),
    ("a received one", "src/rendezvous/z.c", "n = recvmsg(fd, &message, 0);\n", "receives a descriptor"),
    ("a descriptor moved up", "src/communicator/aa.c", "int fd = oh_fd_high(\n    openat(at, name, O_RDONLY));\n", ""),
    ("a descriptor of the command", "src/cli/bb.c", "int fd = open(name, 0);\n", ""),
    ("all of it allowed", "src/call/p.c", '#include <onehop.h>\n#include "communicator/comm.h"\n#include "base/base.h"\n', ""),
    ("getenv in env.c", "src/base/env.c", 'const char *s = getenv("ONEHOP_LOG");\n', ""),
    ("only in a comment", "src/base/q.c", '/* #include "call/ops.h"\n getenv(x) */\n// getenv(y)\n', ""),
    ("CUDA where it may be", "src/device/cuda/r.c", "#include <cuda.h>\n", ""),
    ("test uses internals", "tests/test_s.c", '#include "communicator/comm.h"\n', ""),
    ("command's own header", "src/cli/t.c", '#include "cli/shared/cli.h"\n#include <stdio.h>\n', ""),
    ("Python module uses internals", "python/extension/ii.c", '#include "base/base.h"\n', "only onehop.h"),
    ("headers in a circle", "src/base/base.h", '#include "base/other.h"\n', "a circle"),
    ("a source of a header", "src/base/other.c", '#include "base/base.h"\n', ""),
    ("pairs in a circle", "src/base/base.c", '#include "base/other.h"\n', "a circle"),
    ("a call upwards", "src/base/jj.c", "void oh_jj(void) {\n    oh_called(1);\n}\n", "calls oh_called of call"),
    ("a call downwards", "src/call/kk.c", "void oh_kk(void) {\n    oh_based(1);\n}\n", ""),
    ("calls of the command in a circle", "src/cli/ll.c", "int cli_ll(int x) {\n    return cli_first(x);\n}\n", "a circle"),
)


def write(root, path, text):
    path = os.path.join(root, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


# What lies in the scratch tree beside what is planted.
PRESENT = dict.fromkeys((
    "include/onehop.h", "src/base/base.h", "src/device/device.h", "src/protocol/regions.h", "src/rendezvous/rendezvous.h",
    "src/communicator/comm.h", "src/cli/shared/cli.h", "src/kernels/prim/prim.h", "src/device/cuda/inside.h",
    "src/device/host/lanes.h", "src/device/nccl/nccl.h", "src/device/nccl/nccl_api.h", "src/plan/explain.h",
    "src/call/ops.h"), "") | {
    "src/base/other.h": '#include "base/base.h"\n',
    "src/base/under.c": "int oh_based(int x) {\n    return x;\n}\n",
    "src/call/over.c": "int oh_called(int x) {\n    return x;\n}\n",
    "src/cli/first.c": "int cli_first(int x) {\n    return cli_ll(x);\n}\n"}


def self_test():
    failed = 0
    for what, path, text, word in PLANTED:
        with tempfile.TemporaryDirectory(prefix="onehop-layers-") as root:
            for name, content in PRESENT.items():
                write(root, name, content)
            write(root, path, text)
            problems = check(root).problems
        good = (len(problems) == 1 and word in problems[0]) if word else not problems
        failed += not good
        print(f"  {'ok  ' if good else 'FAIL'}  {what}: {'; '.join(problems) or 'nothing found'}")
    print(f"{len(PLANTED) - failed} passed, {failed} failed")
    return 1 if failed else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) > 2 or (len(sys.argv) == 2 and sys.argv[1].startswith("-")):
        sys.exit(__doc__)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    tree = check(sys.argv[1] if len(sys.argv) == 2 else here)
    for problem in tree.problems:
        print(problem)
    print(f"layers: {len(tree.text)} files, {len(tree.problems)} violations")
    return 1 if tree.problems else 0


if __name__ == "__main__":
    sys.exit(main())
