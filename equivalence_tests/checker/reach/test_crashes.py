"""An exception of which no argument is the cause is a finding; one that another call might avoid never is."""

import sys
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import pytest
import torch

from equivalence_tests import verify
from equivalence_tests.checker.reach.absent import ABSENCES
from equivalence_tests.checker.reach.arguments import Sizes
from equivalence_tests.checker.reach.crashes import CRASHES, Crash
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.checker.reach.plans import MOST_AT_A_CRASH, Errors, trials_of
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.tried import TRIED
from equivalence_tests.checker.zoo.right import broken

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\n"
CLASS = "class Mine(nn.Module):\n    def __init__(self, dim=4):\n        super().__init__()\n"
BUILT = "        self.project = nn.Linear(dim, dim)\n\n    def forward(self, x, part=None):\n"


def raised_by(tmp_path: Path, body: str, *, built: str = "", after: str = "", head: str = HEAD) -> list[Crash]:
    """What is noted of a module whose constructor and forward hold these lines, built and called once."""
    return noted(tmp_path, f"{head}{CLASS}{indent(built, ' ' * 8)}{BUILT}{indent(body, ' ' * 8)}\n{after}")


def noted(tmp_path: Path, text: str) -> list[Crash]:
    """What is noted of a file whose class Mine is built and called once."""
    (tmp_path / "mine.py").write_text(text)
    CRASHES.forget()
    ABSENCES.forget()
    made = load(f"{tmp_path / 'mine.py'}:Mine")
    TRIED.begin(made)
    assert attempt(lambda: made()(torch.ones(2, 3, 4)), []) is None  # it raises
    return CRASHES.found


OUTSIDE = """
class Mine(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(x)


class Part(nn.Module):
    pass


def forward(self, x):
    return x
"""


@pytest.mark.parametrize(("change", "line"), [(("", ""), 20), (("def forward(self, x):\n    return x", ""), None)])
def test_a_forward_outside_its_class_is_named(tmp_path: Path, change: tuple[str, str], line: int | None) -> None:
    crashes = noted(tmp_path, HEAD + OUTSIDE.replace(*change))
    assert [one.stack[-1].number for one in crashes] == ([] if line is None else [line])


