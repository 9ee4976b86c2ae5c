"""Draw docs/img/rooms.svg: the rooms of src/ and the imports between them.

python docs/img/rooms.py
"""

import ast
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
BOXES = {  # folder under src/ -> centre and half the width of its box
    ".": (4.25, 3, 5.1),
    "sft": (1, 2, 0.75),
    "ad": (3, 2, 0.75),
    "dpo_inv": (5, 2, 0.75),
    "prompt_baking": (7, 2, 0.75),
    "ddp_utils/tools": (0, 1, 0.75),
    "ddp_utils/readers": (2, 1, 0.75),
    "ddp_utils/runs": (4, 1, 0.75),
    "ddp_utils/sharding": (6, 1, 0.75),
    "ddp_utils/fast": (8, 1, 0.75),
    "ddp_utils": (4.25, -0.2, 5.1),
}
NAMES = {".": "scripts and their settings", "ddp_utils": "ddp_utils: the core"}


def room_of(module):
    """Return the room of a module, "ddp_utils/runs" of ddp_utils.runs.run, or None."""
    path = SRC / module.replace(".", "/")
    folder = path if path.is_dir() else path.parent
    room = folder.relative_to(SRC).as_posix()
    ours = path.is_dir() or path.with_suffix(".py").exists()
    return room if ours and room in BOXES else None


def imports_of(path):
    """Yield the name of each module that a file imports, and whether a function does it."""
    tree = ast.parse(path.read_text())
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node in inside
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if room_of(name) else node.module, node in inside


def arrow(axis, room, other, dashed):
    """Draw an arrow from a room to another that it imports."""
    (x, y, half), (to, level, width) = BOXES[room], BOXES[other]
    style = {"arrowstyle": "-|>", "linestyle": "dashed" if dashed else "solid"}
    style |= {"color": "0.35", "shrinkA": 0, "shrinkB": 0}
    if y == level:  # along the row, below it
        style["connectionstyle"] = f"arc3,rad={0.5 / (to - x)}"
        axis.annotate("", (to - 0.2, level - 0.3), (x + 0.2, y - 0.3), arrowprops=style)
        return
    down = 0.3 if y > level else -0.3
    if half > 1 and width > 1:
        x = to = 9.25  # beside all rooms
    elif half > 1 or width > 1:  # straight, down or up
        x = to = (to if half > 1 else x) + (0 if y > level else 0.5)
    else:
        x, to = x + 0.25 * (to - x) / abs(to - x), to + 0.5 * (x - to) / abs(to - x)
    axis.annotate("", (to, level + down), (x, y - down), arrowprops=style)


def main(target=ROOT / "docs/img/rooms.svg"):
    matplotlib.rcParams.update({"svg.hashsalt": "rooms", "svg.fonttype": "none", "font.size": 9})
    figure, axis = plt.subplots(figsize=(11, 5), layout="constrained")
    edges = {}  # (room, other) -> whether all its imports are made in functions
    for room, (x, y, half) in BOXES.items():
        files = [path for path in sorted((SRC / room).glob("*.py")) if path.stat().st_size > 200]
        lines = 0
        for path in files:
            lines += len(path.read_text().splitlines())
            for module, inside in imports_of(path):
                other = room_of(module)
                if other and other != room:
                    edges[room, other] = edges.get((room, other), True) and inside
        axis.add_patch(plt.Rectangle((x - half, y - 0.3), 2 * half, 0.6, fc="0.93", ec="0.35"))
        name = NAMES.get(room, room.rpartition("/")[2])
        files = f"{len(files)} file{'s' * (len(files) > 1)}"
        text = f"{name}\n{files}, {max(1, round(lines / 100)) * 100:,} lines"
        axis.annotate(text, (x, y), ha="center", va="center")
    for (room, other), dashed in sorted(edges.items()):
        arrow(axis, room, other, dashed)
    axis.set(xlim=(-1.1, 9.7), ylim=(-0.6, 3.4))
    axis.axis("off")
    figure.savefig(target, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
