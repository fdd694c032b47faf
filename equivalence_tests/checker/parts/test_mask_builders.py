"""Code that builds masks: what it means is read off what it gives, and what is wrong with it is named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equivalence_tests.checker.helpers_for_tests import line_of
from equivalence_tests.checker.parts.kinds import builds_masks
from equivalence_tests.checker.parts.mask_builders import examine_mask_builder, mask_methods
from equivalence_tests.checker.reporting.report import Report
from equivalence_tests.checker.verify import verify
from equivalence_tests.checker.zoo import builders
from scratch import masks

MEANINGS = {
    "subsequent_mask": ("causal", "(1, query, key), True = may look"),
    "square_subsequent_mask": ("causal", "(query, key), added to the scores: 0 = may look, -inf = may not"),
    "finite_causal_mask": (
        "causal, aligned at the end",
        "(query, key), added to the scores: 0 = may look, -inf = may not (here -1e+09)",
    ),
    "key_padding_mask": ("padding of tokens (pad_idx)", "(batch, key), True = may not look"),
    "cross_pad_mask": ("padding of seq_k (id 1)", "(batch, query, key), True = may not look"),
    "target_mask": ("causal, padding of tgt (pad)", "(batch, 1, query, key), 1 = may look, 0 = may not"),
    "mask_from_lengths": ("padding of lengths", "(batch, key), True = may look"),
    "prefix_mask": ("causal after a prefix that all see", "(query, key), True = may look"),
    "window_mask": ("causal, a window with the token itself", "(query, key), True = may look"),
}


def rows(found: Any) -> list[str]:
    return said_by(examine_mask_builder(found, "it"))


def said_by(report: Report) -> list[str]:
    return [here for what, here, _ in report.conventions if what != "arguments"]


@pytest.mark.parametrize(
    "found", [x for x in builders.CORRECT if x is not builders.all_masks], ids=lambda found: found.__name__
)
def test_what_is_right_is_read(found: Callable[..., Any]) -> None:
    report = verify(found)
    assert report.verdict == "equal", str(report)
    assert report.kind == "mask builder"
    if found.__name__ in MEANINGS:
        assert tuple(said_by(report)) == MEANINGS[found.__name__]


def half_a_window(size: int, window: int, causal: bool = True) -> Tensor:
    apart = torch.arange(size)[:, None] - torch.arange(size)
    near = apart.abs() <= window // 2
    return near & (apart >= 0) if causal else near


def test_a_window_of_half_its_width_is_called_so() -> None:
    assert rows(half_a_window)[0] == "causal, half a window and the token itself"


def mask_of_a_window_ahead(size: int, window: int) -> Tensor:
    ahead = torch.arange(size) - torch.arange(size)[:, None]
    return (ahead >= 0) & (ahead <= window)


def test_a_window_the_wrong_way_round_is_named() -> None:
    assert verify(mask_of_a_window_ahead).mistakes == ("causal_mask_inverted",)


def test_several_masks_are_read_one_by_one() -> None:
    report = verify(builders.all_masks)
    assert (report.verdict, report.kind) == ("equal", "mask builder"), str(report)
    assert said_by(report)[::2] == ["hides nothing", "causal", "padding of src (id 1)", "padding of tgt (id 1)"]
    assert report.conventions[0][1].count("(len, batch)") == 2


@pytest.mark.parametrize(("found", "names", "_"), builders.BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_wrong_is_named(found: Callable[..., Any], names: tuple[str, ...], _: str) -> None:
    report = verify(found)
    assert report.verdict == "deviates"
    assert set(report.mistakes) == set(names), str(report)
    assert all(finding.line for finding in report.findings), str(report)
    assert not any("def " in line_of(finding) for finding in report.findings), str(report)


class Translator(nn.Module):
    def __init__(self, d_model: int, trg_pad_idx: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, 1, batch_first=True)
        self.trg_pad_idx = trg_pad_idx

    def make_trg_mask(self, trg: Tensor) -> Tensor:
        return (trg != self.trg_pad_idx).unsqueeze(1).unsqueeze(3)

    def mask_scores(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask, 0.0)


def test_a_method_is_bound_to_an_instance() -> None:
    assert examine_mask_builder(Translator.make_trg_mask, "it").mistakes == ("padding_mask_on_queries",)
    assert examine_mask_builder(Translator(6).make_trg_mask, "it").mistakes == ("padding_mask_on_queries",)


def test_the_methods_of_a_model_are_checked_with_it() -> None:
    assert [name for name, _ in mask_methods(Translator(6))] == ["make_trg_mask", "mask_scores"]
    report = verify(Translator, kind="layers")
    assert [(f.where, f.name) for f in report.findings] == [("make_trg_mask", "padding_mask_on_queries")], str(report)


def hides_rows_and_what_follows(trg: Tensor) -> Tensor:
    return (trg != 0)[:, None, :, None] & torch.ones(trg.size(1), trg.size(1)).tril().bool()


def hides_rows_and_all_but_one_that_follows(trg: Tensor) -> Tensor:
    return (trg != 0)[:, None, :, None] & torch.ones(trg.size(1), trg.size(1)).tril(1).bool()


def test_padding_of_queries_alone_is_right_where_the_causal_mask_hides_what_stands_behind_the_tokens() -> None:
    report = examine_mask_builder(hides_rows_and_what_follows, "it")
    assert (report.verdict, [one.what for one in report.not_exercised]) == (
        "partial",
        ["padding in front of the tokens"],
    )
    wrong = examine_mask_builder(hides_rows_and_all_but_one_that_follows, "it")
    assert {*wrong.mistakes} == {"causal_sees_one_ahead", "padding_mask_on_queries"}


class HidesRowsAndWhatFollows(Translator):
    def make_trg_mask(self, trg: Tensor) -> Tensor:
        return super().make_trg_mask(trg) & torch.ones(trg.size(1), trg.size(1)).tril().bool()


def test_a_model_lists_what_its_mask_builders_leave_open() -> None:
    report = verify(HidesRowsAndWhatFollows, kind="layers")
    assert "padding in front of the tokens in make_trg_mask" in [one.what for one in report.not_exercised]


def test_rows_that_hide_everything_are_noted() -> None:
    def pad_mask(q: Tensor, k: Tensor) -> Tensor:
        return (q != 0)[:, None, :, None] & (k != 0)[:, None, None, :]

    report = verify(pad_mask)
    assert report.verdict == "equal"
    assert "padded queries" in report.notes[0]


def test_nothing_that_is_unknown_is_blamed() -> None:
    def first_frame_mask(size: int) -> Tensor:
        mask = torch.ones(size, size).tril()
        mask[0, 1] = 1
        return mask

    def empty_mask(size: int) -> Tensor:
        return torch.full((size, size), float("nan"))

    def open_mask(tokens: Tensor) -> Tensor:
        return torch.zeros(tokens.shape).bool()

    report = verify(first_frame_mask)
    assert (report.verdict, report.findings) == ("unchecked", [])
    assert "no mask that is known" in report.reason
    assert "NaN" in verify(empty_mask).reason
    assert verify(open_mask).verdict == "unchecked"


def test_what_cannot_be_called_is_said_with_its_error() -> None:
    def subsequent_mask(size: int) -> Tensor:
        raise TypeError("ones() got an unexpected keyword argument 'k'")

    report = verify(subsequent_mask)
    assert report.verdict == "unchecked"
    assert "unexpected keyword argument 'k'" in report.reason


def test_only_functions_that_build_masks_are_taken_for_such() -> None:
    def masked_softmax(x: Tensor) -> Tensor:
        return x.softmax(-1)

    assert builds_masks(masks.causal) is False  # the name does not say it
    assert not builds_masks(masked_softmax)
    assert not builds_masks(nn.Transformer)
    assert builds_masks(nn.Transformer.generate_square_subsequent_mask)


@pytest.mark.parametrize("found", [masks.causal, masks.from_token_ids, nn.Transformer.generate_square_subsequent_mask])
def test_ours_and_torchs_are_right(found: Callable[..., Any]) -> None:
    assert verify(found, kind="mask_builder").verdict in ("equal", "partial")  # ours has a condition that no call met


def batch_causal_mask(batch_size: int, seq_len: int, padding: Tensor) -> Tensor:
    causal = padding.new_ones(seq_len, seq_len).long().tril().bool().expand(batch_size, -1, -1)
    return causal & ~padding[:, None]


def additive_mask(key_padding: Tensor) -> Tensor:
    hidden = key_padding.bool()[:, None] | key_padding.new_ones(2 * [key_padding.size(1)]).long().triu(1).bool()
    return torch.where(hidden, -torch.inf, 0.0)


def pad_masking(x: Tensor, target_len: int) -> Tensor:
    return (x == 0)[:, None].expand(-1, target_len, -1)


def mask_for_four_heads(x: Tensor, pad: int) -> Tensor:
    return (x != pad)[:, None].expand(-1, x.size(1), -1).repeat_interleave(4, 0)


def batch_last_mask(size: int, batch_size: int) -> Tensor:
    return torch.ones(size, size).tril().bool()[..., None].expand(-1, -1, batch_size)


look_ahead_mask = lambda n: np.tril(np.ones((n, n), dtype=bool))  # noqa: E731


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("batch_causal_mask", "causal, padding of padding (1)"),
        ("additive_mask", "causal, padding of key_padding (1)"),
        ("pad_masking", "padding of x (id 0)"),
        ("look_ahead_mask", "causal"),
        ("mask_for_four_heads", "padding of x (pad)"),
        ("batch_last_mask", "causal"),
    ],
)
def test_arguments_and_results_of_other_kinds_are_known(name: str, meaning: str) -> None:
    report = verify(f"{__name__}:{name}")
    assert (report.verdict, report.kind) == ("equal", "mask builder"), str(report)
    assert ("mask", meaning, "") in report.conventions


def makeMaskOf(ids: Tensor, option: str) -> Tensor:  # noqa: N802
    if option == "padding":
        mask = (ids != 0)[:, None, None]
    elif option == "ahead":
        mask = (ids != 0)[:, None, None] & ids.new_ones(ids.size(1), ids.size(1)).tril().bool()
    return mask


def mask_of_a_mode(ids: Tensor, mode: str = "padding") -> Tensor:
    padding = (ids != 0)[:, None, None]
    return padding if mode == "padding" else padding & torch.ones(ids.size(1), ids.size(1)).tril(1).bool()


def mask_of_known_modes(ids: Tensor, mode: str = "padding") -> Tensor:
    if mode != "padding":
        raise ValueError("there is no other")
    return (ids != 0)[:, None, None]


def test_each_string_that_a_builder_looks_for_is_tried_and_another() -> None:
    report = verify(makeMaskOf)
    assert (report.verdict, report.kind) == ("equal", "mask builder"), str(report)
    assert ("option='ahead': mask", "causal, padding of ids (id 0)", "") in report.conventions
    (finding,) = verify(mask_of_a_mode).findings
    assert finding.name == "causal_sees_one_ahead"
    assert finding.evidence.endswith("called with another mode")
    assert verify(mask_of_known_modes).verdict == "equal"
