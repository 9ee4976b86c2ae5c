"""Draw docs/img/rooms.svg: the rooms of src/ and the imports between them."""

import ast
from pathlib import Path

from matplotlib import pyplot as plt

SRC = Path(__file__).resolve().parents[2] / "src"
BOXES = {".": (4.25, 3, 5.1), "ddp_utils": (4.25, -0.2, 5.1)}  # centre, half the width
for number, name in enumerate(["sft", "ad", "dpo_inv", "prompt_baking"]):
    BOXES[name] = (2 * number + 1, 2, 0.75)
for number, name in enumerate(["tools", "readers", "runs", "sharding", "fast"]):
    BOXES[f"ddp_utils/{name}"] = (2 * number, 1, 0.75)


def room_of(module):
    """Return the room of a module of ours, "ddp_utils/runs" of ddp_utils.run; else None."""
    path = SRC / module.replace(".", "/")
    if path.with_suffix(".py").exists():
        path = path.parent
    return path.relative_to(SRC).as_posix() if path.is_dir() else None


def imports_of(path):
    """Yield each room that a file imports, and whether a function does so."""
    tree = ast.parse(path.read_text())
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)  # of `from module import name`
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                yield room_of(name) or room_of(module or name), node in inside


def ends_of(room, other):
    """Return where an arrow begins and ends, and its bend."""
    (x, y, half), (to, level, width) = BOXES[room], BOXES[other]
    if y == level:  # along the row, below it
        return (x + 0.2, y - 0.3), (to - 0.2, y - 0.3), 0.5 / (to - x)
    if half > 1 and width > 1:
        x = to = 9.25  # beside all rooms
    elif half > 1 or width > 1:  # straight, down or up
        x = to = (to if half > 1 else x) + (0 if y > level else 0.5)
    else:
        side = 1 if to > x else -1
        x, to = x + 0.25 * side, to - 0.5 * side
    down = 0.3 if y > level else -0.3
    return (x, y - down), (to, level + down), 0


def main(target=SRC.parent / "docs/img/rooms.svg"):
    plt.rcParams.update({"svg.hashsalt": "rooms", "svg.fonttype": "none", "font.size": 9})
    figure, axis = plt.subplots(figsize=(11, 5), layout="constrained")
    edges = {}  # (room, other) -> whether functions alone import it
    for room, (x, y, half) in BOXES.items():
        files = sorted(SRC.glob(f"{room}/*.py"))
        for path in files:
            for other, inside in imports_of(path):
                edges[room, other] = edges.get((room, other), True) and inside
        lines = sum(path.read_text().count("\n") for path in files)
        axis.add_patch(plt.Rectangle((x - half, y - 0.3), 2 * half, 0.6, fc="0.93", ec="0.35"))
        name = {".": "scripts", "ddp_utils": "core"}.get(room, Path(room).name)
        text = f"{name}\nfiles: {len(files)}, lines: {round(lines, -2):,}"
        axis.annotate(text, (x, y), ha="center", va="center")
    for (room, other), dashed in sorted(edges.items(), key=str):
        if other in BOXES and room != other:
            begin, end, bend = ends_of(room, other)
            style = {"arrowstyle": "-|>", "linestyle": "dashed" if dashed else "solid"}
            style |= {"connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", end, begin, arrowprops=style | {"color": "0.35"})
    axis.set(xlim=(-1.1, 9.7), ylim=(-0.6, 3.4))
    axis.axis("off")
    figure.savefig(target, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
