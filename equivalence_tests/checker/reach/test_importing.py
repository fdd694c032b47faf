"""Files import as their authors run them: without packages that nothing uses, from ``src``, and if they are scripts."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from equivalence_tests import verify
from equivalence_tests.checker.helpers_for_tests import saved
from equivalence_tests.checker.reach.absent import ABSENCES
from equivalence_tests.checker.reach.errors import CannotCheckError
from equivalence_tests.checker.reach.loading import load

TRAINS = """
import absent_logs.online as logs
from absent_tensors import Kernel, rearrange, registered
from absent_tensors.shapes import Shape
from torch import nn

log = logs.start(project="attention")
text = open("corpus-that-is-not-there.txt").read()
letters = sorted(text)
block_size = 16


@registered
class Settings(Kernel):
    shape: Shape["b", "l"] | None = None


class Attention(nn.Module, Kernel):
    def __init__(self, dim):
        super().__init__()
        self.packed = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        return attend(*self.packed(x).chunk(3, -1))


def attend(query, key, value):
    return (query @ key.mT / query.size(-1) ** 0.5).softmax(-1) @ value


def attend_heads(query, key, value):
    query, key, value = (rearrange(x, "b l (h d) -> b h l d", h=3) for x in (query, key, value))
    return rearrange(attend(query, key, value), "b h l d -> b l (h d)")


for step in range(block_size):
    raise KeyError("it trains")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project") / "train.py"
    path.write_text(TRAINS)
    return path


def test_what_uses_no_absent_package_and_no_file_is_checked(script: Path) -> None:
    report = verify(f"{script}:attend")
    assert report, str(report)
    told = "\n".join(report.notes)
    assert "not installed, and not used by what was checked: absent_logs, absent_tensors" in told
    assert "only the definitions of train.py were run: FileNotFoundError" in told
    assert "train.py:8" in told
    assert load(f"{script}:block_size") == 16


def test_a_package_that_is_used_is_named_and_nothing_else(script: Path) -> None:
    report = verify(f"{script}:attend_heads")
    assert report.verdict == "unchecked"
    assert report.reason.startswith(f"It uses absent_tensors, which is not installed ({script}:32): install it, or")
    assert "\n" not in report.reason


def test_what_inherits_from_an_absent_class_is_checked_without_it(script: Path) -> None:
    report = verify(f"{script}:Attention")
    assert report.verdict == "partial", str(report)
    assert [exercise.what for exercise in report.not_exercised] == ["other calls"]


def test_a_file_that_asks_for_an_absent_package_by_itself_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fast.py").write_text("try:\n    import absent_fast as fast\nexcept ImportError:\n    fast = None\n")
    assert load(f"{tmp_path / 'fast.py'}:fast") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_fast")


@pytest.mark.parametrize(
    "line", ["from shapes_of_ours.sizes import width", "from ..sizes import width", "from ...tools.more import width"]
)
def test_modules_are_found_from_the_root_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    inner = tmp_path / "src" / "shapes_of_ours" / "layers"
    inner.mkdir(parents=True)
    (tmp_path / "src" / "tools").mkdir()
    (tmp_path / "src" / "tools" / "more.py").write_text("width = 7")
    for file in (inner.parent / "__init__.py", inner / "__init__.py", inner / "shapes_of_ours.py"):
        file.touch()
    (inner.parent / "sizes.py").write_text("width = 7")
    (inner / "attention.py").write_text(line)
    monkeypatch.chdir(tmp_path)
    assert load("src/shapes_of_ours/layers/attention.py:width") == 7


def test_packages_of_the_project_are_found_though_nothing_shows_its_root(tmp_path: Path) -> None:
    inner, tools = tmp_path / "net_of_ours", tmp_path / "tools_of_ours"
    inner.mkdir()
    tools.mkdir()
    (inner / "tools_of_ours.py").write_text("depth = 3")  # lies nearer, and is another
    (inner / "sizes.py").write_text("width = 7")
    (tools / "logger.py").write_text("from net_of_ours.sizes import width")
    text = "from tools_of_ours.logger import width\nfrom net_of_ours.tools_of_ours import depth"
    (inner / "attention.py").write_text(text)
    assert load(f"{inner / 'attention.py'}:width") == 7
    assert load(f"{inner / 'attention.py'}:depth") == 3


def test_of_neighbours_that_train_or_break_off_the_definitions_are_run(tmp_path: Path) -> None:
    (tmp_path / "fits_of_ours.py").write_text("steps = 3\nfor _ in iter(int, 1):\n    loss.backward()")
    (tmp_path / "reads_of_ours.py").write_text("text = open('no-such-corpus')\nwidth = 7")
    (tmp_path / "attention.py").write_text("from fits_of_ours import steps\nfrom reads_of_ours import width")
    ABSENCES.forget()
    assert load(f"{tmp_path / 'attention.py'}:width") == 7
    assert ABSENCES.in_part["fits_of_ours.py"] == "it trains (fits_of_ours.py:3)"
    assert ABSENCES.in_part["reads_of_ours.py"].startswith("FileNotFoundError")


def test_a_neighbour_that_is_no_python_is_left_out_of_the_package_that_imports_it(tmp_path: Path) -> None:
    inner = tmp_path / "words_of_ours" / "inner"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("from .torn import text\nfrom .sizes import width")
    (inner / "torn.py").write_text("text = 'not closed")
    (inner / "sizes.py").write_text("width = 7")
    (inner / "attention.py").write_text("from .sizes import width\nfrom words_of_ours.inner.sizes import width as w")
    ABSENCES.forget()
    assert load(f"{inner / 'attention.py'}:w") == 7  # nor does words_of_ours hold a file itself
    assert "torn.py, line 1" in ABSENCES.in_part["__init__.py"]


