"""``python -m equivalence_tests.traps`` is ``sidebyside traps``."""

import typer

from equivalence_tests.traps.command import traps

if __name__ == "__main__":
    typer.run(traps)
