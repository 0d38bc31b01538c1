#!/usr/bin/env python3
"""Checks what the documents quote, README.md, CHANGELOG.md, CONTRIBUTING.md and docs/*.md:

- every name in backticks that looks like ours (onehop_*, ONEHOP_*, oh_*, OH_*) is in the sources;
- every file path in backticks exists, in the tree or in what the build makes;
- every relative link leads to a file, and its anchor to a heading;
- operations.md has every environment variable of src/base/base.h, and every result code of onehop.h.

    check_docs.py [ROOT]       checks; ends with 1 if anything is wrong
    check_docs.py --write      writes the table of environment variables into docs/operations.md
    check_docs.py --self-test  plants faults in pages and wants each of them found
"""

import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
SOURCES = ("include/", "src/", "python/", "tests/", "cmake/", "bench/", "examples/", "tools/")
SOURCE_FILES = ("CMakeLists.txt", "CMakePresets.json", "Makefile", "pyproject.toml")
NAME = re.compile(r"\b(?:onehop|ONEHOP|oh|OH)_\w*\*?")
# Names that pages quote because they are gone.
FORMER = {"CHANGELOG.md": re.compile(r"onehop_t|onehop_stream_t|onehop_op_t|onehop_comm_row_\w*|ONEHOP_ERR_ROW|onehop_(?:all_reduce|reduce_scatter|all_gather)_with")}
# Begins with a folder of the tree, or is a file of one of the kinds that the tree has.
PATH = re.compile(r"(?:\.\./)*(?:(?:bench|cmake|docs|examples|include|python|src|tests|tools|\.ci)/[\w./*-]*"
                  r"|[\w-]+\.(?:def|md|map|py|sh|table))")
MADE = re.compile(r"build/|.*\*|.*NAME|onehop\.table$|my\.table$")
# Files of the engines that engines.md speaks of.
FOREIGN = {"docs/engines.md": {"custom_all_reduce.py", "cuda_communicator.py"}}
LINK = re.compile(r"\]\(([^)\s]+)\)")
WIDTH = 100
FENCE = re.compile(r"^```.*?^```[ \t]*$|^(?:    [^\n]*\n)+", re.DOTALL | re.MULTILINE)
BEGIN, END = "<!-- environment: written by tools/check_docs.py --write -->\n", "<!-- end -->"


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


def words_of_sources(root):
    """All words of the sources, and their files."""
    words, files = set(), set()
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True,
                            check=False).stdout.split("\n")
    if not any(listed):  # no git: whatever lies there
        listed = [os.path.relpath(os.path.join(folder, name), root)
                  for folder, _, names in os.walk(root) for name in names]
    for path in listed:
        if not path or path.startswith("build") or not os.path.isfile(os.path.join(root, path)):
            continue
        files.add(path)
        if (path.startswith(SOURCES) or path in SOURCE_FILES) and path != "tools/check_docs.py":
            with open(os.path.join(root, path), encoding="utf-8", errors="replace") as file:
                words.update(re.findall(r"\w+", file.read()))
    return words, files


