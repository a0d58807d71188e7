"""`Arguments`: a command as a class, whose fields are its flags. Imports no MLX and no pydantic, so
that every `--help` answers at once.

A field's type says how the text is read, its default what holds without the flag, its docstring is
the help:

    class Hello(Arguments):
        name: Annotated[str, "NAME"] = place()
        \"\"\"whom to greet\"\"\"
        times: Count = 1
        \"\"\"how often\"\"\"

        def run(self) -> int:
            …

`mlx_parallm hello NAME [--times N]`. A field without a default is a required flag; a `bool` is a
switch; a `Literal` has choices; a `list` may be repeated, or left out.
`Annotated[int, "N", AtLeast(1)]` has a metavar and a bound. `place` makes a positional argument,
`flag` one with another name or with further arguments of `argparse`.
"""

import ast
import inspect
import json
import sys
from abc import ABC, abstractmethod
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)


@dataclass(frozen=True)
class AtLeast:
    """The least value of a number."""

    bound: int


Count = Annotated[int, "N", AtLeast(1)]
File = Annotated[Path, "FILE"]
Directory = Annotated[Path, "DIR"]
RunDirectory = Annotated[Path, "RUN_DIR"]
Name = Annotated[str, "NAME"]
Url = Annotated[str, "URL"]
Model = Annotated[str, "M"]
KeyFile = Annotated[str, "FILE"]
Function = Annotated[str, "FILE.py:F"]


@dataclass(frozen=True)
class _Flag:
    """A field's flag, besides its type and its help."""

    default: Any = None
    required: bool = False
    names: tuple[str, ...] = ()
    key: str | None = None
    one_of: str | None = None
    group: str | None = None
    options: Mapping[str, Any] | None = None
    positional: bool = False


def flag(
    *names: str,
    default: Any = None,
    one_of: str | None = None,
    group: str | None = None,
    **options: Any,
) -> Any:
    """Return the default of a field that needs more than its type and its docstring.

    Args:
        names: in the place of the field's own, e.g. "--from".
        one_of: flags with the same word here exclude each other.
        group: the title, of `Arguments.groups`, under which the help shows the flag.
        options: of `ArgumentParser.add_argument`.
    """
    return _Flag(default, False, names, None, one_of, group, options)


def setting(key: str, *names: str) -> Any:
    """Return the default of a field that sets a key of the configuration
    (`Arguments.settings`)."""
    return _Flag(names=names, key=key)


def place(**options: Any) -> Any:
    """Return the default of a positional argument."""
    return _Flag(options=options, positional=True)


class Arguments(ABC):
    """The arguments of a command, as they were given, and what carries it out.

    `argv`: as they were typed. `groups`: titles and descriptions of groups of flags. `actions`:
    commands of this command, by their names.
    """

    groups: ClassVar[Mapping[str, str]] = {}
    actions: ClassVar[Mapping[str, "type[Arguments]"]] = {}
    argv: list[str]

    def __init__(self, parser: ArgumentParser, values: Mapping[str, Any]) -> None:
        self._parser = parser
        vars(self).update(values)

    @abstractmethod
    def run(self) -> int:
        """Carry the command out and return its exit code."""

    def error(self, message: str) -> NoReturn:
        """End the process with the usage, the message and exit code 2."""
        self._parser.error(message)

    def settings(self, *without: str) -> list[str]:
        """Return the flags that set a key as `section.key=value`, those of `without` left out."""
        keys = {name: each.key for name, _, each in _fields(type(self)) if each.key is not None}
        values = {key: vars(self)[name] for name, key in keys.items() if name not in without}
        return [f"{key}={toml_value(value)}" for key, value in values.items() if value is not None]

    @classmethod
    def added_to(cls, parser: ArgumentParser) -> Callable[[Namespace], int]:
        """Add the arguments, and return what carries the command out."""
        if cls.actions:
            return _add_actions(cls, parser)
        groups: dict[str, Any] = {
            title: parser.add_argument_group(title, text) for title, text in cls.groups.items()
        }
        helps = _docstrings(cls)
        for name, hint, each in _fields(cls):
            if each.one_of is not None and each.one_of not in groups:
                groups[each.one_of] = parser.add_mutually_exclusive_group()
            place = groups.get(each.one_of or each.group or "", parser)
            names, options = _argument(name, hint, each, helps.get(name, ""))
            place.add_argument(*names, **options)
        return lambda namespace: cls(parser, vars(namespace)).run()


