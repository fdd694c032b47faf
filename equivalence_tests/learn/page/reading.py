"""Read the page as its visitors get it: tables, texts, addresses and links, for the tests."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

__all__ = ["PageReader", "Table", "printed_plainly", "read_page"]


@dataclass
class Table:
    """A grid of numbers: the address that it stands under, and its texts row by row."""

    place: str
    rows: list[list[str]] = field(default_factory=list)


class PageReader(HTMLParser):
    """Collects what the tests ask about.

    Attributes:
        ids: All addresses.
        links: Where links lead.
        loaded: What a browser would fetch.
        tables: All grids of numbers, in order.
        texts: For each address that opens a panel, a step or a trap, the text under it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.tables: list[Table] = []
        self.texts: dict[str, str] = {}
        self._place = ""
        self._hidden = False
        self._into: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note addresses, links, what would be loaded, and where numbers begin."""
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        if "id" in given and not given["id"].endswith("-title"):
            self._place = given["id"]
        self.links += [given["href"]] if tag == "a" else []
        self.loaded += [given[name] for name in ("src", "srcset", "data", "poster") if name in given]
        self.loaded += [given["href"]] if tag == "link" else []
        self._hidden = tag in ("style", "script")
        if tag == "table":
            self.tables.append(Table(self._place))
        elif tag == "tr" and self.tables:
            self.tables[-1].rows.append([])
        self._into = self.tables[-1].rows[-1] if tag == "td" and self.tables and self.tables[-1].rows else None

    def handle_endtag(self, tag: str) -> None:
        """Leave styles and scripts."""
        self._hidden = self._hidden and tag not in ("style", "script")

    def handle_data(self, data: str) -> None:
        """Take a text, and with it a number."""
        if not self._hidden:
            self.texts[self._place] = self.texts.get(self._place, "") + data
        if self._into is not None and data.strip():
            self._into.append(data.strip())
            self._into = None

    def numbers(self, place: str) -> list[list[list[str]]]:
        """Give the grids that stand under an address."""
        return [table.rows for table in self.tables if table.place == place]


def read_page(html: str) -> PageReader:
    """Read a page.

    Args:
        html: Its text.

    Returns:
        What is on it.
    """
    reader = PageReader()
    reader.feed(html)
    for table in reader.tables:
        table.rows = [row for row in table.rows if row]
    return reader


def printed_plainly(number: float) -> str:
    """Print a number to the digits of the page, in another way than the page does.

    >>> [printed_plainly(x) for x in (0.12345, -2.0, -0.0001, float("-inf"), float("nan"))]
    ['0.123', '−2.000', '0.000', '−∞', 'NaN']
    """
    special = {"inf": "∞", "-inf": "−∞", "nan": "NaN"}
    text = special.get(str(number)) or f"{number:.3f}"
    return "0.000" if text == "-0.000" else text.replace("-", "−")
