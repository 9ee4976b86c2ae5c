"""Write report.html: what a run did, on one page that loads nothing, from the files of its folder.

    python -m ddp_utils.tools.report results/dpo               # the curves, too
    python -m ddp_utils.tools.report results/dpo --no_curves

A run starts it at its end: so neither torch nor transformers nor matplotlib is imported here.
"""

import argparse
import base64
import contextlib
import itertools
import re
import shlex
from pathlib import Path

import jinja2

from ddp_utils import UserError, files, jsonl

FIRST = ("win_rate", "share_baked", "fraction_of_optimum", "accuracy", "loss")  # on top
TORCHRUN = ("torchrun", "torch.distributed.launch", "accelerate", "deepspeed")


def write(folder):
    """Write report.html into a run folder; what is not there is left out."""
    folder = Path(folder)
    template = Path(__file__).with_suffix(".html.j2").read_text(encoding="utf-8")
    jinja = jinja2.Environment(autoescape=True, finalize=_shown, trim_blocks=True)
    files.write_text(folder / "report.html", jinja.from_string(template).render(_content(folder)))


def _shown(value):
    return jsonl.printable(value) if type(value) is str else value  # not what is escaped already


def _content(folder):
    """Return all that the template shows."""
    summary = _read(folder / "summary.json")
    config = _read(folder / "config.json")
    environment = _read(folder / "environment.json")
    defaults = environment.pop("defaults", {})
    environment["code"] = f"{len(environment.get('code', {}))} files"
    numbers = {name: part for name, part in summary.items() if isinstance(part, dict)}
    facts = environment | {name: fact for name, fact in summary.items() if name not in numbers}
    pictures = {}
    for path in sorted(folder.glob("*.png"), key=lambda path: (path.stem != "loss", path.stem)):
        pictures[path.stem] = base64.b64encode(path.read_bytes()).decode()
    return {
        "folder": folder,
        "facts": facts,
        "numbers": _table(numbers),
        "changed": _table({"here": {k: config.get(k) for k in defaults}, "default": defaults}),
        "settings": _table({"": {k: v for k, v in config.items() if k not in defaults}}),
        "pictures": pictures,
        "examples": _read(folder / "examples.json"),
        "data": _table(_read(folder / "data_report.json")),
        "environment": _table({"": facts}),
        "command": _command(facts),
        "model": _model(folder, config),
        "parts": re.compile(r"(?<=[/_])").split,  # where a long name may go on in the next line
        "quoted": lambda path: shlex.quote(str(path)),
    }


def _read(path):
    """Return the object in a JSON file, an empty one if it cannot be read."""
    with contextlib.suppress(UserError):
        return jsonl.read_object(path)
    return {}


def _table(columns):
    """{column: {row: value}} -> (columns, [(row, its texts)]); objects in objects become rows."""
    flat = [dict(_flat(values)) for values in columns.values()]
    rows = sorted(dict.fromkeys(itertools.chain(*flat)), key=lambda row: row not in FIRST)
    return [*columns], [(row, [values.get(row, "") for values in flat]) for row in rows]


def _flat(values, before=""):
    """Yield the name and the text of each value."""
    for name, value in values.items() if isinstance(values, dict) else [("", values)]:
        if value and isinstance(value, dict):
            yield from _flat(value, f"{before}{name} ")
        elif isinstance(value, float):
            yield before + name, f"{value:.4g}"
        elif isinstance(value, list):
            more = f" and {len(value) - 12} more" if len(value) > 12 else ""
            yield before + name, ", ".join(map(str, value[:12])) + more
        else:
            yield before + name, "-" if value in (None, "", {}) else str(value)


def _command(facts):
    """Return what started the run, to be pasted."""
    command = str(facts.get("command", "")).replace(" --restart", "")
    launcher = facts.get("launcher", "python")
    count = facts.get("world_size", 1)
    if launcher in ("python", "environment") or not command:
        return command
    if launcher in TORCHRUN:
        script = re.sub(r"^\S*python[\d.]*( -u)? ", "", command)
        return f"torchrun --standalone --nproc_per_node={count} {script}"
    return f"{'mpiexec' if launcher == 'pals' else launcher} -n {count} {command}"


def _model(folder, config):
    """Return the first file there is that says what kind of model was saved, or None."""
    own = "result_dir" in config and config.get("output_dir")
    names = ("adapter_config.json", "tokenizer_config.json", "model.safetensors")
    paths = [Path(own or folder / "model") / name for name in names]
    paths += [folder / "best_model.pt", folder / "latest_model.pt"]
    return next((path for path in paths if path.exists()), None)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folders", nargs="+", help="run folders, such as results/dpo")
    parser.add_argument("--no_curves", action="store_true", help="take the curves as they are")
    arguments = parser.parse_args(argv)
    try:
        for folder in arguments.folders:
            if not arguments.no_curves:
                from ddp_utils.tools import plots  # and matplotlib

                plots.draw(folder)
            write(folder)
            print(Path(folder) / "report.html")
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
