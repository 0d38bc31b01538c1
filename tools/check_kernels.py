#!/usr/bin/env python3
"""Checks the GPU kernels without a GPU: src/kernels/kernels.c through nvcc and NVRTC for every target, then
what the compilers made of it.

    check_kernels.py [--root DIR] [--nvcc NVCC] [--cc CC]   compile and check; exit 77 without nvcc
                     [--built DIR]                          of nvcc's work, take what lies in this build tree
    check_kernels.py --self-test [--nvcc NVCC]              plant mistakes, want each of them caught
    check_kernels.py --find-nvrtc                           print NVRTC's library, exit 1 without

Per target: every instance compiles, no spill, no stack frame; in the PTX no load through the read-only path
(.nc), no multimem below compute_90 and from there on in all kernels over multicast and in no other, no membar
and no volatile access, fences and acquire/release at .sys, .gpu only for relaxed words, 16-byte ordered
accesses (slots) only at .sys; from compute_90 on no path reaches a global access before griddepcontrol.wait. In prim_cuda.h each primitive's PTX has the order and the scope of its
name. NVRTC sees our own headers only and must make the same instances as nvcc.
"""

import argparse
import concurrent.futures
import ctypes
import ctypes.util
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FLAGS = ["-O3", "--fmad=false", "-std=c++17"]
SASS = ("80", "90", "100", "120")
PTX = ("80", "90")
NVRTC_TARGETS = ("90",)  # for the rules; test_jit_compile has it compile for every target
SKIPPED = 77


