"""Teach griffe our docstrings: roles, comments next to fields, and checked fields."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod):`(~?)([\w.]+)`")
_SEVERAL = re.compile(r"^    (\w+(?:, \w+)+):(.*\n(?: {5,}.*\n|\n(?= {5}))*)", re.M)
_NOTES = ("type:", "noqa")  # comments for tools
_CHECKED = ("number", "choice")  # grpo_kernels.common: fields with a default and a check


class Docstrings(griffe.Extension):
    """Show docstrings, fields and signatures as they are in the source."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Show a checked field's default as its value, and its comment as its docstring."""
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) in _CHECKED:
            default = attr.value.arguments[0]
            attr.value = default.value if isinstance(default, griffe.ExprKeyword) else default
        is_field = attr.annotation is not None and attr.parent is not None and attr.parent.is_class
        if attr.docstring is None and is_field and (words := _comment(attr)):
            attr.docstring = griffe.Docstring(words, parent=attr)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Show the fields that a dataclass accepts as ``__init__(self, **settings)``."""
        init = cls.members.get("__init__")
        if not isinstance(init, griffe.Function) or not _is_dataclass(cls):
            return
        others = [parameter for parameter in init.parameters if parameter.kind is _OTHERS]
        if len(others) == 1 and len(init.parameters) == 2:
            fields = [_parameter(x) for x in cls.members.values() if _is_field(x)]
            init.parameters = griffe.Parameters(init.parameters[0], *fields, *others)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert a docstring to Markdown in Google style."""
        if obj.docstring is not None:
            obj.docstring.value = _google(obj.docstring.value, obj)


_OTHERS = griffe.ParameterKind.var_keyword


def _comment(attr: griffe.Attribute) -> str:
    """Return the comment after a field, or the comment lines above it."""
    lines, end = attr.lines_collection[attr.filepath], attr.endlineno or attr.lineno
    trailing = [words.strip() for words in lines[end - 1].split("#")[1:]]
    if trailing := [words for words in trailing if not words.startswith(_NOTES)]:
        return " ".join(trailing)
    start = first = attr.lineno - 1
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(line.strip().removeprefix("#").strip() for line in lines[first:start])


def _is_dataclass(cls: griffe.Class) -> bool:
    return any(str(decorator.value).startswith("dataclass") for decorator in cls.decorators)


def _is_field(member: Any) -> bool:
    made = isinstance(member, griffe.Attribute) and member.annotation is not None
    return made and "property" not in member.labels and "init=False" not in str(member.value)


def _parameter(field: Any) -> griffe.Parameter:
    kind = griffe.ParameterKind.keyword_only
    default = field.value
    if isinstance(default, griffe.ExprCall) and str(default.function) == "field":
        default = next(str(x.value) for x in default.arguments if x.name == "default")
    return griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=default)


def _google(text: str, obj: griffe.Object) -> str:
    """Replace roles by links, and give each argument its own line."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
    text = re.sub(r"::$", ":", text, flags=re.M)
    text = _SEVERAL.sub(_one_by_one, text + "\n").rstrip()
    for parameter in getattr(obj, "parameters", ()):
        if parameter.kind is _OTHERS:
            text = re.sub(rf"^    {parameter.name}:", f"    **{parameter.name}:", text, flags=re.M)
    return _ROLE.sub(lambda role: _reference(role, obj), text)


def _one_by_one(found: re.Match[str]) -> str:
    return "".join(f"    {name}:{found[2]}" for name in found[1].split(", "))


def _reference(role: re.Match[str], obj: griffe.Object) -> str:
    """Turn a role into a link if the site documents its target."""
    short, name = role.groups()
    first, dot, rest = name.partition(".")
    try:
        path = f"{obj.resolve(first)}{dot}{rest}"
    except griffe.NameResolutionError:
        path = name
    last = path.rpartition(".")[2]
    with contextlib.suppress(KeyError):  # a function named like its module
        path = obj.modules_collection[path].members[last].path
    shown = (name.rpartition(".")[2] if short else name).replace("_", "&#95;")
    return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'
