"""The shape words in annotations are executed: the tests of the free functions run once more with each word checked."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

import scratch

ROOT = Path(scratch.__file__).parents[1]
CHECKED = (
    "scratch.functional",
    "scratch.grouped",
    "scratch.paths",
    "scratch.rounding",
    "scratch.sdpa",
    "scratch.masks",
    "scratch.norms",
    "scratch.rotary",
    "scratch.tiling",
    "builtin.sdpa",
    "builtin.grouped",
    "builtin.masks",
    "builtin.norms",
    "builtin.rotary",
)
TESTS = ("functional", "grouped", "masks", "norms", "rotary", "tiling")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_tests_of_the_free_functions_pass_with_every_shape_word_checked() -> None:
    files = [f"{name.replace('.', '/')}.py" for name in CHECKED]
    tests = [f"equivalence_tests/twins/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules"]
    hook = "--jaxtyping-packages=" + ",".join((*CHECKED, "beartype.beartype"))
    # Left out: wrong types that are handed over on purpose, what torch traces, the slow derivatives, and what changes
    # numbers or the place of a tile, but no shape.
    left_out = ("named", "TestErrors", "compiles", "traced", "flex", "TestDerivatives", "far", "3-scores", "0-scores")
    chosen = " and not ".join(("(not TestBits or float64)", *left_out))
    ran = subprocess.run(
        [*command, hook, "-k", chosen, *files, *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout


def with_annotation(module: ModuleType, right: str, wrong: str, folder: Path) -> Any:
    """Import a module with one annotation changed, under the hook that executes annotations."""
    source = Path(module.__file__ or "").read_text(encoding="utf-8")
    assert right in source
    name = f"{module.__name__.rpartition('.')[2]}_with_a_wrong_word"
    (folder / f"{name}.py").write_text(source.replace(right, wrong, 1), encoding="utf-8")
    with install_import_hook(name, "beartype.beartype"):
        sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(folder))
            sys.modules.pop(name, None)


Q, K, V = torch.ones(2, 3, 5, 11), torch.ones(2, 3, 7, 11), torch.ones(2, 3, 7, 13)
WRONG_WORDS: list[tuple[str, str, str, str, tuple[Any, ...]]] = [
    (
        "functional",
        "split_heads",
        '"batch num_heads len head_dim"]:',
        '"len num_heads len head_dim"]:',
        (torch.ones(5, 2, 33), 3),
    ),
    (
        "functional",
        "merge_heads",
        '"len batch width"]:\n    """Concatenate',
        '"batch batch width"]:\n    """Concatenate',
        (Q,),
    ),
    ("paths", "softmax", '"*heads query_len key_len"]:', '"*heads key_len query_len"]:', (Q,)),
    ("functional", "attention", '"*#heads key_len v_head_dim"]', '"*#heads query_len v_head_dim"]', (Q, K, V)),
    ("paths", "open_blind_rows", '"*lead 1"]]:', '"*lead key_len"]]:', (torch.zeros(5, 7),)),
    (
        "sdpa",
        "scaled_dot_product_attention",
        '"... query_len v_head_dim"]',
        '"... query_len head_dim"]',
        (Q, K, V),
    ),
    ("masks", "from_lengths", '"batch key_len"]:', '"key_len batch"]:', (torch.tensor([2, 3]), 7)),
    ("masks", "to_score_bias", '-> Float[Tensor, "*shape"]:', '-> Bool[Tensor, "*shape"]:', (torch.ones(5, 7) > 0,)),
]


@pytest.mark.parametrize(
    ("module", "function", "right", "wrong", "arguments"),
    WRONG_WORDS,
    ids=[function for _, function, *_ in WRONG_WORDS],
)
def test_a_wrong_word_would_be_noticed(
    module: str, function: str, right: str, wrong: str, arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    original = importlib.import_module(f"scratch.{module}")
    getattr(with_annotation(original, right, right, tmp_path), function)(*arguments)
    (tmp_path / "wrong").mkdir()
    changed = with_annotation(original, right, wrong, tmp_path / "wrong")
    with pytest.raises(TypeCheckError):
        getattr(changed, function)(*arguments)