class Report:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0

    def check(self, what, problems, note=""):
        self.failed += bool(problems)
        self.passed += not problems
        print(f"  {'FAIL' if problems else 'ok  '}  {what}{': ' + note if note else ''}")
        for problem in problems[:10]:
            print(f"          {problem}")
        if len(problems) > 10:
            print(f"          ... and {len(problems) - 10} more")

    def skip(self, what, why):
        self.skipped += 1
        print(f"  SKIP  {what}: {why}")

    def close(self):
        print(f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped")
        return 1 if self.failed else 0


# ---- finding the compilers -------------------------------------------------------------------------
def wheel_dirs(part):
    """Places where wheels put CUDA 13: build/venv first, then this Python's own packages."""
    roots = glob.glob(f"{HERE}/build/venv/lib/python3*/site-packages") + [p for p in sys.path if p]
    found = [f"{root}/nvidia/{cuda}/{part}" for root in roots for cuda in ("cu13", "cuda_nvrtc")]
    return [path for path in found if os.path.isdir(path)]


def find_nvcc(given):
    places = [given, shutil.which("nvcc"), f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc", "/usr/local/cuda/bin/nvcc"]
    places += [f"{folder}/nvcc" for folder in wheel_dirs("bin")]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def find_nvrtc():
    home = os.environ.get("CUDA_HOME")
    folders = [f"{home}/lib64", f"{home}/lib"] if home else []
    folders += ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", *wheel_dirs("lib")]
    for folder in folders:
        if os.path.exists(f"{folder}/libnvrtc.so.13"):
            return f"{folder}/libnvrtc.so.13"
    try:
        ctypes.CDLL("libnvrtc.so.13")
        return "libnvrtc.so.13"
    except OSError:
        return None


# ---- PTX: reading ---------------------------------------------------------------------------------
def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def functions(ptx):
    """name -> (is entry, [statement]); a statement is a label 'L:' or an instruction with one-space gaps."""
    text = re.sub(r"^\s*\.(loc|file)\b.*$", "", without_comments(ptx), flags=re.MULTILINE)
    found = {}
    head = re.compile(r"\.(entry|func)\s*(?:\([^()]*\)\s*)?([\w$]+)\s*(\([^()]*\))?[^{};]*([{;])")
    for match in head.finditer(text):
        if match.group(4) == ";":
            continue  # a declaration
        depth, end = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found[match.group(2)] = (match.group(1) == "entry", statements(text[match.end():end - 1]))
    return found


def statements(body):
    out = []
    for piece in body.split(";"):
        piece = " ".join(piece.split())
        while True:
            label = re.match(r"([\w$]+): ?", piece)
            scope = re.match(r"[{}] ?", piece)
            if label:
                out.append(label.group(1) + ":")
            elif not scope:
                break
            piece = piece[(label or scope).end():]
        if piece:
            out.append(piece)
    return out


def opcode(statement):
    """The instruction without its predicate: 'ld.relaxed.sys.global.u32'."""
    return re.sub(r"^@!?%\w+ ", "", statement).split(" ")[0]


def is_access(op):
    """An instruction that reads or writes memory other than this thread's, this block's or the arguments."""
    kind = op.split(".")[0]
    return kind in ("ld", "ldu", "st", "atom", "red", "multimem", "prefetch", "cp") and not re.search(
        r"\.(param|const|shared|local)\b", op)


# ---- PTX: the rules -------------------------------------------------------------------------------
def scope_problem(op):
    parts = op.split(".")
    kind, rest = parts[0], set(parts[1:])
    scopes = rest & {"cta", "cluster", "gpu", "sys"}
    if kind == "membar":
        return "membar: a fence with its order and scope is wanted"
    if kind == "fence":
        return "" if "sys" in rest or "proxy" in rest else "a fence that is not .sys"
    if kind not in ("ld", "st", "atom", "red", "multimem") or rest & {"shared", "local", "param", "const"}:
        return ""
    if "volatile" in rest:
        return "volatile access"
    orders = rest & {"relaxed", "acquire", "release", "acq_rel"}
    if kind in ("atom", "red") and not orders:
        return f"{kind} without an order"
    if not orders:
        return ""
    if scopes == {"sys"}:
        return ""
    if scopes != {"gpu"}:
        return "scope is neither .sys nor .gpu"
    if orders != {"relaxed"}:
        return "acquire or release that is not .sys"
    return "16-byte ordered access that is not .sys" if rest & {"v4", "v8", "b128"} else ""


def accesses_nothing(body):
    return not any(is_access(op) or op.startswith("call") for op in map(opcode, body) if not op.startswith("prefetch"))


def before_wait(body, quiet):
    """Accesses that some path reaches before griddepcontrol.wait, save prefetches and loads of what only the host writes; a call
    counts as one, save of the functions `quiet`, which access nothing."""
    labels = {s[:-1]: i for i, s in enumerate(body) if s.endswith(":")}
    todo, seen, bad = [0], set(), []
    while todo:
        i = todo.pop()
        if i in seen or i >= len(body):
            continue
        seen.add(i)
        op = opcode(body[i])
        kind = op.split(".")[0]
        if op == "griddepcontrol.wait":
            continue
        if op.startswith(("ld.relaxed.gpu.global.L1::no_allocate", "prefetch")):  # oh_ld_host_u64: no kernel writes it; oh_prefetch reads nothing
            todo.append(i + 1)
            continue
        if kind == "call" and any(name in body[i] for name in quiet):
            todo.append(i + 1)
            continue
        if is_access(op) or kind == "call":
            bad.append(body[i])
            continue
        if kind == "bra":
            todo.append(labels[body[i].split(" ")[-1]])
        elif kind == "brx":
            todo += labels.values()
        if kind not in ("bra", "brx", "ret", "exit", "trap") or body[i].startswith("@"):
            todo.append(i + 1)
    return bad


def ptx_rules(ptx, target):
    """[(rule, [problem])] for one PTX text."""
    found = functions(ptx)
    quiet = [name for name, (is_entry, body) in found.items() if not is_entry and accesses_nothing(body)]
    rules = {"no read-only path (.nc)": [], "scopes": []}
    pdl = "griddepcontrol.wait before any access"
    if int(target) >= 90:
        rules[pdl] = []
        rules["multimem where it belongs"] = []
    else:
        rules["no multimem, no griddepcontrol"] = []
    for name, (is_entry, body) in found.items():
        for statement in body:
            op = opcode(statement)
            if ".nc" in op or op.startswith("ldu"):
                rules["no read-only path (.nc)"].append(f"{name}: {statement}")
            problem = scope_problem(op)
            if problem:
                rules["scopes"].append(f"{name}: {problem}: {statement}")
            if int(target) < 90 and re.match(r"(multimem|griddepcontrol)\b", op):
                rules["no multimem, no griddepcontrol"].append(f"{name}: {statement}")
        if is_entry and "_multicast_" in name and int(target) >= 90:
            used = {op.split(".")[1] for op in map(opcode, body) if op.startswith("multimem.")}
            wanted = {"ld_reduce"} | ({"st"} if "2shot" in name else set())
            rules["multimem where it belongs"] += [f"{name}: no multimem.{m}" for m in sorted(wanted - used)]
        elif is_entry and int(target) >= 90:
            rules["multimem where it belongs"] += [f"{name}: {s}" for s in body if opcode(s).startswith("multimem.")]
        if is_entry and int(target) >= 90:
            if "griddepcontrol.wait" not in map(opcode, body):
                rules[pdl].append(f"{name}: no griddepcontrol.wait")
            rules[pdl] += [f"{name}: {statement}" for statement in before_wait(body, quiet)]
    return list(rules.items())


def entries(ptx):
    return {name for name, (is_entry, _) in functions(ptx).items() if is_entry and name.startswith("onehop_")}


def difference(wanted, got):
    return [f"missing: {n}" for n in sorted(wanted - got)] + [f"unexpected: {n}" for n in sorted(got - wanted)]


def primitive_problems(text):
    """In prim_cuda.h, a function oh_<op>_<order>_<scope>_... must say the same in its PTX."""
    problems, count = [], 0
    order, scope = "relaxed|acquire|release|acq_rel", "sys|gpu"
    for match in re.finditer(rf"\b(oh_\w*?_({order})_({scope})\w*)\s*\([^)]*\)\s*\{{(.*?)\n\}}", text, re.DOTALL):
        name, wanted_order, wanted_scope, body = match.groups()
        for code in re.findall(r'"((?:ld|st|atom|red|fence|multimem)\.[\w.:]*)', body):
            count += 1
            parts = code.split(".")
            if wanted_order not in parts or wanted_scope not in parts:
                problems.append(f"{name} uses {code}")
    return problems, count


# ---- compiling ------------------------------------------------------------------------------------
def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    return done.returncode, done.stdout


def nvcc_command(nvcc, root, *more):
    return [nvcc, "-x", "cu", *FLAGS, f"-I{root}/src", f"-I{root}/include", *more, f"{root}/src/kernels/kernels.c"]


def resources(log):
    """name -> (registers, stack, spill bytes) from ptxas -v."""
    used = {}
    # Out-of-line functions carry a mangled name; the source's name is enough to find them.
    log = re.sub(r"_Z\w*?\d(oh_[a-z0-9_]+)E\w*", r"\1", log)
    pattern = re.compile(r"Function properties for ([\w$]+)\s*\n?\s*(\d+) bytes stack frame, (\d+) bytes spill stores, "
                         r"(\d+) bytes spill loads(?:\s*\n?\s*ptxas info\s*: Used (\d+) registers)?")
    for name, stack, stores, loads, registers in pattern.findall(log):
        used[name] = (int(registers or 0), int(stack), int(stores) + int(loads))
    return used


def listed_instances(cc, root, target):
    """The kernels that kernels.c stamps out of its list, by preprocessing it as CUDA (it has no system header)."""
    code, text = run([cc, "-E", "-P", "-D__CUDACC__", f"-D__CUDA_ARCH__={target}0", f"-I{root}/src", f"-I{root}/include",
                      "-x", "c", f"{root}/src/kernels/kernels.c"])
    if code:
        return None, text
    return set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\s*\(.*?\)\s*)?(onehop_\w+)\s*\(", text)), ""


def own_headers(root):
    """include spelling -> text of everything that kernels.c reaches in the tree."""
    headers, todo = {}, [f"{root}/src/kernels/kernels.c"]
    while todo:
        path = todo.pop()
        with open(path, encoding="utf-8") as file:
            text = file.read()
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
        names += re.findall(r'^\s*#\s*define\s+\w+\s+"([\w/]+\.(?:h|def))"', text, re.MULTILINE)
        for name in names:
            for folder in os.path.dirname(path), f"{root}/src", f"{root}/include":
                found = os.path.join(folder, name)
                if os.path.exists(found):
                    if name not in headers:
                        with open(found, encoding="utf-8") as file:
                            headers[name] = file.read()
                        todo.append(found)
                    break
    return headers


class Nvrtc:
    def __init__(self, library):
        # Loaded first, since NVRTC looks for it by name only.
        for builtins in glob.glob(os.path.join(os.path.dirname(library), "libnvrtc-builtins.so.13*")):
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self.lib = ctypes.CDLL(library)

    def text(self, size_of, read, program):
        size = ctypes.c_size_t()
        getattr(self.lib, size_of)(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.lib, read)(program, buffer)
        return buffer.value.decode(errors="replace")

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source, headers, target):
        """(PTX or None, log)"""
        program = ctypes.c_void_p()
        strings = ctypes.c_char_p * max(1, len(headers))
        names = strings(*[name.encode() for name in headers])
        texts = strings(*[text.encode() for text in headers.values()])
        options = [f"--gpu-architecture=compute_{target}", "--fmad=false", "-std=c++17"]
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        self.lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.c", len(headers), texts, names)
        code = self.lib.nvrtcCompileProgram(program, len(options), array)
        log = self.text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
        ptx = None if code else self.text("nvrtcGetPTXSize", "nvrtcGetPTX", program)
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return ptx, log


def nvrtc_one(library, source, headers, target):
    """(version, PTX or None, log)"""
    nvrtc, here = Nvrtc(library), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="onehop-nvrtc-") as empty:
        os.chdir(empty)  # nothing to be found beside the headers handed in
        try:
            return nvrtc.version(), *nvrtc.compile(source, headers, target)
        finally:
            os.chdir(here)