SELF = "return self.projection(x)"
OWN = {
    "a misspelt attribute": (SELF, "Is self.project meant?", {}),
    "an attribute that a variable is called like": (SELF, "", {"built": "projection = nn.Linear(dim, dim)\n"}),
    "an attribute that is read before it is set": (SELF, "", {"built": "self.scale = self.width\nself.width = dim\n"}),
    "a function that nothing imports": ("return gelu(self.project(x))", "Import or define gelu.", {}),
    "a function that torch does not have": ("return F.softmx(x, -1)", "Is softmax meant?", {}),
    "a variable that is set too late": ("out = x + y\ny = x\nreturn out", "Set it before it is read.", {}),
    "a misspelt method of a tensor": ("return x.unsqeeze(1)", "Is unsqueeze meant?", {}),
    "too many arguments": (
        "part = Part()\nreturn part(x, x)",
        "Pass what is taken there.",
        {"after": "\nclass Part(nn.Module):\n    def forward(self, x):\n        return x\n"},
    ),
    "an argument that a module of torch does not have": (
        "return x",
        "what is taken there",
        {"built": "self.gelu = nn.GELU(inplace=False)\n"},
    ),
    "a misspelt argument": (
        "return x",
        "what is taken there",
        {"built": "self.conv = nn.Conv1d(4, 4, kerner_size=1)\n"},
    ),
    "a buffer that is an attribute already": (
        "return x",
        "Only register it.",
        {"built": "self.scale = torch.ones(dim)\nself.register_buffer('scale', self.scale)\n"},
    ),
    "a number where torch takes a tensor": (
        "return x / torch.sqrt(self.dim)",
        "math.sqrt",
        {"built": "self.dim = dim\n"},
    ),
    "a number of the constructor": ("return x", "math.sqrt", {"built": "self.scale = torch.sqrt(dim // 2)\n"}),
    "the width of a tensor": ("return x / torch.sqrt(x.size(-1))", "math.sqrt", {}),
    "a mask that is asked whether it is true": (
        "mask = x.ne(0) if part is None else part\nif mask:\n    x = x + mask * -1e9\nreturn x",
        "not None",
        {},
    ),
}
# The same exceptions, where something else may be the cause.
OTHERS = {
    "an attribute that somebody sets": (SELF, {"after": "\ndef build(x):\n    x.projection = nn.Linear(4, 4)\n"}),
    "a buffer that may be an attribute already": (
        "return x",
        {"built": "if dim == 4:\n    self.scale = None\nself.register_buffer('scale', torch.ones(dim))\n"},
    ),
    "an attribute that is set by its name": (SELF, {"built": "for n in []:\n    setattr(self, n, dim)\n"}),
    "an attribute of a subclass": (SELF, {"after": "\nclass Other(Mine):\n    projection = None\n"}),
    "an attribute of what is handed over": ("return part.project(x)", {}),
    "a name that a script gives": ("return x * scale", {"after": "\nif __name__ == '__main__':\n    scale = 2\n"}),
    "a name of a package that is absent": ("return rope(x)", {"head": HEAD + "from nopackage import *\n\n\n"}),
    "a variable that a branch sets": ("if part is not None:\n    y = x\nreturn y", {}),
    "sizes that do not fit": ("return x @ x", {}),
    "what holds a tensor and more": ("return self.project(part.tensor if part else x.tensor)", {}),
    "a method of an array": ("return x.astype(int)", {}),
    "arguments that depend on the input": (
        "return Part()(*x)",
        {"after": "\nclass Part(nn.Module):\n    def forward(self, x):\n        return x\n"},
    ),
    "arguments of a function that is not the user's": ("return torch.ones(x, 3)", {}),
    "a number that a caller chooses": ("return x / torch.sqrt(self.scale)", {"built": "self.scale = dim * 1.0\n"}),
    "a switch that is no mask": ("if x:\n    x = x + 1\nreturn x", {}),
}


@pytest.mark.parametrize("name", OWN)
def test_what_no_argument_causes_is_noted(name: str, tmp_path: Path) -> None:
    body, fix, more = OWN[name]
    (crash,) = raised_by(tmp_path, body, **more)
    assert fix in crash.fix
    lines = "\n".join([HEAD, body, *more.values()]).splitlines()
    assert crash.stack[-1].text in map(str.strip, lines)


def test_what_a_class_lacks_at_its_beginning_is_noted(tmp_path: Path) -> None:
    whole = f"{HEAD}{CLASS}{BUILT}        return self.project(x)\n"
    (crash,) = noted(tmp_path, whole.replace("__init__(self, dim", "__int__(self, dim"))
    assert (crash.fix, crash.stack[-1].number) == ("Call it __init__, not __int__.", 7)
    (crash,) = noted(tmp_path, whole.replace("super().__init__()", "self.dim = dim"))
    assert "super().__init__()" in crash.fix


@pytest.mark.parametrize("name", OTHERS)
def test_what_another_call_might_avoid_is_not(name: str, tmp_path: Path) -> None:
    body, more = OTHERS[name]
    assert raised_by(tmp_path, body, **more) == []


def test_an_attribute_that_a_file_beside_sets_is_not_noted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def prepare(model):\n    model.layer.projection = model.head\n")
    assert raised_by(tmp_path, SELF) == []


def test_a_part_that_raises_is_found_in_its_layer(tmp_path: Path) -> None:
    text = f"import torch\nfrom torch import nn\n\n\n{CLASS}{BUILT}        return gelu(self.project(x))\n"
    (tmp_path / "feed.py").write_text(text.replace("Mine", "FeedForward"))
    report = verify(f"{tmp_path / 'feed.py'}:FeedForward")
    assert (report.verdict, report.mistakes) == ("deviates", ("line_raises",))
    assert report.findings[0].is_proven
    assert "NameError: name 'gelu' is not defined" in report.findings[0].have


