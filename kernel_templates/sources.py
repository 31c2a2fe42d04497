"""The kernel hash: a fingerprint of all code that affects a variant's result or time."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from .errors import TunerError
from .gpu import Gpu
from .outcome import Environment
from .registry import templates

# A definition: its module and its name there. The name `ALL` means the whole module.
Name = tuple[str, str]
ALL = "*"
# Makes every launcher, so it counts for every template.
_MAKER = (f"{__package__}.launch.launcher", "make_launcher")
# Lists the declarations of templates, which do not count.
_REGISTRY = f"{__package__}.registry"
# Fields of a node that follow from its position or describe only its spelling.
_IGNORED = {"ctx", "kind", "type_comment"}


@functools.cache
def kernel_hash(template: str) -> str:
    """A hash over the code that `make_launcher` and the launcher of `template` reach, as 16 hexadecimal digits.

    A definition reaches all definitions that it names, within this package and the launcher's own. Definitions are
    numbered in the order in which they are first named, and each name counts with the number of its definition. So the
    hash ignores in which module a definition stands, but not which one of several equal names is used. It also ignores
    comments, docstrings, formatting, the arguments of raised errors, and the template's declaration, choices and
    constraints included. Raises `TunerError` if the template is not installed or its launcher's module cannot be found.
    """
    record = templates().get(template)
    if record is None:
        raise TunerError(f"template {template!r} is not installed")
    module, _, name = record.launcher.partition(":")
    if _path(module) is None:
        raise TunerError(f"template {template!r} names module {module!r}, which cannot be found")
    packages = frozenset(each.partition(".")[0] for each in (__name__, module))
    # The loop appends the definitions that it finds.
    reached = [*_meanings((module, name), packages), *_meanings(_MAKER, packages)]
    numbers = {each: number for number, each in enumerate(reached)}
    text: list[str] = []
    for each in reached:
        for token in _tokens(each, packages):
            if isinstance(token, str):
                text.append(token)
                continue
            number = numbers.setdefault(token, len(numbers))
            if number == len(reached):
                reached.append(token)
            text.append(f"#{number}")
    return hashlib.sha256(" ".join(text).encode()).hexdigest()[:16]


def environment(template: str, gpu: Gpu) -> Environment:
    """The kernel hash and the versions that a measurement of `template` on `gpu` depends on.

    Imports neither torch nor triton. The version is "" (unknown) for a package installed under another name, such as
    pytorch-triton. Raises `TunerError` as `kernel_hash` does.
    """
    triton, torch = map(_version, ("triton", "torch"))
    return Environment(kernel_hash(template), triton, torch, gpu.driver)


class _Used(str):
    """A name in a canonical text, which may stand for a definition."""

    __slots__ = ()


@dataclass(slots=True)
class _Module:
    """A parsed module."""

    # The statements that count, in order: all but imports and docstrings.
    body: list[ast.stmt] = field(default_factory=list[ast.stmt])
    # The statements by the names that they bind.
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict[str, list[ast.stmt]])
    # The statements that bind no name, such as calls.
    loose: list[ast.stmt] = field(default_factory=list[ast.stmt])
    # The definitions that an imported name may stand for.
    imports: dict[str, list[Name]] = field(default_factory=dict[str, list[Name]])
    is_package: bool = False


@functools.cache
def _meanings(name: Name, packages: frozenset[str]) -> tuple[Name, ...]:
    """The definitions that `name` stands for, also where its module imports it; none for names of the registry."""
    found: list[Name] = []
    # The loop appends the names that an import leads to.
    left = [name]
    for module, attribute in left:
        if module == _REGISTRY:
            continue
        parsed = _parse(module) if _counts(module, packages) else _Module()
        origins, is_bound = parsed.imports.get(attribute, []), attribute in parsed.definitions
        if parsed.is_package and not is_bound and not origins and _path(f"{module}.{attribute}") is not None:
            origins = [(f"{module}.{attribute}", ALL)]
        if is_bound or not origins:
            found.append((module, attribute))
        left += [each for each in origins if each not in left]
    return tuple(dict.fromkeys(found))


@functools.cache
def _tokens(name: Name, packages: frozenset[str]) -> list[str | Name]:
    """The canonical text of a definition, in which each name is followed by the definitions that it stands for."""
    module, attribute = name
    if not _counts(module, packages):
        return [f"{module}.{attribute}"]
    parsed = _parse(module)
    # For other names the whole module counts: it is imported as a whole, or makes them dynamically by `__getattr__`.
    is_bound = attribute in parsed.definitions
    statements = parsed.definitions[attribute] + parsed.loose if is_bound else parsed.body
    tokens: list[str | Name] = [attribute]
    for token in canonical(statements):
        tokens.append(token)
        if isinstance(token, _Used) and (token in parsed.definitions or token in parsed.imports):
            tokens += _meanings((module, str(token)), packages)
    return tokens


def _counts(module: str, packages: frozenset[str]) -> bool:
    return module.partition(".")[0] in packages


@functools.cache
def _parse(module: str) -> _Module:
    path = _path(module)
    if path is None:
        raise TunerError(f"module {module!r}, which a launcher uses, cannot be found")
    tree, parsed = ast.parse(path.read_bytes()), _Module(is_package=path.name == "__init__.py")
    package = module if parsed.is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        for name, target in _imported(node, package):
            parsed.imports.setdefault(name, []).append(target)
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom) or _has_no_effect(statement):
            continue
        names = set(_bound(statement))
        for name in names:
            parsed.definitions.setdefault(name, []).append(statement)
        if not names:
            parsed.loose.append(statement)
        parsed.body.append(statement)
    return parsed


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, Name]]:
    """The names that `node` imports into a module of `package`, each with its definition."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, (alias.name, ALL)
            else:
                yield alias.name.partition(".")[0], (alias.name, ALL)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = parents[: len(parents) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            yield alias.asname or alias.name, (module, alias.name)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.alias):
                yield node.asname or node.name