def nvrtc_all(library, source, headers, targets):
    """target -> (version, PTX or None, log); a process each, since they change directory."""
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs = {target: pool.submit(nvrtc_one, library, source, headers, target) for target in targets}
        return {target: job.result() for target, job in jobs.items()}


def compiled(nvcc, root, sass):
    """'sm_X' -> (exit status, what nvcc and ptxas said), 'compute_X' -> (exit status, PTX or what nvcc said)"""
    with tempfile.TemporaryDirectory(prefix="onehop-kernels-") as scratch:
        jobs = {f"sm_{a}": nvcc_command(nvcc, root, "-cubin", f"-arch=sm_{a}", "-Xptxas", "-v", "-o", f"{scratch}/{a}.cubin")
                for a in sass}
        jobs.update({f"compute_{a}": nvcc_command(nvcc, root, "-ptx", f"-arch=compute_{a}", "-o", f"{scratch}/{a}.ptx")
                     for a in PTX})
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = dict(zip(jobs, pool.map(run, jobs.values())))
        for arch in PTX:
            if not results[f"compute_{arch}"][0]:
                with open(f"{scratch}/{arch}.ptx", encoding="utf-8") as file:
                    results[f"compute_{arch}"] = 0, file.read()
        return results


def built(tree, sass):
    """The same from a build tree, all units together; a unit's log has the messages for all architectures in turn."""
    said = {f"sm_{a}": "" for a in sass} | {f"compute_{a}": "" for a in PTX}
    for unit in sorted(glob.glob(f"{tree}/kernels/*")):
        with open(f"{unit}/kernels.fatbin.log", encoding="utf-8") as file:
            arch = f"sm_{sass[0]}"
            for line in file:
                entry = re.search(r"Compiling entry function '.*' for '(\w+)'", line)
                arch = entry.group(1) if entry else arch
                said[arch] = said.get(arch, "") + line
        for arch in PTX:
            with open(f"{unit}/kernels.compute_{arch}.ptx", encoding="utf-8") as file:
                said[f"compute_{arch}"] += file.read()
    return {target: (0, text) for target, text in said.items()}


