"""report.html: what a run did, on one page that loads nothing, from the files of its folder."""

import base64
import hashlib
import json
import re
import shlex
import sys
from pathlib import Path

import jinja2

from ddp_utils import UserError, files, jsonl
from ddp_utils.runs import plots, preemption, resume

# the numbers that say most, on top; the others as they come
FIRST = ("win_rate", "share_baked", "fraction_of_optimum", "rewards/accuracies", "accuracy")
FIRST += ("loss", "judge/policy", "judge/baked", "judge/prompted", "judge/reference", "judge/base")
SHOWN = 100  # examples of a split; the file for people has all


def write(folder):
    """Write report.html into a run folder; what is not there is left out."""
    folder = Path(folder)
    template = Path(__file__).with_suffix(".html.j2")
    jinja = jinja2.Environment(autoescape=True, finalize=_printable, trim_blocks=True)
    page = jinja.from_string(template.read_text(encoding="utf-8")).render(_content(folder))
    files.write_text(folder / "report.html", page)


def _content(folder):
    """All that the template shows."""
    names = "summary", "config", "environment", "data_report", "examples"
    summary, config, environment, data, examples = (
        resume.summary(folder, f"{name}.json") for name in names
    )
    defaults = environment.pop("defaults", {})
    code = environment.pop("code", {})
    digest = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:16]
    environment["code"] = f"{len(code)} files, {digest}"
    numbers = {name: _rounded(part) for name, part in summary.items() if isinstance(part, dict)}
    facts = environment | {name: fact for name, fact in summary.items() if name not in numbers}
    return {
        "folder": folder,
        "facts": facts,
        "numbers": _table(numbers, FIRST),
        "intervals": any(v.endswith("]") for part in numbers.values() for v in part.values()),
        "changed": _table({"here": {k: config.get(k) for k in defaults}, "default": defaults}),
        "settings": _table({"": {k: v for k, v in config.items() if k not in defaults}}),
        "pictures": list(map(_picture, sorted(folder.glob("*.png"), key=_place))),
        "examples": {split: rows for split, rows in examples.items() if isinstance(rows, list)},
        "shown": SHOWN,
        "data": _table(data),
        "environment": _table({"": facts}),
        "command": _command(facts),
        "model": _model(folder, config),
        "parts": re.compile(r"(?<=[/_])").split,  # where a long name may go on in the next line
        "python": lambda path: repr(str(path)),
        "shell": lambda path: shlex.quote(str(path)),
    }


def _table(columns, first=()):
    """{column: {row: value}} -> (columns, [(row, its texts)]); objects in objects become rows."""
    flat = {column: dict(_flat(values)) for column, values in columns.items()}
    rows = dict.fromkeys(row for values in flat.values() for row in values)
    rows = sorted(rows, key=lambda row: _rank(row, first))
    return [*flat], [(row, [values.get(row, "") for values in flat.values()]) for row in rows]


def _flat(values, before=""):
    for name, value in values.items() if isinstance(values, dict) else [("", values)]:
        if value and isinstance(value, dict):
            yield from _flat(value, f"{before}{name} ")
        else:
            yield before + name, _shown(value)


def _shown(value):
    if isinstance(value, list):
        more = f" and {len(value) - 12} more" if len(value) > 12 else ""
        return ", ".join(map(str, value[:12])) + more or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) if value or value == 0 else "-"


def _rounded(values):
    """Four digits; name_low and name_high become part of name's text."""
    texts = {k: f"{v:.4g}" if isinstance(v, float) else _shown(v) for k, v in values.items()}
    for name in [name for name in texts if f"{name}_low" in texts and f"{name}_high" in texts]:
        texts[name] += f" [{texts.pop(f'{name}_low')}, {texts.pop(f'{name}_high')}]"
    return texts


def _rank(name, order):
    """The place of a name, or of what stands before a slash in it, in an order; else the last."""
    fits = (place for place, first in enumerate(order) if f"{name}/".startswith(f"{first}/"))
    return next(fits, len(order))


def _place(path):
    return _rank(path.name, plots.FIGURES), path.name


def _printable(value):
    text = isinstance(value, str) and not hasattr(value, "__html__")
    return jsonl.printable(value) if text else value


def _picture(path):
    """(what it shows, its bytes), both as text."""
    titles = [title for title, _ in plots.FIGURES.get(path.name, [(path.stem, {})])]
    says = f"curves: {', '.join(titles)}; their numbers are in metrics.jsonl"
    return says, base64.b64encode(path.read_bytes()).decode()


def _command(facts):
    """What started the run, to be pasted."""
    own = str(facts.get("command", "")).replace(" --restart", "")
    count = facts.get("world_size", 1)
    launcher = facts.get("launcher", "python")
    script = re.sub(r"^\S*python[\d.]*( -u)? ", "", own)
    if launcher in ("python", "environment") or not own:
        return own
    if launcher in ("torchrun", "torch.distributed.launch", "accelerate", "deepspeed"):
        return f"torchrun --standalone --nproc_per_node={count} {script}"
    return f"{'mpiexec' if launcher == 'pals' else launcher} -n {count} {own}"


def _model(folder, config):
    """(a file that says what kind of model it is, its folder), or None."""
    place = Path(("result_dir" in config and config.get("output_dir")) or folder / "model")
    kinds = [(name, place) for name in ("adapter_config.json", "tokenizer_config.json")]
    kinds += [("model.safetensors", place), ("best_model.pt", folder), ("latest_model.pt", folder)]
    return next(((name, at) for name, at in kinds if (at / name).exists()), None)


def main(argv=None):  # python -m ddp_utils.tools.report results/dpo
    folders = sys.argv[1:] if argv is None else argv
    if not folders:
        raise UserError("give a run folder, such as results/dpo")
    for folder in folders:
        plots.draw(folder)
        write(folder)
        print(Path(folder) / "report.html")


if __name__ == "__main__":
    preemption.run(main)
