#!/usr/bin/env python3
"""Holds what programs were compiled against, in include/onehop.h, against the list packaging/onehop.abi: functions with
their types, structs with their sizes and the places of their fields, numbers of enums and macros. What is marked experimental is not in it.

    check_abi.py [--cc CC]            says what was taken away or moved; new functions, numbers, and fields at the end of a
                                      struct that begins with struct_size are welcome
    check_abi.py --record             writes the list anew: at a release, or after a change that is meant (CHANGELOG.md)
    check_abi.py --abidiff LIBRARY [--tag TAG]   compares libonehop.so with that of a tag (the last one), built here, by
                                      libabigail's abidiff; 77 if there is no tag or no abidiff
    check_abi.py --self-test
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIST = os.path.join(ROOT, "packaging", "onehop.abi")
SKIPPED = 77
BEGIN = "the_header_begins"


def preprocess(cc, include, *flags):
    source = f"#include <stddef.h>\n#include <stdint.h>\nint {BEGIN};\n#include <onehop.h>\n"
    return subprocess.run([*cc, "-E", "-P", *flags, f"-I{include}", "-x", "c", "-"], input=source, capture_output=True,
                          text=True, check=True).stdout  # fmt: skip


def names_of_fields(body):
    for field in filter(str.strip, body.split(";")):
        pointer = re.search(r"\(\*(\w+)\)", field)
        if pointer:
            yield pointer[1]
            continue
        for declarator in re.sub(r"\[[^]]*\]", "", field).split(","):
            yield re.findall(r"\w+", declarator)[-1]


def facts_of(cc, include):
    """{what: value}, in the order of the header."""
    text = re.sub(r"\s+", " ", preprocess(cc, include).split(f"int {BEGIN};", 1)[1])
    text = re.sub(r"__attribute__\s*\(\(.*?\)\)\s*\)?", "", text).strip()
    facts, asked = {}, []
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", text):
        asked.append((f"struct {name}", f"sizeof({name})"))
        for field in names_of_fields(body):
            asked.append((f"field {name}.{field}", f"offsetof({name}, {field})"))
            asked.append((f"size {name}.{field}", f"sizeof((({name} *)0)->{field})"))
    for body in re.findall(r"enum \w+ \{(.*?)\}", text):
        asked += [(f"enum {name}", name) for name in re.findall(r"(\w+)(?: =[^,]*)?(?:,|$)", body.strip())]
    for name in re.findall(r"^#define (ONEHOP_\w+) \(?-?[0-9]\w*\)?$", preprocess(cc, include, "-dM"), re.MULTILINE):
        if not name.startswith("ONEHOP_VERSION"):
            asked.append((f"macro {name}", name))
    for statement in re.sub(r"(typedef )?(struct|enum) \w+ \{.*?\}[^;]*;", "", text).split(";"):
        function = re.match(r"(.*?)\b(onehop_\w+)\((.*)\)$", statement.strip())
        if function and "typedef" not in function[1]:
            facts[f"function {function[2]}"] = f"{function[1].strip()} ({function[3].strip()})"
        elif statement.strip().startswith("typedef"):
            facts[f"type {re.findall(r'onehop_[a-z_]+', statement)[-1 if '(*' not in statement else 0]}"] = statement.strip()
    prints = "".join(f'    printf("%lld\\n", (long long)({value}));\n' for _, value in asked)
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "abi.c"), os.path.join(folder, "abi")
        with open(source, "w", encoding="utf-8") as file:
            file.write(f"#include <onehop.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{prints}}}\n")
        subprocess.run([*cc, f"-I{include}", "-o", program, source], check=True)
        values = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    facts.update({what: value for (what, _), value in zip(asked, values)})
    return facts


def broken(old, new):
    """Sentences: what a program that was compiled against the old list would not find as it was."""
    for what, value in old.items():
        now = new.get(what)
        if now == value:
            continue
        kind, name = what.split(" ", 1)
        if now is None:
            yield f"{what} is gone (it was {value})"
        elif kind == "struct" and f"field {name}.struct_size" in old and int(now) > int(value):
            continue
        else:
            yield f"{what} was {value}, is {now}"
    for what in new:
        name = what.split(" ", 1)[1].split(".")[0]
        if what.startswith("field ") and what not in old and f"struct {name}" in old:
            if int(new[what]) < int(old[f"struct {name}"]):
                yield f"{what} is new, and not at the end"


def read_list():
    with open(LIST, encoding="utf-8") as file:
        return dict(line.rstrip("\n").split(": ", 1) for line in file if not line.startswith("#"))


def abidiff(library, tag, cc):
    if not tag:
        done = subprocess.run(["git", "-C", ROOT, "describe", "--tags", "--abbrev=0"], capture_output=True, text=True)
        tag = done.stdout.strip()
    if not tag or not shutil.which("abidiff"):
        print("SKIPPED: " + ("there is no abidiff (Debian: abigail-tools)" if tag else "nothing is tagged yet"))
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        tree = subprocess.run(["git", "-C", ROOT, "archive", tag], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=tree, check=True)
        build = os.path.join(folder, "build")
        subprocess.run(["cmake", "-S", folder, "-B", build, f"-DCMAKE_C_COMPILER={cc[0]}", "-DONEHOP_CUDA=OFF", "-DONEHOP_TESTS=OFF",
                        "-DONEHOP_PYTHON_PACKAGE=OFF"], stdout=subprocess.DEVNULL, check=True)  # fmt: skip
        subprocess.run(["cmake", "--build", build, "--target", "onehop", "--parallel"], stdout=subprocess.DEVNULL, check=True)
        print(f"abidiff of {tag} and {library}", flush=True)
        command = ["abidiff", "--headers-dir1", os.path.join(folder, "include"), "--headers-dir2", os.path.join(ROOT, "include"),
                   os.path.join(build, "libonehop.so"), library]  # fmt: skip
        status = subprocess.run(command).returncode
    # Bit 2: something changed; bit 3: a program that was compiled before may not run.
    return 1 if status & 8 or status & 3 else 0


def self_test(cc):
    with open(os.path.join(ROOT, "include", "onehop.h"), encoding="utf-8") as file:
        header = file.read()
    old = facts_of(cc, os.path.join(ROOT, "include"))
    promised = re.sub(r"#ifdef ONEHOP_EXPERIMENTAL.*?#endif", "", header, flags=re.DOTALL)
    assert len([what for what in old if what.startswith("function ")]) == promised.count("\nONEHOP_API "), "functions"
    config = re.search(r"typedef struct onehop_config \{(.*?)\} onehop_config;", header, re.DOTALL)
    middle = config.start(1) + re.search(r"struct_size;[^\n]*\n", config[1]).end()
    cases = (
        (header, None),
        (f"{header[:config.end(1)]}    uint64_t since_then;\n{header[config.end(1):]}", None),
        (f"{header[:middle]}    uint64_t in_the_middle;\n{header[middle:]}", "onehop_config.in_the_middle is new"),
        (header.replace("ONEHOP_API int onehop_rank(const onehop_context *context);", ""), "function onehop_rank is gone"),
        (header.replace("int onehop_rank(const", "long onehop_rank(const"), "function onehop_rank was int"),
        (header.replace("ONEHOP_MODE_GRAPH = 1", "ONEHOP_MODE_GRAPH = 2"), "enum ONEHOP_MODE_GRAPH was 1, is 2"),
        (header.replace("ONEHOP_FLAG_NCCL 4u", "ONEHOP_FLAG_NCCL 32u"), "macro ONEHOP_FLAG_NCCL was 4"),
        (header.replace("typedef struct onehop_failure {", "typedef struct onehop_failure {\n    uint64_t more;"), "struct onehop_failure was"),
    )  # fmt: skip
    for text, expected in cases:
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "onehop.h"), "w", encoding="utf-8") as file:
                file.write(text)
            said = "\n".join(broken(old, facts_of(cc, folder)))
        assert (expected in said) if expected else not said, (expected, said)
    print(f"{len(cases)} headers judged as they should be")
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--abidiff", metavar="LIBRARY")
    parser.add_argument("--tag")
    given = parser.parse_args()
    cc = given.cc.split()
    if given.self_test:
        return self_test(cc)
    if given.abidiff:
        return abidiff(given.abidiff, given.tag, cc)
    facts = facts_of(cc, os.path.join(ROOT, "include"))
    if given.record:
        with open(LIST, "w", encoding="utf-8") as file:
            file.write("# What programs were compiled against; written by tools/check_abi.py --record.\n")
            file.writelines(f"{what}: {value}\n" for what, value in facts.items())
        return 0
    wrong = list(broken(read_list(), facts))
    if wrong:
        print("\n".join(wrong))
        print("If this is meant, say so in CHANGELOG.md and run tools/check_abi.py --record.")
    else:
        print(f"{len(facts)} facts of onehop.h are as programs know them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
