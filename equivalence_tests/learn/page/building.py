"""The page itself: one HTML file from the data of every section, with its styles, its script and no other file."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivalence_tests.learn.excerpts import Excerpt, Place
from equivalence_tests.learn.page import beside, exercises, gallery, speed, steps_section, switches, tape, trap_cards
from equivalence_tests.learn.page.live import live_attention, live_boards, live_layer
from equivalence_tests.learn.page.templating import environment
from scratch import functional

__all__ = ["SECTIONS", "Section", "build_page"]


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Args:
        name: Its address, and the name of its template.
        title: Its heading.
        lead: What it is for, in a sentence.
        data: Computes what it shows.
        lacks: Says why it cannot be computed here; "" if it can.
    """

    name: str
    title: str
    lead: str
    data: Callable[[], Any]
    lacks: Callable[[], str] = str


SECTIONS: tuple[Section, ...] = (
    Section(
        "steps",
        "Step by step",
        "One small attention from input to output: at each step the line of scratch, the line of torch.nn, the "
        "operation that each runs, and the numbers of both.",
        steps_section.views,
        tape.lacks,
    ),
    Section(
        "switches",
        "Switches",
        "Every argument of the built-in attention: set any of them, and see what changes, which path torch takes, and "
        "which lines of scratch implement it.",
        switches.switch_data,
        tape.lacks,
    ),
    Section(
        "code",
        "Code beside code",
        "The files of scratch next to their twins in builtin, line by line. Docstrings unfold, and names are links.",
        beside.twins,
    ),
    Section(
        "masks",
        "Masks",
        "Who may look at whom: every mask builder drawn, and a converter between torch's three conventions.",
        gallery.mask_data,
    ),
    Section(
        "traps",
        "Traps",
        "What people write and what to write instead, with what each printed when this page was built.",
        trap_cards.trap_data,
    ),
    Section(
        "mistakes",
        "Find the mistake",
        "Twelve attentions, each with one mistake. Look at the numbers, guess the line, then see what verify finds.",
        exercises.exercise_data,
    ),
    Section(
        "speed",
        "How fast",
        "What should you use at your size? Every implementation, timed side by side on the machine named below.",
        speed.speed_data,
        speed.lacks,
    ),
)


def build_page(tell: Callable[[str], object] = str) -> str:
    """Compute every section and put the page together.

    Args:
        tell: Called with each section that is done.

    Returns:
        The HTML.
    """
    page = environment().get_template("page.html.j2")
    lacks = {section.name: section.lacks() for section in SECTIONS}
    found = []
    for section in SECTIONS:
        found.append((section, None if lacks[section.name] else section.data()))
        tell(section.title)
    version = str(torch.__version__).partition("+")[0]
    live = {"live_attention": live_attention, "live_boards": live_boards, "live_layer": live_layer}
    html = page.render(sections=found, lacks=lacks, textbook=textbook(), torch_version=version, **live)
    return without_empty_lines(html)


def textbook() -> list[Excerpt]:
    """Quote the lines of attention, one equation each."""
    lines = ("scores = (q * scale)", "masked_scores =", "weights = softmax", "context = weights")
    return [Place(functional.attention, line).excerpt() for line in lines]


def without_empty_lines(html: str) -> str:
    r"""Take out the lines that templates leave empty: those of code and of what was printed stay.

    >>> without_empty_lines("<p>\n\n  <pre>a\n\nb</pre>")
    '<p>\n<pre>a\n\nb</pre>'
    """
    parts = re.split(r"(<pre\b.*?</pre>)", html, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\n\s*\n\s*", "\n", part) for part in parts[::2]]
    return "".join(parts)
