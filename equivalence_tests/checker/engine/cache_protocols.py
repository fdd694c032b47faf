"""How code may be given the keys and values that it has kept: the arguments, what is empty, and what makes it."""

import copy
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from equivalence_tests.checker.reach.arguments import MASK_ROLES, MAX_LEN, first_match, value_for
from equivalence_tests.checker.reach.calling import Trial
from equivalence_tests.checker.reach.importing import definitions_beside
from equivalence_tests.checker.reach.plans import POSITION
from equivalence_tests.checker.reach.proposing import empty_state, parameters_of
from equivalence_tests.checker.reach.state import CACHE
from equivalence_tests.checker.reporting.lines import source_of

NO_CACHE = re.compile(r"causal|mask|pad|^(encoder_)?memory$")  # the second tensor of a cross-attention
PREPARES = re.compile(r"^_?(set_?up|init(iali[sz]e)?|alloc(ate)?|prepare|make|create|build|enable)_\w*cache", re.I)
COUNTS_ON = re.compile(r"^(advance|increment|step|bump)(_\w+)?$")
OF_CACHES = re.compile(r"^class \w*Cache\b", re.MULTILINE)
OF_LAYER = re.compile(r"^layer_?(i|id|idx|index|num|number)$")  # whose keys and values they are
NO_OBJECTS = (inspect.Parameter.empty, type(None), Tensor, tuple, list, dict, bool, int)
SWITCHES = re.compile(r"^(use|return|with|save)_?(kv|cache|past|present)\w*$|^is_?decod\w*$|^incremental$", re.I)


class Protocol(NamedTuple):
    """One way in which code may keep keys and values from step to step."""

    holders: tuple[str, ...]  # the arguments that take the cache: none, one, or one each for keys and values
    detail: str  # the same in words
    first: Callable[[], Any] = lambda: None  # gives the cache of the first step
    # Which of the returned values the next step takes as the cache; None if it takes the same object.
    fed_back: int | slice | None = None
    prepares: str = ""  # the name of the method that makes the cache before the first step; "" for none
    joins: bool = False  # whether the caller joins what comes back, of the new tokens alone, to what it has kept


def cache_arguments(function: Callable[..., Any]) -> list[str]:
    """Name the arguments of a forward that serve decoding with a cache.

    >>> cache_arguments(lambda x, past_key_value=None, use_cache=False, start_pos=0: None)
    ['past_key_value', 'use_cache', 'start_pos']
    """
    names = [p.name for p in parameters_of(function)]
    found = [
        name
        for name in names
        if (CACHE.search(name) and not NO_CACHE.search(name))
        or (POSITION.search(name) or SWITCHES.search(name) or empty_state(function, name) is not None)
    ]
    return [*found, *(name for name in names if found and OF_LAYER.search(name))]


def protocols(trial: Trial, names: list[str]) -> Iterator[Protocol]:
    """List the ways in which a cache may be passed from step to step, the likeliest first."""
    parameters = {p.name: p for p in parameters_of(trial.function)}
    places = [name for name in names if POSITION.search(name) or OF_LAYER.search(name)]
    holders = [name for name in names if name not in places and not is_switch(parameters[name])]
    if len(holders) == 2:
        detail = f"what it returns is passed to {' and '.join(holders)}"
        yield Protocol(tuple(holders), detail, lambda: (None, None), slice(1, 3))
    for holder in holders:
        for back in (1, 2, 3, slice(1, 3)):  # the last: keys and values come back beside the output
            empty = partial(empty_state, trial.function, holder, trial.sizes, trial.sizes.batch)
            first = empty if (holder, "=state") in trial.plan.roles else lambda: None
            yield Protocol((holder,), f"what it returns is passed to {holder}", first, back)
        for detail, make in _objects(parameters[holder], trial):
            yield Protocol((holder,), f"{detail} is passed to {holder}", make)
        for nothing in ((None, None), [(None, None)] * trial.sizes.num_layers):  # of one layer, of all
            yield Protocol((holder,), f"what it returns is passed to {holder}", partial(copy.copy, nothing), 1)
    yield Protocol((), "the module keeps it")
    inside = trial.function.modules() if isinstance(trial.function, nn.Module) else ()
    for name in dict.fromkeys(name for module in inside for name in dir(type(module)) if PREPARES.search(name)):
        yield Protocol((), f"the module keeps it, made by {name}", prepares=name)


