"""How code that was checked is called, and what its layouts and masks are in torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from equivalence_tests.checker.equivalent.unread import UnreadError
from equivalence_tests.checker.reach.calling import WINDOWS
from equivalence_tests.checker.reach.masking import MaskForm

# From a layout to (batch, tokens, features), and back.
LAYOUTS: Mapping[str, tuple[str, str]] = {
    "b l e": ("", ""),
    "l b e": (".transpose(0, 1)", ".transpose(0, 1)"),
    "l e": ("[None]", "[0]"),
    "b e l": (".mT", ".mT"),
    "b e l 1": (".flatten(2).mT", ".mT.unflatten(2, (-1, width))"),
    "b l 1 e": (".flatten(1, 2)", ".unflatten(1, (-1, width))"),
    WINDOWS: (".flatten(3, 4).flatten(0, 2)", ".unflatten(1, shape[3:5]).unflatten(0, shape[:3])"),
    "b h l d": (".transpose(1, 2).flatten(2)", ""),
    "b l h d": (".flatten(2)", ""),
    "b e": ("[:, None]", "[:, 0]"),
    "1 b e": (".transpose(0, 1)", ".transpose(0, 1)"),
    "b 1 e": ("", ""),
}
# From the shape of a mask to (batch, heads, query, key).
MASK_SHAPES: Mapping[str, str] = {
    "(batch, query, key)": "[:, None]",
    "(batch, 1, query, key)": "",
    "(batch, heads, query, key)": "",
    "(batch * heads, query, key)": ".unflatten(0, (-1, {heads}))",
    "(heads * batch, query, key)": ".unflatten(0, ({heads}, -1)).transpose(0, 1)",
    "(query, key, batch)": ".permute(2, 0, 1)[:, None]",
    "(query, key)": "[None, None]",
    "(1, query, key)": "[:, None]",
    "(1, 1, query, key)": "",
    "(batch, key)": "[:, None, None]",
    "(batch, 1, key)": "[:, None]",
    "(batch, 1, 1, key)": "",
    "(1, key, batch)": ".permute(2, 0, 1)[:, None]",
    "(batch, key, 1)": ".mT[:, None]",
    "segments (batch, key)": "[:, None]",
    "lengths (batch,)": "[:, None, None, None]",
    "lengths (batch, query)": "[:, None, :, None]",
}
HIDES: Mapping[str, str] = {"look": "~{}", "block": "{}", "look_float": "{} == 0", "look_int": "{} == 0"}
HIDES = {**HIDES, "block_float": "{} != 0", "block_int": "{} != 0", "additive": "{} < 0"}
HIDES = {**HIDES, "segments": "{0}[..., None] != {0}[..., None, :]"}
HIDES = {**HIDES, "lengths": "torch.arange({keys}, device={name}.device) >= {0}"}


@dataclass(frozen=True)
class Signature:
    """How the code that was checked is called."""

    target: str
    arguments: tuple[tuple[str, str], ...]  # those that hold tokens: the names in a call, and in its signature
    layout: str = "b l e"
    mask: str = ""  # the name of its mask; "" for none
    form: MaskForm | None = None  # how that is understood; None where it is not known
    merged: bool = True  # whether heads that are handed over come back side by side
    tables: tuple[str, ...] = ()  # the arguments that hold relative positions
    steps: Mapping[str, str] = field(default_factory=dict)  # those that are one time step, and how they are laid out
    returned: str = "b l e"

    def inward(self, name: str) -> str:
        """Write what lays an argument out as (batch, tokens, features)."""
        return LAYOUTS[self.steps.get(name, self.layout)][0]

    def hidden(self, heads: int, keys: str = "key.size(-2)") -> str:
        """Write what the mask hides of so many keys, (batch, heads, query, key) bool, True = may not look."""
        if self.form is None or self.form.shape not in MASK_SHAPES or self.form.held:
            raise UnreadError(f"a mask of the form {self.form} cannot be written down")
        mask = self.mask + MASK_SHAPES[self.form.shape].format(heads=heads)
        return HIDES[self.form.encoding].format(mask, name=self.mask, keys=keys)
