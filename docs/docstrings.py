"""Docstrings as Markdown: what the sources write for people who read them there, for the reference pages."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([^`]+)`")
SESSION = re.compile(r"(?:^(?:>>>|\.\.\.).*\n?(?:(?!>>>).+\n?)*)+", re.MULTILINE)
DIRECTIVE = re.compile(r"\s*# doctest:.*$", re.MULTILINE)


class Markdown(griffe.Extension):
    """Roles become code, and examples become blocks of it."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    text = ROLE.sub(r"`\1`", text)
    text = re.sub(r"::\n\n(?= {4})", ":\n\n", text)
    return SESSION.sub(lambda match: f"```pycon\n{DIRECTIVE.sub('', match[0]).rstrip()}\n```\n", text)
