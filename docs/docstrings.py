"""Docstrings as Markdown: what the sources write for people who read them there, for the reference pages."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")
SESSION = re.compile(r"(?:^(?:>>>|\.\.\.).*\n?(?:(?!>>>).+\n?)*)+", re.MULTILINE)
ARGUMENT = re.compile(r"(?:^|(?<=[.)\n])\s)(?=``[\w=]+``(?:,\s``[\w=]+``)*:\s)")
DIRECTIVE = re.compile(r"\s*# doctest:.*$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Docstrings as Markdown; and a function stays one where a module beside it has its name."""

    def __init__(self) -> None:
        self.functions: dict[str, griffe.Function] = {}

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        self.functions[func.path] = func

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        for path, function in self.functions.items():
            package, _, name = path.removeprefix(f"{pkg.path}.").rpartition(".")
            if package and isinstance(pkg[package], griffe.Module) and pkg[package].members[name].is_module:
                pkg[package].set_member(name, function)

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    text = ROLE.sub(r"`\1`", text)
    text = re.sub(r"::\n\n(?= {4})", ":\n\n", text)
    text = "\n\n".join(map(_list, text.split("\n\n")))
    return SESSION.sub(lambda match: f"```pycon\n{DIRECTIVE.sub('', match[0]).rstrip()}\n```\n", text)


def _list(paragraph: str) -> str:
    """A paragraph that explains arguments one after the other, as a list of them."""
    parts = ARGUMENT.split(paragraph)
    if len(parts) < 2:
        return paragraph
    items = "\n".join("- " + part.strip().replace("\n", "\n  ") for part in parts[1:])
    return "\n\n".join(filter(None, [parts[0].strip(), items]))
