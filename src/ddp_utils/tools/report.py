"""Write report.html: what a run did, on one page that loads nothing, from the files of its folder.

It also writes the model card, README.md beside the weights, and prints the results.

    python -m ddp_utils.tools.report results/dpo               # draws the curves as well
    python -m ddp_utils.tools.report results/dpo --no_curves

A run starts this program when it ends. It imports neither torch nor transformers.
"""

import argparse
import base64
import contextlib
import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jinja2
from huggingface_hub import ModelCardData

from ddp_utils import UserError, check_clone, data, plots
from ddp_utils.terminal import METRICS, Metric, wrapped

FILES = ("summary", "config", "environment", "data_report", "examples")
HERE = Path(__file__).parent
FIRST = ("win_rate", "share_baked", "fraction_of_optimum", "accuracy", "loss")  # on top
LIBRARIES = {  # a file of a model's folder -> what loads the folder
    "adapter_config.json": "peft",
    "tokenizer_config.json": "transformers",
    "model.safetensors": "safetensors",
}
FEWEST = 20  # held-out rows whose numbers are printed as a result
# notes of data reports on held-out rows that are trained on: of language models, and of proteins
REPEATED = ("prompts also in train_data", "sequences also in train_data")
TAGS = {  # a setting of only one script -> tag
    "divergence": "prompt-baking",
    "traj_file": "algorithm-distillation",
    "base_model_dir": "proteinmpnn",
}
HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
REPLIES = ("reference", "fine-tuned", "base", "baked")  # of an example: before and after


class Model(NamedTuple):
    """The model that a run has saved."""

    path: Path  # of its folder, or of the .pt file
    library: str


class Table(NamedTuple):
    """A table of texts."""

    title: str
    head: list[str]  # names of the columns
    rows: list[tuple[str, list[str]]]  # name and texts of each row


def read_run(folder: Path) -> dict[str, dict]:
    """Return the objects in FILES; one that is missing or damaged is empty."""
    run: dict[str, dict] = {}
    for name in FILES:
        run[name] = {}
        with contextlib.suppress(UserError):
            run[name] = data.read_json(folder / f"{name}.json")
    return run


def find_model(folder: Path, run: dict[str, dict]) -> Model | None:
    """Return the model that a run has saved, or None."""
    model = data.model_of_run(folder, run["config"], run["environment"])
    for name, library in LIBRARIES.items():
        if (model / name).exists():
            return Model(model, library)
    for name in ("best_model.pt", "latest_model.pt"):
        if (folder / name).exists():
            return Model(folder / name, "proteinmpnn")
    return None


# --- the results ---------------------------------------------------------------------------------


def doubts(val: dict, report: dict) -> str:
    """Return why the held-out numbers do not describe new data, or "" if they do.

    val: the held-out numbers; report: the data report of the same rows.
    """
    rows = val.get("count", FEWEST)
    if rows < FEWEST:
        problem = f"held-out rows: {rows} (expected at least {FEWEST})"
        fix = "hold out more rows (docs/pairs.md)"
        shows = "This run shows that data and settings work, not how good the model is on new data"
        learned = "the numbers below are of training rows, which a model learns by heart"
        return f"{problem}, too few to judge the result; {fix}. {shows}: {learned}"
    for note in REPEATED:
        repeated = report.get("notes", {}).get(note, 0)
        if 10 * repeated > rows:
            problem = f"{repeated} of {rows} held-out rows have {note}"
            return f"{problem}: their numbers say nothing about new data; use another --val_data"
    return ""


