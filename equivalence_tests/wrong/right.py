"""All that is right and is changed: attentions of the zoo and of the tests of styles and of public code, and layers."""

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from equivalence_tests.checker.zoo import conventions
from equivalence_tests.checker.zoo import right as texts
from equivalence_tests.wrong import fixed_layers
from equivalence_tests.wrong.sources import HEADS, LENGTHS, WIDTH, Right, call_of, complete, sizes_of, text_of

__all__ = ["Row", "right_of", "rights"]

X = ("x:tokens",)
CROSS = "query:tokens key:memory value:memory"
ATTENDS = {"dim": WIDTH, "context_dim": WIDTH, "num_heads": HEADS}
DIM, EMBED = {"dim": WIDTH, "num_heads": HEADS}, {"embed_dim": WIDTH, "num_heads": HEADS}

Row = tuple[str, Mapping[str, Any], tuple[str, ...]]
ZOO: tuple[Row, ...] = (
    ("SeparateLinears", {"d_model": WIDTH, "n_heads": HEADS}, (CROSS, f"{CROSS} mask:seen")),
    (
        "ValuesFirst",
        {"heads": HEADS, "embed_size": WIDTH},
        ("values:memory keys:memory queries:tokens mask:seen_by_heads",),
    ),
    ("FusedCausal", {"config": SimpleNamespace(n_embd=WIDTH, n_head=HEADS, bias=True)}, X),
    ("PackedByHead", DIM, (*X, "x:tokens attention_mask:added")),
    (
        "SequenceFirst",
        {"d_model": WIDTH, "n_heads": HEADS},
        (
            "query:tokens_first key:memory_first value:memory_first",
            "query:tokens_first key:memory_first value:memory_first attn_mask:hidden",
        ),
    ),
    (
        "PostNorm",
        {"n_head": HEADS, "d_model": WIDTH, "d_k": WIDTH // HEADS, "d_v": WIDTH // HEADS},
        ("q:tokens k:memory v:memory", "q:tokens k:memory v:memory mask:hidden_by_all"),
    ),
    ("ParametersOnly", {"emb": WIDTH, "heads": HEADS}, X),
)
# Of ``zoo/right.py``, where each is called Attention.
WRITTEN: tuple[Row, ...] = (
    ("cross", EMBED, (CROSS, f"{CROSS} mask:hidden_by_all")),
    ("itself", EMBED, X),
    ("causal", EMBED, X),
    ("padded", EMBED, (CROSS, f"{CROSS} key_padding_mask:hidden_memory")),
    ("lengths", EMBED, (CROSS, f"{CROSS} lengths:lengths")),
    ("packed", EMBED, X),
    ("grouped", {"embed_dim": 24, "num_heads": 6, "num_kv_heads": 2}, ("x:wide",)),
    ("rotary", EMBED, X),
    ("tiled", EMBED, X),
    ("post_norm", EMBED, X),
    ("pre_norm", EMBED, X),
)
STYLES: tuple[Row, ...] = (
    *(
        (name, {}, X)
        for name in (
            "Base", "TurnedByMatrices", "LearntScales", "ScaledTables", "PooledQueries", "PooledImages",
            "PassesOnWhatItIsTold", "ScaledByConfiguration", "ScaledForLongerContexts", "NormedValues", "Gated",
            "ScaledByPosition", "BentOnPurpose", "Indexed", "NormedBoth", "NormedWithoutScale", "LearntQuery",
            "BesideWhatPasses", "FallsWithDistance", "RollsAllThreeAndBack",
        )
    ),
    ("TwoStreams", {}, ("x:tokens text:memory",)),
    ("Masked", {}, ("x:tokens attention_mask:added",)),
)  # fmt: skip
PUBLIC: tuple[Row, ...] = (
    ("Attends", ATTENDS, ("x:tokens context:memory",)),
    ("SumsByLetters", ATTENDS, ("x:tokens context:memory",)),
    ("TurnsByATable", ATTENDS, ("x:tokens context:memory",)),
    ("AddsItsMask", ATTENDS, ("x:tokens mask:added",)),
    (
        "KeepsADictionary",
        ATTENDS,
        ("query:tokens key:tokens value:tokens", "query:tokens key:tokens value:tokens cache:kept"),
    ),
    ("LooksAtNeighbours", {"feat_dim": WIDTH, "num_head": HEADS}, ("x:features_first",)),
    ("ListOfHeads", {"n_embed": WIDTH, "n_heads": HEADS}, X),
    ("Packed", {"n_embd": WIDTH, "n_head": HEADS}, X),
    (
        "WritesInPlace",
        {"dim": WIDTH, "n_heads": HEADS},
        (
            "x:tokens start_pos:zero freqs_cis:angles",
            "x:tokens start_pos:zero freqs_cis:angles mask:added",
            "x:tokens start_pos:two freqs_cis:angles",
        ),
    ),
    ("TakesGroupedHeads", {"num_heads": 6, "num_kv_heads": 2}, ("q:heads k:memory_heads v:memory_heads",)),
    ("WindowsOfAnImage", {"channels": WIDTH}, ("x:image",)),
    ("RowByRow", {"d_model": WIDTH}, X),
    ("RowWithItsKeys", {"d_model": WIDTH}, X),
    ("ReadsItselfToo", {"dim": WIDTH, "dim_head": 4}, ("x:memory latents:tokens",)),
    ("ScalesItsValues", EMBED, X),
    ("GatesByHand", EMBED, X),
    ("DividesByItsInputs", EMBED, X),
    ("AdaptedAttention", EMBED, X),
    ("LooksUpClasses", {"channels": WIDTH}, ("x:image",)),
    ("KeysOnTheLeft", {"query_dim": WIDTH, "memory_dim": WIDTH, "width": WIDTH}, ("query:image memory:image",)),
    ("HidesByNode", EMBED, ("x:tokens node_mask:seen_tokens",)),
    (
        "DecodesWithAMemory",
        {"dim": WIDTH, "heads": HEADS},
        ("query:tokens memory:memory", "query:tokens memory:memory mask:hidden"),
    ),
    ("WithABranchFactor", {"dim": WIDTH, "heads": HEADS, "alpha": 0.7}, X),
    ("MixesPlaces", DIM, X),
    ("RootInSinglePrecision", {"d_model": WIDTH, "n_heads": HEADS}, ("q:tokens k:memory v:memory",)),
    ("ReadsATextBeside", {"dim": WIDTH, "num_heads": HEADS}, ("x:tokens text:memory",)),
    (
        "TurnsByTablesIfGiven",
        {"hidden_size": WIDTH, "num_heads": HEADS},
        (*X, "x:tokens cos:table sin:table", "x:tokens position_ids:places cos:table sin:table"),
    ),
    ("Crossing", {"d_model": WIDTH, "n_head": HEADS}, ("x:tokens context:memory",)),
    ("AttentionOfTwoSignals", {"dim": WIDTH, "num_heads": HEADS}, ("slow:features_first fast:features_first",)),
)
ENGINE = "equivalence_tests.checker.engine"


@cache
def rights() -> tuple[Right, ...]:
    """List them all; what the tests hold is left out where the tests are not installed."""
    return tuple(_listed())


def _listed() -> Iterator[Right]:
    source = inspect.getsource(conventions)
    yield from (right_of("zoo", row, text_of(source, row[0])) for row in ZOO)
    yield from (right_of("zoo", row, texts.broken(row[0]), "Attention") for row in WRITTEN)
    for room, rows in (("styles", STYLES), ("public_code", PUBLIC)):
        try:
            source = inspect.getsource(import_module(f"{ENGINE}.test_{room}"))
        except ModuleNotFoundError:
            continue
        yield from (right_of(room.partition("_")[0], row, text_of(source, row[0])) for row in rows)
    yield from fixed_layers.rights()


def right_of(room: str, row: Row, text: str, target: str = "") -> Right:
    """Make one of its row and its text.

    Args:
        room: Where it comes from.
        row: Its name, the arguments of its constructor, and its calls.
        text: Source that stands alone.
        target: The class or function in it, where that is not its name.
    """
    name, arguments, calls = row
    sizes = sizes_of(arguments, text)
    lengths = (5,) if name == "LearntScales" else LENGTHS  # its table has five rows
    return Right(room, name, complete(text), target or name, arguments, tuple(map(call_of, calls)), sizes, lengths)
