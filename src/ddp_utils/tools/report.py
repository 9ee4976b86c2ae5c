"""Write report.html: what a run did, on one page that loads nothing, from the files of its folder.

And the model card, README.md beside the weights.

    python -m ddp_utils.tools.report results/dpo               # the curves, too
    python -m ddp_utils.tools.report results/dpo --no_curves

A run starts it at its end: so neither torch nor transformers nor matplotlib is imported here.
"""

import argparse
import base64
import contextlib
import itertools
import json
import re
import shlex
import textwrap
from pathlib import Path

import jinja2

from ddp_utils import UserError, data

FIRST = ("win_rate", "share_baked", "fraction_of_optimum", "accuracy", "loss")  # on top
SHOWN = {  # in the summary: metric -> its name there
    "loss": "loss",
    "kl": "kl",
    "rewards/accuracies": "accuracy",
    "logps/accuracies": "likelier",
    "accuracy": "accuracy",
    "share_baked": "share baked",
    "kept/kl": "kept: kl",
}
MEANINGS = {
    "loss": "what is minimised, in nats",
    "rewards/chosen": "beta x log-ratio of the chosen responses to the reference",
    "rewards/rejected": "the same of the rejected ones",
    "rewards/margins": "chosen - rejected",
    "rewards/accuracies": "share of pairs whose margin is above 0",
    "logps/chosen": "log-prob of a chosen response, in nats",
    "logps/rejected": "log-prob of a rejected response, in nats",
    "logps/accuracies": "share of pairs whose preferred side is the likelier one",
    "loss/preference": "the loss without the SFT term",
    "loss/sft": "negative log-prob of the chosen responses, in nats a token",
    "nll": "negative log-prob of the preferred sequences, in nats a residue",
    "perplexity": "exp(nll)",
    "kl": "from the prompted model to this one, in nats a token",
    "kl_base": "from the prompted model to the base model, in nats a token",
    "share_baked": "1 - kl / kl_base",
    "kept/kl": "from the base model to this one under other prompts, in nats a token",
    "kept/obeyed": "share of replies that obey other prompts",
    "kept/obeyed_base": "the same of the base model",
    "accuracy": "share of actions that are predicted",
    "fraction_of_optimum": "return of the last 10 episodes over the optimum",
    "win_rate": "wins / (wins + losses) against the replies before training",
    "count": "rows",
}
WHAT = {  # the card's first sentence, by what is in the command
    "train_loop": "A LoRA into which a system prompt is baked: without the prompt the model "
    "answers as it did with it.",
    "main_distributed": "A language model fine-tuned on preferences ({method}).",
    "dpo_inv": "ProteinMPNN fine-tuned on preferences between sequences ({method}).",
    "ad.train": "A transformer that has learnt from histories of learning to find a goal.",
    "train.py": "A language model fine-tuned by {objective}.",
}
LIBRARIES = {"adapter_config.json": "peft", "tokenizer_config.json": "transformers"}
JUDGED = ("win_rate", "win_rate_low", "win_rate_high", "wins", "losses", "ties")
REPLIES = ("reference", "fine-tuned", "base", "baked")  # of an example: before and after
TORCHRUN = ("torchrun", "torch.distributed.launch", "accelerate", "deepspeed")


def write(folder):
    """Write report.html into a run folder, and its model card; what is not there is left out."""
    folder = Path(folder)
    content = _content(folder)
    template = Path(__file__).with_suffix(".html.j2").read_text(encoding="utf-8")
    jinja = jinja2.Environment(autoescape=True, finalize=_shown, trim_blocks=True)
    data.write_text(folder / "report.html", jinja.from_string(template).render(content))
    if content["model"]:
        template = Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8")
        card = jinja.from_string(template).render(content | _card(folder, content))
        data.write_text(content["model"].parent / "README.md", card)


def _card(folder, content):
    """Return what the model card has besides the report's content."""
    model = content["model"]
    config = _read(folder / "config.json")
    names = {"method": "DPO", "objective": "DPO", **config}
    what = [text.format(**names) for name, text in WHAT.items() if name in content["command"]]
    base = config.get("model_name") or _read(model).get("base_model_name_or_path", "")
    library = LIBRARIES.get(model.name) or ("proteinmpnn" if model.suffix == ".pt" else "torch")
    summary = _read(folder / "summary.json")
    val, test = (summary.get(split) or {} for split in ("val", "test"))
    kept = []
    for name, value in val.items():
        prompt = name.removeprefix("kept/kl/")
        if prompt != name:
            obeyed = [
                test.get(f"kept/{score}/{prompt}", "-") for score in ("obeyed", "obeyed_base")
            ]
            kept.append([prompt, f"{value:.4f}", *obeyed])
    return {"what": "".join(what[:1]), "base": base, "library": library, "kept": kept}


