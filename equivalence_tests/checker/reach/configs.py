"""The config that a constructor wants: of the same file, of what it imports, or of a file beside it; else imitated."""

import ast
import copy
import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from equivalence_tests.checker.reach.arguments import AMBIGUOUS, CONFIG, Sizes, first_match, value_for
from equivalence_tests.checker.reach.importing import definitions_beside
from equivalence_tests.checker.reach.proposing import compared_by, nodes_of, parameters_of
from equivalence_tests.checker.reach.syntax import assigned_in
from equivalence_tests.checker.reach.tried import TRIED
from equivalence_tests.checker.reporting.findings import Exercise

# Attributes with these names would be read as "present" by hasattr; an imitated config does not have them.
ABSENT = re.compile(r"^__|prun|quant|_attn_implementation|rope|rotary|type|dtype|alibi|relative|lora|window")

OF_SCORES = re.compile(r"scal|multipl|temper|.factor|factor.|alpha|beta|cap|coef")  # no sizes

COUNTS = re.compile(r"num(ber)?_|_num$|count|iter|times")  # what is no section

SECTION = re.compile(
    r"^(transformer|attention|attn|encoder|decoder|model|network|arch\w*)(_(config|cfg|args|params))?$"
)
ENTRY_OF_A_PART = re.compile(r"^(self|cross|masked|multi_?head)_?(attention|attn)$")


class ImitatedConfig:
    """Answers config.n_embd, config["n_embd"], config.num_attention_heads, ... with sizes, by what the name says.

    Args:
        sizes: What it answers.
        optional: Names to which it answers None where they say no size.
        nested: Whether it answers itself to names that say nothing, as a section, and knows what is often absent.
        otherwise: Whether a name that means one thing here and another there means the other.
        number: What it answers to names that say nothing; None to know none of these.
    """

    def __init__(
        self,
        sizes: Sizes,
        optional: Collection[str] = (),
        nested: bool = False,
        otherwise: bool = False,
        number: int | None = None,
    ) -> None:
        self._sizes, self._optional, self._nested, self._otherwise = sizes, optional, nested, otherwise
        self._number = number
        self.answers, self.is_subscripted = dict[str, Any](), False  # all that was asked for, and whether as entries
        self.made_up = dict[str, int]()  # the numbers that were answered though nothing says what they are

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy asks for these before there is anything to answer with
            raise AttributeError(name)
        self.answers[name] = value = self._answer(name)
        return value

    def _answer(self, name: str) -> Any:
        if SECTION.search(name.lower()):
            return self
        absent = name.startswith("_") or (ABSENT.search(name.lower()) and not self._nested)
        known, value = (False, None) if absent else value_for(name, self._sizes)
        if self._otherwise and (ambiguous := first_match(name, AMBIGUOUS, None)):
            value = next(iter(x for x in ambiguous(self._sizes) if x != value), value)
        if not known and name in self._optional:
            return None
        if absent:
            raise AttributeError(name)
        if not known and self._nested and not COUNTS.search(name.lower()):
            return self
        if not known and self._number is not None and not OF_SCORES.search(name.lower()):
            self.made_up[name] = self._number
            return self._number
        if not known:
            raise AttributeError(f"nothing is known about the config's {name!r}")
        return value

    def __getitem__(self, name: str) -> Any:
        self.is_subscripted = True
        if ENTRY_OF_A_PART.search(name.lower()):  # as an attribute such a name is a switch
            return self
        try:
            return getattr(self, name)
        except AttributeError as error:
            raise KeyError(str(error)) from error

    def get(self, name: str, default: Any = None) -> Any:
        """Answer like a dictionary."""
        return getattr(self, name, default)

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)


def made_up_for(instance: Any) -> Iterator[Exercise]:
    """List what an instance was built with of which nothing says what it is: a window, a number of neighbours."""
    made = TRIED.construction_of(instance)
    for config in (x for x in (made.kwargs.values() if made else ()) if isinstance(x, ImitatedConfig)):
        for name, value in config.made_up.items():
            yield Exercise(f"the config's {name}", False, f"nothing says what it is; it was built with {value}")


