"""Every argument of the built-in attention as a switch: what it changes, for each alone and for known pairs."""

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scratch
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.learn.excerpts import Excerpt
from equivalence_tests.learn.explain.entry import ATTENTION, SDPA
from equivalence_tests.learn.explain.registry import find_explanations
from equivalence_tests.learn.explain.rendering import traps_of
from equivalence_tests.learn.page.figures import Matrix, gap, largest_of, matrices, rounding_of
from equivalence_tests.learn.page.switch_table import ATTENTION_SWITCHES, SDPA_SWITCHES, SIZES, Option, Switch
from equivalence_tests.learn.page.tape import Tape
from equivalence_tests.learn.traps.entry import Trap
from equivalence_tests.learn.traps.registry import TRAPS, traps_about
from scratch import masks

__all__ = ["Board", "Outcome", "State", "Told", "code_of", "names_after", "run_code", "switch_data"]

# Operations that say which way was taken; the others only prepare for these.
MODE, INPUTS = "mode", "query, key, value"
MASKS = ("key_padding_mask", "attn_mask")
TELLING = ("mm", "softmax", "dropout", "bernoulli", "attention", "cat")
PATHS = {
    "_native_multi_head_attention": "the fast path, one fused call",
    "_scaled_dot_product": "a fused kernel of scaled_dot_product_attention",
    "": "the plain path, step by step",
}


@dataclass(frozen=True)
class Outcome:
    """What a piece of code gave: tensors by name, or the error in which it ended; its warnings and operations."""

    tensors: dict[str, Tensor]
    error: str
    warnings: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Shown:
    """A tensor of a result: its name, its shape in words, its numbers."""

    name: str
    shape: str
    tables: tuple[Matrix, ...]


@dataclass(frozen=True)
class State:
    """One setting of the switches.

    Args:
        key: The switches that are not as by default, with the number of the option.
        title: The same in words.
        code: What was run.
        torch: What torch.nn gave.
        scratch: What scratch gave where it is not the same; else nothing.
        error: The error that torch raised; "" if none.
        warnings: What torch warned of.
        scratch_error: The error that scratch raised; "" if none.
        agreement: How far the two are apart.
        changes: What is different from the defaults.
        path: Which way torch took.
        operations: What it called on that way.
        traps: Those about both switches that are set, by name.
    """

    key: str
    title: str
    code: str
    torch: tuple[Shown, ...]
    scratch: tuple[Shown, ...]
    error: str
    warnings: tuple[str, ...]
    scratch_error: str
    agreement: str
    changes: tuple[str, ...]
    path: str
    operations: tuple[str, ...]
    traps: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """What an argument does, the lines of scratch that do it, and the traps around it."""

    argument: str
    does: str
    excerpts: tuple[Excerpt, ...]
    traps: tuple[str, ...]


@dataclass(frozen=True)
class Board:
    """All switches of one class or function, and all states that were computed."""

    name: str
    title: str
    switches: tuple[Switch, ...]
    told: tuple[Told, ...]
    states: tuple[State, ...]


def switch_data() -> tuple[Board, ...]:
    """Compute every state of both boards."""
    return (
        _board("mha", ATTENTION, "nn.MultiheadAttention", ATTENTION_SWITCHES),
        _board("sdpa", SDPA, "F.scaled_dot_product_attention", SDPA_SWITCHES),
    )


def _board(name: str, owner: str, title: str, switches: Sequence[Switch]) -> Board:
    base = _results(code_of(name, switches, {}))
    states = tuple(_state(name, owner, switches, chosen, base) for chosen in _settings(owner, switches))
    told = tuple(_told(owner, switch) for switch in switches if switch.explained)
    return Board(name, title, tuple(switches), told, states)


def _told(owner: str, switch: Switch) -> Told:
    (explanation,) = find_explanations(switch.explained, owner)
    excerpts = tuple(place.excerpt() for place in explanation.places)
    return Told(switch.argument, explanation.does, excerpts, tuple(trap.name for trap in traps_of(explanation)))


def _settings(owner: str, switches: Sequence[Switch]) -> Iterator[dict[str, int]]:
    """Give the defaults, each option alone, and the pairs of switches that a trap names, each option with each."""
    yield {}
    options = {switch.argument: range(1, len(switch.options)) for switch in switches}
    yield from ({argument: option} for argument in options for option in options[argument])
    pairs = {pair for trap in TRAPS for pair in combinations(_named(trap, owner, switches), 2)}
    for first, second in sorted(pairs, key=lambda pair: [list(options).index(x) for x in pair]):
        yield from ({first: a, second: b} for a, b in product(options[first], options[second]))


