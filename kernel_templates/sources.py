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
# Fields of a node that follow from its position or describe only its spelling.
_IGNORED = {"ctx", "kind", "type_comment"}


@functools.cache
def kernel_hash(template: str) -> str:
    """A hash over the definitions that the launcher of `template` reaches, as 16 hexadecimal digits.

    A definition reaches all definitions that it names, within this package and the launcher's own. The hash ignores
    comments, docstrings, formatting, the module of a definition, and the template's declaration. Raises `TunerError`
    if the template is not installed or its launcher's module cannot be found.
    """
    record = templates().get(template)
    if record is None:
        raise TunerError(f"template {template!r} is not installed")
    module, _, name = record.launcher.partition(":")
    if _path(module) is None:
        raise TunerError(f"template {template!r} names module {module!r}, which cannot be found")
    packages = frozenset(each.partition(".")[0] for each in (__name__, module))
    texts: set[str] = set()
    seen: set[Name] = set()
    left: set[Name] = {(module, name)}
    while left:
        reached = left.pop()
        seen.add(reached)
        found, uses = _definition(reached, packages)
        texts |= found
        left |= uses - seen
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]


def environment(template: str, gpu: Gpu) -> Environment:
    """The kernel hash and the versions that a measurement of `template` on `gpu` depends on.

    Imports neither torch nor triton. The version is "" (unknown) for a package installed under another name, such as
    pytorch-triton. Raises `TunerError` as `kernel_hash` does.
    """
    triton, torch = map(_version, ("triton", "torch"))
    return Environment(kernel_hash(template), triton, torch, gpu.driver)


@dataclass(slots=True)
class _Module:
    """The statements of a module, by the names that they bind; `loose` statements, such as calls, bind none."""

    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict[str, list[ast.stmt]])
    loose: list[ast.stmt] = field(default_factory=list[ast.stmt])
    # The definitions that an imported name may stand for.
    imports: dict[str, set[Name]] = field(default_factory=dict[str, set[Name]])
    is_package: bool = False


@functools.cache
def _definition(name: Name, packages: frozenset[str]) -> tuple[set[str], set[Name]]:
    """The canonical texts of the definition called `name`, and the names that it uses."""
    module, attribute = name
    if module.partition(".")[0] not in packages:
        return {f"{module}.{attribute}"}, set()
    parsed = _parse(module)
    if attribute in parsed.definitions:
        statements = parsed.definitions[attribute] + parsed.loose
    elif attribute in parsed.imports:
        return set(), parsed.imports[attribute]
    elif parsed.is_package and _path(f"{module}.{attribute}") is not None:
        return set(), {(f"{module}.{attribute}", ALL)}
    else:
        # The whole module counts: it is imported as a whole, or makes the name dynamically, as with `__getattr__`.
        statements = [each for group in parsed.definitions.values() for each in group] + parsed.loose
    texts, uses = set[str](), set[Name]()
    for statement in statements:
        text, used = canonical(statement)
        texts.add(text)
        for each in used:
            if each in parsed.definitions:
                uses.add((module, each))
            for _, original in parsed.imports.get(each, ()):
                texts.add(f"{each} is {original}")
            uses |= parsed.imports.get(each, set())
    return texts, uses


@functools.cache
def _parse(module: str) -> _Module:
    path = _path(module)
    if path is None:
        raise TunerError(f"module {module!r}, which a launcher uses, cannot be found")
    tree, parsed = ast.parse(path.read_bytes()), _Module(is_package=path.name == "__init__.py")
    package = module if parsed.is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        for name, target in _imported(node, package):
            parsed.imports.setdefault(name, set()).add(target)
    for statement in tree.body:
        names = set(_bound(statement))
        for name in names:
            parsed.definitions.setdefault(name, []).append(statement)
        if not names and not isinstance(statement, ast.Import | ast.ImportFrom) and not _has_no_effect(statement):
            parsed.loose.append(statement)
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
    """The names that a statement of a module binds, except by a plain import."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif not isinstance(statement, ast.Import | ast.ImportFrom) and not _has_no_effect(statement):
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


def canonical(node: ast.AST) -> tuple[str, set[str]]:
    """The parsed program as one text, equal under all versions of Python, and the names in it.

    Docstrings and raised errors are left out. So are empty fields, because newer versions of Python add some. Adjacent
    fixed texts of an f-string are joined, because versions cut them differently.
    """
    tokens: list[str] = []
    names: set[str] = set()
    _write(node, tokens, names)
    return " ".join(tokens), names


def _write(node: object, tokens: list[str], names: set[str]) -> None:
    if isinstance(node, ast.Name):
        names.add(node.id)
        tokens.append(node.id)
    elif isinstance(node, ast.AST):
        tokens.append(type(node).__name__)
        tokens.append("(")
        for name in _fields(type(node)):
            value = _joined(node.values) if isinstance(node, ast.JoinedStr) else getattr(node, name, None)
            # The module of a relative import does not count, because the imported definition counts instead.
            if value is None or value == [] or (name in ("module", "level") and getattr(node, "level", 0)):
                continue
            tokens.append(name)
            _write(value, tokens, names)
        tokens.append(")")
    elif isinstance(node, list):
        tokens.append("[")
        for each in cast(list[object], node):
            if not _is_text(each):
                _write(each, tokens, names)
        tokens.append("]")
    else:
        # Not `repr`: versions of Python escape different characters.
        tokens.append(ascii(node))


@functools.cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields that count for nodes of this `kind`, sorted; none for a raised error."""
    return () if kind is ast.Raise else tuple(sorted(set(kind._fields) - _IGNORED))


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
