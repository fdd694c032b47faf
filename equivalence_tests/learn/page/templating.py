"""The templates and what they can call."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from equivalence_tests.learn.page.code import coloured

__all__ = ["environment"]


@cache
def environment() -> Environment:
    """Set up the templates.

    Returns:
        An environment in which a name that is not given raises, and text is escaped.
    """
    found = Environment(
        loader=PackageLoader("equivalence_tests.learn.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["coloured"] = coloured
    found.filters["json"] = as_json
    found.filters["with_indices"] = with_indices
    found.globals["file"] = text_of
    return found


def as_json(value: Any) -> Markup:
    r"""Write data so that it can stand in a script element.

    >>> as_json(["</script>"])
    Markup('["\\u003c/script>"]')
    """
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))


def with_indices(formula: str) -> Markup:
    """Set the indices of weights and biases below the line.

    >>> with_indices("query W_q + b_q, in heads")
    Markup('query W<sub>q</sub> + b<sub>q</sub>, in heads')
    """
    return Markup(re.sub(r"\b([Wb])_([qkvo])\b", r"\1<sub>\2</sub>", str(escape(formula))))


def text_of(name: str) -> Markup:
    """Read a file that stands beside the templates: the styles, the script."""
    return Markup((Path(__file__).parent / "templates" / name).read_text(encoding="utf-8"))
