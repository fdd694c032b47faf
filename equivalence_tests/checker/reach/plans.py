"""Find out how to call somebody's attention.

Names are read first. Where they say nothing, every assignment is tried with lengths that are all different: the
output then has the length of the query, and perturbing one sample shows which axis the samples lie on.
"""

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from equivalence_tests.checker.reach.angles import AngleForm
from equivalence_tests.checker.reach.answering import answered
from equivalence_tests.checker.reach.arguments import (
    ADDED_POSITIONS,
    MAX_LEN,
    OF_A_NUMBER,
    ROLES,
    Sizes,
    role_of_parameter,
)
from equivalence_tests.checker.reach.calling import (
    HEADS,
    LAYOUTS,
    OF_KEY_TOKENS,
    OF_KEYS,
    OF_MEMORY,
    OF_ONE,
    OF_QUERIES,
    OF_QUERY_TOKENS,
    OF_STEPS,
    REAL_TOKENS,
    TABLES,
    VECTOR,
    CallPlan,
    Trial,
    held_roles,
)
from equivalence_tests.checker.reach.crashes import CRASHES
from equivalence_tests.checker.reach.masking import MaskForm
from equivalence_tests.checker.reach.misfits import NOT_VIEWED
from equivalence_tests.checker.reach.proposing import (
    JOINED,
    LONGEST,
    SHORT,
    called_arguments,
    compared_by,
    empty_state,
    exact_lengths,
    handed_on_as,
    held_by_arguments,
    multiplied_by,
    parameters_of,
    ranked,
    unread_arguments,
)
from equivalence_tests.checker.reach.tried import TRIED

# What tensors are tried as where their names say nothing.
THREE = tuple(itertools.permutations(ROLES))
ASSIGNMENTS: tuple[tuple[str, ...], ...] = (
    *(("input",), ("query", "memory"), ("memory", "query"), ("input", "mask")),
    *(*THREE, ("query", "memory", "mask"), *((*three, "mask") for three in THREE)),
)
OF_TOKENS = ("input", "query", "key", "value", "memory")
IMAGE_SIZES = (("h", "w"), ("height", "width"))
SWITCH = re.compile(
    r"(^|_)mark(_|$)|^(is|use|need|return|output|average|training|train)_|^(training|train)$|cache|past|causal|(?<!a)head_mask|weights$|dropout|^p$|drop|scale|temperature|pos|verbose|need|rope|freqs|freq$|freq_c|kwargs|layer_idx|relative"
)