def results(folder: Path, summary: dict, report: dict) -> list[str]:
    """Return a line with the values of each printed metric before and after training.

    They are held-out values. For a metric without one, and if doubts() names a problem, they are
    means of the first and the last ten steps, or of fewer if there are fewer than 20. A judge adds
    two lines with its verdicts.

    report: the data report, by split.
    """
    texts = []
    lines = plots.read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    train = [line for line in lines if line["split"] == "train"]
    parts = {split: part for split, part in summary.items() if isinstance(part, dict)}
    first, last = parts.get("before", {}), parts.get("val", {})
    doubt = doubts(last, report.get("val", {}))
    if doubt:
        texts.append(f"warning: {doubt}")
        first = last = {}
    elif "best" not in summary:
        texts += past_the_best(lines, last.get("loss_low"))
    for metric, known in METRICS.items():
        name = known.result
        if not name:
            continue
        ends = [part[metric] for part in (first, last) if part.get(metric) is not None]
        if last.get(metric) is not None:
            low, high = last.get(f"{metric}_low"), last.get(f"{metric}_high")
            interval = f" [{low:.4f}, {high:.4f}]" if low is not None else ""
            texts.append(f"{name:<11} held out {arrow(ends)}{interval}")
            continue
        values = [line[metric] for line in train if line.get(metric) is not None]
        count = max(1, min(10, len(values) // 2))
        ends = [fmean(part) for part in (values[:count], values[count:][-count:]) if part]
        if metric == "rewards/accuracies":  # there is no first one: all pairs of step 1 are ties
            ends = ends[1:]
        if ends:
            kind = f"means of {count} steps" if count > 1 else "single steps"
            texts.append(f"{name:<11} training {arrow(ends)}, {kind}")
    for split, part in parts.items():
        if "win_rate" in part and "ties" in part:
            wins, lost, ties = (part[name] for name in ("wins", "losses", "ties"))
            texts.append(f"{'replies':<11} {split}: {wins} better, {lost} worse, {ties} equal")
            if part["win_rate"] is None:  # there are only ties
                continue
            spread = f"[{part['win_rate_low']:.2f}, {part['win_rate_high']:.2f}]"
            rate = f"{part['win_rate']:.2f} {spread} of the {wins + lost} decided"
            texts.append(f"{'win rate':<11} {rate}")
    return texts + summary.get("warnings", [])


def past_the_best(lines: list[dict], low: float | None) -> list[str]:
    """Return a warning if the held-out loss is significantly above the lowest one of the run.

    lines: the metrics; low: lower limit of the last held-out loss, or None.
    """
    held_out = [line for line in lines if line["split"] == "val" and line.get("loss") is not None]
    loss, step = min(((line["loss"], line["step"]) for line in held_out), default=(0.0, 0))
    if low is None or not step or loss >= low:  # step 0: metrics.worse() has a warning
        return []
    lowest = f"the held-out loss was lowest after step {step} ({loss:.4f}) and has risen since"
    return [f"warning: {lowest}; use fewer steps, or --save_best if the script has it"]


def arrow(values: Sequence[float]) -> str:
    """Return the numbers with an arrow between them."""
    return " -> ".join(f"{value:.4f}" for value in values)


def result_lines(folder: Path, run: dict[str, dict]) -> str:
    """Return the results of a run for a terminal of 80 columns: numbers, replies, and paths."""
    summary = run["summary"]
    took = f" in {int(summary['seconds'])} s" if "seconds" in summary else ""
    lines = [f"{summary.get('status', 'no summary')} after {summary.get('step', 0)} steps{took}"]
    lines += map(wrapped, results(folder, summary, run["data_report"]))
    for row in (run["examples"].get("test") or run["examples"].get("val") or [])[:3]:
        lines += two_lines(str(next(iter(row.values()))))
        replies = {name: str(row[name]) for name in REPLIES if name in row}
        if len(replies) == 2:
            replies = from_difference(replies)
        for name, text in replies.items():
            lines += two_lines(text, f"  {name:>10}  ")
    lines.append(f"{'report':<11} {folder / 'report.html'}")
    model = find_model(folder, run)
    if model:
        lines.append(f"{'model':<11} {model.path}")
        if model.library in ("peft", "transformers"):
            quoted = shlex.quote(str(folder))
            lines.append(f"{'talk to it':<11} {activation()}python -m lm.chat {quoted}")
    return data.printable("\n".join(lines))


def activation() -> str:
    """Return the command for the environment that only run_*.sh has activated, or ""."""
    script = os.environ.get("DDP_ACTIVATE")  # set by scripts/environment.sh
    return f". {shlex.quote(script)}; " if script else ""


def from_difference(replies: dict[str, str]) -> dict[str, str]:
    """Return two replies from a few words before they differ; equal ones as one, named "both"."""
    first, second = replies.values()
    if first == second:
        return {"both": first}
    same = len(os.path.commonprefix([first, second]))
    start = first.rfind(" ", 0, max(0, same - 30)) + 1  # at the beginning of a word
    return {name: f"... {text[start:]}" if start else text for name, text in replies.items()}


def two_lines(text: str, title: str = "") -> list[str]:
    """Return a text, behind a title, in at most two lines of 80 columns."""
    shape = textwrap.TextWrapper(80, title, " " * len(title), max_lines=2, placeholder=" ...")
    return shape.wrap(text) or [title.rstrip()]


# --- report and card -----------------------------------------------------------------------------


def write(folder: Path, run: dict[str, dict]) -> None:
    """Write report.html into a run folder, and the model card beside the weights."""
    content = content_of(folder, run)
    jinja = jinja2.Environment(autoescape=True, finalize=shown, trim_blocks=True)
    template = jinja.from_string((HERE / "report.html.j2").read_text(encoding="utf-8"))
    data.write_text(folder / "report.html", template.render(content))
    model = content["model"]
    if model:
        card = jinja2.Template((HERE / "card.md.j2").read_text(encoding="utf-8"))
        text = card.render(content | card_content(model, content, run), cell=cell)
        parent = model.path if model.path.is_dir() else model.path.parent
        data.write_text(parent / "README.md", data.printable(text))


def cell(text: str) -> str:
    """Return a text for a cell of a table in Markdown."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("\n", " ")


def card_content(model: Model, content: dict, run: dict[str, dict]) -> dict[str, Any]:
    """Return what only the model card shows."""
    config = run["config"]
    tags = [tag for setting, tag in TAGS.items() if setting in config]
    method = "sft" if config.get("objective") == "sft" else config.get("method", "")
    tags.append(method.partition("_")[0])  # ipo_sum is a kind of IPO
    if model.library == "peft":
        tags.append("qlora" if config.get("type") == "qlora" else "lora")
    base = config.get("model_name") or ""
    folder = Path(run["environment"].get("directory", ""), base)
    is_local = folder.is_dir() or data.resolve(base).is_dir() or not re.fullmatch(HUB_NAME, base)
    metadata = ModelCardData(
        base_model=None if is_local else base,  # the Hub does not accept the path of a folder
        library_name=model.library,
        model_name=content["name"],
        pipeline_tag="text-generation" if model.library in ("peft", "transformers") else None,
        tags=[*filter(None, tags)],
    )
    entries = []
    for entry in (HERE / "citations.bib").read_text(encoding="utf-8").split("\n\n"):
        methods, _, text = entry.partition("\n")
        if {*methods.split()} & {*tags}:
            entries.append(text.strip())
    return {
        "metadata": metadata.to_yaml(),
        "is_local": is_local,
        "template_arguments": config.get("chat_template_kwargs"),
        "citations": "\n\n".join(entries),
    }


def content_of(folder: Path, run: dict[str, dict]) -> dict[str, Any]:
    """Return what the templates show."""
    summary, config, environment = run["summary"], run["config"], dict(run["environment"])
    defaults = environment.pop("defaults", {})
    environment["code"] = f"{len(environment.get('code', {}))} files"
    numbers = {name: for_people(part) for name, part in summary.items() if isinstance(part, dict)}
    facts = environment | {name: fact for name, fact in summary.items() if name not in numbers}
    model = find_model(folder, run)
    pictures = {}
    order = [*plots.FIGURES, "returns", "others"]
    files = {file.stem: file for file in sorted(folder.glob("*.png"))}
    for name in sorted(files, key=lambda name: order.index(name) if name in order else -1):
        pictures[name] = base64.b64encode(files[name].read_bytes()).decode()
    others = {name: value for name, value in config.items() if name not in defaults}
    changed = {"value": {name: config.get(name) for name in defaults}, "default": defaults}
    about = [config.get(name) for name in ("model_name", "base_model_name", "method", "train_data")]
    about += [str(environment.get("start", ""))[:10], environment.get("host")]
    return {
        "name": folder.absolute().name,
        "about": [portable(str(text)) for text in about if text],
        "base": portable(config.get("model_name") or config.get("base_model_name") or "") or None,
        "facts": facts,
        "results": results(folder, summary, run["data_report"]),
        "pictures": pictures,
        "examples": run["examples"],
        "numbers": table("Numbers", numbers),
        "changed": table("Settings that you set", changed),
        "more": [
            table("All other settings", {"": others}),
            table("Data", run["data_report"]),
            table("Environment", {"": facts}),
        ],
        "command": portable(str(facts.get("command", "")).replace(" --restart", "")),
        "model": model,
        "location": portable(str(model.path)) if model else "",
    }


def for_people(part: dict) -> dict[str, Any]:
    """Return the metrics of a split under their names for people, means with their intervals."""
    values: dict[str, Any] = {}
    for name, value in part.items():
        low, high = part.get(f"{name}_low"), part.get(f"{name}_high")
        is_end = name.endswith(plots.ENDS) and name.rpartition("_")[0] in part
        if low is not None and high is not None:
            values[words_of(name)] = f"{value:.4g} [{low:.4g}, {high:.4g}]"
        elif not is_end:
            values[words_of(name)] = value
    return values


def words_of(name: str) -> str:
    """Return the name of a metric for people, with its unit."""
    known = METRICS.get(name, Metric(name))
    return ", ".join(filter(None, (known.words, known.unit)))


def table(title: str, columns: dict[str, dict]) -> Table:
    """Return {column: {row: value}} as a table; nested objects become rows."""
    flat = {name: dict(flatten(values)) for name, values in columns.items()}
    names: dict[str, None] = {}  # in the order of their first appearance
    for texts in flat.values():
        names.update(dict.fromkeys(texts))
    rows = []
    first = [*map(words_of, FIRST)]
    for name in sorted(names, key=lambda name: name not in first):
        rows.append((name, [texts.get(name, "") for texts in flat.values()]))
    return Table(title, [*filter(None, flat)], rows)


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each value."""
    for name, value in values.items() if isinstance(values, dict) else [("", values)]:
        if value and isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name} ")
        elif isinstance(value, float):
            yield prefix + name, f"{value:.4g}"
        elif isinstance(value, list):
            more = f" and {len(value) - 12} more" if len(value) > 12 else ""
            yield prefix + name, portable(", ".join(map(str, value[:12])) + more)
        else:
            yield prefix + name, "-" if value in (None, "", {}) else portable(str(value))


def portable(text: str) -> str:
    """Return the text without the folders of this machine: relative to the project, or names."""
    text = text.replace(f"{data.ROOT}/", "")
    return re.sub(r"(?<![\w./~:-])/(?:[^\s/'\"]+/)*([^\s/'\"]+)", r"\1", text)


def shown(value: Any) -> Any:
    """Return a text without control characters; text that is escaped already as it is."""
    return data.printable(value) if type(value) is str else value


def main(argv: list[str] | None = None) -> None:
    """Write the report of each run folder and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folders", nargs="+", help="run folders, such as results/dpo")
    parser.add_argument("--no_curves", action="store_true", help="keep the curves as they are")
    arguments = parser.parse_args(argv)
    try:
        for folder in map(Path, arguments.folders):
            if not (folder / "summary.json").is_file():
                raise UserError(f"{folder}: no summary.json (expected a run folder)")
            run = read_run(folder)
            print(result_lines(folder, run), flush=True)
            if not arguments.no_curves:
                plots.draw(folder)
            write(folder, run)
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    check_clone()
    main()
