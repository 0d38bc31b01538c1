#!/usr/bin/env python3
"""Writes the first C block of a Markdown file to a C file: readme_example.py README.md OUT.c"""

import re
import sys


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    markdown, out = sys.argv[1:]
    with open(markdown, encoding="utf-8") as file:
        text = file.read()
    block = re.search(r"^```c[ \t]*\n(.*?)^```[ \t]*$", text, re.DOTALL | re.MULTILINE)
    if not block:
        sys.exit(f"{markdown}: no ```c block")
    line = text.count("\n", 0, block.start(1)) + 1
    with open(out, "w", encoding="utf-8") as file:
        file.write(f'#line {line} "{markdown}"\n{block.group(1)}')


if __name__ == "__main__":
    main()
