#!/usr/bin/env python3
"""Takes programs out of Markdown pages, so that what a page shows is what the tests build and run.

    doc_example.py PAGE NAME OUT   writes the program NAME to the file OUT
    doc_example.py PAGE            lists the programs: name, then the words of its mark

A line `<!-- example: NAME WORD... -->` before a block marks a program. Without a mark the first C block of a page is
the program `first.c`. Words: `gpu` needs GPUs, `ranks=N` is started N times,
`together` makes no sense for one rank.
"""

import re
import sys
from typing import NamedTuple

BLOCK = re.compile(
    r"(?:^<!-- example: (?P<mark>[^\n]*?) -->\n)?^```(?P<language>c|python)[ \t]*\n(?P<text>.*?)^```[ \t]*$",
    re.DOTALL | re.MULTILINE,
)


class Example(NamedTuple):
    """A program: what it is called, what its mark says, its text, and the line of the page where that begins."""

    name: str
    words: list
    text: str
    line: int


def examples(path):
    """The programs of a page."""
    with open(path, encoding="utf-8") as file:
        page = file.read()
    blocks = list(BLOCK.finditer(page))
    marked = [block for block in blocks if block["mark"]]
    if not marked:
        marked = [block for block in blocks if block["language"] == "c"][:1]
    found = []
    for block in marked:
        name, *words = (block["mark"] or "first.c").split()
        found.append(Example(name, words, block["text"], page.count("\n", 0, block.start("text")) + 1))
    return found


def main():
    if len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    page = sys.argv[1]
    if len(sys.argv) == 2:
        for example in examples(page):
            print(example.name, *example.words)
        return
    name, out = sys.argv[2:]
    for example in examples(page):
        if example.name == name:
            with open(out, "w", encoding="utf-8") as file:
                if name.endswith(".c"):
                    file.write(f'#line {example.line} "{page}"\n')
                file.write(example.text)
            return
    sys.exit(f"{page}: no program {name}")


if __name__ == "__main__":
    main()
