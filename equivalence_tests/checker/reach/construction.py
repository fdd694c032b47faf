"""Build somebody's class: work out the constructor's arguments from their names, and by trying.

Sizes are chosen so that no two axes are equal. A config object is imitated by one that answers every name it knows a
size for.
"""

import ast
import contextlib
import enum
import functools
import inspect
import itertools
import math
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from equivalence_tests.checker.reach.arguments import (
    AMBIGUOUS,
    COUNTS_KEY_HEADS,
    MAX_LEN,
    OF_A_NUMBER,
    PARTS,
    ROTATES,
    SIZES,
    Sizes,
    first_match,
    value_for,
)
from equivalence_tests.checker.reach.callers import asks_for_parts, taken_from_callers
from equivalence_tests.checker.reach.configs import ImitatedConfig, call_text, configs_for, is_config, names_read
from equivalence_tests.checker.reach.crashes import CRASHES
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.guessing import guesses, override, value_of
from equivalence_tests.checker.reach.importing import definitions_beside
from equivalence_tests.checker.reach.proposing import (
    compared_by,
    keys_for,
    parameters_of,
    parsed,
    ranked,
    used_as,
)
from equivalence_tests.checker.reach.registering import REGISTERING
from equivalence_tests.checker.reach.state import prepare
from equivalence_tests.checker.reach.tried import TRIED, Try
from equivalence_tests.checker.reporting.lines import raised_in, source_of

# Heads of even width; two of keys, each for three of queries, so that neither their order nor their counts mix up.
GROUPED_SIZES = (Sizes(num_heads=6, head_dim=10), *SIZES)
ROTARY = re.compile(r"rotary|rotate_half|rope(_|\b)|freqs_c|view_as_complex", re.IGNORECASE)
ALTERNATIVES, MOST_BUILDS = 3, 12
INSIDE = re.compile(r"hid|qk")  # in the names of widths
LAYER = re.compile(r"(Encoder|Decoder|Transformer)\w*(Layer|Block)$")
PLAIN = re.compile(r"Full|Dot|Softmax|Vanilla|Standard")  # attentions, in the names of their classes
LARGE = 2**22  # such as a bias between the places of two windows of 64 x 64
HUGE, MOST_IN_VAIN = 2**26, 2**29  # entries of one tensor, and of all that constructors made before they failed
FIXED, WIDEST = 2, 1024  # how many widths that a class always has are tried, and the greatest
MOST_GUESSES, MOST_CONFIGS = 60, 3
FEW = 3  # how often something is repeated of which nothing says how often


def build(target: Any, **given: Any) -> Iterator[tuple[Any, Sizes]]:
    """Construct instances of a class or from a factory, each with the sizes asked for, the most telling sizes first."""
    if not given:
        yield from ((made, sizes) for sizes in SIZES[:2] for made in _as_callers_do(target, sizes))
    yield from _by_its_arguments(target, **given)


def _by_its_arguments(target: Any, **given: Any) -> Iterator[tuple[Any, Sizes]]:
    """Construct instances with what the names of the arguments say, in each size."""
    errors: list[str] = []
    builds, small, making = False, False, _Making()
    large = list[tuple[Any, Sizes]]()
    # What is large already would be larger still.
    for sizes in (one for one in _sizes_to_try(target) if not large or one.embed_dim <= SIZES[-2].embed_dim):
        lists = ([way | given for way in ways] for ways in argument_lists(target, sizes))
        made = (_first_that_builds(target, proposals, errors, making) for proposals in lists)
        for instance in itertools.islice((x for x in made if x is not None), ALTERNATIVES):
            builds = True
            if isinstance(instance, nn.Module) and not materialise(instance, sizes):
                errors.append(f"{getattr(target, '__name__', target)} holds lazy layers, and no call gave them shapes")
                continue
            parameters, tables = _sizes_of_tensors(instance)
            if small and parameters > LARGE:  # what fits nothing in small sizes fits nothing in this one
                break
            if max(parameters, tables) > LARGE:  # anything smaller is tried first
                large = large or [(instance, sizes)]
            else:
                small = True
                yield instance, sizes
    # With its own defaults, which may fit only each other.
    plain = [] if given else next(argument_lists(target, SIZES[0]), [])[1:2]
    if (instance := _first_that_builds(target, plain, errors)) is not None:
        builds = True
        large.append((instance, SIZES[0]))
    yield from (one for one in large if not small or _sizes_of_tensors(one[0])[0] <= LARGE)
    if not builds:
        _note_defaults(target)
        raise CannotCheckError(f"{errors[0] if errors else getattr(target, '__name__', target)}\n{_advice(errors)}")


