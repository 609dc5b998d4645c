# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/step_timeline.svg, a step over two hosts: python docs/figures/step_timeline.py

The drawing obeys simple rules and is not a measurement. Both hosts do the same at the same time. A bucket can leave
when the backward pass has made it. A host sends one message after another, in the time that its bytes take. Whatever is
sent arrives one delay later. Stock Gloo has two all-reduces at work at a time; each has two messages, and each of these
waits until the peer has said that it is ready. bagua codes a bucket to a quarter of its bytes and has all at work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

OUTPUT = Path(__file__).with_suffix(".svg")

# In units of the drawing's time.
BACKWARD, DELAY, WIRE, CODEC = 2.0, 2.5, 2.0, 0.35
BUCKETS = 4
# Stock Gloo's threads in torch.
AT_WORK = 2
COMPRESSION = 4

WIDTH, LEFT, UNIT = 660, 66, 17.0
BAR, GAP = 22, 74
COLOURS = ("#c8102e", "#e8a33d", "#2a7f62", "#4a90c2")
DARK, GREY = "#22313c", "#6b7b88"


@dataclass
class Panel:
    """What is drawn of one way to communicate."""

    # (bucket, begin, end) of the codec's work; the same of messages as they leave; (bucket, begin) of "ready".
    codec: list[tuple[int, float, float]] = field(default_factory=list)
    messages: list[tuple[int, float, float]] = field(default_factory=list)
    ready: list[tuple[int, float]] = field(default_factory=list)
    end: float = 0.0


class Link:
    """One direction of the network: one message after another."""

    def __init__(self) -> None:
        self._free = 0.0

    def send(self, when: float, seconds: float) -> tuple[float, float]:
        """Return when a message that is there at `when` leaves: its first and its last byte."""
        begin = max(when, self._free)
        self._free = begin + seconds
        return begin, self._free


def gloo() -> Panel:
    """Return a step whose buckets are averaged by stock Gloo."""
    panel, link = Panel(), Link()
    # What has to be done, as it becomes possible: (when, phase, bucket).
    waiting = [(BACKWARD * (bucket + 1), 0, bucket) for bucket in range(AT_WORK)]
    while waiting:
        waiting.sort()
        when, phase, bucket = waiting.pop(0)
        if phase % 2 == 0 and phase < 4:  # before the reduce-scatter and the all-gather
            panel.ready.append((bucket, when))
            waiting.append((when + DELAY, phase + 1, bucket))
        elif phase < 4:
            begin, end = link.send(when, WIRE)
            panel.messages.append((bucket, begin, end))
            waiting.append((end + DELAY, phase + 1, bucket))
        else:
            panel.end = when
            if (following := bucket + AT_WORK) < BUCKETS:
                waiting.append((max(when, BACKWARD * (following + 1)), 0, following))
    return panel


def bagua() -> Panel:
    """Return a step whose buckets are averaged by bytegrad."""
    panel, link, processor = Panel(), Link(), Link()
    waiting = [(BACKWARD * (bucket + 1), 0, bucket) for bucket in range(BUCKETS)]
    while waiting:
        waiting.sort()
        when, phase, bucket = waiting.pop(0)
        coded = processor.send(when, CODEC)
        panel.codec.append((bucket, *coded))
        if phase == 2:
            panel.end = coded[1]
            continue
        begin, end = link.send(coded[1], WIRE / COMPRESSION)
        panel.messages.append((bucket, begin, end))
        waiting.append((end + DELAY, phase + 1, bucket))
    return panel


def x_of(time: float) -> float:
    return round(LEFT + UNIT * time, 1)


def text(x: float, y: float, words: str, colour: str = DARK, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def rectangle(begin: float, end: float, y: float, height: float, colour: str) -> str:
    x = x_of(begin)
    return f'<rect x="{x}" y="{y}" width="{x_of(end) - x - 1:.1f}" height="{height}" rx="2" fill="{colour}"/>'


def band(begin: float, end: float, first: float, last: float, colour: str) -> str:
    """Return a message on its way from the height `first` to the height `last`."""
    corners = [(begin, first), (end, first), (end + DELAY, last), (begin + DELAY, last)]
    points = " ".join(f"{x_of(time)},{y}" for time, y in corners)
    return f'<polygon points="{points}" fill="{colour}" fill-opacity="0.5"/>'


def drawn(panel: Panel, title: str, top: float) -> list[str]:
    """Return the elements of a panel, which is 190 high."""
    upper, lower = top + 46, top + 46 + BAR + GAP
    shapes = [text(8, top + 18, title, weight="bold")]
    for name, y in (("host 1", upper), ("host 2", lower)):
        shapes.append(text(8, y + 16, name, GREY))
        shapes.append(f'<line x1="{LEFT}" y1="{y + BAR / 2}" x2="{WIDTH - 10}" y2="{y + BAR / 2}" stroke="#d5dbe0"/>')
        for bucket, colour in enumerate(COLOURS):
            shapes.append(rectangle(BACKWARD * bucket, BACKWARD * (bucket + 1), y, BAR, colour))
            shapes.append(text(x_of(BACKWARD * (bucket + 0.5)), y + 16, str(bucket + 1), "white", "middle", "bold"))
    # Messages leave from the side of the bar that faces the other host.
    down, up = upper + BAR + 1, lower - 1
    for bucket, begin, end in panel.messages:
        shapes += [band(begin, end, down, up, COLOURS[bucket]), band(begin, end, up, down, COLOURS[bucket])]
    for bucket, begin in panel.ready:
        for first, last in ((down, up), (up, down)):
            shapes.append(
                f'<line x1="{x_of(begin)}" y1="{first}" x2="{x_of(begin + DELAY)}" y2="{last}" '
                f'stroke="{COLOURS[bucket]}" stroke-width="1.5" stroke-dasharray="4 3"/>'
            )
    for _, begin, end in panel.codec:
        shapes += [rectangle(begin, end, y, 6, DARK) for y in (upper + BAR - 6, lower)]
    x = x_of(panel.end)
    shapes.append(f'<line x1="{x}" y1="{upper - 8}" x2="{x}" y2="{lower + BAR + 8}" stroke="{DARK}" stroke-width="2"/>')
    side, anchor = (-6, "end") if x > WIDTH / 2 + 200 else (6, "start")
    shapes.append(text(x + side, upper - 12, "optimizer's step", anchor=anchor))
    return shapes


def legend(top: float) -> list[str]:
    """Return what the signs mean."""
    signs = [
        (rectangle(0, 1.2, top, 16, COLOURS[0]), "backward pass of a bucket"),
        (band(0, 0.6, top + 40, top + 26, COLOURS[0]), "a message: as wide as its bytes, arriving one delay later"),
        (
            f'<line x1="{x_of(0)}" y1="{top + 66}" x2="{x_of(1.8)}" y2="{top + 52}" stroke="{COLOURS[0]}" '
            'stroke-width="1.5" stroke-dasharray="4 3"/>',
            "“I am ready to receive”: another delay",
        ),
        (rectangle(0, 1.2, top + 83, 6, DARK), "compress, add, decompress"),
    ]
    shapes = []
    for row, (sign, meaning) in enumerate(signs):
        shapes += [sign, text(x_of(3.6), top + 13 + 26 * row, meaning, GREY)]
    return shapes


def main() -> None:
    """Write the drawing."""
    shapes = [
        *drawn(gloo(), "Stock Gloo, full precision", 4),
        *drawn(bagua(), "bagua, bytegrad: 8 bits", 218),
        *legend(430),
    ]
    height = 544
    OUTPUT.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="15">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
