"""Python in colours, in few characters: keywords, comments and strings stand out, the rest is plain."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import groupby

from markupsafe import Markup
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Operator, String, _TokenType

__all__ = ["Link", "coloured", "coloured_lines"]

# Elements without a meaning of their own, styled by the page: pygments' own formatter writes three times as much.
ELEMENTS = ((Keyword, "b"), (Operator.Word, "b"), (Comment, "i"), (String, "u"))

# What stands before a name that belongs to somebody else, whatever it is called.
OTHERS = re.compile(r"(?:^from torch\b.*|\b(?:torch|nn|F|self)\.(?:\w+\.)*)$")

Link = Callable[[str], str]


@cache
def lexer() -> PythonLexer:
    """Make the lexer once."""
    return PythonLexer(stripnl=False, ensurenl=False)


def coloured(code: str, link: Link | None = None) -> Markup:
    """Colour Python.

    Args:
        code: Any piece of it.
        link: Gives the address of a name, or "" if it has none.

    Returns:
        The same text as HTML.

    >>> coloured("return 'x'  # why")
    Markup("<b>return</b> <u>'x'</u>  <i># why</i>")
    """
    return Markup("\n").join(coloured_lines(code, link))


def coloured_lines(code: str, link: Link | None = None) -> list[Markup]:
    r"""Colour Python line by line: no element runs on into the next line.

    >>> coloured_lines("x = 1\ndel x")
    [Markup('x = 1'), Markup('<b>del</b> x')]
    """
    lines, before = [Markup("")], ""
    for element, text in _pieces(code, link is not None):
        for number, piece in enumerate(text.split("\n")):
            if number:
                lines.append(Markup(""))
                before = ""
            lines[-1] += _wrapped(element, piece, None if OTHERS.search(before) else link)
            before += piece
    return lines


def _wrapped(element: str, text: str, link: Link | None) -> Markup:
    if element == "a":
        address = link(text) if link is not None else ""
        return Markup('<a href="#{}">{}</a>').format(address, _escaped(text)) if address else _escaped(text)
    return Markup("<{0}>{1}</{0}>").format(element, _escaped(text)) if element and text else _escaped(text)


def _escaped(text: str) -> Markup:
    """Escape what HTML would read in an element; quotes, of which code has many, mean something in attributes only."""
    return Markup(text.replace("&", "&amp;").replace("<", "&lt;"))


def _pieces(code: str, with_names: bool) -> Iterator[tuple[str, str]]:
    """Cut the code into runs of one colour, white space going with what stands before it."""
    tokens = ((_element(kind, with_names), text) for kind, text in lexer().get_tokens(code))
    for element, run in groupby(tokens, key=lambda token: token[0]):
        texts = [text for _, text in run]
        yield from ((element, text) for text in (texts if element == "a" else ["".join(texts)]))


def _element(kind: _TokenType, with_names: bool) -> str:
    if with_names and kind in Name and kind not in Name.Builtin:
        return "a"
    return next((element for found, element in ELEMENTS if kind in found), "")