# ---- the check ------------------------------------------------------------------------------------
def print_table(used):
    names = sorted(name for name in set().union(*used.values()) if name.startswith("onehop_"))
    width = max(map(len, names), default=9)
    print(f"\n  {'registers':{width}}  " + "  ".join(f"{'sm_' + arch:>6}" for arch in used))
    for name in names:
        print(f"  {name:{width}}  " + "  ".join(f"{used[arch].get(name, ('-',))[0]:>6}" for arch in used))
    print()


def check_tree(report, root, results, cc, nvrtc, sass=SASS, nvrtc_targets=NVRTC_TARGETS):
    """`results` are those of compiled() or built(). Returns architecture -> name -> (registers, stack, spill bytes)."""
    wanted = {}
    for target in sorted({*sass, *PTX, *nvrtc_targets}, key=int):
        wanted[target], message = listed_instances(cc, root, target)
        if wanted[target] is None:
            report.check("instance list", message.splitlines())
            return {}
        problems = [] if wanted[target] else ["empty"]
        if int(target) < 90:
            problems += [f"over multicast: {name}" for name in sorted(wanted[target]) if "_multicast_" in name]
        report.check(f"instance list, sm_{target}", problems, f"{len(wanted[target])} kernels")
    prim = f"{root}/src/kernels/prim/prim_cuda.h"
    if os.path.exists(prim):
        with open(prim, encoding="utf-8") as file:
            problems, count = primitive_problems(file.read())
        report.check("primitives do what their names say", problems, f"{count} instructions")

    used = {}
    for arch in sass:
        code, log = results[f"sm_{arch}"]
        used[arch] = resources(log)
        warnings = [line for line in log.splitlines() if "warning" in line]
        report.check(f"nvcc sm_{arch}", log.splitlines() if code else warnings)
        report.check(f"nvcc sm_{arch}: no stack frame, no spill",
                     [f"{name}: {stack} bytes of stack, {spill} bytes of spills"
                      for name, (_, stack, spill) in used[arch].items() if stack or spill])
        kernels = {name for name in used[arch] if name.startswith("onehop_")}
        report.check(f"nvcc sm_{arch}: every instance", difference(wanted[arch], kernels), f"{len(kernels)}")
    for arch in PTX:
        code, text = results[f"compute_{arch}"]
        report.check(f"nvcc compute_{arch}", text.splitlines() if code else [])
        if not code:
            check_ptx(report, f"nvcc compute_{arch}", text, arch, wanted[arch])
    check_nvrtc(report, root, nvrtc, nvrtc_targets, wanted)
    return used