@pytest.mark.parametrize(
    ("default", "line", "other"),
    [
        ("ratio=4.0", "self.into = nn.Linear(dim, hidden)", "ratio=4"),
        ("ratio=0.5", "", ""),
        ("act='GELU'", "self.act = getattr(F, act)", "act='gelu'"),
        ("act='gelu', *, names", "", ""),
    ],
)
def test_a_default_that_raises_where_another_does_not_is_found(
    tmp_path: Path, default: str, line: str, other: str
) -> None:
    hidden = "dim * ratio" if "ratio" in default else "dim"
    lines = [f"class FeedForward(nn.Module):\n    def __init__(self, dim, {default}):", "super().__init__()"]
    lines += [f"hidden = {hidden}", "self.into = nn.Linear(dim, hidden)"]
    lines += ["self.act = getattr(F, act)"] if "act" in default else []
    lines += ["self.on = names['x']['y']['z']"] if "names" in default else []
    (tmp_path / "feed.py").write_text(
        HEAD + "\n        ".join(lines) + "\n\n    def forward(self, x):\n        return x\n"
    )
    found = verify(f"{tmp_path / 'feed.py'}:FeedForward").findings
    assert [one.line.text for one in found if one.line] == ([line] if line else [])
    assert all(f"with {other} the class can be built" in one.evidence for one in found)


def test_a_file_that_raises_when_it_is_imported_deviates_where_nothing_else_is_said(tmp_path: Path) -> None:
    class_alone = f"{CLASS}{BUILT}        return self.project(x)\n"
    (tmp_path / "model.py").write_text(class_alone)
    (finding,) = verify(f"{tmp_path / 'model.py'}:Mine").findings
    assert (finding.name, finding.line and finding.line.number) == ("line_raises", 1)
    right = "def attention(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)\n\n\nprint(undefined)\n"
    (tmp_path / "right.py").write_text(HEAD + right)
    assert verify(f"{tmp_path / 'right.py'}:attention")


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("x = (1, 2))", "deviates"),
        ("x = 1\u200b", "deviates"),
        ("x = \u2018a\u2019", "deviates"),
        ("print 'x'", "unchecked"),
        ("x = f'{[1}'", "unchecked"),
    ],
)
def test_a_line_that_no_version_of_python_reads_is_found(tmp_path: Path, line: str, verdict: str) -> None:
    (tmp_path / "mine.py").write_text(f"{HEAD}{line}\n")
    report = verify(f"{tmp_path / 'mine.py'}:attention")
    assert report.verdict == verdict
    assert [one.line.number for one in report.findings if one.line] == [6] * (verdict == "deviates")


@pytest.mark.parametrize(
    ("windows", "fix"),
    [
        ("def merge(x):\n    return x\n", "Define split there."),
        ("split = globals().get('split')\n", None),
        ("import torch\n\nif torch.cuda.device_count() > 99:\n    from fused import *\n", None),
        ("def split(x):\n    return x\n", None),
    ],
)
def test_a_name_that_a_file_beside_lacks_is_found(tmp_path: Path, windows: str, fix: str | None) -> None:
    (tmp_path / "windows.py").write_text(windows)
    (tmp_path / "model.py").write_text(
        f"{HEAD}from windows import split\n\n\n{CLASS}{BUILT}        return self.project(x)\n"
    )
    assert [one.fix for one in verify(f"{tmp_path / 'model.py'}:Mine").findings] == ([fix] if fix else [])
    sys.modules.pop("windows", None)


def test_the_file_that_has_a_name_is_said(tmp_path: Path) -> None:
    (tmp_path / "windows.py").write_text("")
    (tmp_path / "helpers.py").write_text("def split(x):\n    return x\n")
    (tmp_path / "model.py").write_text(
        f"{HEAD}from windows import split\n\n\n{CLASS}{BUILT}        return self.project(x)\n"
    )
    (finding,) = verify(f"{tmp_path / 'model.py'}:Mine").findings
    assert finding.fix == "Import it from helpers.py, which defines it."
    sys.modules.pop("windows", None)


def test_a_dropout_that_a_caller_chooses_may_take_other_arguments(tmp_path: Path) -> None:
    lines = ["def attention(q, k, v, dropout=None):", "weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)"]
    lines += ["if dropout is not None:", "    weights = dropout(weights, 0.1, True)", "return weights @ v"]
    (tmp_path / "mine.py").write_text(HEAD + "\n    ".join(lines))
    assert verify(f"{tmp_path / 'mine.py'}:attention").verdict != "deviates"