def test_an_installed_package_that_refuses_to_be_imported_is_stood_in_for(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "picky_package"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("raise ImportError('wants version 9 of something')")
    (tmp_path / "attention.py").write_text(
        f"import sys\nsys.path.append({str(library.parent)!r})\nfrom picky_package import logs\nwidth = 7"
    )
    assert load(f"{tmp_path / 'attention.py'}:width") == 7


def test_what_a_neighbour_does_with_an_absent_package_is_no_use_of_it(tmp_path: Path) -> None:
    (tmp_path / "tables_of_ours.py").write_text("from absent_words import WORDS\nwidth = 7\nsizes = [*WORDS]")
    (tmp_path / "attention.py").write_text("from tables_of_ours import width")
    ABSENCES.forget()
    assert load(f"{tmp_path / 'attention.py'}:width") == 7
    assert (ABSENCES.names, ABSENCES.used) == (["absent_words"], {})


def test_a_script_that_trains_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text("steps = 3\n\nfor _ in iter(int, 1):\n    loss.backward()\n")
    assert load(f"{tmp_path / 'fit.py'}:steps") == 3


def test_what_cannot_be_imported_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("import math\nfrom math import cosine")
    with pytest.raises(CannotCheckError, match=r"importing .*torn.py failed: ImportError: .*cosine.*torn.py:2"):
        load(f"{tmp_path / 'torn.py'}:cosine")


NUMPY = """import numpy as np
from weighing import softmax


def attention(Q, K, V, mask=None):
    scores = np.dot(Q, K.T) / np.sqrt(Q.shape[-1])
    if mask is not None:
        scores = np.where(mask, -1e9, scores)
    return softmax(scores) @ V
"""
WEIGHING = """import numpy as np


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
"""


@pytest.mark.parametrize(("change", "name"), [(("", ""), ""), ((" / np.sqrt(Q.shape[-1])", ""), "scale_missing")])
def test_a_function_of_numpy_is_watched_in_torchs_functions(change: tuple[str, str], name: str, tmp_path: Path) -> None:
    (tmp_path / "weighing.py").write_text(WEIGHING)
    report = verify(saved(tmp_path, NUMPY.replace(*change), "attention"))
    assert report.verdict == ("deviates" if name else "equal"), str(report)
    assert report.mistakes == (name,) * bool(name)


def test_numpy_is_back_in_the_users_modules_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weighing_once.py").write_text(WEIGHING)
    (tmp_path / "mine_once.py").write_text(NUMPY.replace("weighing", "weighing_once"))
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine_once")
    assert verify(mine.attention).verdict == "equal"
    assert isinstance(mine.attention(*np.ones((3, 4, 5))), np.ndarray)
    assert mine.np is np is importlib.import_module("weighing_once").np


def test_a_class_of_no_framework_is_called_by_its_forward(tmp_path: Path) -> None:
    body = NUMPY.replace("def attention(Q", "class Mine:\n  def forward(self, Q").replace("\n    ", "\n      ")
    body += "\n  def __init__(self, d_k=4):\n    self.scale = np.sqrt(np.full((1, 1), 1.0))\n"
    body = body.replace("np.sqrt(Q.shape[-1])", "np.sqrt(Q.shape[-1]) * self.scale")
    (tmp_path / "weighing.py").write_text(WEIGHING)
    assert verify(saved(tmp_path, body, "Mine")).verdict == "equal"


OF_NO_FRAMEWORK = """
import torch


class Mine:
    def __init__(self, dim=12):
        self.weights = torch.randn(3, dim, dim)

    def forward(self, x):
        q, k, v = (x @ w for w in self.weights)
        return torch.softmax(q @ k.mT / k.size(-1) ** 0.5, -1) @ v
"""


def test_a_class_of_tensors_is_called_by_its_forward(tmp_path: Path) -> None:
    assert verify(saved(tmp_path, OF_NO_FRAMEWORK, "Mine")).verdict == "equal"


ON_A_GPU = """
import torch
from settings import DEVICE
from torch import nn

SCALE, FIRST = torch.tensor(1.0).cuda(), torch.cuda.LongTensor([0])


class Attention(nn.Module):
    def __init__(self, num_heads, num_embed):
        super().__init__()
        self.heads, self.packed = num_heads, nn.Linear(num_embed, 3 * num_embed, device=DEVICE)
        self.out = nn.Linear(num_embed, num_embed).to(torch.device(DEVICE))

    def forward(self, x):
        b, l, c = x.shape
        q, k, v = (y.view(b, l, self.heads, -1).transpose(1, 2) for y in self.packed(x.to("cuda:0")).chunk(3, -1))
        past = torch.ones(l, l, device=torch.cuda.current_device()).tril().type(torch.cuda.FloatTensor)
        scores = SCALE * q @ k.mT / WIDTH**0.5
        scores = scores.masked_fill(past == FIRST, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, l, c))
"""


@pytest.mark.parametrize(("width", "expected"), [("k.size(-1)", ("equal", ())), ("c", ("deviates", ("scale_wrong",)))])
def test_what_names_a_gpu_runs_on_the_cpu(tmp_path: Path, width: str, expected: object) -> None:
    (tmp_path / "settings.py").write_text('DEVICE = "cuda"\n')
    (tmp_path / "model.py").write_text(ON_A_GPU.replace("WIDTH", width))
    report = verify(f"{tmp_path / 'model.py'}:Attention")
    assert (report.verdict, report.mistakes) == expected, str(report)
    assert any("names a GPU" in note and "model.py:" in note for note in report.notes)
