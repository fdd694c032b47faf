"""An exception of which no argument is the cause is a finding; one that another call might avoid never is."""

import sys
from pathlib import Path
from textwrap import indent

import pytest

from equivalence_tests import verify
from equivalence_tests.checker.reach.absent import ABSENCES
from equivalence_tests.checker.reach.crashes import CRASHES, Crash
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.checker.reach.state import attempt
from equivalence_tests.checker.reach.tried import TRIED

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\n"
CLASS = "class Mine(nn.Module):\n    def __init__(self, dim=4):\n        super().__init__()\n"
BUILT = "        self.project = nn.Linear(dim, dim)\n\n    def forward(self, x, part=None):\n"


def raised_by(tmp_path: Path, body: str, *, built: str = "", after: str = "", head: str = HEAD) -> list[Crash]:
    """What is noted of a module whose constructor and forward hold these lines, built and called once."""
    text = f"{head}{CLASS}{indent(built, ' ' * 8)}{BUILT}{indent(body, ' ' * 8)}\n{after}"
    (tmp_path / "mine.py").write_text(text)
    CRASHES.forget()
    ABSENCES.forget()
    made = load(f"{tmp_path / 'mine.py'}:Mine")
    TRIED.begin(made)
    torch = sys.modules["torch"]
    assert attempt(lambda: made()(torch.ones(2, 3, 4)), []) is None  # it raises
    return CRASHES.found


SELF = "return self.projection(x)"
OWN = {
    "a misspelt attribute": (SELF, "Is self.project meant?", {}),
    "an attribute that is read before it is set": (SELF, "", {"built": "self.scale = self.width\nself.width = dim\n"}),
    "a function that nothing imports": ("return gelu(self.project(x))", "Import or define gelu.", {}),
    "a function that torch does not have": ("return F.softmx(x, -1)", "Is softmax meant?", {}),
    "a variable that is set too late": ("out = x + y\ny = x\nreturn out", "Set it before it is read.", {}),
    "too many arguments": (
        "part = Part()\nreturn part(x, x)",
        "Pass what is taken there.",
        {"after": "\nclass Part(nn.Module):\n    def forward(self, x):\n        return x\n"},
    ),
}
# The same exceptions, where something else may be the cause.
OTHERS = {
    "an attribute that somebody sets": (SELF, {"after": "\ndef build(x):\n    x.projection = nn.Linear(4, 4)\n"}),
    "an attribute that is set by its name": (SELF, {"built": "for n in []:\n    setattr(self, n, dim)\n"}),
    "an attribute of a subclass": (SELF, {"after": "\nclass Other(Mine):\n    projection = None\n"}),
    "an attribute of what is handed over": ("return part.project(x)", {}),
    "a name that a script gives": ("return x * scale", {"after": "\nif __name__ == '__main__':\n    scale = 2\n"}),
    "a name of a package that is absent": ("return rope(x)", {"head": HEAD + "from nopackage import *\n\n\n"}),
    "a variable that a branch sets": ("if part is not None:\n    y = x\nreturn y", {}),
    "arguments that depend on the input": (
        "return Part()(*x)",
        {"after": "\nclass Part(nn.Module):\n    def forward(self, x):\n        return x\n"},
    ),
    "arguments of a function that is not the user's": ("return torch.ones(x, 3)", {}),
    "as many arguments as no function of torch takes": ("return F.softmax(x, -1, 2, 3, 4)", {}),
    "sizes that do not fit": ("return x @ x", {}),
}


@pytest.mark.parametrize("name", OWN)
def test_what_no_argument_causes_is_noted(name: str, tmp_path: Path) -> None:
    body, fix, more = OWN[name]
    (crash,) = raised_by(tmp_path, body, **more)
    assert fix in crash.fix
    assert crash.stack[-1].text in (*body.splitlines(), *more.get("built", "").splitlines())


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


def test_a_file_that_raises_when_it_is_imported_deviates_where_nothing_else_is_said(tmp_path: Path) -> None:
    class_alone = f"{CLASS}{BUILT}        return self.project(x)\n"
    (tmp_path / "model.py").write_text(class_alone)
    (finding,) = verify(f"{tmp_path / 'model.py'}:Mine").findings
    assert (finding.name, finding.line and finding.line.number) == ("line_raises", 1)
    right = "def attention(q, k, v):\n    return F.scaled_dot_product_attention(q, k, v)\n\n\nprint(undefined)\n"
    (tmp_path / "right.py").write_text(HEAD + right)
    assert verify(f"{tmp_path / 'right.py'}:attention")
