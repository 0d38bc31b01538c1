"""Sphinx's settings for the site that `make docs` builds from README.md and docs/ (tools/docs.sh).

The source folder is the root of the tree, so that the pages' links to files of the tree hold. Neither a GPU, PyTorch nor
a built extension is needed: the extension is its stub _onehop.pyi, PyTorch is a mock.
"""

import __future__

import os
import re
import sys
import types

SITE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(SITE))

project = "onehop"
author = "the authors of onehop"
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc"]
root_doc = "docs/site/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/notes/*.md", "docs/site/*.md",
                    "bench/results/README.md"]
exclude_patterns = [".git", ".ci", "build", "build-*"]
html_theme = "furo"
html_title = "onehop"
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

breathe_projects = {"onehop": os.path.join(ROOT, "build", "docs-xml", "xml")}
breathe_default_project = "onehop"
breathe_domain_by_extension = {"h": "c"}

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
default_role = "code"
suppress_warnings = ["ref.python"]  # `bytes` of an annotation might be a field of that name
sys.path.insert(0, os.path.join(ROOT, "python"))


class Stand(type):
    """Classes that stand for whatever PyTorch has: any attribute is a class, and annotations show its name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = Stand(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}".removeprefix("builtins.")})
        setattr(cls, name, made)
        return made

    def __call__(cls, *_, **__):
        return Stand("made", (), {})


def load_torch():
    """PyTorch's modules as far as the package imports them."""
    torch = types.ModuleType("torch")
    stand = Stand("torch", (), {"__module__": "builtins"})
    torch.__getattr__ = lambda name: getattr(stand, name)
    sys.modules["torch"] = torch
    for name in "_C", "_C._distributed_c10d", "distributed", "distributed.distributed_c10d", "utils", "utils.dlpack":
        module = sys.modules[f"torch.{name}"] = types.ModuleType(f"torch.{name}")
        module.__getattr__ = lambda name, place=getattr(stand, name): getattr(place, name)


def load_stub():
    """Makes onehop._onehop of the stub, whose text is Python."""
    path = os.path.join(ROOT, "python", "onehop", "_onehop.pyi")
    module = types.ModuleType("onehop._onehop")
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec", __future__.annotations.compiler_flag), module.__dict__)
    with open(os.path.join(ROOT, "include", "onehop.h"), encoding="utf-8") as file:
        parts = re.findall(r"#define ONEHOP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", file.read())
    module.version = lambda: int(parts[0]) * 10000 + int(parts[1]) * 100 + int(parts[2])
    sys.modules[module.__name__] = module
    return ".".join(parts)


load_torch()
release = version = load_stub()


def folders_as_text(app, name, source):
    """A link to a folder of the tree has no page: its text stays."""
    def plain(match):
        target = os.path.join(ROOT, os.path.dirname(name), match[2])
        return match[1] if os.path.isdir(target) else match[0]

    source[0] = re.sub(r"\[([^\]\n]*)\]\(([^)\s#:]+)\)", plain, source[0])


def arguments_as_list(app, what, name, obj, options, lines):
    """Our docstrings say `name: what it means`, with what follows indented: items of a list."""
    for i, line in enumerate(lines):
        found = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if found:
            lines[i] = f"- `{found[1]}`: {found[2]}"
        elif re.match(r" {4,}\S", line) and i and re.match(r"- | {2}\S", lines[i - 1]):
            lines[i] = f"  {line.lstrip()}"
    item = re.compile(r"- | {2}\S")
    for i in range(len(lines) - 1, 0, -1):  # a list stands apart from the paragraphs around it
        if lines[i] and lines[i - 1] and bool(item.match(lines[i])) != bool(item.match(lines[i - 1])):
            lines.insert(i, "")


def setup(app):
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", arguments_as_list)
    app.connect("source-read", folders_as_text)
