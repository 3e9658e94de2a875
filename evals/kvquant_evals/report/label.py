"""Labels beside what they name, without covering each other: of points in a plane, and of the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

_Boxes = NDArray[np.float64]  # [n, 4]: left, bottom, right and top of each, in pixels

SIZE = 7.5
# In pixels at 100 dots per inch: how far a marker reaches from its point, the room around a text, and the distances
# from its point at which there is tried to place it, up to a third of a figure.
_MARKER, _PADDING = 5.0, 2.0
_DISTANCES = (9, 16, 26, 40, 58, 80, 106, 136, 180)
_ANGLES = (0, 180, 45, -45, 135, -135, 90, -90, 22, -22, 158, -158, 68, -68, 112, -112)
_NEAR = _DISTANCES[1]  # up to here nobody needs a line from the point to its label


@dataclass(frozen=True)
class Label:
    """A text for the point at x and y of the axes' data."""

    x: float
    y: float
    text: str
    color: str


def place(figure: Figure, axes: Axes, labels: Sequence[Label], obstacles: Sequence[tuple[float, float]] = ()) -> None:
    """Writes each label as near to its point as nothing is in its way, with a thin line where that is not near.

    obstacles: points of the data that stay uncovered, beside those of the labels.
    """
    figure.draw_without_rendering()  # settles where the axes lie
    scale = figure.dpi / 100
    spots = axes.transData.transform([(label.x, label.y) for label in labels] + list(obstacles))
    taken = _around(spots, _MARKER * scale, _MARKER * scale)
    for label, (x, y) in zip(labels, spots, strict=False):
        places = _Places(x, y, *_extent(figure, label.text), scale)
        box, is_far = places.nearest_free(taken, np.array(axes.bbox.extents))
        taken = np.concatenate([taken, places.parts(box, is_far)])
        _write(axes, label, places, box, is_far)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions from low to high, in the order of those that are wanted, `gap` apart and on the whole as near to them
    as that allows; with a smaller gap if there is no room for it.
    """
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[float, int]] = []  # where the first of a group lies, and how many there are
    for i in order:
        groups.append((wanted[i], 1))
        while len(groups) > 1 and groups[-2][0] + groups[-2][1] * gap > groups[-1][0]:
            (first, count), (other, more) = groups[-2:]
            groups[-2:] = [((first * count + (other - count * gap) * more) / (count + more), count + more)]
    placed = [first + gap * i for first, count in groups for i in range(count)]
    # A group at an end may reach beyond it, and pushes its neighbours when it is moved back.
    for i in range(len(placed)):
        placed[i] = max(placed[i], low + gap * i)
    for i in range(len(placed)):
        placed[i] = min(placed[i], high - gap * (len(placed) - 1 - i))
    return [placed[order.index(i)] for i in range(len(wanted))]


@dataclass(frozen=True)
class _Places:
    """Where a text of a width and height may go beside the pixel at x and y."""

    x: float
    y: float
    width: float
    height: float
    scale: float

    def nearest_free(self, taken: _Boxes, room: _Boxes) -> tuple[_Boxes, bool]:
        """The first box that is in the way of nothing, or else of the least, and whether it is far from the point."""
        found: list[tuple[float, _Boxes, bool]] = []
        for distance, angle in product(_DISTANCES, _ANGLES):
            box, is_far = self._beside(distance * self.scale, math.radians(angle)), distance > _NEAR
            outside = self.width * self.height - _common_area(box[None], room[None])
            covered = _common_area(self.parts(box, is_far), taken) + 10 * outside
            if covered < 1:  # a pixel; sums do not come out at zero
                return box, is_far
            found.append((covered, box, is_far))
        _, box, is_far = min(found, key=lambda candidate: candidate[0])
        return box, is_far

    def parts(self, box: _Boxes, is_far: bool) -> _Boxes:
        """All that a label takes: its box and, if it is far, a line to it from beside the point's own marker."""
        if not is_far:
            return box[None]
        end = np.array(self.end(box))
        way = end - (self.x, self.y)
        length, step = float(np.hypot(*way)), 2 * self.scale
        shares = np.arange(2 * _MARKER * self.scale, length - step, step) / max(length, step)
        return np.concatenate([box[None], _around(end - way * (1 - shares[:, None]), step / 4, step / 4)])

    def end(self, box: _Boxes) -> tuple[float, float]:
        """The nearest to the point of the middles of the box's sides."""
        left, bottom, right, top = box.tolist()
        aside, above = (left + right) / 2, (bottom + top) / 2
        middles = [(left, above), (right, above), (aside, bottom), (aside, top)]
        return min(middles, key=lambda middle: math.hypot(middle[0] - self.x, middle[1] - self.y))

    def _beside(self, distance: float, angle: float) -> _Boxes:
        """A box whose side that faces the point is `distance` from it."""
        aside = math.copysign(self.width / 2, math.cos(angle)) if abs(math.cos(angle)) > 0.1 else 0.0
        center_x = self.x + math.cos(angle) * distance + aside
        center_y = self.y + math.sin(angle) * (distance + self.height / 2)
        found: _Boxes = _around(np.array([[center_x, center_y]]), self.width / 2, self.height / 2)[0]
        return found


def _around(centers: NDArray[np.float64], half_width: float, half_height: float) -> _Boxes:
    """centers: [n, 2]"""
    half = np.array([half_width, half_height])
    return np.concatenate([centers - half, centers + half], axis=1)


def _common_area(some: _Boxes, others: _Boxes) -> float:
    """Summed over all pairs of one of each."""
    low = np.maximum(some[:, None, :2], others[None, :, :2])
    high = np.minimum(some[:, None, 2:], others[None, :, 2:])
    return float((high - low).clip(0).prod(axis=-1).sum())


def _extent(figure: Figure, text: str) -> tuple[float, float]:
    """Width and height of a text in pixels, with room around it."""
    written = figure.text(0, 0, text, size=SIZE)
    box = written.get_window_extent()
    written.remove()
    room = 2 * _PADDING * figure.dpi / 100
    return box.width + 2 * room, box.height + room


def _write(axes: Axes, label: Label, places: _Places, box: _Boxes, is_far: bool) -> None:
    (end_x, end_y), (left, bottom, right, top) = places.end(box), box.tolist()
    line = {
        "arrowstyle": "-", "color": label.color, "linewidth": 0.5, "alpha": 0.7, "shrinkA": 0, "shrinkB": 2,
        "relpos": ((end_x - left) / places.width, (end_y - bottom) / places.height),
    }  # fmt: skip
    center = ((left + right) / 2 - places.x, (bottom + top) / 2 - places.y)
    axes.annotate(
        label.text, (label.x, label.y), xytext=center, textcoords="offset pixels", color=label.color, size=SIZE,
        ha="center", va="center", arrowprops=line if is_far else None,
    )  # fmt: skip
