#!/usr/bin/env python3
"""Checks the built site: every function of onehop.h and every public name of the Python package has an entry in it, and
every function a text.

check_site.py SITE XML     the site's folder, and that of Doxygen's output
"""

import ast
import glob
import os
import re
import sys
from xml.etree import ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def functions():
    """Those of the header, whose declarations begin with ONEHOP_API."""
    return re.findall(r"^ONEHOP_API [^(;]*?(\w+)\(", read(ROOT, "include", "onehop.h"), re.MULTILINE)


def python_names():
    """`__all__` of the package, without its modules and its version."""
    for node in ast.parse(read(ROOT, "python", "onehop", "__init__.py")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            no_names = "__version__", "distributed", "ops", "symmetric"
            return [name for name in ast.literal_eval(node.value) if name not in no_names]
    raise AssertionError("__all__ was not found")


def without_text(folder):
    """Functions that no comment of the header describes."""
    for path in glob.glob(os.path.join(folder, "group__*.xml")):
        for member in ElementTree.parse(path).iterfind(".//memberdef[@kind='function']"):
            texts = [member.find(part) for part in ("briefdescription", "detaileddescription")]
            if not any("".join(text.itertext()).strip() for text in texts):
                yield member.findtext("name")


def main():
    site, xml = sys.argv[1:]
    c_entries = set(re.findall(r'id="c\.(\w+)"', read(site, "docs", "site", "c-api.html")))
    python_entries = set(re.findall(r'id="onehop\.(?:\w+\.)*(\w+)"', read(site, "docs", "site", "python-api.html")))
    known, names = functions(), python_names()
    assert len(known) > 60 and len(names) > 20, (len(known), len(names))
    missing = [name for name in known if name not in c_entries] + [name for name in names if name not in python_entries]
    for name in missing:
        print(f"{name} has no entry: docs/site/{'c' if name in known else 'python'}-api.md")
    silent = list(without_text(xml))
    for name in silent:
        print(f"{name} has no comment in include/onehop.h")
    if not missing and not silent:
        print(f"{len(known)} functions and {len(names)} Python names have an entry")
    return bool(missing or silent)


if __name__ == "__main__":
    sys.exit(main())
