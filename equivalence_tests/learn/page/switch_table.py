"""The switches of both boards and their options, each as the code that sets it."""

from dataclasses import dataclass

__all__ = ["ATTENTION_SWITCHES", "SDPA_SWITCHES", "SIZES", "Option", "Switch"]


@dataclass(frozen=True)
class Option:
    """One position of a switch.

    Args:
        label: What stands beside it.
        code: The value as it is typed.
        setup: Lines that come before; words in capitals stand for what other switches say, as in ``SIZES``.
        inputs: What is passed as key or value instead of all of it.
    """

    label: str
    code: str
    setup: tuple[str, ...] = ()
    inputs: str = ""


@dataclass(frozen=True)
class Switch:
    """One argument.

    Args:
        argument: Its name.
        place: "init" or "call", where it is a keyword; "" for what stands in the code in another way.
        options: Its positions, the default first.
        explained: The argument whose explanation is shown; "" if there is none.
        concerns: The names by which traps call it.
    """

    argument: str
    place: str
    options: tuple[Option, ...]
    explained: str
    concerns: tuple[str, ...]


def switch(argument: str, place: str, *options: Option) -> Switch:
    """Make a switch of an argument that is explained and concerned under its own name."""
    return Switch(argument, place, options, argument, (argument,))


def plain(*codes: str) -> tuple[Option, ...]:
    """Make options whose label is their code."""
    return tuple(Option(code, code) for code in codes)


CAUSAL = "masks.causal(QUERY_LEN, KEY_LEN)"
REAL = "masks.from_lengths(torch.tensor(LENGTHS), KEY_LEN)PICK"

# What the words in capitals stand for, by the option of the inputs and by that of batch_first: x keeps its shape, so
# that its axes change their meaning.
SIZES: dict[str, tuple[dict[str, int | str], ...]] = {
    "mha": (
        {"QUERY_LEN": 3, "KEY_LEN": 3, "BATCH": 2, "LENGTHS": "[3, 2]", "MEMORY": "5, 2", "PICK": ""},
        {"QUERY_LEN": 2, "KEY_LEN": 2, "BATCH": 3, "LENGTHS": "[2, 1, 2]", "MEMORY": "3, 5", "PICK": ""},
        {"QUERY_LEN": 3, "KEY_LEN": 5, "BATCH": 2, "LENGTHS": "[5, 3]", "MEMORY": "5, 2", "PICK": ""},
        {"QUERY_LEN": 2, "KEY_LEN": 5, "BATCH": 3, "LENGTHS": "[5, 3, 4]", "MEMORY": "3, 5", "PICK": ""},
        {"QUERY_LEN": 3, "KEY_LEN": 3, "BATCH": 1, "LENGTHS": "[2]", "MEMORY": "", "PICK": "[0]"},
        {"QUERY_LEN": 3, "KEY_LEN": 3, "BATCH": 1, "LENGTHS": "[2]", "MEMORY": "", "PICK": "[0]"},
    ),
    "sdpa": (
        {"QUERY_LEN": 3, "KEY_LEN": 5, "LENGTHS": "[3]", "PICK": "[:, None, None, :]"},
        {"QUERY_LEN": 3, "KEY_LEN": 5, "LENGTHS": "[3]", "PICK": "[:, None, None, :]"},
        {"QUERY_LEN": 3, "KEY_LEN": 5, "LENGTHS": "[3]", "PICK": "[:, None, :]"},
        {"QUERY_LEN": 2, "KEY_LEN": 2, "LENGTHS": "[1]", "PICK": "[:, None, None, :]"},
    ),
}
ATTENTION_SWITCHES = (
    Switch(
        "dtype",
        "",
        (
            Option("float64", "torch.float64"),
            Option("float32", "torch.float32"),
            Option("bfloat16", "torch.bfloat16"),
        ),
        "dtype",
        ("dtype",),
    ),
    switch("embed_dim", "", *plain("4", "6")),
    switch("num_heads", "", *plain("2", "1", "4")),
    Switch(
        "query, key, value",
        "",
        (
            Option("x, x, x", "x, x, x", ("x = torch.randn(3, 2, EMBED_DIM, dtype=torch.float64DEVICE)CAST",)),
            Option(
                "x, memory, memory",
                "x, memory, memory",
                (
                    "x = torch.randn(3, 2, EMBED_DIM, dtype=torch.float64DEVICE)CAST",
                    "memory = torch.randn(MEMORY, EMBED_DIM, dtype=torch.float64DEVICE)CAST",
                ),
            ),
            Option("no batch", "x, x, x", ("x = torch.randn(3, EMBED_DIM, dtype=torch.float64DEVICE)CAST",)),
        ),
        "query",
        ("query", "key", "value"),
    ),
    switch("dropout", "init", *plain("0.0", "0.5")),
    switch("bias", "init", *plain("True", "False")),
    switch("add_bias_kv", "init", *plain("False", "True")),
    switch("add_zero_attn", "init", *plain("False", "True")),
    switch("kdim", "init", Option("None", "None"), Option("3", "3", (), "[..., :3]")),
    switch("vdim", "init", Option("None", "None"), Option("2", "2", (), "[..., :2]")),
    switch("batch_first", "init", *plain("False", "True")),
    switch("device", "init", Option("None", "None"), Option('"meta"', '"meta"')),
    switch(
        "key_padding_mask",
        "call",
        Option("None", "None"),
        Option("bool", "is_padding", (f"is_padding = ~{REAL}",)),
        Option("float", "padding", (f"padding = masks.to_score_bias({REAL}, x.dtype)",)),
    ),
    switch("need_weights", "call", *plain("True", "False")),
    switch(
        "attn_mask",
        "call",
        Option("None", "None"),
        Option("causal, bool", "hidden", (f"hidden = masks.to_module_mask({CAUSAL})",)),
        Option("causal, float", "hiding", (f"hiding = masks.to_score_bias({CAUSAL}, x.dtype)",)),
        Option(
            "one for each head",
            "hidden",
            (
                "windows = [masks.sliding_window(QUERY_LEN, KEY_LEN, window=1 + i % 3) for i in range(MAPS)]",
                "hidden = ~torch.stack(windows)",
            ),
        ),
        Option(
            "a row without keys",
            "hidden",
            ("hidden = torch.zeros(QUERY_LEN, KEY_LEN, dtype=torch.bool)", "hidden[0] = True"),
        ),
    ),
    switch("average_attn_weights", "call", *plain("True", "False")),
    switch("is_causal", "call", *plain("False", "True")),
    Switch(
        "mode",
        "",
        (
            Option("training, with gradients", ""),
            Option("eval(), without gradients", "attention.eval().requires_grad_(False)"),
        ),
        "",
        (),
    ),
)