def _as_callers_do(target: Any, sizes: Sizes) -> Iterator[nn.Module]:
    """Build a class that wants its parts handed over as those do that construct it."""
    if isinstance(target, type) and asks_for_parts(target):
        yield from taken_from_callers(target, lambda caller: built(caller, sizes, MOST_BUILDS))


def _note_defaults(target: Any) -> None:
    """Note a class's own default that it raises with, such as 4.0 or "GELU", where 4 or "gelu" lets it be built."""
    defaults = {p.name: p.default for p in parameters_of(target)}
    others: dict[str, Any] = {name: int(x) for name, x in defaults.items() if type(x) is float and x.is_integer()}
    others |= {name: x.lower() for name, x in defaults.items() if isinstance(x, str) and x != x.lower()}
    for name, other in others.items() if target is TRIED.target else ():
        for ways in itertools.islice(argument_lists(target, SIZES[1]), MOST_BUILDS):
            own = ways[-1] | {name: defaults[name]}
            if _first_that_builds(target, [own | {name: other}], []) is not None:
                try:
                    target(**own)
                except Exception as error:  # what every construction ended with
                    CRASHES.note_default(error, name, own[name], other)
                return


def built_with(target: Any, **given: Any) -> Iterator[tuple[nn.Module, Sizes]]:
    """Build a class with these arguments, in the first ways; give nothing where it cannot be built so."""
    with contextlib.suppress(CannotCheckError):
        yield from itertools.islice(build(target, **given), MOST_BUILDS)


def _advice(errors: list[str]) -> str:
    """Say what would help where nothing was built; the same error from most attempts is hardly one of arguments."""
    ends = [text.partition(" raised ")[2] for text in errors]
    alike = ends.count(ends[0]) if ends else 0
    tried = f"{alike} of the {len(ends)} constructions that were tried ended there. If that line is right, pass"
    return (
        f"{tried if 1 < alike >= len(ends) / 2 else 'Could not work out how to construct it. Pass'} an instance, "
        "a factory (verify(lambda: Mine(...))) or Adapter(build=lambda: Mine(...))."
    )


def _sizes_of_tensors(instance: Any) -> tuple[int, int]:
    """How many entries its largest parameter has, and its largest table."""
    held = (instance.parameters(), instance.buffers()) if isinstance(instance, nn.Module) else ((), ())
    parameters, tables = (max((x.numel() for x in tensors), default=0) for tensors in held)
    return parameters, tables


def _sizes_to_try(target: Any) -> Iterator[Sizes]:
    """Give the most telling sizes, then what the file may fix, which is looked for only then, and the others."""
    first, *others = GROUPED_SIZES if _may_ask_for_groups(target) else SIZES
    yield first
    yield from _fixed_sizes(target, (first, others[-2]))
    yield from others


