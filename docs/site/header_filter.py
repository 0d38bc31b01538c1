#!/usr/bin/env python3
"""Doxygen's input filter for include/onehop.h: header_filter.py FILE writes what Doxygen understands.

The header has plain comments, and rulers between its parts. Here

- a ruler `/* ---- name ---- */` begins a group, which docs/site/c-api.md shows;
- a comment before a declaration documents it and those that follow it without an empty line;
- a comment behind a member documents that member;
- lines of a comment that are indented, and no list, stay as they are;
- the list of results becomes the enumeration that is made of it.
"""

import re
import sys

RULER = re.compile(r"^/\* ---- (.*?) -+ \*/$", re.MULTILINE)
RESULT = re.compile(r'X\((\w+), (-?\d+), +"([^"]*)"\)')
TAGGED = re.compile(r"typedef (struct|enum) (\w+) \{\n(.*?)^\} \2;$", re.DOTALL | re.MULTILINE)
# What stands before a comment on its line, and the comment.
COMMENT = re.compile(r"^([^\n/]*)/\* (?!----)(.*?)[ \n]\*/", re.DOTALL | re.MULTILINE)


def results(text):
    """The list of results becomes an enumeration like others."""
    members = "".join(f"    {name} = {value}, /* {meaning} */\n" for name, value, meaning in RESULT.findall(text))
    text = re.sub(r"#define ONEHOP_RESULTS\(X\).*?\n\n", "", text, flags=re.DOTALL)
    return re.sub(r"(typedef enum onehop_result \{\n).*?^(\} onehop_result;)", lambda enum: enum[1] + members + enum[2],
                  text, flags=re.DOTALL | re.MULTILINE)


def body(text):
    """A comment's text: Doxygen's own characters escaped, indented lines that are no list kept as they are."""
    out, kept, in_list = [], [], False

    def end_kept():
        if kept:  # in one piece, for a verbatim line shows its asterisk
            out.append("\n".join(["@verbatim", *kept, "@endverbatim"]))
            kept.clear()

    for line in text.split("\n"):
        line = re.sub(r"^ *\* ?", "", line) if out or kept else line
        indent = len(line) - len(line.lstrip())
        in_list = line.lstrip().startswith("- ") or (in_list and indent > 0)
        if indent >= 2 and not in_list and out:
            kept.append(line)
            continue
        end_kept()
        out.append(re.sub(r"([<>@\\%#])", r"\\\1", line))
    end_kept()
    return "\n * ".join(out)


def comment(match):
    """A plain comment as Doxygen's, for what is behind it or for what is before it."""
    before, text = match[1], match[2]
    if before.lstrip().startswith("#"):
        return match[0]
    return f"{before}/**{'<' if before.strip() else ''} {body(text)}\n */"


def shared(text):
    """A comment before several functions without an empty line between them is given to each."""
    blocks = text.split("\n\n")
    for i, block in enumerate(blocks):
        found = re.match(r"(/\*\* .*?\*/\n)(ONEHOP_API .*)$", block, re.DOTALL)
        if found:
            blocks[i] = "\n".join(found[1] + one for one in re.findall(r"ONEHOP_API .*?;", found[2], re.DOTALL))
    return "\n\n".join(blocks)


def groups(text):
    """Rulers become groups; what is before the first one is the file's own."""
    first, *parts = RULER.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return first.replace("/** ", "/** @file\n * ", 1) + "".join(
        f"/** @defgroup {re.sub(r'[^a-z]+', '_', title)} {title}\n * @{{ */\n{part}\n/** @}} */\n" for title, part in pairs)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        text = results(file.read())
    text = COMMENT.sub(comment, text)
    sys.stdout.write(groups(shared(TAGGED.sub(r"\1 \2 {\n\3};", text))))


if __name__ == "__main__":
    main()
