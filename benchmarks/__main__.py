"""The command ``sidebyside-bench``; also ``python -m benchmarks``."""

from benchmarks.command import app


def main() -> None:
    """Run the command line."""
    app(prog_name="sidebyside-bench")


if __name__ == "__main__":
    main()
