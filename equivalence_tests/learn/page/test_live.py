"""The page's own scripts, run by Node over random settings, give torch's numbers, errors, gradients and code."""

import json
import math
import operator
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scratch
from equivalence_tests.instruments.differences import compare_tensors
from equivalence_tests.instruments.side_by_side import random_tensor
from equivalence_tests.learn.page.figures import printed
from equivalence_tests.learn.page.live import layer_with_parameters, live_attention, live_boards, live_layer
from equivalence_tests.learn.page.steps_attention import attention_inputs
from equivalence_tests.learn.page.switch_table import ATTENTION_SWITCHES, SDPA_SWITCHES, Switch
from equivalence_tests.learn.page.switches import TORCH, Outcome, code_of, run_code
from scratch import masks
from scratch.recording import STAGES

NODE = shutil.which("node") or ""
TEMPLATES = Path(__file__).parent / "templates"
pytestmark = pytest.mark.skipif(not NODE, reason="Node is not installed")
SWITCHES: dict[str, tuple[Switch, ...]] = {"mha": ATTENTION_SWITCHES, "sdpa": SDPA_SWITCHES}
COUNT = {"mha": 150, "sdpa": 50}
# The scripts that touch no page, and what a test asks of them; JSON has no infinity.
SCRIPTS = "\n".join(
    (TEMPLATES / f"{name}.js").read_text() for name in ("attention", "boards", "heat", "sums", "layers")
)
RUN = """
const asked = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const plain = (_, x) => (typeof x === "number" && !Number.isFinite(x) ? String(x) : x);
process.stdout.write(JSON.stringify(asked.cases.map(answer), plain));
"""
OF_BOARDS = """
const answer = ([name, chosen]) => {
  const board = asked.data[name], error = Boards.errorOf(name, board, chosen);
  return [Boards.codeOf(name, board, chosen), error, error ? {} : Boards.resultOf(name, board, chosen)];
};
"""
OF_LAYERS = """
const answer = inputs => {
  const found = Layers.stagesOf(asked.data, inputs), last = found.stages.at(-1).name, texts = {};
  const text = (name, t, i, j) => Layers.explained(asked.data, inputs, found, name, t, i, j);
  for (const { name, tables } of found.stages)
    texts[name] = tables.map((x, t) => x.map((row, i) => row.map((_, j) => text(name, t, i, j))));
  return [Layers.codeOf(inputs), found.stages, texts, Layers.gradients(asked.data, inputs, last, 0, 1, 3)];
};
"""
OF_STEPS = """
const answer = inputs => {
  const stages = Sums.stagesOf(asked.data, inputs), sums = {};
  const sum = (name, t, i, j) => Sums.explained(asked.data, stages, name, t, i, j);
  for (const name of asked.data.names)
    sums[name] = stages[name].map((x, t) => x.map((row, i) => row.map((_, j) => sum(name, t, i, j))));
  return [stages, sums, Sums.gradients(asked.data, inputs, "output", 0, 1, 3)];
};
"""


def drawn_settings() -> list[tuple[str, dict[str, int]]]:
    """Draw settings of all switches but those that round or draw numbers, or have none."""
    rng = random.Random(0)
    settings = []
    for name, switches in SWITCHES.items():
        free = [x for x in switches if x.argument not in ("dtype", "dropout", "dropout_p", "device")]
        for _ in range(COUNT[name]):
            set_ones = [x for x in free if rng.random() < 0.4]
            settings.append((name, {x.argument: rng.randrange(1, len(x.options)) for x in set_ones}))
    return settings


