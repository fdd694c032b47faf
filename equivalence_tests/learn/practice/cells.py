"""The exercises as a notebook: a cell with the task, one with the blank, and one that checks it."""

import json
from typing import Any

from equivalence_tests.learn.practice.exercise import IMPORTS, Exercise
from equivalence_tests.learn.practice.listing import EXERCISES, number_of

__all__ = ["notebook"]

INSTALL = "%pip install -q attention-side-by-side  # or the address of the repository, with git+ before it"
BEGINNING = """\
# Twenty exercises in attention

Run the next cell once. Then do the exercises in order: write code in place of the `...`, run the cell, and run the cell
below it. `solution("scale")` prints a solution.
"""


def notebook() -> str:
    """Write the notebook.

    Returns:
        The text of an .ipynb file.
    """
    setup = f"{INSTALL}\n\n{IMPORTS}\nfrom equivalence_tests.learn.practice import check, solution\n"
    cells = [_text(BEGINNING), _code(setup)]
    for exercise in EXERCISES:
        cells += [_text(_task(exercise)), _code(exercise.blanked), _code(f'check("{exercise.name}", {exercise.name})')]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _task(exercise: Exercise) -> str:
    return f"## {number_of(exercise)}. {exercise.title}\n\n{exercise.task}"


def _text(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.rstrip().splitlines(keepends=True)}


def _code(text: str) -> dict[str, Any]:
    source = text.rstrip().splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