LOCAL = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return ((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).view(len(x), T, -1)


class Other(nn.Module):
    def forward(self, x):
        T = x.size(1)
        return x.view(len(x), T, -1)
"""


def test_a_name_that_only_another_function_gives_is_not_defined(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(LOCAL, encoding="utf-8")
    report = verify(f"{tmp_path / 'theirs.py'}:Attention")
    assert report.mistakes == ("line_raises",), str(report)
    assert "no line of theirs.py that this line sees defines or imports T" in " ".join(str(report).split())


KEPT = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT / self.head_dim**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
"""


def test_an_attribute_gives_no_name_without_self(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(KEPT, encoding="utf-8")
    (finding,) = verify(f"{tmp_path / 'theirs.py'}:Attention").findings
    assert (finding.name, finding.fix) == ("line_raises", "Is self.head_dim meant?")


CONFIGURED = """
class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.packed = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.norm = nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, query):
        q, k, v = self.packed(query).chunk(3, -1)
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return self.drop(weights) @ v, weights


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = Head(config)

    def forward(self, x):
        found = self.head(x)
        return found[0]
"""


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("drop(weights)", "drop(weights, training=True)", "return self.drop(weights, training=True) @ v, weights"),
        ("return found[0]", "return x + found", "return x + found"),
        ("return found[0]", "return x + self.head(x)", "return x + self.head(x)"),
        ("return found[0]", "return found.relu()", "return found.relu()"),
        ("return found[0]", "found, _ = found\n        return found.reshape('no tuple')", ""),
        ("self.head = Head(config)", "self.head = config.kind(config)", ""),
    ],
)
def test_what_a_part_takes_and_returns_is_the_same_for_every_config(
    tmp_path: Path, old: str, new: str, line: str
) -> None:
    (tmp_path / "mine.py").write_text(HEAD + CONFIGURED.replace(old, new))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert [one.line.text for one in report.findings if one.name == "line_raises" and one.line] == [line] * bool(line)
    assert report.verdict in ("deviates", "unchecked"), str(report)


def test_the_search_for_a_call_ends_where_each_raises_at_such_a_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + CONFIGURED.replace("drop(weights)", "drop(weights, training=True)"))
    made = load(f"{tmp_path / 'mine.py'}:Attention")(SimpleNamespace(hidden_size=12))
    TRIED.begin(type(made))
    CRASHES.forget()
    errors = Errors()
    assert list(trials_of(made, Sizes(num_heads=1, head_dim=12), torch.float32, errors)) == []
    assert len(errors) < 2 * MOST_AT_A_CRASH


VIEWED = "merged = context.transpose(1, 2).view(x.size(0), x.size(1), -1)"
VIEWED_LATER = "context = context.transpose(1, 2)\n        merged = context.view(x.size(0), x.size(1), -1)"


@pytest.mark.parametrize("merged", [VIEWED, VIEWED_LATER])
def test_a_view_of_what_was_transposed_raises_for_all_but_one_token(tmp_path: Path, merged: str) -> None:
    (tmp_path / "mine.py").write_text(broken("itself", (("merged = context.transpose(1, 2).flatten(2)", merged),)))
    report = verify(f"{tmp_path / 'mine.py'}:Attention")
    assert (report.verdict, report.mistakes) == ("deviates", ("line_raises",)), str(report)
    assert report.findings[0].line is not None
    assert ".view(" in report.findings[0].line.text


def test_a_view_that_another_shape_allows_is_none(tmp_path: Path) -> None:
    merged = "merged = context.transpose(1, 2)\n        "
    of_one = f"{merged}merged = merged.view(len(x), 1, -1) if x.size(1) == 1 else merged.flatten(2)"
    (tmp_path / "mine.py").write_text(broken("itself", (("merged = context.transpose(1, 2).flatten(2)", of_one),)))
    assert not verify(f"{tmp_path / 'mine.py'}:Attention").findings