def in_node(answer: str, data: Any, cases: list[Any]) -> list[Any]:
    given = json.dumps({"data": data, "cases": cases})
    program = SCRIPTS + answer + RUN
    ran = subprocess.run([NODE, "-e", program], input=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def as_tensor(x: Any) -> torch.Tensor:
    """Read nested lists, in which what JSON cannot say is text."""
    if isinstance(x, list):
        return torch.stack([as_tensor(part) for part in x])
    return torch.tensor(float(x), dtype=torch.float64)


def assert_same(found: dict[str, Any], expected: Outcome, code: str) -> None:
    assert list(found) == list(expected.tensors), code
    for name, x in expected.tensors.items():
        mine = as_tensor(found[name])
        comparison = compare_tensors(mine, x, name=name, call=code)
        assert comparison.passed, str(comparison)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_every_setting_gives_torchs_numbers_errors_and_code() -> None:
    settings = drawn_settings()
    keyed = [(name, {x.replace(", ", "_"): option for x, option in chosen.items()}) for name, chosen in settings]
    computed = 0
    answers = in_node(OF_BOARDS, live_boards(17), keyed)
    for (name, chosen), (code, error, result) in zip(settings, answers, strict=True):
        assert code == code_of(name, SWITCHES[name], chosen)
        expected = run_code(code, TORCH)
        assert bool(error) == bool(expected.error), f"{error!r} is not {expected.error!r}:\n{code}"
        kind, _, words = error.partition(": ")
        assert expected.error.startswith(kind)
        assert words in expected.error
        if not error:
            assert_same(result, expected, code)
            computed += 1
    assert computed > len(settings) / 2


def changed_inputs() -> Iterator[dict[str, Any]]:
    """Give the inputs as they are, and then other numbers, masks and heads; the last mask has a row without keys."""
    given = live_attention()
    yield {name: given[name] for name in ("query", "memory", "mayAttend", "numHeads")}
    for num_heads in (1, 4, 8):
        may_attend = random_tensor(3, 5, seed=num_heads) > (-1.0 if num_heads < 8 else 0.3)
        query, memory = random_tensor(3, 8, seed=num_heads + 1), random_tensor(5, 8, seed=num_heads + 2)
        tensors = {"query": query, "memory": memory, "mayAttend": may_attend}
        yield {name: x.tolist() for name, x in tensors.items()} | {"numHeads": num_heads}


def expected_stages(inputs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Give the stages from scratch, and the gradients of one number of the output from torch."""
    (_, module), *_ = attention_inputs()
    ours = scratch.MultiheadAttention(8, inputs["numHeads"], batch_first=True).double()
    theirs = nn.MultiheadAttention(8, inputs["numHeads"], batch_first=True).double()
    for one in (ours, theirs):
        one.load_state_dict(module.state_dict())
    query, memory = (torch.tensor([inputs[x]], dtype=torch.float64, requires_grad=True) for x in ("query", "memory"))
    hidden = ~torch.tensor(inputs["mayAttend"])
    stages = scratch.trace_attention(ours.eval(), query, memory, memory, attn_mask=hidden)
    output = theirs.eval()(query, memory, memory, attn_mask=hidden)[0]
    assert compare_tensors(stages["output"], output).passed
    return {name: x[0].detach() for name, x in stages.items()}, list(
        torch.autograd.grad(output[0, 1, 3], (query, memory))
    )


def test_every_step_follows_its_inputs_as_torch_does() -> None:
    cases = list(changed_inputs())
    names = list(STAGES)
    for inputs, (stages, sums, slopes) in zip(
        cases, in_node(OF_STEPS, live_attention() | {"names": names}, cases), strict=True
    ):
        expected, gradients = expected_stages(inputs)
        for name, x in expected.items():
            found = as_tensor(stages[name]).view(x.shape)
            assert compare_tensors(found, x, name=name).passed, str(compare_tensors(found, x, name=name))
        for one, other in zip(slopes, gradients, strict=True):
            torch.testing.assert_close(as_tensor(one), other[0], rtol=1e-6, atol=1e-8, equal_nan=True)
        assert_sums(stages, sums)


def layer_settings() -> Iterator[dict[str, Any]]:
    """Give every setting of the layer's switches, each with a mask of its own; some tokens see none."""
    given = live_layer(17)["inputs"]
    options = [(False, True), (False, True), ("relu", "gelu"), (True, False), (1e-5, 0.1)]
    for number, chosen in enumerate(product(*options)):
        switches = dict(zip(("isDecoder", "normFirst", "activation", "bias", "eps"), chosen, strict=True))
        may_attend = random_tensor(3, 3, seed=number) > (0.5 if number % 5 == 0 else -0.5)
        yield given | switches | {"numHeads": (1, 2, 4, 8)[number % 4], "mayAttend": may_attend.tolist()}


def run_layer(code: str, inputs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any, list[torch.Tensor]]:
    """Run the code that the page shows, with the page's parameters: what each part gave, the output, its gradients."""
    x, memory = (torch.tensor([inputs[name]], dtype=torch.float64, requires_grad=True) for name in ("x", "memory"))
    names: dict[str, Any] = {"torch": torch, "nn": nn, "masks": masks, "src": x, "tgt": x, "memory": memory}
    build, _, call = code.partition("\n")
    exec(build, names)
    layer, found, given = names["layer"].double(), dict[str, torch.Tensor](), layer_with_parameters().state_dict()
    layer.load_state_dict({name: given[name] for name in layer.state_dict()})
    for part, module in layer.named_children():
        first = operator.itemgetter(0) if part.endswith("attn") else torch.Tensor.detach
        module.register_forward_hook(lambda _m, _i, y, part=part, first=first: found.update({part: first(y)}))
    setup, _, last = call.rpartition("\n")
    exec(setup, names)
    output = eval(last, names)
    sources = (x, memory) if inputs["isDecoder"] else (x,)
    return found, output, list(torch.autograd.grad(output[0, 1, 3], sources))


def test_every_setting_of_the_layer_gives_torchs_numbers() -> None:
    cases = list(layer_settings())
    for inputs, (code, stages, texts, slopes) in zip(cases, in_node(OF_LAYERS, live_layer(17), cases), strict=True):
        parts, output, gradients = run_layer(code, inputs)
        mine = {x["name"]: as_tensor(x["tables"][0]) for x in stages}
        expected = {stages[-1]["name"]: output, **parts}
        for name, x in expected.items():
            if name in mine:
                comparison = compare_tensors(mine[name], x[0], name=name, call=code)
                assert comparison.passed, str(comparison)
        assert len(expected.keys() & mine.keys()) == len(expected) - (4 if inputs["isDecoder"] else 3), code
        for one, other in zip(slopes, gradients, strict=True):
            torch.testing.assert_close(as_tensor(one), other[0], rtol=1e-5, atol=1e-7)
        for stage in stages:
            for text, number in zip(flat(texts[stage["name"]], 3), flat(stage["tables"], 3), strict=True):
                assert_sum(text, number)


def assert_sums(stages: dict[str, Any], sums: dict[str, Any]) -> None:
    for name, tables in sums.items():
        for (text, _), number in zip(flat(tables, 3), flat(stages[name], 3), strict=True):
            assert_sum(text, number)


def assert_sum(text: str, number: Any) -> None:
    """A sum ends in its number, and comes to it with the numbers that are printed."""
    assert text.endswith(printed(float(number))), text
    left, equals, right = text.replace("−", "-").replace("∞", "math.inf").partition(" = ")
    if equals and "NaN" not in text and "at no token" not in text:
        formula = re.sub(r"√(\d+)", r"math.sqrt(\1)", left.replace("×", "*").replace("exp", "math.exp"))
        formula = re.sub(r"√|mean |variance |, the share.*,", "", formula.replace("√(", "math.sqrt("))
        # Each printed number is off by half a digit at most, and there are nine products.
        assert eval(formula, {"math": math, "max": max}) == pytest.approx(eval(right, {"math": math}), abs=0.02), text


def flat(x: Any, depth: int) -> list[Any]:
    return x if depth == 1 else [one for part in x for one in flat(part, depth - 1)]