def prepare(trial: Trial, name: str) -> None:
    """Let the outermost modules that have a method of this name make their cache."""
    done = list[str]()
    for path, module in trial.function.named_modules() if isinstance(trial.function, nn.Module) else ():
        if hasattr(module, name) and not any(path.startswith(f"{other}." if other else "") for other in done):
            _sized(getattr(module, name), trial)
            done.append(path)


def count_on(kept: Any, function: Any, length: int) -> None:
    """Tell an object that keeps keys and values how many tokens a step had, where that is left to the caller."""
    modules = [*function.modules()] if isinstance(function, nn.Module) else [function]
    for name in filter(COUNTS_ON.search, dir(type(kept))):
        told = getattr(kept, name)
        asked = [p for p in parameters_of(told) if p.default is p.empty] if inspect.ismethod(told) else []
        if len(asked) == 1 and not any(f".{name}(" in source_of(module) for module in modules):
            told(length)


def _sized(make: Callable[..., Any], trial: Trial) -> Any:
    """Call what makes a cache, with the sizes that the code has under such names, or that they ask for."""
    sizes, asked = trial.sizes, [p.name for p in parameters_of(make) if p.default is p.empty]
    known = {"samples": sizes.batch, "size": MAX_LEN, "dtype": trial.dtype, "device": "cpu"}
    roles = {one: first_match(one, MASK_ROLES, "") for one in asked}
    given = {one: known.get(role, value_for(one, sizes)[1]) for one, role in roles.items()}
    own = {one: getattr(trial.function, one, None) for one in asked}
    return make(**given | {one: x for one, x in own.items() if type(x) is int and x > 0})  # 0 until it is set


def _in_dtype(kind: type, trial: Trial) -> Any:
    """Make an object that keeps keys and values, of the dtype of the call."""
    made = _sized(kind, trial)
    if isinstance(made, nn.Module):
        return made.to(trial.dtype)

    def cast(x: Any) -> Any:
        return x.to(trial.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    for name, x in vars(made).items():
        setattr(made, name, tree_map(cast, x))
    return made


def is_switch(parameter: inspect.Parameter) -> bool:
    """Whether an argument says that there is a cache, and does not take one."""
    return isinstance(parameter.default, bool) or bool(SWITCHES.search(parameter.name))


def _objects(parameter: inspect.Parameter, trial: Trial) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What an empty cache may be: an object of a class for that, transformers' cache, a dict, a list."""
    for kind in _classes(parameter, trial.function):
        yield f"a {kind.__name__}", partial(_in_dtype, kind, trial)
    if "Cache" in str(parameter.annotation):
        yield "a DynamicCache", lambda: importlib.import_module("transformers").DynamicCache()
    yield "a dict", dict
    yield "a list", list


def _classes(parameter: inspect.Parameter, function: Any) -> Iterator[type]:
    """List the classes that an argument is said to take, or else those of caches in its file and in files beside."""
    annotated = (parameter.annotation, *getattr(parameter.annotation, "__args__", ()))
    yield from (x for x in annotated if inspect.isclass(x) and x not in NO_OBJECTS)
    if parameter.annotation is parameter.empty:
        beside = definitions_beside(type(function), lambda text: bool(OF_CACHES.search(text)))
        for held in (vars(sys.modules[type(function).__module__]), *beside):
            yield from (x for x in held.values() if inspect.isclass(x) and OF_CACHES.search(f"class {x.__name__}:"))