def switched(instance: Any) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Give what a class reads of its config with another value: Booleans negated, strings that it compares them with.

    Yields:
        What it is called, its name, its other value, and the argument of the constructor that has it.
    """
    target: Any = type(instance)
    made, compared = TRIED.construction_of(instance), compared_by(target)
    for argument, config in (made.kwargs if made else {}).items():
        asked, kept = _switches_asked_for(target, argument), _kept_as(target, argument)
        read = names_read(target, argument) | asked.keys()
        held = asked | (config.answers if isinstance(config, ImitatedConfig) else _settings(config))
        for name in read & held.keys():
            strings = dict.fromkeys(x for one in (name, *kept.get(name, ())) for x in compared.get(one, []))
            values = [not held[name]] if isinstance(held[name], bool) else [*strings]
            for value in (x for x in values if isinstance(x, bool | str) and x != held[name]):
                other = copy.copy(config)
                _settings(other)[name] = value
                yield f"{argument}.{name}={value}", name, value, {argument: other}


def _settings(config: Any) -> dict[str, Any]:
    """Give what a config holds; nothing where it is none."""
    return config if isinstance(config, dict) else getattr(config, "__dict__", {})


METHODS = {"get", "items", "keys", "values", "copy", "pop", "update", "to_dict", "setdefault"}


def is_config(target: Any, parameter: inspect.Parameter) -> bool:
    """Whether an argument of a constructor holds several others: by its name, its class, or what is read of it."""
    named = CONFIG.search(parameter.name.lower()) or hasattr(parameter.annotation, "__dataclass_fields__")
    return bool(named) or sum(value_for(name, Sizes())[0] for name in names_read(target, parameter.name)) > 1


@functools.lru_cache(maxsize=8)
def names_read(target: Any, argument: str) -> frozenset[str]:
    """Name what a class reads of an argument of its constructor, and of the attribute that keeps it.

    That is ``conf.n_head`` and ``conf["n_embd"]``, and after ``self.c = conf`` also ``self.c.n_head``.
    """
    read, owners = set(), _owners(target, argument)
    for node in nodes_of(target):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if owner in owners:
                read.add(name)
            case ast.Subscript(
                value=ast.Name(id=owner) | ast.Attribute(attr=owner), slice=ast.Constant(value=str(name))
            ) if owner in owners:
                read.add(name)
    return frozenset(read - METHODS)


def _owners(target: Any, argument: str) -> set[str]:
    """Name an argument of a constructor, and the attributes that keep it."""
    kept = (pair for node in nodes_of(target) for pair in assigned_in(node))
    return {getattr(place, "attr", "") for place, x in kept if getattr(x, "id", "") == argument} | {argument}


def _kept_as(target: Any, argument: str) -> dict[str, set[str]]:
    """Name the attributes that keep what a class reads of a config: ``self.kind = config.attention_kind``."""
    kept, owners = dict[str, set[str]](), _owners(target, argument)
    for own, value in (pair for node in nodes_of(target) for pair in assigned_in(node)):
        words = {getattr(x, "id", getattr(x, "attr", getattr(x, "value", ""))) for x in ast.walk(value)}
        for name in (x for x in words if isinstance(x, str) and not owners.isdisjoint(words)):
            kept.setdefault(name, set()).add(getattr(own, "attr", getattr(own, "id", "")))
    return kept


def _switches_asked_for(target: Any, argument: str) -> dict[str, bool | str]:
    """Name the switches that a config need not have, with their defaults: ``getattr(config, "use_rope", False)``."""
    asked, owners = dict[str, bool | str](), _owners(target, argument)
    for node in nodes_of(target):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[
                    ast.Name(id=owner) | ast.Attribute(attr=owner),
                    ast.Constant(value=str(name)),
                    ast.Constant(value=bool(default) | str(default)),
                ],
            ) if owner in owners:
                asked[name] = default
    return asked


@functools.lru_cache(maxsize=8)
def configs_for(target: Any, parameter: inspect.Parameter) -> list[Any]:
    """Find the classes and dictionaries that hold all that is read of an argument of a constructor.

    That is what it is annotated with, else those of the file and of what it imports, else those of the files beside it.
    """
    asked, module = parameter.annotation, sys.modules.get(getattr(target, "__module__", ""))
    if isinstance(asked, type) and asked is not parameter.empty and asked.__module__ != "builtins":
        return [asked]
    read = names_read(target, parameter.name)
    if found := list(_fitting(vars(module) if module else {}, read)):
        return found
    beside = definitions_beside(target, lambda text: bool(CONFIG.search(text.lower())) and all(n in text for n in read))
    return [one for names in (beside if read else ()) for one in _fitting(names, read)]


def _fitting(names: Mapping[str, Any], read: Collection[str]) -> Iterator[Any]:
    """Those of these values that hold all that is read; where nothing is, those that are called configs."""
    for name, value in list(names.items()):
        held = _held_by(value)
        if held and held.issuperset(read) and (read or CONFIG.search(name.lower())):
            yield value


def _held_by(value: Any) -> set[str]:
    """Name what a dictionary or an instance of a class of settings holds; nothing for anything else."""
    if isinstance(value, dict):
        return {name for name in value if isinstance(name, str)}
    if not isinstance(value, type) or issubclass(value, nn.Module) or value.__module__.partition(".")[0] == "torch":
        return set()
    own = [name for one in value.__mro__[:-1] for name in (*vars(one), *getattr(one, "__annotations__", ()))]
    if not parameters_of(value):  # its constructor says all
        own += [x.attr for x in nodes_of(value) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
    return {name for name in (*own, *(p.name for p in parameters_of(value))) if not name.startswith("__")}


def call_text(target: Any, arguments: Mapping[str, Any]) -> str:
    """Write a call of a class or a function, as a person would type it."""
    shown = ("<imitated config>" if isinstance(x, ImitatedConfig) else repr(x) for x in arguments.values())
    return f"{getattr(target, '__name__', 'factory')}({', '.join(map('{}={}'.format, arguments, shown))})"