def read_metrics(folder):
    """Return the lines of metrics.jsonl as dicts; those that are damaged or cut are left out."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: no metrics.jsonl here; give a run folder")
    lines = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and {"split", "step"} <= values.keys():
                lines.append(values)
    return lines


def summary(folder) -> str:
    """Return the result of a run as lines of 80 columns: numbers, three replies, where to look."""
    facts = _read(folder / "summary.json")
    seconds = facts.get("seconds")
    took = f" in {seconds:.0f} s" if isinstance(seconds, int | float) else ""
    lines = [f"{facts.get('status', 'no summary')} after {facts.get('step', 0)} steps{took}"]
    lines += _numbers(folder, facts) + _replies(_read(folder / "examples.json"))
    lines.append(f"{'report':<11} {folder / 'report.html'}")
    model = _model(folder, _read(folder / "config.json"))
    if model:
        lines.append(f"{'model':<11} {model if model.suffix == '.pt' else model.parent}")
        if model.name in ("adapter_config.json", "tokenizer_config.json"):
            lines.append(f"{'talk to it':<11} python -m ddp_utils.tools.chat {_quoted(folder)}")
    return data.printable("\n".join(lines))


def _moved(folder, facts):
    """Yield the title of each of SHOWN, its values in the first and last step, and held out.

    Held out is the result's own: with save_best not that of the last step. What there is not is
    None.
    """
    metrics = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    steps = [line for line in metrics if line["split"] == "train"]
    for name, title in SHOWN.items():
        values = [line[name] for line in steps if line.get(name) is not None]
        first, last = (values[0], values[-1]) if values else (None, None)
        held_out = facts["val"].get(name) if isinstance(facts.get("val"), dict) else None
        if values or held_out is not None:
            yield title, first, last, held_out


def _judged(summary):
    """Yield each split that a judge has compared, and its numbers."""
    for split in ("test", "val"):
        part = summary.get(split)
        if isinstance(part, dict) and all(isinstance(part.get(key), int | float) for key in JUDGED):
            yield split, part


def _numbers(folder, facts):
    """Return a line for each number that training was to move, and the win rates."""
    lines = []
    for title, first, last, held_out in _moved(folder, facts):
        texts = [] if first is None else [f"{first:.4f} -> {last:.4f}"]
        texts += [] if held_out is None else [f"held out {held_out:.4f}"]
        lines.append(f"{title:<11} {', '.join(texts)}")
    for split, part in _judged(facts):
        bounds = f"[{part['win_rate_low']:.2f}, {part['win_rate_high']:.2f}]"
        pairs = f"{part['wins']} better, {part['losses']} worse, {part['ties']} equal"
        lines.append(f"{'win rate':<11} {part['win_rate']:.2f} {bounds}, {split}: {pairs}")
    return lines


def _sentence(folder, facts):
    """Return the result of a run in one or two sentences, "" without numbers."""
    parts = []
    for title, first, last, held_out in _moved(folder, facts):
        text = title if first is None else f"{title} went from {first:.4g} to {last:.4g}"
        parts.append(text if held_out is None else f"{text} (held out: {held_out:.4g})")
    sentences = [f"{'; '.join(parts)}."] if parts else []
    for split, part in itertools.islice(_judged(facts), 1):
        total = part["wins"] + part["losses"] + part["ties"]
        sentences.append(
            f"Of {total} replies to {split} prompts the judge prefers {part['wins']} to those "
            f"before training, and {part['losses']} the other way round."
        )
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _replies(examples):
    """Return three examples, each as its prompt and a line for each of REPLIES."""
    rows = examples.get("test") or examples.get("val") or []
    lines = []
    for row in rows[:3]:
        lines.append(_short(next(iter(row.values()))))
        for name in REPLIES:
            if name in row:
                lines.append(f"  {name:>10}  {_short(row[name])}")
    return lines


def _short(text):
    return textwrap.shorten(str(text), 60, placeholder=" ...")


def _quoted(path):
    return shlex.quote(str(path))


def _shown(value):
    return data.printable(value) if type(value) is str else value  # not what is escaped already


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
        "meanings": MEANINGS,
        "result": _sentence(folder, summary),
        "changed": _table({"here": {k: config.get(k) for k in defaults}, "default": defaults}),
        "settings": _table({"": {k: v for k, v in config.items() if k not in defaults}}),
        "pictures": pictures,
        "examples": _read(folder / "examples.json"),
        "data": _table(_read(folder / "data_report.json")),
        "environment": _table({"": facts}),
        "command": _command(facts),
        "model": _model(folder, config),
        "parts": re.compile(r"(?<=[/_])").split,  # where a long name may go on in the next line
        "quoted": _quoted,
    }


def _read(path):
    """Return the object in a JSON file, an empty one if it cannot be read."""
    with contextlib.suppress(UserError):
        return data.read_json(path)
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
                from ddp_utils import plots  # and matplotlib

                plots.draw(folder)
            write(folder)
            print(summary(Path(folder)))
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