def check_ptx(report, what, ptx, target, wanted):
    made = entries(ptx)
    report.check(f"{what}: every instance", difference(wanted, made), f"{len(made)}")
    for rule, problems in ptx_rules(ptx, target):
        report.check(f"{what}: {rule}", problems)


def check_nvrtc(report, root, library, targets, wanted):
    if not library:
        for target in targets:
            report.skip(f"NVRTC compute_{target}", "no libnvrtc.so.13 (tools/bootstrap.sh test installs it)")
        return
    with open(f"{root}/src/kernels/kernels.c", encoding="utf-8") as file:
        source = file.read()
    for target, (version, ptx, log) in nvrtc_all(library, source, own_headers(root), targets).items():
        report.check(f"NVRTC compute_{target}", [] if ptx is not None else log.splitlines(), version)
        if ptx is not None:
            check_ptx(report, f"NVRTC compute_{target}", ptx, target, wanted[target])


# ---- self-test ------------------------------------------------------------------------------------
GOOD = """
    griddepcontrol.wait;
    ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1];
    st.relaxed.sys.global.v4.u32 [%rd2], {%r1,%r2,%r3,%r4};
    $L1:
    ld.relaxed.sys.global.u32 %r5, [%rd3];
    @%p1 bra $L1;
    red.relaxed.gpu.global.add.u32 [%rd4], %r1;
    fence.acq_rel.sys;
    ret;"""