def _named(trap: Trap, owner: str, switches: Sequence[Switch]) -> list[str]:
    """List the switches that a trap is about, in their order."""
    return [switch.argument for switch in switches if _is_about(trap, owner, switch)]


def _is_about(trap: Trap, owner: str, switch: Switch) -> bool:
    """Whether a trap concerns a switch; the mode, if its code calls ``eval()``."""
    if switch.argument == MODE:
        return ".eval()" in inspect.getsource(trap.wrong)
    return any(trap in traps_about(name, owner) for name in switch.concerns)


def code_of(name: str, switches: Sequence[Switch], chosen: dict[str, int]) -> str:
    """Write the code of a setting, as one would type it.

    Args:
        name: Of the board.
        switches: All of its switches.
        chosen: Those that are not as by default, with the number of the option.

    Returns:
        Lines of Python; the last one is the call.
    """
    options = {switch.argument: switch.options[chosen.get(switch.argument, 0)] for switch in switches}
    given = {
        place: [
            f"{x.argument}={options[x.argument].code}" for x in switches if x.place == place and x.argument in chosen
        ]
        for place in ("init", "call")
    }
    inputs = options[INPUTS]
    lines = [*inputs.setup, *(line for x in MASKS if x in options for line in options[x].setup)]
    if name == "sdpa":
        lines.append(f"output = F.scaled_dot_product_attention({', '.join([inputs.code, *given['call']])})")
    else:
        sizes = [options[argument].code for argument in ("embed_dim", "num_heads")]
        query, key, value = inputs.code.split(", ")
        passed = [query, key + options["kdim"].inputs, value + options["vdim"].inputs]
        lines += [
            f"attention = nn.MultiheadAttention({', '.join([*sizes, *given['init'], 'dtype=DTYPE'])})",
            "randomize_parameters(attention)",
            *([options[MODE].code] if MODE in chosen else []),
            f"output, weights = attention({', '.join([*passed, *given['call']])})",
        ]
    return _filled_in("\n".join(lines), _words_for(name, options, chosen))


def _words_for(name: str, options: dict[str, Option], chosen: dict[str, int]) -> dict[str, int | str]:
    """Say what the words in capitals stand for."""
    if name == "sdpa":
        return {**SIZES[name][chosen.get(INPUTS, 0)], "KEY_HEADS": 1 if "enable_gqa" in chosen else 2}
    sizes = SIZES[name][2 * chosen.get(INPUTS, 0) + chosen.get("batch_first", 0)]
    dtype = options["dtype"].code
    return {
        **sizes,
        "EMBED_DIM": options["embed_dim"].code,
        "MAPS": int(sizes["BATCH"]) * int(options["num_heads"].code),
        "DTYPE": dtype,
        "DEVICE": f", device={options['device'].code}" if "device" in chosen else "",
        "CAST": f".to({dtype})" if "dtype" in chosen else "",
    }


def _filled_in(text: str, words: dict[str, int | str]) -> str:
    return re.sub("|".join(words), lambda found: str(words[found[0]]), text)


def run_code(code: str, package: Any) -> Outcome:
    """Run the code of a state.

    Args:
        code: As it is shown.
        package: What ``nn`` and ``F`` stand for: torch's, or scratch under both names.

    Returns:
        What came of it.
    """
    names, error, tape = _names_for(package), "", Tape()
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        setup, _, call = code.rpartition("\n")
        try:
            exec(setup, names)
            exec(call, names)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        told = tuple(f"{warning.category.__name__}: {warning.message}" for warning in caught)
        given = {name: names[name].detach() for name in ("output", "weights") if names.get(name) is not None}
        # Apart from the call whose results are shown: torch takes a few calls that it refuses where it is listened to.
        if not error:
            with tape:
                exec(call, names)
    return Outcome(given, error, told, _telling(tape))


