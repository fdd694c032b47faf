"""Pictures: positional encodings, and attention maps with their tokens. Needs matplotlib, the extra ``plot``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from scratch import validation
from scratch.positional import Layout, sinusoidal_encoding

__all__ = ["attention_figure", "positional_figure", "save_figure"]


def positional_figure(
    num_positions: int = 64, d_model: int = 8, layout: Layout = "interleaved", curves: int = 5
) -> Any:
    """Draw a table of positional encodings, as a heat map and as curves of its first dimensions.

    Args:
        num_positions: Number of rows of the table.
        d_model: Number of its columns.
        layout: "interleaved" or "concatenated".
        curves: Number of dimensions that are drawn as curves, from 0 on.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: For sizes below 1, an unknown layout, or if matplotlib is missing.
    """
    validation.check_positive(num_positions=num_positions, curves=curves)
    encoding = sinusoidal_encoding(num_positions, d_model, layout).numpy()
    figure = _new_figure((11, 4.2))
    heat, lines = figure.subplots(1, 2, width_ratios=(2, 3))
    image = heat.imshow(encoding, aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    heat.set(xlabel="dimension", ylabel="position", title=f"{num_positions} positions × {d_model} dimensions")
    heat.set_xticks(range(d_model) if d_model <= 16 else range(0, d_model, max(1, d_model // 8)))
    figure.colorbar(image, ax=heat)
    for dimension in range(min(curves, d_model)):
        lines.plot(encoding[:, dimension], label=f"dimension {dimension}")
    lines.set(xlabel="position", ylabel="encoding", title="the first dimensions", ylim=(-1.1, 1.1))
    lines.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(f"Sinusoidal positional encoding, {layout}")
    return figure


def attention_figure(maps: Mapping[str, Tensor], tokens: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> Any:
    """Draw attention maps, a row for each attention and a column for each head.

    Args:
        maps: (num_heads, query_len, key_len) by module path.
        tokens: For each path the tokens of the queries and of the keys.

    Returns:
        A matplotlib figure: a row of a map is a query, a column a key; white = no weight, darkest = the greatest
        weight of all maps; each row of a map sums to 1.

    Raises:
        ValueError: If there are no maps, or matplotlib is missing.
    """
    validation.check_maps_to_draw(maps)
    num_heads = max(weights.size(0) for weights in maps.values())
    greatest = max(float(weights.max()) for weights in maps.values())
    figure = _new_figure((1.7 * num_heads + 2.5, 2.2 * len(maps) + 0.6))
    axes = figure.subplots(len(maps), num_heads, squeeze=False)
    for row, (path, heads) in zip(axes, maps.items(), strict=True):
        queries, keys = tokens[path]
        for head, (cell, weights) in enumerate(zip(row, heads.detach().cpu().numpy(), strict=False)):
            image = cell.imshow(weights, cmap="Blues", vmin=0, vmax=greatest, interpolation="nearest", aspect="auto")
            cell.set_xticks(range(len(keys)), keys, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
            cell.set_yticks(range(len(queries)), queries if head == 0 else [], fontsize=8)
            cell.set_title(f"head {head}", fontsize=8)
            cell.set_xlabel("key", fontsize=8)
        row[0].set_ylabel(f"{path}\nquery", fontsize=8)
        for cell in row[heads.size(0) :]:
            cell.axis("off")
    figure.colorbar(image, ax=axes, aspect=40, label="weight")
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG or SVG, by the suffix of its name.

    Args:
        figure: A matplotlib figure.
        path: Ends in .png or .svg.

    Raises:
        ValueError: For another suffix, or if the file cannot be written.
    """
    validation.check_picture_path(path)
    with validation.writing(path):
        figure.savefig(path, dpi=150)


def _new_figure(size: tuple[float, float]) -> Any:
    figure_module = validation.import_matplotlib_figure()
    return figure_module.Figure(figsize=size, layout="constrained")