# What is planted, the target, the body, and a word of the rule that must catch it ("" for none).
PLANTED_PTX = (
    ("good kernel", "90", GOOD, ""),
    ("arguments before the wait", "90", "ld.param.u64 %rd1, [p]; ld.shared.u32 %r1, [%r2];" + GOOD, ""),
    ("read-only load", "90", GOOD.replace("ld.global.v4", "ld.global.nc.v4"), ".nc"),
    ("read-only load of nvcc", "80", "ld.global.nc.L1::no_allocate.u32 %r1, [%rd1]; ret;", ".nc"),
    ("no wait", "90", GOOD.replace("griddepcontrol.wait;", ""), "griddepcontrol"),
    ("load before the wait", "90", "ld.global.u32 %r1, [%rd1];" + GOOD, "griddepcontrol"),
    ("wait on one path only", "90", "@%p1 bra $L9; griddepcontrol.wait; $L9: ld.global.u32 %r1, [%rd1]; ret;",
     "griddepcontrol"),
    ("wait on both paths", "90", "@%p1 bra $L9; griddepcontrol.wait; bra $L8; $L9: griddepcontrol.wait; $L8: "
     "ld.global.u32 %r1, [%rd1]; ret;", ""),
    ("call before the wait", "90", "call.uni f, (p);" + GOOD, "griddepcontrol"),
    ("multimem on sm_80", "80", "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1]; ret;", "multimem"),
    ("multimem in another kernel", "90",
     "griddepcontrol.wait; multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1]; ret;", "where it belongs"),
    ("slot at .gpu", "90", GOOD.replace("st.relaxed.sys", "st.relaxed.gpu"), "scopes"),
    ("release at .gpu", "80", "st.release.gpu.global.u32 [%rd1], %r1; ret;", "scopes"),
    ("flag at .cta", "80", "st.relaxed.cta.global.u32 [%rd1], %r1; ret;", "scopes"),
    ("fence at .gpu", "90", GOOD.replace("fence.acq_rel.sys", "fence.acq_rel.gpu"), "scopes"),
    ("__threadfence", "80", "membar.gl; ret;", "scopes"),
    ("atomic without order", "80", "atom.global.add.u32 %r1, [%rd1], 1; ret;", "scopes"),
    ("volatile", "80", "ld.volatile.global.u32 %r1, [%rd1]; ret;", "scopes"),
)
# The same in a kernel over multicast.
MULTIMEM = """
    griddepcontrol.wait;
    multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%r1,%r2,%r3,%r4}, [%rd1];
    multimem.st.relaxed.sys.global.v4.f32 [%rd1], {%f1,%f2,%f3,%f4};
    ret;"""
PLANTED_MULTICAST = (
    ("multimem over multicast", "90", MULTIMEM, ""),
    ("multimem over multicast on sm_80", "80", MULTIMEM.replace("griddepcontrol.wait;", ""), "multimem"),
    ("no sum by the switch", "90", MULTIMEM.replace("multimem.ld_reduce", "ld"), "where it belongs"),
    ("no store by the switch", "90", MULTIMEM.replace("multimem.st", "st"), "where it belongs"),
    ("multimem at .gpu", "90", MULTIMEM.replace("st.relaxed.sys", "st.relaxed.gpu"), "scopes"),
)
SAMPLE_PRIM = """
#define KERNEL(name, body, bound) \\
    extern "C" __global__ void __launch_bounds__(bound) name(const __grid_constant__ args a) { body(&a); }
static __device__ __forceinline__ unsigned oh_ld_relaxed_sys_u32(unsigned long long p) {
    unsigned v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
"""
SAMPLE = """
typedef struct args { unsigned long long in, out; } args;
#include "kernels/prim/prim_cuda.h"
static __device__ __forceinline__ void body(const args *a) {
    wait();
    unsigned v = oh_ld_relaxed_sys_u32(a->in + 4 * threadIdx.x); /*HERE*/
    *(unsigned *)(a->out + 4 * threadIdx.x) = v;
}
#define ROW(dtype, w) KERNEL(onehop_sample_##dtype##_w##w, body, 512)
#include "instances.def"
"""
SAMPLE_LIST = "ROW(f32, 2)\nROW(f32, 4) /* ROW(f32, 6) */\nROW(bf16, 2)\n"
PLANTED_SOURCE = (
    ("good sample", "", "", ""),
    ("read-only load in C", "/*HERE*/", "v += __ldg((const unsigned *)a->in);", ".nc"),
    ("local array", "/*HERE*/", "unsigned t[64]; for (unsigned i = 0; i < 64; i++) t[i] = v * i; v = t[v & 63];", "stack"),
    ("NVRTC has no system headers", "typedef struct", "#include <stdint.h>\ntypedef struct", "NVRTC"),
    ("primitive with another scope", "ld.relaxed.sys", "ld.relaxed.gpu", "primitives"),
)


BUILD_LOG = "".join(f"""ptxas info    : Compiling entry function 'onehop_x' for 'sm_{arch}'
ptxas info    : Function properties for onehop_x
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers
""" for arch, registers, stack, spill in (("90", 21, 0, 0), ("80", 32, 8, 4)))


