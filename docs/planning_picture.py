"""Draws docs/planning.svg: python docs/planning_picture.py

Twelve blocks of a step, four of them streamed, a ring with room for two. Shown is one step after the run has settled:
once with the last four blocks streamed, once with every third.
"""

from __future__ import annotations

from pathlib import Path

COMPUTE, COPY, SLOTS, STEPS = 1.0, 2.5, 2, 5
BLOCKS = 12
LEFT, WIDTH, LANE = 150, 720, 34
COLOURS = {"resident": "#9db4c8", "streamed": "#e0a458", "wait": "#f7e3e3"}

Span = tuple[float, float, int]


def timeline(streamed: list[int]) -> tuple[list[Span], list[Span], float, float]:
    """Compute and copy spans of all steps, and where the last but one begins and ends."""
    computing: list[Span] = []
    copying: list[Span] = []
    uses: list[float] = []
    now = link_free = 0.0
    borders: list[float] = []
    for _ in range(STEPS):
        borders.append(now)
        for block in range(BLOCKS):
            if block in streamed:
                room = uses[len(copying) - SLOTS] if len(copying) >= SLOTS else 0.0
                start = max(link_free, room)
                link_free = start + COPY
                copying.append((start, link_free, block))
                now = max(now, link_free)
            computing.append((now, now + COMPUTE, block))
            now += COMPUTE
            if block in streamed:
                uses.append(now)
    return computing, copying, borders[-2], borders[-1]


def draw_lane(spans: list[Span], top: int, begin: float, end: float, scale: float, streamed: list[int]) -> list[str]:
    parts = []
    for start, stop, block in spans:
        left, right = max(start, begin), min(stop, end)
        if right - left <= 1e-9:
            continue
        kind = "streamed" if block in streamed else "resident"
        x, width = LEFT + (left - begin) * scale, (right - left) * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{top}" width="{width - 1:.1f}" height="{LANE - 8}" rx="3" fill="{COLOURS[kind]}"/>'
        )
        parts.append(f'<text x="{x + width / 2:.1f}" y="{top + 18}" text-anchor="middle">{block + 1}</text>')
    return parts


def draw_case(title: str, streamed: list[int], top: int, scale: float) -> list[str]:
    computing, copying, begin, end = timeline(streamed)
    waited = end - begin - BLOCKS * COMPUTE
    note = f"{waited:g} of waiting" if waited > 1e-9 else "no waiting"
    width = (end - begin) * scale
    return [
        f'<text x="10" y="{top}" class="title">{title}: a step takes {end - begin:g}, {note}</text>',
        f'<text x="10" y="{top + 30}">compute device</text>',
        f'<rect x="{LEFT}" y="{top + 12}" width="{width:.1f}" height="{LANE - 8}" fill="{COLOURS["wait"]}"/>',
        *draw_lane(computing, top + 12, begin, end, scale, streamed),
        f'<text x="10" y="{top + 30 + LANE}">link from RAM</text>',
        f'<rect x="{LEFT}" y="{top + 12 + LANE}" width="{width:.1f}" height="{LANE - 8}" fill="#f2f2f2"/>',
        *draw_lane(copying, top + 12 + LANE, begin, end, scale, streamed),
    ]


def main() -> None:
    cases = {"The last four blocks stream": [8, 9, 10, 11], "Every third block streams": [2, 5, 8, 11]}
    longest = max(end - begin for _, _, begin, end in map(timeline, cases.values()))
    scale = WIDTH / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 10}" height="240" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Two plans of one step: while the link idles, waiting builds up">',
        "<style>.title { font-weight: bold; font-size: 13px }</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for row, (title, streamed) in enumerate(cases.items()):
        parts += draw_case(title, streamed, 22 + row * 105, scale)
    parts.append(
        '<text x="10" y="230">Orange: streamed blocks and their copies. Blue: resident blocks. Red: waiting. '
        "Grey: the link is idle. Copies run ahead into the next step.</text>"
    )
    Path(__file__).with_name("planning.svg").write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
