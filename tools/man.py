#!/usr/bin/env python3
"""Writes packaging/onehop.1, the manual page of the command, from what the command says of itself.

    tools/man.py [--tool build/release/onehop]           writes the page
    tools/man.py --check [--tool build/release/onehop]   says what the page and the completion lack

The check asks for commands, flags and exit codes only: a sentence may change without a new page.
"""

import argparse
import json
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "packaging", "onehop.1")
COMPLETION = os.path.join(ROOT, "packaging", "onehop.bash")

HEAD = r""".\" Written by tools/man.py from what the command says of itself.
.TH ONEHOP 1 "" "onehop {version}" "User Commands"
.SH NAME
onehop \- all-reduce between the processors of one machine: measure, verify, tune
.SH SYNOPSIS
.B onehop
.I COMMAND
.RI [ FLAGS ]
.SH DESCRIPTION
The command of libonehop, a library of all-reduce, reduce-scatter and all-gather for NVIDIA GPUs and for
processes of the host.
Sizes are integers with an optional K, M or G (1024, 1024^2, 1024^3).
A flag's value follows as the next word or behind an equals sign:
.B \-\-ranks 2
or
.BR \-\-ranks=2 .
.SH COMMANDS
"""
TAIL = r""".SH FILES
What
.B \-J
and
.B tune \-o
name is written under another name in its directory and renamed: readers see the whole file or the old one.
.B perf \-J
writes it after each size: a run that is ended early leaves what it measured.
.SH EXAMPLES
.TP
.B onehop perf
times and verifies all-reduce on all GPUs, or without GPUs on the host.
.TP
.B onehop perf \-\-device host \-g 2 \-e 64K \-J out.json
two ranks of the host, messages to 64 KiB, results as JSON.
.TP
.B onehop which 64K \-g 2 \-\-device cuda
says by which rule of the tuning tables a message goes its way.
.SH SEE ALSO
The header
.I onehop.h
is the manual of the library.
"""


def say(tool, *words):
    return subprocess.run([tool, *words], capture_output=True, text=True, timeout=60, check=True).stdout


def escape(text):
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def commands(tool):
    """{command: its summary}"""
    found = dict(re.findall(r"^  (\w+) +(.+)$", say(tool, "help"), re.MULTILINE))
    if not found:
        sys.exit(f"{tool} help lists no command")
    return found


def flags(help_text):
    """[(-b or "", --minbytes, SIZE or "", meaning)]"""
    found = re.findall(r"^ +(?:(-\w), )?(--[\w-]+)(?: (\S+))? {2,}(.*)$", help_text, re.MULTILINE)
    if len(found) != len(re.findall(r"^ +(?:-\w, +)?--", help_text, re.MULTILINE)):
        sys.exit(f"not every flag is understood:\n{help_text}")
    return found


def exit_codes(tool):
    """[(number, meaning)]"""
    line = re.search(r"^exit codes: (.*)$", say(tool, "help"), re.MULTILINE)[1]
    return re.findall(r"(\d+) (.*?)(?:, (?=\d)|$)", line)


def command_page(tool, name, summary):
    text = say(tool, "help", name)
    usage = re.match(r"usage: onehop (.*)\n", text)
    yield f".SS {escape(usage[1] if usage else name)}\n"
    about = re.sub(r"\s+", " ", text.split("\n\n", 2)[1]) if usage else summary[0].upper() + summary[1:] + "."
    yield escape(about).replace(". ", ".\n") + "\n"
    for letter, flag, value, meaning in flags(text):
        names = ", ".join(rf"\fB{escape(each)}\fR" for each in (letter, flag) if each)
        value = rf" \fI{escape(value)}\fR" if value else ""
        yield f".TP\n{names}{value}\n{escape(meaning)}\n"


def page(tool):
    info = json.loads(say(tool, "info", "--json"))
    yield HEAD.replace("{version}", info["version"])
    for name, summary in commands(tool).items():
        yield from command_page(tool, name, summary)
    yield ".SH EXIT STATUS\n"
    for code, meaning in exit_codes(tool):
        yield f".TP\n.B {code}\n{escape(meaning)}\n"
    yield ".SH ENVIRONMENT\n"
    for row in info["environment"]:
        default = f" (default {row['default']})" if row["default"] else ""
        yield f".TP\n.B {escape(row['name'])}\n{escape(row['meaning'] + default)}\n"
    yield TAIL


def lacks(tool):
    """What is in the command, but not in its page or its completion."""
    with open(PAGE, encoding="utf-8") as file:
        manual = file.read()
    with open(COMPLETION, encoding="utf-8") as file:
        completion = file.read()
    sections = dict(re.findall(r"^\.SS (\w+)[^\n]*\n(.*?)(?=^\.S[SH] )", manual, re.MULTILINE | re.DOTALL))
    for name in commands(tool):
        if name not in sections:
            yield f"the page has no command {name}"
            continue
        listed = re.search(rf"^ +{name}\) +flags=\"([^\"]*)\"", completion, re.MULTILINE)
        if not listed:
            yield f"the completion has no command {name}"
        told, wanted = re.findall(r"\\fB(\S+?)\\fR", sections[name]), []
        for letter, flag, _, _ in flags(say(tool, "help", name)):
            wanted += [each for each in (letter, flag) if each]
            if listed and flag not in listed[1].split():
                yield f"the completion lacks {name} {flag}"
        yield from (f"the page lacks {name} {each}" for each in wanted if escape(each) not in told)
        yield from (f"the page has {name} {each}, which there is not" for each in told if each not in map(escape, wanted))
        for each in listed[1].split() if listed else ():
            if each not in wanted and each != "--help":
                yield f"the completion has {name} {each}, which there is not"
    for code, _ in exit_codes(tool):
        if f".B {code}\n" not in manual:
            yield f"the page lacks exit code {code}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default=os.path.join(ROOT, "build", "release", "onehop"))
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        wrong = list(lacks(given.tool))
        print("\n".join(wrong) or "page and completion have every command and flag")
        return 1 if wrong else 0
    text = "".join(page(given.tool))
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
