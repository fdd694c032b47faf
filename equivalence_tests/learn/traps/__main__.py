"""``python -m equivalence_tests.learn.traps`` is ``sidebyside traps``."""

import typer

from equivalence_tests.learn.traps.command import traps

if __name__ == "__main__":
    typer.run(traps)