def anchors(text):
    """Anchors of the headings, as GitHub and MyST make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.*?)[ \t]*$", FENCE.sub("", text), re.MULTILINE):
        heading = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while f"{heading}-{number}" in found or (number == 0 and heading in found):
            number += 1
        found.add(f"{heading}-{number}" if number else heading)
    return found


def is_kernel(root, name):
    """Names of kernels are put together from the lines of these lists."""
    parts = re.fullmatch(r"onehop_(\w+)_(F32|F16|BF16)_w\d+", name)
    lists = [read(root, f"src/kernels/{file}") for file in ("instances.def", "fused/fused.def")]
    return parts and any(re.search(rf"\({parts[1]}, \w+, (\w+, )?{parts[2]}[,)]", text) for text in lists)


def known(name, words, prefixes):
    """`onehop_comm_registration_*` stands for all names that begin so."""
    return any(word.startswith(name[:-1]) for word in prefixes) if name.endswith("*") else name in words


def check_names(root, page, text, words):
    prefixes = {word for word in words if NAME.match(word)}
    gone = FORMER.get(page)
    for quoted in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        for name in NAME.findall(quoted):
            gone_here = gone and gone.fullmatch(name.rstrip("*"))
            if not known(name, words, prefixes) and not gone_here and not is_kernel(root, name):
                yield f"{page}: `{name}` is not in the sources"


def check_paths(root, page, text, files):
    names = {os.path.basename(path) for path in files}
    for quoted in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        for path in quoted.split():
            path = re.sub(r":.*", "", path)
            if not PATH.fullmatch(path) or MADE.match(path) or NAME.match(path) or path in FOREIGN.get(page, ()):
                continue
            places = [path, os.path.join(os.path.dirname(page), path), os.path.join("src", path)]
            if path not in names and not any(os.path.exists(os.path.join(root, place)) for place in places):
                yield f"{page}: there is no `{path}`"


def check_links(root, page, text):
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if file != page and not os.path.exists(os.path.join(root, file)):
            yield f"{page}: the link to {target} leads nowhere"
        elif anchor and file.endswith(".md") and anchor not in anchors(text if file == page else read(root, file)):
            yield f"{page}: {file} has no heading #{anchor}"


def variables(root):
    """(name, default, meaning) of OH_ENV_TABLE."""
    table = re.search(r"#define OH_ENV_TABLE\(X\)(.*?)\n\n", read(root, "src/base/base.h"), re.DOTALL)[1]
    rows = re.findall(r'X\(\w+,\s*"(\w+)",\s*"(\w+)",\s*"([^"]*)",\s*"([^"]*)"\)', table.replace("\\\n", "\n"))
    return [(name, default, meaning) for name, _, default, meaning in rows]


def environment_table(root):
    """The rows of base.h as Markdown."""
    rows = [f"| `{name}` | {default} | {meaning} |" for name, default, meaning in variables(root)]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows, ""])


def check_operations(root):
    page = "docs/operations.md"
    text = read(root, page)
    table = text[text.index(BEGIN) + len(BEGIN):text.index(END)]
    if table != environment_table(root):
        yield f"{page}: the table of variables is not that of src/base/base.h; tools/check_docs.py --write writes it"
    header = re.findall(r"X\((ONEHOP_\w+), (-?\d+), ", read(root, "include/onehop.h"))
    told = re.findall(r"^### (ONEHOP_\w+) \((-?\d+)\)$", text, re.MULTILINE)
    if told != header:
        wrong = sorted(set(told) ^ set(header)) or "their order"
        yield f"{page}: the results are not those of include/onehop.h: {wrong}"


def check_width(page, text):
    """Prose is wrapped; code, tables and a single long word are not asked."""
    for number, line in enumerate(FENCE.sub(lambda m: "\n" * m.group().count("\n"), text).splitlines(), 1):
        words = max((len(word) for word in line.split()), default=0)
        if len(line) > WIDTH and not line.startswith("|") and words < WIDTH - 20:
            yield f"{page}:{number}: the line has {len(line)} columns, at most {WIDTH}"


def problems(root, pages=None):
    """What is wrong, a sentence each. `pages`: page -> text, instead of those on disk."""
    words, files = words_of_sources(root)
    if pages is None:
        docs = sorted(name for name in os.listdir(os.path.join(root, "docs")) if name.endswith(".md"))
        pages = {page: read(root, page) for page in [*PAGES, *(f"docs/{name}" for name in docs)]}
        yield from check_operations(root)
    for page, text in pages.items():
        yield from check_names(root, page, text, words)
        yield from check_paths(root, page, text, files)
        yield from check_links(root, page, text)
        yield from check_width(page, text)


def write(root):
    path = os.path.join(root, "docs", "operations.md")
    text = read(root, "docs/operations.md")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text[:start] + environment_table(root) + text[end:])


def self_test():
    faults = {
        "`onehop_crate`": "not in the sources",
        "`onehop_grop_*`": "not in the sources",
        "`onehop_1shot_push_bfloat16_w2`": "not in the sources",
        "`oh_mesh_opne(x)`": "not in the sources",
        "`src/base/bsae.h`": "there is no",
        "`tools/chek_docs.py --write`": "there is no",
        "`kernelz.def`": "there is no",
        "[a](nowhere.md)": "leads nowhere",
        "[a](faq.md#nothing)": "no heading",
        "[a](#nothing)": "no heading",
        21 * "word ": "columns, at most",
    }
    right = ("# A `b` (c)\n`onehop_create`, `onehop_group_*`, `onehop_1shot_push_BF16_w2`, `src/base/base.h`,\n`base/base.h`, [a](#a-b-c)\n"
             "[b](../README.md) [c](https://example.org/x)\n```\n`onehop_crate`\n```\n")
    failed = [f"wrongly found: {one}" for one in problems(HERE, {"docs/self-test.md": right})]
    for text, expected in faults.items():
        found = list(problems(HERE, {"docs/self-test.md": text + "\n"}))
        if len(found) != 1 or expected not in found[0]:
            failed.append(f"{text}: expected one '{expected}', found {found}")
    print("\n".join(failed) or f"{len(faults)} faults found")
    return bool(failed)


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:] == ["--write"]:
        return write(HERE)
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    found = list(problems(sys.argv[1] if len(sys.argv) == 2 else HERE))
    print("\n".join(found) or "the documents quote what there is")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