ASKED_WIDTH = re.compile(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
OF_WIDTHS = re.compile(r"shape '\[|cannot be multiplied|expected input|channels|came back|split")
NUMBER_SAID, MOST_NAMED = re.compile(r"(?<![\w:./])\d+\b"), 1  # not that of a line
SIZES_SAID = re.compile(r"(?<![\w:./])\d[\dx]*")
MOST_FAILED = 3_000  # calls that fail: what can be called mostly runs among the first few
MOST_AT_A_CRASH = 60  # where some reached a line that raises whatever it is given
SOME = 7  # of the neutral masks one in so many: still all ranks and all encodings
PACKED = "qkv"  # holds queries, keys and values side by side
NUMBER = re.compile(r"^(d_k|dk|d_model|num_heads|n_heads|heads)$")
TILE = re.compile(r"(block|chunk|tile|segment)_?(size|len(gth)?)$")  # several fit into a sequence
TARGET = re.compile(r"^q_|quer|tgt|target")
LETTER = re.compile(r"^[a-z]_?\d?$")
ATTENDS = re.compile(r"att(n|ention)|mhs?a|multi_?head", re.IGNORECASE)
POSITIONS = re.compile(r"pos(ition)?_?ids?$|^(\w+_)?positions$")
WINDOW = re.compile(r"^window(_?size)?$")
POSITION = re.compile(
    r"^(start_?(pos|idx)|(past|cache|kv)_?len\w*|((rope|seqlen|\w*pos\w*)_)?offset|(input_|cache_)?pos(ition)?|step)$"
)


class Errors(list[str]):
    """What the code said to calls that failed."""

    def __init__(self, said: Iterable[str] = ()) -> None:
        super().__init__(said)
        self.own: list[str] = []  # what steps of the check itself raised, where the code ran
        self.before_the_mask: set[str] = set()  # what was said, but for sizes, where no mask changed the answer


def trials_of(
    function: Callable[..., Any], sizes: Sizes, dtype: torch.dtype, errors: Errors | None = None
) -> Iterator[Trial]:
    """Give the ways in which the code runs and gives an output of the query's length, the likeliest first.

    Equal lengths are tried only where different ones fail.
    """
    errors = Errors() if errors is None else errors
    alike = (replace(sizes, query_len=n, key_len=n) for n in _lengths_to_try(function, sizes, errors))
    heads_of_keys = dict.fromkeys((sizes.key_heads % sizes.num_heads, 0))  # 0: as many as of queries
    for lengths, layouts in ((one, layouts) for one in itertools.chain([sizes], alike) for layouts in LAYOUTS):
        found = False
        for plan, layout, heads in itertools.product(_plans(function), layouts, heads_of_keys):
            one = plan.self_attention and isinstance(function, nn.Module)
            if (layouts in OF_ONE and not one) or (one and layout in HEADS and layouts not in OF_ONE):
                continue
            not_viewed = layout in OF_STEPS and any(map(NOT_VIEWED.search, errors))
            if ", " in layout and (found or not plan.may_lie_apart or not_viewed):
                continue
            if (heads and "h" not in layout) or (layout == "l e" and VECTOR in dict(plan.roles).values()):
                continue  # without samples there is no vector of each
            if len(errors) > (MOST_AT_A_CRASH if CRASHES.met_in(errors) else MOST_FAILED):
                return
            wide = replace(lengths, head_dim=3 * lengths.head_dim) if PACKED in dict(plan.roles) else lengths
            wide = wide if plan.given.isdisjoint(TABLES) else replace(wide, key_len=wide.query_len)
            trial = Trial(function, replace(plan.laid_out(layout), key_heads=heads), wide, dtype)
            for working in _working(trial, errors):
                if trial.plan.step and _takes_as_many(trial):
                    break
                found = True
                yield working
                if _may_take_one_head(working):
                    yield from _working(replace(working, sizes=replace(lengths, num_heads=1)), Errors())
        if found:
            return


def _takes_as_many(trial: Trial) -> bool:
    """Whether as many queries as keys may stand in the place of one time step, so that it is none."""
    sizes = replace(trial.sizes, key_len=trial.sizes.query_len)
    ways = (replace(trial, plan=replace(trial.plan, layout=x, step=""), sizes=sizes) for x in LAYOUTS[0][:2])
    return any(True for way in ways for _ in _working(way, Errors()))


def _lengths_to_try(function: Callable[..., Any], sizes: Sizes, errors: Errors) -> Iterator[int]:
    """Give lengths that queries and keys may have to have: that of tables, and what is named where others failed."""
    yield from (sizes.query_len, MAX_LEN)
    exact = exact_lengths(function) if isinstance(function, nn.Module) else []
    yield from exact
    named = Counter(int(n) for text in errors if not OF_WIDTHS.search(text) for n in NUMBER_SAID.findall(text))
    known = {*exact, MAX_LEN, sizes.embed_dim, *vars(sizes).values()}
    yield from [n for n, _ in named.most_common() if SHORT < n <= LONGEST and n not in known][:MOST_NAMED]


def _may_take_one_head(trial: Trial) -> bool:
    """Whether the width that a constructor was given may be that of one head: no parameter shows which it is."""
    module = trial.function if "h" not in trial.plan.layout else None
    return isinstance(module, nn.Module) and next(module.parameters(), None) is None


def crossed(trial: Trial) -> Trial | None:
    """Give the way to call with a second tensor that may be left out, masks left to their defaults; None if none is."""
    parameters = parameters_of(trial.function)
    required, roles = _required(parameters), {p.name: _role(p) for p in parameters}
    held = {*required, *held_by_arguments(trial.function), *filter(LETTER.search, unread_arguments(trial.function))}
    memory = [n for n, role in roles.items() if role in ("memory", "key", "value") and n not in held]
    if not memory or "input" not in roles.values():
        return None
    given = {n: "query" if role == "input" else role for n, role in roles.items() if role not in ("", "default")}
    kept = {n: role for n, role in given.items() if n in memory or n in required or role.startswith("=")}
    if not {"key", "value"} <= set(kept.values()):  # one tensor for both, whatever it is called
        kept |= dict.fromkeys(memory, "memory")
    plan = CallPlan(tuple(kept.items()), trial.plan.layout, trial.plan.positional)
    equal = replace(trial.sizes, key_len=trial.sizes.query_len)
    tried = (replace(trial, plan=plan, sizes=sizes) for sizes in (trial.sizes, equal))
    return next((working for one in tried for working in _working(one, Errors())), None)


def positioned(trial: Trial) -> Trial | None:
    """Give the way to call with positions that may be left out, one vector for each token; None if there is none."""
    given, parameters = dict(trial.plan.roles), parameters_of(trial.function)
    optional = [p.name for p in parameters if p.default is None and ADDED_POSITIONS.search(p.name.lower())]
    names = {name for name in optional if name not in given and not trial.plan.positional}
    ways = _added_positions({**given, **dict.fromkeys(sorted(names), "=0")}, names)
    plans = (replace(trial.plan, roles=(*trial.plan.roles, *way.items())) for way in ways)
    return next((one for plan in plans for one in _working(replace(trial, plan=plan), Errors())), None)


def other_masks(trial: Trial) -> Iterator[Trial]:
    """Give the ways to call with each mask that is left out; the one that is not hides nothing then."""
    plan, first = trial.plan, trial.plan.mask_parameter
    others = [p.name for p in parameters_of(trial.function) if _role(p) == "mask" and p.name != first]
    instead = {"mask?": "=None"} if plan.neutral is None else {"mask": "neutral", "mask?": "neutral"}
    kept = tuple((n, instead.get(r, r)) for n, r in plan.roles if n != first or r in instead)
    for name in () if plan.positional else others:
        roles = (*(pair for pair in kept if pair[0] != name), (name, "mask"))
        yield replace(trial, plan=replace(plan, roles=roles))


def _required(parameters: list[inspect.Parameter]) -> set[str]:
    return {p.name for p in parameters if p.default is p.empty}


def _plans(function: Callable[..., Any]) -> Iterator[CallPlan]:
    """Propose what each parameter gets; what tokens are multiplied with may be a mask of those that are there."""
    parameters = parameters_of(function)
    required = _required(parameters)
    roles = _roles(function, parameters, required)
    times = {n for n in multiplied_by(function) & required if role_of_parameter(n) == "mask"}
    for more in ([dict.fromkeys(times, REAL_TOKENS)] if times else []) + [{}]:
        yield from _plans_with({**roles, **more}, function, parameters, required)


def _plans_with(
    roles: Mapping[str, str], function: Callable[..., Any], parameters: list[inspect.Parameter], required: set[str]
) -> Iterator[CallPlan]:
    """Propose what each parameter gets: what their names say, if that is enough, then every assignment."""
    positional = any(p.kind is p.POSITIONAL_ONLY for p in parameters)
    unsaid = [name for name in required if not roles[name]]
    if called_arguments(function).intersection(unsaid):
        return  # what it is to call only its caller knows
    compared = compared_by(type(function)) if unsaid else {}
    left_out = {name: "=None" for name in unsaid if None in compared.get(name, [])}
    positions = {p.name: "=positions" for p in parameters if p.default is None and POSITIONS.search(p.name.lower())}
    ways = *_added_positions(roles, required), *(left_out, {}, positions)[not left_out : 2 + bool(positions)]
    named = [option for more in ways for option in _named_roles({**roles, **more}, required)]
    yield from (CallPlan(tuple(option.items()), "", positional) for option in named)
    sure = named and "angles" in {roles[name] for name in required}  # names that say as much are not doubted
    tensors = [name for name, role in roles.items() if role in ("", *OF_TOKENS)]
    tensors = [name for name in tensors if not roles[name] or name in required] or tensors[:1]
    others = ("mask", "angles", "=", "[")
    kept = {name: role for name, role in roles.items() if name in tensors or role.startswith(others)}
    for assignment in (one for one in ASSIGNMENTS if len(one) == len(tensors) and not sure):
        chosen = kept | dict(zip(tensors, assignment, strict=True))
        if any(roles[name] and "mask" in chosen[name] for name in tensors):
            continue  # its name says that it holds tokens
        yield CallPlan(tuple(chosen.items()), "", positional, named=False)
    beside = [name for name in tensors[1:] if roles[name] in ("", "input", "memory")]
    for vectors in dict.fromkeys([*((name,) for name in beside[::-1]), tuple(beside)]) if beside else ():
        one = {**roles, tensors[0]: roles[tensors[0]] or "input", **dict.fromkeys(vectors, VECTOR)}
        yield from (CallPlan(tuple(x.items()), "", positional, named=False) for x in _named_roles(one, required))


def _roles(function: Callable[..., Any], parameters: list[inspect.Parameter], required: set[str]) -> dict[str, str]:
    """Say what each argument gets by its name, and by what the code does with it."""
    roles = {p.name: _role(p) for p in parameters}
    roles |= _image_sizes(roles) | _masks_left_out(roles, required) | _memory_never_read(function, roles, required)
    turning = required & handed_on_as(function, "angles")
    roles |= {name: "angles" for name in turning if roles[name] in ("", "=0", "=False")}
    held = held_by_arguments(function)
    roles |= {name: "default" for name in held if name not in required and roles[name] in OF_TOKENS}
    roles |= _of_several(held, roles)
    roles |= {name: "=None" for name in required & unread_arguments(function) if not roles[name]}
    return roles | {name: "=state" for name in required if empty_state(function, name) is not None}


def _memory_never_read(function: Any, roles: Mapping[str, str], required: set[str]) -> dict[str, str]:
    """Leave out a memory that no line reads, as where a layer has the signature of torch's; one attention is left."""
    idle = {n for n, role in roles.items() if role in ("memory", "key", "value")} & unread_arguments(function)
    held = function.named_modules() if isinstance(function, nn.Module) else ()
    attend = [f"{path}." for path, m in held if ATTENDS.search(type(m).__name__)]
    outermost = [path for path in attend if not any(path != other and path.startswith(other) for other in attend)]
    if not idle or idle & required or len(outermost) > 1:
        return {}
    left = [name for name, role in roles.items() if role in OF_TOKENS and name not in idle]
    return dict.fromkeys(idle, "default") | {name: "input" for name in left if len(left) == 1}


def _added_positions(roles: Mapping[str, str], required: set[str]) -> Iterator[dict[str, str]]:
    """Give what is called positions and required one vector for each query, or key, or for each distance of both."""
    tokens = [role for role in roles.values() if role in OF_TOKENS]
    named = [name for name, role in roles.items() if name in required and ADDED_POSITIONS.search(name.lower())]
    named = [name for name in named if roles[name] in ("=0", "=False") or tokens.count(roles[name]) > 1]
    both = [OF_QUERIES, OF_KEYS][: 2 - (len(tokens) == 1)]
    likely = [both if TARGET.search(name.lower()) else both[::-1] for name in named]
    yield from (dict(zip(named, chosen, strict=True)) for chosen in (ranked(likely) if named else ()))
    of_one = len(tokens) == 1 or sorted(tokens) == sorted(ROLES)  # which may be one and the same
    tables = [name for name in required if of_one and ADDED_POSITIONS.search(name.lower())]
    yield from ({name: table} for name in tables for table in TABLES)


def _of_several(held: Mapping[str, tuple[str, ...]], roles: Mapping[str, str]) -> dict[str, str]:
    """Say what arguments that hold several tensors hold, by the names that these get, or else by their number."""
    tokens = [name for name, role in roles.items() if role in ("", *OF_TOKENS)]
    found = dict[str, str]()
    for name, items in ((name, held[name]) for name in tokens if name in held):
        alone, named = tokens == [name], list(map(role_of_parameter, items))
        beside = {2: ["key", "value"]} if not alone else {2: ["query", "memory"], 3: ["query", "key", "value"]}
        if items == JOINED:
            named = ["input" if alone else "memory"] * 2
        elif "" in named or len({*named}) < len(named):
            named = beside.get(len(items), [])
        named = named if {*named} <= {*OF_TOKENS} else []  # a mask, or angles, beside tokens
        crosses, rest = bool({"key", "value", "memory"} & {*named}), [one for one in tokens if one not in held]
        found |= {one: "query" for one in rest if crosses and len(rest) == 1}
        found[name] = f"[{', '.join('query' if one == 'input' and crosses else one for one in named)}]"
    return {name: role for name, role in found.items() if role != "[]"}


def _image_sizes(roles: Mapping[str, str]) -> dict[str, str]:
    """Height and width beside each other are the sizes of an image: x of (batch, height * width, features), H, W."""
    names = {name.lower(): name for name in roles}
    pairs = (pair for pair in IMAGE_SIZES if set(pair) <= set(names))
    return {names[size]: role for pair in pairs for size, role in zip(pair, ("=height", "=width"), strict=True)}


def _masks_left_out(roles: Mapping[str, str], required: set[str]) -> dict[str, str]:
    """Of several masks pass one, the most general: not the one of the padding. The others are left out."""
    names = [name for name, role in roles.items() if role == "mask"]
    chosen = next((name for name in names if not re.search(r"pad|len|causal", name.lower())), (*names, "")[0])
    return {name: "=None" if name in required else "default" for name in names if name != chosen}


def _named_roles(roles: Mapping[str, str], required: set[str]) -> Iterator[dict[str, str]]:
    """X with an optional second tensor is self-attention first; with a required one it is cross-attention."""
    kept = {name: role for name, role in roles.items() if role != "default"}
    known = {one for role in kept.values() for one in held_roles(role)}
    three = known & {"query", "key", "value"}
    enough = not three or len(three) == 3 or (three == {"query"} and "memory" in known)
    if "" in known or ("input" in known) == ("query" in known) or not enough:
        return
    memory = [name for name, role in kept.items() if role == "memory"]
    if "input" not in known:
        yield kept
    elif required.isdisjoint(memory):
        yield {name: role for name, role in kept.items() if role not in ("memory", "key", "value")}
        if memory:  # a constructor may have asked for cross-attention
            yield {name: "query" if role == "input" else role for name, role in kept.items()}
    else:
        yield {name: "query" if role == "input" else role for name, role in kept.items()}
        if all(LETTER.search(name) for name in memory):  # where lengths must be equal, (x, y) may be (memory, target)
            yield {name: {"input": "memory", "memory": "query"}.get(role, role) for name, role in kept.items()}


def _role(parameter: inspect.Parameter) -> str:
    """Say what an argument gets; "default" if it is left out, "" if its name does not say."""
    name, optional = parameter.name.lower(), parameter.default is not parameter.empty
    role = role_of_parameter(name)
    switch = SWITCH.search(name) and role != "angles" and (role != "mask" or "head_mask" in name)
    constant = isinstance(parameter.default, bool | int | float) or "str" in str(parameter.annotation)
    if optional and (constant or switch or role in ("", "angles")):
        return "default"
    if POSITIONS.search(name) and not optional:
        return "=positions"
    if switch:
        return "=None" if re.search("drop|cache|past|mark", name) else "=0" if POSITION.search(name) else "=False"
    if TILE.search(name):
        return "=2"
    if WINDOW.search(name):
        return "=no window"
    number = parameter.annotation in (int, float) or NUMBER.search(name) or (not role and OF_A_NUMBER.search(name))
    return f"={parameter.name}" if number and role != "angles" else role


def _working(trial: Trial, errors: Errors) -> Iterator[Trial]:
    """Try it in all forms of masks and angles, unless all of them failed alike for another instance or precision."""
    of = type(trial.function) if isinstance(trial.function, nn.Module) else trial.function
    key, met, found = (of, trial.plan, trial.sizes), dict[str, Trial](), False
    known = TRIED.failed.get(key, {})
    again = (replace(one, function=trial.function, dtype=trial.dtype) for one in known.values())
    if known and all(_answer(one) == text for text, one in zip(known, again, strict=True)):
        errors += [text for text in known if text not in errors]
        return
    for working in _in_all_forms(trial, errors, met):
        found = True
        yield working
    if not found:
        TRIED.failed[key] = met
        given, asked = next((width.groups() for width in map(ASKED_WIDTH.search, met) if width), ("", ""))
        roles = tuple((name, f"=(batch, {asked})" if role == VECTOR else role) for name, role in trial.plan.roles)
        if asked and roles != trial.plan.roles:
            yield from _working(replace(trial, plan=replace(trial.plan, roles=roles)), errors)
        elif asked and {"query", "memory"} <= trial.plan.given and not trial.sizes.memory_dim:
            wide = int(asked) - int(given) + trial.sizes.embed_dim  # alone, or beside what queries give
            yield from _working(replace(trial, sizes=replace(trial.sizes, memory_dim=max(wide, 1))), errors)


def _in_all_forms(trial: Trial, errors: Errors, met: dict[str, Trial]) -> Iterator[Trial]:
    """Try it without a mask, or None where one is required, then each mask that might hide nothing; with all angles."""

    def tried(plan: CallPlan) -> Trial | None:
        one = replace(trial, plan=plan)
        done = answered(one, errors)
        if done is None:
            met.setdefault(errors[-1], one)
        return done

    plan, parameters = trial.plan, parameters_of(trial.function)
    required = _required(parameters)
    without = tuple((name, "mask?" if role == "mask" and name in required else role) for name, role in plan.roles)
    none_masks = {name for name, role in plan.roles if role == "=None" and role_of_parameter(name) == "mask"}
    all_neutral = tuple((name, "neutral" if name in none_masks else role) for name, role in plan.roles)
    left_out = tuple((p.name, "neutral") for p in parameters if _role(p) == "mask" and p.name not in dict(plan.roles))
    masked = MaskForm.neutral_forms() if plan.mask_parameter else []
    for angles in _angles_to_try(replace(trial, plan=replace(plan, roles=without))):
        done = tried(replace(plan, roles=without, angles=angles))
        if done is not None:
            yield done
            masked = []  # it asks for none
            continue
        neutral = replace(trial, plan=replace(plan, roles=all_neutral, angles=angles))
        said = SIZES_SAID.sub("", errors[-1])
        if masked and (said in errors.before_the_mask or _fails_before_the_mask(neutral, errors)):
            errors.before_the_mask.add(said)
            continue
        all_neutral += left_out if "NoneType" in errors[-1] and not plan.positional else ()  # it asks for all of them
        for form in masked:
            every = {plan.roles: 0, all_neutral: 0, _with_padding(all_neutral): 0}
            plans = [replace(plan, roles=r, angles=angles, neutral=form) for r in every]
            yield from itertools.islice((done for done in map(tried, plans) if done is not None), 1)


def _with_padding(roles: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Let masks that are called padding, beside one that is not, hold the tokens of one side alone."""
    masks = [name for name, role in roles if role in ("mask", "neutral")]
    pads = [name for name in masks if "pad" in name.lower()]
    sides = {name: OF_KEY_TOKENS if OF_MEMORY.search(name) else OF_QUERY_TOKENS for name in pads}
    own = sides if len(pads) < len(masks) else {}
    return tuple((name, own.get(name, role)) for name, role in roles)


def _angles_to_try(trial: Trial) -> list[AngleForm] | list[None]:
    """List the forms of angles; one will do where it meets the same words at the same line as None in its place."""
    roles = trial.plan.roles
    if "angles" not in dict(roles).values():
        return [None]
    held = held_by_arguments(trial.function)
    pairs = any(len(held.get(name, ())) == 2 for name, role in roles if role == "angles")  # cos, sin = angles
    forms = [form for form in AngleForm.all() if form.kind == "both" or not pairs]
    without = replace(trial.plan, roles=tuple((name, "=None" if role == "angles" else role) for name, role in roles))
    first, none = (_answer(replace(trial, plan=plan)) for plan in (replace(trial.plan, angles=forms[0]), without))
    return forms[:1] if first and first == none else forms


def _answer(trial: Trial) -> str:
    """Say what the code says to a call that fails; "" where it runs."""
    answers: list[str] = []
    return "" if answered(trial, answers) else answers[-1]


def _fails_before_the_mask(trial: Trial, errors: list[str]) -> bool:
    """Whether masks of all ranks and encodings meet the same words at the same line as the call without one."""
    forms = MaskForm.neutral_forms()[::SOME]
    return all(_answer(replace(trial, plan=replace(trial.plan, neutral=form))) == errors[-1] for form in forms)