SDPA_SWITCHES = (
    Switch(
        "query, key, value",
        "",
        (
            Option(
                "(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)",
                "query, key, value",
                (
                    "query = torch.randn(1, 2, 3, 4, dtype=torch.float64)",
                    "key, value = torch.randn(2, 1, KEY_HEADS, 5, 4, dtype=torch.float64)",
                ),
            ),
            Option(
                "values of width 6",
                "query, key, value",
                (
                    "query = torch.randn(1, 2, 3, 4, dtype=torch.float64)",
                    "key = torch.randn(1, 2, 5, 4, dtype=torch.float64)",
                    "value = torch.randn(1, 2, 5, 6, dtype=torch.float64)",
                ),
            ),
            Option(
                "no batch",
                "query, key, value",
                (
                    "query = torch.randn(2, 3, 4, dtype=torch.float64)",
                    "key, value = torch.randn(2, 2, 5, 4, dtype=torch.float64)",
                ),
            ),
            Option(
                "heads after the length",
                "query, key, value",
                (
                    "query = torch.randn(1, 3, 2, 4, dtype=torch.float64)",
                    "key, value = torch.randn(2, 1, 3, 2, 4, dtype=torch.float64)",
                ),
            ),
        ),
        "query",
        ("query", "key", "value"),
    ),
    switch(
        "attn_mask",
        "call",
        Option("None", "None"),
        Option("bool", "may_attend", ("may_attend = masks.sliding_window(QUERY_LEN, KEY_LEN, window=2)",)),
        Option("float", "bias", ("bias = -torch.arange(KEY_LEN, dtype=torch.float64).expand(QUERY_LEN, KEY_LEN)",)),
        Option("padding", "may_attend", ("may_attend = masks.from_lengths(torch.tensor(LENGTHS), KEY_LEN)PICK",)),
        Option(
            "a row without keys",
            "may_attend",
            ("may_attend = torch.ones(QUERY_LEN, KEY_LEN, dtype=torch.bool)", "may_attend[0] = False"),
        ),
    ),
    switch("dropout_p", "call", *plain("0.0", "0.5")),
    switch("is_causal", "call", *plain("False", "True")),
    switch("scale", "call", *plain("None", "1.0", "0.05")),
    switch("enable_gqa", "call", *plain("False", "True")),
)
