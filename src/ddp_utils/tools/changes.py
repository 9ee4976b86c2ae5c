"""Find out what differs between the script of a run and the project's own."""

import ast
import contextlib
import dataclasses
import inspect
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ddp_utils import data

SRC = data.ROOT / "src"


def git(*arguments: str) -> str | None:
    """Return what a git command prints about the project; None if that fails."""
    program = shutil.which("git")
    if not program:
        return None
    command = [program, "-C", str(data.ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def of_script(path: Path) -> str:
    """Return which definitions of a script differ from the project's, such as loss_of; "": none.

    A file of the last commit is compared with that, a copy with the script that is most like it.
    """
    if path.suffix != ".py" or not path.is_file():  # python -c, or a program of a test
        return ""
    own = definitions(path.read_text(encoding="utf-8"))
    others = {}
    is_here = data.ROOT in path.parents
    committed = git("show", f"HEAD:{path.relative_to(data.ROOT)}") if is_here else None
    if committed:
        others["the last commit"] = definitions(committed)
    else:
        tracked = git("ls-files", "src")  # None: this is not a clone
        files = {*SRC.glob("*.py"), *path.parent.glob("*.py")} - {path}
        if tracked:  # not another copy
            files &= {data.ROOT / name for name in tracked.splitlines()}
        for file in files:
            with contextlib.suppress(SyntaxError, ValueError):  # a file of the user's
                others[file.name] = definitions(file.read_text(encoding="utf-8"))
    equal = {name: own.items() & other.items() for name, other in others.items()}
    nearest = max(equal, key=lambda name: len(equal[name]), default="")
    if not nearest or 2 * len(equal[nearest]) <= len(own):
        return ""
    changed = sorted({name for name, _ in own.items() ^ others[nearest].items()})
    return f"{path.name} differs from {nearest} in {', '.join(changed)}" if changed else ""


def edited_defaults(config_class: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass that differ from the last commit, field -> the old one."""
    path = Path(inspect.getfile(config_class)).resolve()
    is_here = data.ROOT in path.parents
    committed = git("show", f"HEAD:{path.relative_to(data.ROOT)}") if is_here else None
    names = {part.__name__ for part in config_class.__mro__}
    old: dict[str, Any] = {}
    for node in ast.parse(committed or "").body:
        for field in node.body if isinstance(node, ast.ClassDef) and node.name in names else []:
            if isinstance(field, ast.AnnAssign) and field.value:
                with contextlib.suppress(ValueError):  # not a literal, such as the name of another
                    old[ast.unparse(field.target)] = ast.literal_eval(field.value)
    edited = {}
    for setting in dataclasses.fields(config_class):
        if setting.name in old and old[setting.name] != setting.default:
            edited[setting.name] = old[setting.name]
    return edited


def definitions(code: str) -> dict[str, str]:
    """Return name -> source without comments of each function, class and constant of a module."""
    sources = {}
    for node in ast.parse(code).body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        name = getattr(node, "name", getattr(targets[0], "id", None))
        if name:
            sources[name] = ast.unparse(node)
    return sources
