"""``python -m equivalence_tests.explain`` is ``sidebyside explain``."""

import typer

from equivalence_tests.explain.command import explain

if __name__ == "__main__":
    typer.run(explain)