def _fixed_sizes(target: Any, tried: tuple[Sizes, Sizes]) -> list[Sizes]:
    """Give sizes for a width that its matrices take in whatever the constructor is given: a constant of the file."""
    first, second = (_widths_taken(target, sizes) for sizes in tried)
    widths = sorted(first & second, key=lambda width: (-first[width], width))
    heads = (3, 4, 6, 7, 8, 5, 2, 1)
    return [
        Sizes(num_heads=count, head_dim=width // count)
        for width in widths[:FIXED]
        for count in itertools.islice((n for n in heads if width % n == 0 and width > n), 1)
    ]


def _widths_taken(target: Any, sizes: Sizes) -> Counter[int]:
    """The widths that the linears of a class take in, built with these sizes, and how many parameters have each."""
    instance = built(target, sizes, ALTERNATIVES)
    modules = list(instance.modules()) if isinstance(instance, nn.Module) else []
    parameters: Iterator[Any] = (p for m in modules for p in m.parameters(recurse=False))
    axes = Counter(n for p in parameters if not is_lazy(p) for n in p.shape)
    taken = {m.in_features for m in modules if isinstance(m, nn.Linear)}
    return Counter({n: axes[n] for n in taken if 1 < n <= WIDEST})


def asks_for_groups(target: Any) -> bool:
    """Whether a constructor reads a count of key heads: an argument, or an attribute or entry of its config."""
    read = {name for parameter in parameters_of(target) for name in names_read(target, parameter.name)}
    for node in parsed(source_of(target if inspect.isroutine(target) else target.__init__)):
        match node:
            case ast.Name(id=word, ctx=ast.Load()) | ast.Attribute(attr=word, ctx=ast.Load()):
                read.add(word)
            case ast.Constant(value=str(word)) if word.isidentifier():
                read.add(word)
    return any(re.search(COUNTS_KEY_HEADS, word.lower()) for word in read)


def inner_widths(target: Any) -> list[str]:
    """Name the required widths of what is hidden, where a constructor asks for that of what comes in as well.

    >>> def attention(input_size, hidden_size, window): ...
    >>> inner_widths(attention)
    ['hidden_size']
    """
    required = [p.name for p in parameters_of(target) if p.default is p.empty]
    widths = [name for name in required if value_for(name, SIZES[0])[1] == SIZES[0].embed_dim]
    hidden = [name for name in widths if INSIDE.search(name.lower())]
    return hidden if len(hidden) < len(widths) else []


def _may_ask_for_groups(target: Any) -> bool:
    """Whether a constructor names a count of key heads, or wants something of which the name says nothing.

    So does a class whose file speaks of rotary positions, which need heads of even width.
    """
    unknown = (p for p in parameters_of(target) if p.default is p.empty and not value_for(p.name, Sizes())[0])
    return (
        asks_for_groups(target) or any(unknown) or bool(ROTARY.search(source_of(inspect.getmodule(target) or target)))
    )


_BEING_BUILT: list[Any] = []


def built(target: Any, sizes: Sizes, most: int | None = None) -> Any:
    """Call a class or factory at these sizes; None where no way is found, or not in so many attempts."""
    if target in _BEING_BUILT:  # classes of one file may ask for one another
        return None
    _BEING_BUILT.append(target)
    try:
        proposals = itertools.chain.from_iterable(argument_lists(target, sizes))
        made = next(_as_callers_do(target, sizes), None)
        return _first_that_builds(target, itertools.islice(proposals, most), []) if made is None else made
    finally:
        _BEING_BUILT.remove(target)


class _Making(TorchFunctionMode):
    """Counts the entries that constructors fill before they fail, and stops them before a tensor too large to check."""

    entries = in_vain = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = args[0] if args and isinstance(args[0], tuple | list) else args
        sized = func in (torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand)
        if sized and all(isinstance(size, int) for size in asked) and math.prod(asked) > HUGE:
            raise MemoryError(f"a tensor of {tuple(asked)} is larger than the check allows")
        made = func(*args, **(kwargs or {}))
        self.entries += made.numel() if isinstance(made, torch.Tensor) else 0
        return made


def _first_that_builds(
    target: Any, proposals: Iterable[dict[str, Any]], errors: list[str], making: _Making | None = None
) -> Any:
    making = making or _Making()
    for arguments in proposals if making.in_vain < MOST_IN_VAIN else ():
        before = making.entries
        try:
            with making:
                instance = target(**arguments)
        except Exception as error:  # the user's constructor may raise anything
            making.in_vain += making.entries - before
            said = f"{type(error).__name__}: {error}{raised_in(error)}"
            errors.append(f"{call_text(target, arguments)} raised {said}")
            TRIED.built(Try(target, (), arguments, said))
            if target is TRIED.target:
                CRASHES.note(error)
            continue
        if target is TRIED.target:
            REGISTERING.register(instance)
        TRIED.built(Try(target, (), arguments), instance)
        return instance
    return None


def argument_lists(target: Any, sizes: Sizes) -> Iterator[list[dict[str, Any]]]:
    """Propose keyword arguments for the constructor: by name first, then every guess for names that say nothing.

    Each guess at the required ones comes with sizes for optional ones, then without, then with sizes for those that
    default to None, too.
    """
    parameters = parameters_of(target)
    required = [p for p in parameters if p.default is p.empty]
    extras = {p.name: value for p in parameters if p not in required for value in override(p, sizes, target)}
    by_name = {p.name: value_for(p.name, sizes)[1] for p in parameters if p.default is None}
    unset = {name: value for name, value in by_name.items() if type(value) is int}
    for values in itertools.islice(ranked([_candidates(p, sizes, target) for p in required]), MOST_GUESSES):
        chosen = dict(zip((p.name for p in required), values, strict=True))
        ways = [chosen | extras, chosen, chosen | extras | unset]
        yield [way for place, way in enumerate(ways) if way not in ways[:place]]


def materialise(module: nn.Module, sizes: Sizes) -> bool:
    """Call a module with lazy layers once, so that its parameters get their shapes; say whether all have them now."""
    x = torch.randn(sizes.batch, sizes.query_len, sizes.embed_dim)
    given = [(*[x] * count, *more) for count, more in itertools.product((3, 1, 2), ((), (None,), (None, None)))]
    for args in (*given, (x, x[:, 0]), (x, x[:, 0], x[:, 0])):  # a vector of each sample may condition it
        if not any(is_lazy(p) for p in (*module.parameters(), *module.buffers())):
            return True
        with contextlib.suppress(Exception), torch.no_grad():
            module(*args)
    return not any(is_lazy(p) for p in (*module.parameters(), *module.buffers()))


def _candidates(parameter: inspect.Parameter, sizes: Sizes, target: Any) -> list[Any]:
    """List what a required argument may want: a part, a config, or what its name says; every guess if it says none."""
    name, asked = parameter.name.lower(), parameter.annotation
    _, value = value_of(target, parameter.name, sizes)
    if keys_for(target, parameter.name):
        return [value]
    runs = used_as(target).get(parameter.name) == "runs"
    plain = asked in (bool, int, float, str) or OF_A_NUMBER.search(name) or (used_as(target).get(name) and not runs)
    of_theirs = isinstance(asked, type) and issubclass(asked, nn.Module) and not asked.__module__.startswith("torch.")
    if typing.get_origin(asked) is type or (name.endswith(("_cls", "_class")) and not (plain or of_theirs)):
        return [*_parts_beside(target, name)[:2], nn.LayerNorm]
    if isinstance(asked, enum.EnumMeta) or typing.get_origin(asked) is typing.Literal:
        return [*asked] if isinstance(asked, enum.EnumMeta) else [*typing.get_args(asked)]
    parts = [] if plain else _parts_beside(target, parameter.name)[:2]
    # What rotates is mostly called on one head.
    inner = [replace(sizes, num_heads=1), sizes] if re.search(ROTATES, name) else [sizes]
    made = [built(found, one) for found in parts for one in inner]
    if is_config(target, parameter):
        return [one for one in (*made, *_configs(target, parameter, sizes), value) if one is not None]
    if of_theirs or asked in _classes_beside(target):
        return [made for made in (built(asked, sizes),) if made is not None]
    return [*(one for one in made if one is not None), *guesses(parameter, sizes, target)]


def _classes_beside(target: Any) -> list[type]:
    """List the classes of the same file."""
    file = getattr(target, "__module__", "")
    held = vars(sys.modules[file]).values() if file in sys.modules else ()
    return [x for x in held if isinstance(x, type) and x.__module__ == file]


def _configs(target: Any, parameter: inspect.Parameter, sizes: Sizes) -> Iterator[Any]:
    """Make the config that is asked for, or that lies beside: in these sizes, imitated, and as its own defaults say."""
    beside = configs_for(target, parameter)[:MOST_CONFIGS]
    yield from (_resized(one, sizes) for one in beside)
    yield ImitatedConfig(sizes, _may_be_none(target))
    if any(first_match(name, AMBIGUOUS, None) for name in names_read(target, parameter.name)):
        yield ImitatedConfig(sizes, _may_be_none(target), otherwise=True)
    yield from (one.copy() if isinstance(one, dict) else _first_that_builds(one, [{}], []) for one in beside)
    switches = {name for name, use in used_as(target).items() if use == "decides"}
    yield ImitatedConfig(sizes, _may_be_none(target) | switches, number=MAX_LEN)
    yield ImitatedConfig(sizes, _may_be_none(target), nested=True, number=FEW)


def _resized(config: Any, sizes: Sizes) -> Any:
    """Make a config with these sizes where its own names say which are meant, and its own values else."""
    if isinstance(config, dict):
        return {name: _sized(name, value, sizes) for name, value in config.items()}
    made = built(config, sizes)
    if made is not None and not parameters_of(config):
        for name, value in (vars(config) | vars(made)).items():
            if type(value) in (int, float):
                setattr(made, name, _sized(name, value, sizes))
    return made


def _sized(name: str, value: Any, sizes: Sizes) -> Any:
    known = name.isidentifier() and override(
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value), sizes
    )
    return known[0] if known else value


