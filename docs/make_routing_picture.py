"""Draws docs/routing.svg: the activated sets of static and dynamic mixing, and of a layer after training.

python docs/make_routing_picture.py
"""

from pathlib import Path

from hypermlp.theory.gallery import mixing, trained

COLOURS = ("#c2410c", "#a16207", "#2563eb", "#0f766e", "#7c3aed", "#be185d", "#0891b2", "#4d7c0f")
SIZE, GAP, TEXT = 320, 20, 30


def main() -> None:
    static, dynamic, _ = mixing(8)
    _, after, _ = trained(8)
    shown = [static.partition, dynamic.partition, after.partition]
    style = ".ground{fill:#fdfcfa;stroke:#e4dfd8}.on{fill:#2563eb;shape-rendering:crispEdges}.mark{fill:#1c1917}"
    style += "path{fill:none;stroke-width:2}text{font:14px sans-serif;fill:#6b6560}"
    style += "".join(f".s{i}{{stroke:{colour}}}" for i, colour in enumerate(COLOURS))
    width = len(shown) * (SIZE + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {SIZE + TEXT}"><style>{style}</style>',
        f'<rect width="{width}" height="{SIZE + TEXT}" fill="#ffffff"/>',
    ]
    for i, item in enumerate(shown):
        left = i * (SIZE + GAP)
        inner = item.svg(SIZE).replace("<svg ", f'<svg x="{left}" y="0" width="{SIZE}" height="{SIZE}" ', 1)
        parts.append(f'{inner}<text x="{left}" y="{SIZE + 20}">{item.title}</text>')
    Path(__file__).with_name("routing.svg").write_text("".join([*parts, "</svg>\n"]), encoding="utf-8")


if __name__ == "__main__":
    main()
