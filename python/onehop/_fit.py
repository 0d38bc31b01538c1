"""What an engine's source asks of the object that stands for its all-reduce, and whether ours has it.

Read from the source text, without an import of the engine: so a start and tools/engine_names.py ask the same questions.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Use(NamedTuple):
    """How a source uses the object that it keeps as `holder`."""

    keywords: set[str]
    """Of the calls that make it."""
    positional: int
    """The most arguments without a name in such a call."""
    attributes: set[str]
    """That it must have."""
    optional: set[str]
    """That are used where the object has them, or where it is of the engine's own class."""


class Parameters(NamedTuple):
    """Of a function, without `self`: those that may be given by place, in order, and those by name only."""

    positional: list[str]
    named: list[str]


class NoSource(Exception):
    """A sentence: what could not be found."""


def source_of(module: str) -> str:
    """The text of a module, which is not imported; its packages are."""
    try:
        spec = importlib.util.find_spec(module)
        origin = spec.origin if spec else None
        if origin is None:
            raise NoSource(f"there is no {module}")
        with open(origin, encoding="utf-8") as file:
            return file.read()
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise NoSource(f"{module} cannot be read: {error}") from error


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Functions and methods; what is defined inside one belongs to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        else:
            yield from functions(node)


def parameters(source: str, name: str, owner: str | None = None) -> Parameters | None:
    """Of the function `name`, of the class `owner` or of the module; None: it is not there."""
    place: ast.AST | None = ast.parse(source)
    if owner is not None:
        classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
        place = next((node for node in classes if node.name == owner), None)
    for node in ast.iter_child_nodes(place) if place else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
            return Parameters(given[owner is not None :], [one.arg for one in node.args.kwonlyargs])
    return None


def imports_when_called(source: str, name: str) -> bool:
    """Whether functions import `name` when they run, and the module itself never does."""
    tree = ast.parse(source)
    inside = {id(node) for one in functions(tree) for node in ast.walk(one)}
    found = [
        id(node) in inside
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names)
    ]
    return bool(found) and all(found)


class _Function:
    """The names of one function that mean the object, or what makes it."""

    def __init__(self, node: ast.AST, holder: str, makers: Iterable[str]) -> None:
        self.nodes = list(ast.walk(node))
        self.holder, self.aliases, self.makers = holder, {holder}, set(makers)
        self.given = set(makers)  # makers, without what they returned
        for one in self.nodes:
            if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
                target = one.targets[0].id
                if self.is_object(one.value):
                    self.aliases.add(target)
                elif isinstance(one.value, ast.Call) and name_of(one.value.func) in self.given:
                    self.makers.add(target)

    def is_object(self, node: ast.AST) -> bool:
        """self.ca_comm, ca_comm, a name for it, getattr(x, "ca_comm", None)."""
        if isinstance(node, ast.Attribute):
            return node.attr == self.holder
        if isinstance(node, ast.Name):
            return node.id in self.aliases
        return (
            isinstance(node, ast.Call)
            and name_of(node.func) == "getattr"
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and node.args[1].value == self.holder
        )

    def asked(self) -> tuple[bool, set[str]]:
        """Whether its class is looked at, and the names that are looked for."""
        own, names = False, set[str]()
        for one in self.nodes:
            if isinstance(one, ast.Call) and len(one.args) > 1 and self.is_object(one.args[0]):
                what, called = one.args[1], name_of(one.func)
                own = own or called == "isinstance"
                if called in ("hasattr", "getattr") and isinstance(what, ast.Constant):
                    names.add(str(what.value))
        return own, names


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def uses(source: str, holder: str, makers: Iterable[str] = ()) -> Use:
    """How a module uses the object of that name. `makers`: the class, or functions that return it."""
    makers = set(makers)
    found = Use(set(), 0, set(), set())
    positional = 0
    asked = set[str]()
    for node in functions(ast.parse(source)):
        function = _Function(node, holder, makers)
        own, names = function.asked()
        asked |= names
        into = found.optional if own else found.attributes
        for one in function.nodes:
            if isinstance(one, ast.Attribute) and function.is_object(one.value):
                into.add(one.attr)
            if isinstance(one, ast.Call) and name_of(one.func) in function.makers:
                found.keywords.update(keyword.arg for keyword in one.keywords if keyword.arg)
                positional = max(positional, len(one.args))
    return Use(found.keywords, positional, found.attributes - asked, found.optional | asked)


def has(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute: defined or declared."""
    return any(name in vars(one) or name in vars(one).get("__annotations__", {}) for one in kind.__mro__)


def misfits(kind: type, ours: Parameters, theirs: Parameters | None, found: Use) -> list[str]:
    """What is asked of the object that `kind` has not. `theirs`: parameters of the constructor it stands for."""
    wrong = []
    name, known = kind.__name__, {*ours.positional, *ours.named}
    if theirs is not None:
        wrong += [f"{name} has no argument {one}" for one in (*theirs.positional, *theirs.named) if one not in known]
        if ours.positional[: found.positional] != theirs.positional[: found.positional]:
            wrong.append(f"{name} is made with arguments in another order: {', '.join(theirs.positional)}")
    wrong += [f"{name} is made with {one}=" for one in sorted(found.keywords - known)]
    if found.positional > len(ours.positional):
        wrong.append(f"{name} is made with {found.positional} arguments")
    return wrong + [f"{name}.{one} is used" for one in sorted(found.attributes) if not has(kind, one)]


def signature(kind: type) -> Parameters:
    """Of our constructor."""
    import inspect

    found = list(inspect.signature(kind).parameters.values())
    return Parameters(
        [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD],
        [one.name for one in found if one.kind is one.KEYWORD_ONLY],
    )
