"""What stands beside a class in its file is made and called, and nothing else of the file runs."""

from pathlib import Path

import pytest

from equivalence_tests.checker.reach.examples import examples_of
from equivalence_tests.checker.reach.loading import load
from equivalence_tests.checker.verify import verify

CODE = '''
from os import remove

import torch
from torch import nn

from equivalence_tests.checker.verify import verify


class Odd(nn.Module):
    """Takes what no name tells.

    >>> odd = Odd(8, quux="yes")
    >>> odd({"x": torch.ones(1, 3, 8)})
    """

    def __init__(self, zebra, quux):
        super().__init__()
        assert quux == "yes"
        self.q, self.k, self.v = (nn.Linear(zebra, zebra) for _ in range(3))
        self.scale = zebra ** -0.5

    def forward(self, thing):
        x = thing["x"]
        q, k, v = self.q(x), self.k(x), self.v(x)
        return (q @ k.mT * self.scale).softmax(-1) @ v


def load_batch():
    return open("batch").read()
'''
SCRIPT = """
if __name__ == "__main__":
    open("{place}", "w")
    width = 12
    odd = Odd(width, quux="yes").eval()
    thing = {{"x": {x}}}
    with torch.no_grad():
        out = odd(thing)
"""


def written(folder: Path, x: str = "", code: str = CODE) -> str:
    place = folder / "was_run"
    (folder / "odd.py").write_text(code + (SCRIPT.format(place=place, x=x) if x else ""))
    return f"{folder / 'odd.py'}:Odd"


def test_what_only_its_own_file_can_call_is_judged_there(tmp_path: Path) -> None:
    report = verify(written(tmp_path, "torch.randn(2, 4, width)"))
    assert report.verdict == "partial", str(report)
    assert report.not_exercised[0].detail == "only the one in your file was run: odd(thing)"
    assert not (tmp_path / "was_run").exists()


def test_a_mistake_shows_in_the_call_of_the_file(tmp_path: Path) -> None:
    code = CODE.replace("softmax(-1)", "softmax(-2)")
    assert verify(written(tmp_path, "torch.randn(2, 4, width)", code)).mistakes == ("softmax_over_queries",)


@pytest.mark.parametrize(
    "x",
    [
        "load_batch()",
        "torch.load('batch')",
        "open('batch')",
        "odd.undefined",
        "str(width)",
        "remove('batch')",
        "verify(Odd)",
    ],
)
def test_what_does_more_than_to_make_a_tensor_is_not_run(tmp_path: Path, x: str) -> None:
    (tmp_path / "batch").touch()
    lines = [example.line for example in examples_of(load(written(tmp_path, x)))]
    assert lines == ["odd({'x': torch.ones(1, 3, 8)})"]