class Configured(Arguments):
    """A command that reads a configuration."""

    set: list[str] = flag(metavar="SECTION.KEY=VALUE")
    """override one key of the configuration; may be repeated"""

    @property
    def overrides(self) -> list[str]:
        """The keys that `--set` and other flags set."""
        return [*self.set, *self.settings()]


def _add_actions(cls: type[Arguments], parser: ArgumentParser) -> Callable[[Namespace], int]:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    runs = {}
    for name, kind in cls.actions.items():
        about = inspect.getdoc(kind) or ""
        summary = about.partition(". ")[0].rstrip(".").replace("\n", " ")
        runs[name] = kind.added_to(commands.add_parser(name, help=summary, description=about))
    return lambda namespace: runs[namespace.action](namespace)


def toml_value(value: str | int | Path) -> str:
    """Return a text or a number as TOML writes it."""
    plain = str(value) if isinstance(value, Path) else value
    return json.dumps(plain, ensure_ascii=False)  # a JSON string or integer is a TOML one


def _fields(cls: type[Arguments]) -> Iterator[tuple[str, Any, _Flag]]:
    """Yield the fields with their types, those of a class before those of its bases."""
    hints = get_type_hints(cls, include_extras=True)
    for base in cls.__mro__:
        if not issubclass(base, Arguments) or base is Arguments:
            continue
        for name in inspect.get_annotations(base):
            value = vars(base).get(name, _Flag(required=True))
            if ClassVar not in (hints[name], get_origin(hints[name])):
                yield name, hints[name], value if isinstance(value, _Flag) else _Flag(value)


def _argument(
    name: str, hint: Any, each: _Flag, about: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return what `add_argument` is called with."""
    options: dict[str, Any] = {"help": about.replace("%", "%%")}
    kind, notes = _unwrapped(hint)
    is_list = get_origin(kind) is list
    if is_list:
        kind, notes = _unwrapped(get_args(kind)[0])
    options |= _reading(kind, notes)
    if each.positional:
        options |= {"nargs": "+"} if is_list else {}
        return (name,), options | dict(each.options or {})
    if is_list:
        options |= {"action": "append", "default": []}
    elif kind is not bool:
        options |= {"default": each.default, "required": each.required}
        if each.default is not None:
            options["help"] += f" (default: {each.default})"
    names = each.names or (f"--{name.replace('_', '-')}",)
    return names, options | {"dest": name} | dict(each.options or {})


def _reading(kind: Any, notes: tuple[Any, ...]) -> dict[str, Any]:
    """Return how a text is read, and its metavar."""
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "type": type(get_args(kind)[0])}
    options: dict[str, Any] = {"type": kind}
    for note in notes:
        if isinstance(note, AtLeast):
            options["type"] = _bounded(kind, note.bound)
        else:
            options["metavar"] = note
    return options


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type without `| None` and `Annotated`, and its annotations."""
    if get_origin(hint) in (Union, UnionType):
        [hint] = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) is Annotated:
        return get_args(hint)[0], get_args(hint)[1:]
    return hint, ()


def _bounded(kind: Any, least: int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if (value := kind(text)) < least:
            raise ArgumentTypeError(f"at least {least}")
        return value

    read.__name__ = kind.__name__  # argparse says "invalid int value"
    return read


def _docstrings(cls: type[Arguments]) -> dict[str, str]:
    """Return the docstrings below the fields; none if the source is not there."""
    bases = [base for base in reversed(cls.__mro__) if issubclass(base, Arguments)]
    return {
        name: text
        for base in bases
        for name, text in _docstrings_in(base.__module__).get(base.__name__, {}).items()
    }


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """Return those of each class of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: _below_fields(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _below_fields(class_: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(class_.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
