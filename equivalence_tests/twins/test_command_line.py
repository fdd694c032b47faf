"""train, translate, summary and plot, as a user runs them."""

import errno
import io
import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.padding import Padding
from typer.testing import CliRunner

from scratch.task.terminal import Screen
from scratch.task.translation import PAIRS

QUICK = ["--small", "--optimizer", "adam"]


def run(package: str, *arguments: Any, stdin: str | None = None) -> Any:
    app = import_module(f"{package}.__main__").app
    return CliRunner().invoke(app, list(map(str, arguments)), input=stdin)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "c.pt"
    result = run("scratch", "train", *QUICK, "-c", path)
    assert result.exit_code == 0, result.output
    assert result.output.count("right") == 3
    return path


@pytest.mark.parametrize("package", ["scratch", "builtin"])
@pytest.mark.parametrize("beam_size", [1, 2])
def test_translate_prints_the_translation_alone(package: str, beam_size: int, checkpoint: Path) -> None:
    result = run(package, "translate", "ich mochte ein bier", "-c", checkpoint, "--beam-size", beam_size)
    assert result.stdout == "i want a beer .\n"


def test_translate_reads_lines_and_writes_json(checkpoint: Path) -> None:
    lines = "\n".join(source for source, _ in PAIRS)
    result = run("scratch", "translate", "-", "--json", "-c", checkpoint, stdin=f"{lines}\n\n")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows == [{"source": source, "translation": target} for source, target in PAIRS]


def test_resuming_adds_epochs(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "c.pt"
    copy.write_bytes(checkpoint.read_bytes())
    result = run("builtin", "train", "--resume", "--epochs", 31, "-c", copy)
    assert "epoch 31" in result.output


def test_a_file_of_pairs_is_learnt(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("eins\tone\nzwei\ttwo\n")
    result = run("scratch", "train", *QUICK, "--pairs", pairs, "-c", tmp_path / "c.pt")
    assert result.output.count("right") == 2


def test_summary_describes_the_model_just_trained(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "an untrained model: width 512" in run("scratch", "summary").stdout
    (tmp_path / "translation.pt").write_bytes(checkpoint.read_bytes())
    assert "translation.pt: width 64" in run("builtin", "summary").stdout
    assert run("scratch", "summary").stdout == run("scratch", "summary", "-c", "translation.pt").stdout
    assert "an untrained model: width 64" in run("scratch", "summary", "--small").stdout
    assert "an untrained model: width 512" in run("scratch", "summary", "--paper").stdout


def test_what_is_piped_has_no_blanks_at_the_ends_of_lines(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "c.pt"
    copy.write_bytes(checkpoint.read_bytes())
    for arguments in (["summary"], ["train", "--resume", "--epochs", 31, "-c", copy]):
        lines = run("scratch", *arguments).stdout.splitlines()
        assert len(lines) > 5
        assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(("is_terminal", "printed"), [(False, "a\nb\n"), (True, "a    \nb    \n")])
def test_blanks_at_the_ends_of_lines_are_for_terminals(is_terminal: bool, printed: str) -> None:
    file = io.StringIO()
    Screen(file=file, force_terminal=is_terminal, width=5, color_system=None).print(Padding("a\nb"))
    assert file.getvalue() == printed


class SmallDisk(io.FileIO):
    """Takes so many bytes and no more."""

    room = 0

    def write(self, data: Any) -> int:
        type(self).room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("room", [0, 100_000])
def test_a_full_disk_ends_the_training_in_one_line_and_spares_the_checkpoint(
    room: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "c.pt"
    copy.write_bytes(checkpoint.read_bytes())
    monkeypatch.setattr(SmallDisk, "room", room)
    monkeypatch.setattr(Path, "open", lambda path, mode: SmallDisk(path, mode))
    result = run("scratch", "train", "--resume", "--epochs", 31, "-c", copy)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if "training" not in line]
    assert errors == [f"error: {copy} could not be written: No space left on device"]
    assert copy.read_bytes() == checkpoint.read_bytes()
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.parametrize("package", ["scratch", "builtin"])
def test_summary_counts_the_source_s_model(package: str) -> None:
    rows = {row["path"]: row for row in json.loads(run(package, "summary", "--json").stdout)}
    assert rows["transformer.encoder.layers.5.linear1"]["total"] == 1_050_624
    assert rows["transformer.decoder.layers.0.multihead_attn.k"]["weights"] == 262_144
    assert "1,050,624" in run(package, "summary").stdout


def test_plots_are_written(checkpoint: Path, tmp_path: Path) -> None:
    positional, attention = tmp_path / "p.svg", tmp_path / "a.png"
    assert run("scratch", "plot", "positional", "-o", positional).exit_code == 0
    drawn = run("builtin", "plot", "attention", "ich mag das Buch", "-c", checkpoint, "-o", attention)
    assert drawn.exit_code == 0
    assert positional.stat().st_size > 1000
    whole = attention.stat().st_size
    part = run(
        "scratch", "plot", "attention", "ich mag das Buch", "--only", "encoder", "-c", checkpoint, "-o", attention
    )
    assert part.exit_code == 0
    assert 1000 < attention.stat().st_size < whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["translate", "x", "-c", "none.pt"], "none.pt must be a checkpoint, and there is no such file"),
        (["train", "-c", "none/c.pt"], "in a folder that exists"),
        (["train", "--pairs", "none.tsv"], "none.tsv must be a file that can be read"),
        (["train", "--device", "abacus"], "device must be one that this machine has"),
        (["train", "--device", "cuda:99"], "device must be one that this machine has"),
        (["train", "--epochs", "0"], "num_epochs must be greater than 0, got num_epochs=0"),
        (["train", "--dropout", "2"], "dropout probability has to be between 0 and 1, but got dropout=2.0"),
        (["train", "--seed", f"{2**70}"], "seed must be in 0 ... 2**32 - 1"),
        (["plot", "positional", "-o", "p.gif"], "must end in .png or .svg"),
    ],
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("scratch", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--resume", "--optimizer", "adam", "--batch-size", 3], "leave out --optimizer, --batch-size"),
        (["summary", "--no-bias"], "--checkpoint takes everything else from the checkpoint: leave out --bias"),
        (["plot", "attention", "ich", "--only", "norm"], "--only must be in the path of an attention, one of encoder."),
    ],
)
def test_options_without_effect_are_refused(arguments: list[Any], message: str, checkpoint: Path) -> None:
    before = checkpoint.read_bytes()
    result = run("scratch", *arguments, "--checkpoint", checkpoint)
    assert result.exit_code == 2
    assert message in result.stderr
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("sentence", ["ich mochte ein wasser", " "])
def test_a_sentence_that_cannot_be_translated_is_said(sentence: str, checkpoint: Path) -> None:
    result = run("scratch", "translate", sentence, "-c", checkpoint)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "sentence must hold" in result.stderr


@pytest.mark.parametrize("package", ["scratch", "builtin"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package:RuntimeWarning")
def test_each_package_runs_as_a_module(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``python -m`` does it, in this interpreter."""
    monkeypatch.setattr(sys, "argv", [package, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(package, run_name="__main__")
    said = capsys.readouterr().out
    for command in ("train", "translate", "summary", "plot"):
        assert command in said
