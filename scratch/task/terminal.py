"""A console whose tables can be piped and pasted."""

from typing import Any

from rich.console import Console

__all__ = ["Screen"]


class Screen(Console):
    """A console of rich that leaves no blanks at the ends of lines where its output is no terminal's.

    rich fills every line of a table or a paragraph up to its width, which only a terminal needs.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as ``rich.console.Console.print`` does.

        Args:
            *objects: What to print.
            **options: As rich takes them.
        """
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
