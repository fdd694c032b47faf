"""``python -m equivalence_tests.learn.explain`` is ``sidebyside explain``."""

import typer

from equivalence_tests.learn.explain.command import explain

if __name__ == "__main__":
    typer.run(explain)
