"""The folder of a learner: a file for each exercise, and what is solved."""

import importlib.util
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivalence_tests.learn.practice.checking import Answer, check_solution
from equivalence_tests.learn.practice.exercise import IMPORTS, Exercise
from equivalence_tests.learn.practice.listing import EXERCISES, number_of

__all__ = ["Folder", "FolderError", "begun_file"]

WIDTH = 100


class FolderError(Exception):
    """The folder or a file in it cannot be used."""


@dataclass(frozen=True)
class Folder:
    """Where the exercises of one learner are.

    Args:
        path: The folder.
    """

    path: Path

    @property
    def progress(self) -> Path:
        """The file that says what is solved."""
        return self.path / "progress.json"

    def file_of(self, exercise: Exercise) -> Path:
        """Name the file of an exercise."""
        return self.path / f"{number_of(exercise):02d}_{exercise.name}.py"

    def solved(self) -> list[str]:
        """Read which exercises are solved.

        Returns:
            Their names.

        Raises:
            FolderError: If the file of the progress is damaged.
        """
        if not self.progress.exists():
            return []
        try:
            names = json.loads(self.progress.read_text(encoding="utf-8"))["solved"]
            return [exercise.name for exercise in EXERCISES if exercise.name in names]
        except (ValueError, KeyError, TypeError):
            raise FolderError(
                f'{self.progress} must hold {{"solved": [names]}}: repair or delete it; your code is in the other files'
            ) from None

    def following(self) -> Exercise | None:
        """Give the first exercise that is not solved; None if all are."""
        solved = self.solved()
        return next((exercise for exercise in EXERCISES if exercise.name not in solved), None)

    def begin(self, exercise: Exercise) -> bool:
        """Write the file of an exercise, unless it is there.

        Returns:
            Whether it was written.

        Raises:
            FolderError: If it cannot be written.
        """
        file = self.file_of(exercise)
        if file.exists():
            return False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file.write_text(begun_file(exercise), encoding="utf-8")
        except OSError as error:
            raise FolderError(f"{file} cannot be written: {error.strerror}") from None
        return True

    def check(self, exercise: Exercise) -> Answer:
        """Check the file of an exercise, and remember it if it is solved.

        Raises:
            FolderError: If the file is missing, cannot be imported, or does not hold the function.
        """
        answer = check_solution(exercise, self._function(exercise))
        if answer.solved and exercise.name not in (solved := self.solved()):
            self.progress.write_text(
                json.dumps({"solved": [*solved, exercise.name]}, indent=2) + "\n", encoding="utf-8"
            )
        return answer

    def _function(self, exercise: Exercise) -> Callable[..., Any]:
        file = self.file_of(exercise)
        if not file.is_file():
            raise FolderError(f"{file} is missing: `sidebyside practice {exercise.name}` writes it")
        spec = importlib.util.spec_from_file_location(f"practice_{exercise.name}", file)
        assert spec is not None  # it is a Python file
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a learner's code can raise anything
            place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise FolderError(f"{file}{place} cannot be imported: {type(error).__name__}: {error}") from None
        function = getattr(module, exercise.name, None)
        if not callable(function):
            raise FolderError(f"{file} must define the function {exercise.name}, but does not")
        return function


def begun_file(exercise: Exercise) -> str:
    """Write what a learner starts from: the task, the imports, and the function with its blank."""
    number = number_of(exercise)
    paragraphs = exercise.task.split("\n\n")
    task = "\n\n".join(textwrap.fill(" ".join(text.split()), WIDTH) for text in paragraphs)
    how = f"Write code in place of the `...`, then run:  sidebyside practice check {exercise.name}"
    return f'"""{number}. {exercise.title}\n\n{task}\n\n{how}\n"""\n\n{IMPORTS}\n\n{exercise.blanked}'