def _has_no_effect(statement: ast.stmt) -> bool:
    """True if `statement` has no effect: a docstring, or imports for type checkers."""
    return _is_text(statement) or (
        isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    )


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def canonical(node: object) -> list[str]:
    """The parsed program as tokens, equal under all versions of Python.

    Docstrings and the arguments of raised errors are left out. So are empty fields, because newer versions of Python
    add some. Adjacent fixed texts of an f-string are joined, because versions cut them differently.
    """
    tokens: list[str] = []
    _write(node, tokens)
    return tokens


def _write(node: object, tokens: list[str]) -> None:
    if isinstance(node, ast.Name):
        tokens.append(_Used(node.id))
    elif isinstance(node, ast.AST):
        tokens.append(type(node).__name__)
        tokens.append("(")
        for name in _fields(type(node)):
            value = _joined(node.values) if isinstance(node, ast.JoinedStr) else getattr(node, name, None)
            # The module of a relative import does not count, because the imported definition counts instead.
            if value is None or value == [] or (name in ("module", "level") and getattr(node, "level", 0)):
                continue
            if isinstance(node, ast.Raise) and isinstance(value, ast.Call):
                value = value.func
            tokens.append(name)
            _write(value, tokens)
        tokens.append(")")
    elif isinstance(node, list):
        tokens.append("[")
        for each in cast(list[object], node):
            if not _is_text(each):
                _write(each, tokens)
        tokens.append("]")
    else:
        # Not `repr`: versions of Python escape different characters.
        tokens.append(ascii(node))


@functools.cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields that count for nodes of this `kind`, sorted."""
    return tuple(sorted(set(kind._fields) - _IGNORED))


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, with adjacent fixed texts joined and empty ones removed."""
    joined: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and joined and isinstance(joined[-1], ast.Constant):
            joined[-1] = ast.Constant(f"{joined[-1].value}{value.value}")
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            joined.append(value)
    return joined


@functools.cache
def _path(module: str) -> Path | None:
    """The file of `module`; None if there is none or its package is missing or broken."""
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        return None
    return None if found is None or found.origin is None else Path(found.origin)


@functools.cache
def _version(package: str) -> str:
    # Cached, because every trial needs it and reading it takes milliseconds.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