def _may_be_none(target: Any) -> set[str]:
    """Name what a constructor of the same file takes None for, and what the class compares with None."""
    taken = (p for one in _classes_beside(target) if issubclass(one, nn.Module) for p in parameters_of(one))
    optional = {p.name for p in taken if p.default is None or re.search(r"\bNone\b|Optional", str(p.annotation))}
    return optional | {name for name, others in compared_by(target).items() if None in others}


@functools.lru_cache(maxsize=16)
def part_for(target: Any, argument: str, sizes: Sizes, dtype: torch.dtype) -> Any:
    """Build what a forward may want handed over under this name; None where no class beside is called so."""
    made = (built(one, sizes) for one in _parts_beside(target, argument)[:2])
    found = next((one for one in made if one is not None), None)
    return prepare(found, dtype) if isinstance(found, nn.Module) else found


def _parts_beside(target: Any, argument: str) -> list[type[nn.Module]]:
    """List the classes of the same file, else of what it imports, else of a file beside it, that an argument may want.

    They are called as such parts are, or, where the argument is one that the class runs, as the argument itself.
    Those that are named most like the target come first, of others those that say that they have torch's formula.
    """
    pattern, name = first_match(argument, PARTS, ""), getattr(target, "__name__", "")
    if not pattern and used_as(target).get(argument) == "runs":
        pattern = f"^{argument.lower().replace('_', '')}$"
    if not pattern:
        return []

    def fitting(held: Iterable[Any]) -> list[type[nn.Module]]:
        parts = (x for x in held if isinstance(x, type) and issubclass(x, nn.Module) and x is not target)
        return [x for x in parts if re.search(pattern, x.__name__.lower()) and not x.__module__.startswith("torch.")]

    def speaks_of_one(text: str) -> bool:
        return any(re.search(pattern, found.lower()) for found in re.findall(r"^class (\w+)", text, re.MULTILINE))

    module = sys.modules.get(getattr(target, "__module__", ""))
    parts = fitting(_classes_beside(target)) or fitting(vars(module).values() if module else ())
    beside = (fitting(names.values()) for names in definitions_beside(target, speaks_of_one))
    parts = parts or next(filter(None, beside), [])
    beginnings = [name[:length] for length in range(1, len(name) + 1)]

    def order(part: type[nn.Module]) -> tuple[int, bool, bool]:
        of_heads = bool(LAYER.search(name)) and not _takes_a_width(part)  # a layer hands tokens on
        return -sum(map(part.__name__.startswith, beginnings)), of_heads, not PLAIN.search(part.__name__)

    return sorted(parts, key=order)


def _takes_a_width(part: type[nn.Module]) -> bool:
    """Whether a constructor names the width of tokens."""
    return any(value_for(p.name, SIZES[0])[1] == SIZES[0].embed_dim for p in parameters_of(part))