def names_after(setup: str) -> dict[str, Any]:
    """Run all of a state's code but its call, and give what it has set."""
    names = _names_for(TORCH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(setup, names)
    return names


def _names_for(package: Any) -> dict[str, Any]:
    return {
        "torch": torch,
        "nn": SimpleNamespace(MultiheadAttention=package.MultiheadAttention),
        "F": SimpleNamespace(scaled_dot_product_attention=package.scaled_dot_product_attention),
        "masks": masks,
        "randomize_parameters": randomize_parameters,
    }


def _telling(tape: Tape) -> tuple[str, ...]:
    names = (entry.operation for entry in tape.computing if entry.part == 0)
    return tuple(name.strip("_") if "softmax" in name else name for name in names if any(x in name for x in TELLING))


TORCH = SimpleNamespace(
    MultiheadAttention=nn.MultiheadAttention, scaled_dot_product_attention=F.scaled_dot_product_attention
)


def _results(code: str) -> tuple[Outcome, Outcome]:
    return run_code(code, TORCH), run_code(code, scratch)


def _state(
    name: str, owner: str, switches: Sequence[Switch], chosen: dict[str, int], base: tuple[Outcome, Outcome]
) -> State:
    code = code_of(name, switches, chosen)
    theirs, ours = _results(code)
    agreement = _agreement(theirs, ours)
    apart = bool(agreement) and not agreement.startswith("<")
    set_ones = [switch for switch in switches if switch.argument in chosen]
    batch_first = "batch_first" in chosen
    return State(
        "-".join(f"{argument.replace(', ', '_')}.{option}" for argument, option in chosen.items()) or "defaults",
        ", ".join(f"{x.argument}: {x.options[chosen[x.argument]].label}" for x in set_ones) or "all as by default",
        code,
        _shown(theirs, switches, batch_first),
        _shown(ours, switches, batch_first) if apart else (),
        theirs.error,
        theirs.warnings,
        ours.error,
        agreement,
        tuple(_changes(theirs, base[0])) if chosen else (),
        "" if theirs.error else path_of(theirs),
        theirs.operations,
        tuple(trap.name for trap in TRAPS if len(chosen) > 1 and all(_is_about(trap, owner, x) for x in set_ones)),
    )


def path_of(outcome: Outcome) -> str:
    """Say in words which way torch took."""
    return next(words for kind, words in PATHS.items() if any(kind in x for x in outcome.operations) or not kind)


def _agreement(theirs: Outcome, ours: Outcome) -> str:
    """Say how far the two are apart; nothing where there are no numbers."""
    if theirs.error or ours.error:
        return "" if theirs.error and ours.error else "one of the two is an error"
    gaps = [gap(ours.tensors[name], x) for name, x in theirs.tensors.items() if x.device.type != "meta"]
    return max(gaps, key=lambda text: not text.startswith("<"), default="")


def _shown(outcome: Outcome, switches: Sequence[Switch], batch_first: bool) -> tuple[Shown, ...]:
    return tuple(_shown_tensor(name, x, switches, batch_first) for name, x in outcome.tensors.items())


def _shown_tensor(name: str, x: Tensor, switches: Sequence[Switch], batch_first: bool) -> Shown:
    words = _words(name, x, switches)
    if name == "output" and batch_first and x.dim() == 3:
        words = (words[1], words[0], *words[2:])
    shape = ", ".join(f"{word} {size}" for word, size in zip(words, x.shape, strict=True))
    if x.device.type == "meta":
        return Shown(name, f"{shape}, on meta: no numbers", ())
    return Shown(name, shape, matrices(x, words, 1.0 if name == "weights" else None))


def _words(name: str, x: Tensor, switches: Sequence[Switch]) -> tuple[str, ...]:
    """Name the axes of a result."""
    if name == "weights":
        full = ("batch", "num_heads", "query_len", "key_len")
        return full if x.dim() == 4 else ("batch", "query_len", "key_len")[3 - x.dim() :]
    if not any(switch.argument == "num_heads" for switch in switches):  # the function, whose heads are an axis
        return ("batch", "num_heads", "query_len", "head_dim")[4 - x.dim() :]
    return ("query_len", "batch", "embed_dim") if x.dim() == 3 else ("query_len", "embed_dim")


def _changes(now: Outcome, before: Outcome) -> Iterator[str]:
    """Say in words what is different from the defaults."""
    if now.error:
        yield "The call ends in an error."
        return
    for name, old in before.tensors.items():
        new = now.tensors.get(name)
        if new is None:
            yield f"{name} is None."
        elif new.shape != old.shape:
            yield f"{name} has the shape {tuple(new.shape)} instead of {tuple(old.shape)}."
        elif new.device.type != "meta":
            yield _changed(name, new, old)


def _changed(name: str, new: Tensor, old: Tensor) -> str:
    rounding = rounding_of(new.dtype) * largest_of(old)
    same = torch.isclose(new.double(), old.double(), rtol=0, atol=rounding, equal_nan=True)
    if same.all():
        return f"{name} stays the same{'' if new.dtype == old.dtype else ', rounded'}."
    return f"{int((~same).sum())} of the {new.numel()} numbers of {name} change."
