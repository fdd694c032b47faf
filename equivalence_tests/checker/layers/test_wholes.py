"""An EQUAL of a layer, a stack or a model is one program: it runs alone, and lists what stands between its parts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.engine.running import Call
from equivalence_tests.checker.equivalent.steps import Step
from equivalence_tests.checker.layers.whole_calls import called_by_hooks
from equivalence_tests.checker.layers.whole_steps import Follower
from equivalence_tests.checker.parts.kinds import atoms_of
from equivalence_tests.checker.reach.tracing import tensors_in
from equivalence_tests.checker.verify import verify
from equivalence_tests.instruments.weights import randomize_parameters
from equivalence_tests.wrong import fixed_layers
from equivalence_tests.wrong.editing import Version
from equivalence_tests.wrong.sources import Right

ALONE = """
import importlib.util, sys, torch
for path in sys.argv[1:]:
    case = torch.load(path + ".pt")
    spec = importlib.util.spec_from_file_location("theirs", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    made = theirs.Equivalent().double().eval()
    made.load_state_dict(theirs.from_theirs(case["state"]), strict=True)
    for inputs, output in case["calls"]:
        error = (made(**inputs) - output).abs().max() / output.abs().max()
        assert error < 1e-12, (path, error)
    back = theirs.to_theirs(made.state_dict(), {name: torch.zeros_like(x) for name, x in case["state"].items()})
    assert all(torch.equal(back[name], x) for name, x in case["state"].items()), path
assert not {"equivalence_tests", "scratch", "builtin"} & {name.partition(".")[0] for name in sys.modules}
"""
RIGHT = {right.name: right for right in fixed_layers.rights()}
FOUND_BY_NAME = ("last norm dropped", "last norm left out", "gate outside of its activation")  # in a part, or unused


def built(right: Right, text: str, folder: Path) -> nn.Module:
    return right.built(right.imported(text, folder)[1])


def steps_of(module: nn.Module, given: dict[str, Any]) -> list[Step]:
    torch.set_default_dtype(torch.float64)
    with called_by_hooks(module):
        run = Call(module, (), given).run(read=False)
    kinds = {path: kind for path, kind in atoms_of(module).items() if kind}
    masks = [name for name in given if "mask" in name]
    return Follower(module, run.recorder, kinds, masks).steps(list(tensors_in((run.output,))))


def saved(right: Right, folder: Path) -> str:
    """Write the program of a right one into a file, and beside it what the user's own code gives."""
    module = built(right, right.text, folder)
    randomize_parameters(module)
    report = verify(module)
    assert report.verdict == "equal", str(report)
    assert report.equivalent is not None
    path = folder / f"{right.name}_in_torch.py"
    path.write_text(report.equivalent.source)
    calls = [(given, module(**given).detach()) for given in right.drawn(5, 7)]
    torch.save({"state": module.state_dict(), "calls": calls}, f"{path}.pt")
    return str(path)


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_the_program_of_a_whole_runs_alone_in_a_fresh_interpreter(tmp_path: Path) -> None:
    paths = [saved(RIGHT[name], tmp_path) for name in ("PostNormLayer", "GatedBlock", "CrossLayer", "Gpt")]
    run = subprocess.run([sys.executable, "-c", ALONE, *paths], capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr


@pytest.mark.parametrize("right", RIGHT.values(), ids=lambda right: right.name)
def test_each_step_of_what_is_right_has_evidence(right: Right, tmp_path: Path) -> None:
    steps = steps_of(built(right, right.text, tmp_path), right.drawn(0, 6)[-1])
    assert all(step.evidence for step in steps), steps


@pytest.mark.parametrize(
    "version",
    [one for one in fixed_layers.versions() if one.operator not in FOUND_BY_NAME],
    ids=lambda version: f"{version.right.name} {version.operator}",
)
def test_what_is_wrong_between_the_parts_is_a_step_without_evidence(version: Version, tmp_path: Path) -> None:
    steps = steps_of(built(version.right, version.text, tmp_path), version.right.drawn(0, 6)[-1])
    assert not all(step.evidence for step in steps), steps


@pytest.mark.parametrize("name", ["input added at the end", "embedding added twice"])
def test_a_wrong_whole_is_not_called_equal(name: str, tmp_path: Path) -> None:
    version = next(one for one in fixed_layers.versions() if one.operator == name)
    report = verify(built(version.right, version.text, tmp_path))
    assert (report.verdict, report.mistakes) == ("unchecked", ())
    assert "times 2" in report.reason


class TakesATable(nn.Module):
    """Its table is in no state_dict."""

    positions: Tensor

    def __init__(self, dim: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 20), nn.ReLU(), nn.Linear(20, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.register_buffer("positions", torch.randn(64, dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[: x.size(1)]
        x = self.norm1(x + self.attn(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


def test_what_no_state_dict_holds_is_taken_from_the_module() -> None:
    module, x = TakesATable().double().eval(), torch.randn(2, 9, 12, dtype=torch.float64)
    report = verify(module)
    assert report.equivalent is not None, str(report)
    assert torch.equal(report.equivalent.of(module)(x), module(x))
