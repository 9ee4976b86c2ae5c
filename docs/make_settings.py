"""Write the tables of docs/settings.md: the settings of every script, from its dataclass.

python docs/make_settings.py
"""

import dataclasses
import importlib
import shlex
import typing
from pathlib import Path

from ddp_utils import cli

# script -> module of its settings, and the page that explains them
SCRIPTS = {
    "src/main_distributed.py": ("config", "dpo.md"),
    "src/train.py": ("train_config", "strategies.md"),
    "dpo_inv.run_dpo_ddp": ("dpo_inv.config", "protein_dpo.md"),
    "src/ad/train.py": ("ad.config", "algorithm_distillation.md"),
    "src/generate_data.py": ("prompt_baking.generate_config", "prompt_baking.md"),
    "src/train_loop.py": ("prompt_baking.train_config", "prompt_baking.md"),
}
PAGE = Path(__file__).with_name("settings.md")
MARK = "<!-- python docs/make_settings.py writes what follows -->\n"


def kind_of(hint: typing.Any) -> str:
    """Return the values that a type hint allows, as a reader writes them."""
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    names = {bool: "switch", int: "integer", float: "number", str: "text"}
    return names[kinds[0]]


def table(config_class: type) -> str:
    """Return the groups of settings of one script as Markdown tables."""
    hints = typing.get_type_hints(config_class)
    comments = cli.comments_of(config_class)
    groups: dict[str, list[str]] = {}
    for field in dataclasses.fields(config_class):
        heading, comment = comments[field.name]
        default = "empty" if field.default == "" else f"`{shlex.join([str(field.default)])}`"
        cells = [f"`{field.name}`", kind_of(hints[field.name]), default, comment]
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        groups.setdefault(heading, []).append(f"| {row} |")
    header = "| setting | values | default | meaning |\n|---|---|---|---|\n"
    return "\n\n".join(f"**{name}**\n\n{header}" + "\n".join(rows) for name, rows in groups.items())


def page() -> str:
    """Return docs/settings.md as it should be: what stands above the mark, and all tables."""
    parts = [PAGE.read_text().partition(MARK)[0] + MARK]
    for script, (module, guide) in SCRIPTS.items():
        file = f"src/{module.replace('.', '/')}.py"
        config_class = importlib.import_module(module).Config
        parts.append(
            f"## {script}\n\nDefined in `{file}`, explained in [{guide}]({guide}).\n\n"
            f"{table(config_class)}\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