class Listing(Report):
    """A report that only remembers what failed."""

    def __init__(self):
        super().__init__()
        self.failures = []

    def check(self, what, problems, note=""):
        if problems:
            self.failures.append(what)

    def skip(self, what, why):
        pass


def planted_tree(old, new):
    root = tempfile.mkdtemp(prefix="onehop-sample-")
    os.makedirs(f"{root}/src/kernels/prim")
    files = {"kernels.c": SAMPLE, "prim/prim_cuda.h": SAMPLE_PRIM, "instances.def": SAMPLE_LIST}
    for name, text in files.items():
        with open(f"{root}/src/kernels/{name}", "w", encoding="utf-8") as file:
            file.write(text.replace(old, new) if old else text)
    return root


def check_built(report):
    """What a build says is told apart by architecture, and its units are put together."""
    with tempfile.TemporaryDirectory(prefix="onehop-built-") as tree:
        for unit, kernel in ("1", "onehop_x"), ("2", "onehop_y"):
            os.makedirs(f"{tree}/kernels/{unit}")
            texts = {"fatbin.log": BUILD_LOG.replace("onehop_x", kernel)} | {f"compute_{a}.ptx": a + unit for a in PTX}
            for name, text in texts.items():
                with open(f"{tree}/kernels/{unit}/kernels.{name}", "w", encoding="utf-8") as file:
                    file.write(text)
        results = built(tree, ("80", "90"))
    found = {target: text if target in ("compute_80", "compute_90") else resources(text)
             for target, (_, text) in results.items()}
    wanted = {"sm_80": dict.fromkeys(("onehop_x", "onehop_y"), (32, 8, 8)),
              "sm_90": dict.fromkeys(("onehop_x", "onehop_y"), (21, 0, 0)),
              "compute_80": "801802", "compute_90": "901902"}
    report.check("kernels of a build tree", [] if found == wanted else [f"expected {wanted}, found {found}"])


def self_test(report, nvcc, cc, nvrtc):
    check_built(report)
    for what, target, body, word in PLANTED_PTX + PLANTED_MULTICAST:
        name = "onehop_2shot_pull_multicast_F32" if (what, target, body, word) in PLANTED_MULTICAST else "onehop_x"
        text = f".version 9.0\n.visible .entry {name}(\n.param .u64 p\n)\n.maxntid 512\n{{\n{body}\n}}\n"
        caught = [rule for rule, problems in ptx_rules(text, target) if problems]
        good = len(caught) == 1 and word in caught[0] if word else not caught
        report.check(what, [] if good else [f"expected '{word}', caught {caught}"])
    for what, old, new, word in PLANTED_SOURCE:
        if not nvcc or (word == "NVRTC" and not nvrtc):
            report.skip(what, "no nvcc" if not nvcc else "no NVRTC")
            continue
        root = planted_tree(old, new)
        listing = Listing()
        check_tree(listing, root, compiled(nvcc, root, ("90",)), cc, nvrtc, sass=("90",), nvrtc_targets=("90",))
        shutil.rmtree(root)
        good = any(word in failure for failure in listing.failures) if word else not listing.failures
        report.check(what, [] if good else [f"expected '{word}', caught {listing.failures}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=HERE)
    parser.add_argument("--nvcc")
    parser.add_argument("--built")
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--find-nvrtc", action="store_true")
    args = parser.parse_args()
    nvrtc = find_nvrtc()
    if args.find_nvrtc:
        print(nvrtc or "no libnvrtc.so.13")
        return 0 if nvrtc else 1

    nvcc = find_nvcc(args.nvcc)
    report = Report()
    if args.self_test:
        self_test(report, nvcc, args.cc, nvrtc)
        return report.close()
    reason = "" if nvcc else "no nvcc"
    if not os.path.exists(f"{args.root}/src/kernels/kernels.c"):
        reason = "no src/kernels/kernels.c"
    if reason:
        print(f"GPU KERNELS WERE NOT CHECKED: {reason}")
        report.skip("all checks of the GPU kernels", reason)
        report.close()
        return SKIPPED
    results = built(args.built, SASS) if args.built else compiled(nvcc, args.root, SASS)
    print_table(check_tree(report, args.root, results, args.cc, nvrtc))
    return report.close()


if __name__ == "__main__":
    sys.exit(main())
