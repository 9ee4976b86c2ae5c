"""Take a script and its settings away, to change them; both run where they are put.

python -m ddp_utils.tools.copy main_distributed my_dpo.py     # and my_dpo_config.py
torchrun --standalone --nproc_per_node=2 my_dpo.py
"""

import argparse
import re
from pathlib import Path

from ddp_utils import UserError, data

SRC = Path(__file__).resolve().parents[2]
SETTINGS = {  # script -> the module of its settings
    "main_distributed": "config",
    "train": "train_config",
    "generate_data": "prompt_baking.generate_config",
    "train_loop": "prompt_baking.train_config",
    "dpo_inv.run_dpo_ddp": "dpo_inv.config",
    "ad.train": "ad.config",
}
FIRST = "from ddp_utils import cli\n"  # of the imports of each script


def copy(script, target):
    """Write the script to `target` and its settings beside it; return both paths.

    Raises UserError for a script that is not there, and for a file that is.
    """
    if script not in SETTINGS:
        raise UserError(f"{script}: no such script; give one of {', '.join(SETTINGS)}")
    target = Path(target)
    if target.suffix != ".py" or not target.stem.isidentifier():
        raise UserError(f"{target}: give the name of a module, such as my_dpo.py")
    module = SETTINGS[script]
    settings = target.with_name(f"{target.stem}_config.py")
    for path in (target, settings):
        if path.exists():
            raise UserError(f"{path}: it is there; give another name")
    text = read(script)
    name = re.escape(module)
    text = re.sub(rf"^import {name}$", f"import {settings.stem} as {module}", text, flags=re.M)
    text = re.sub(rf"^(import|from) {name} ", rf"\1 {settings.stem} ", text, flags=re.M)
    path = f"sys.path.append({str(SRC)!r})  # of all that is not copied\n"
    if "\nsys.path.append(" in text:
        text = re.sub(r"^sys\.path\.append\(.*\n", path, text, flags=re.M)
    else:
        text = text.replace(FIRST, f"import sys\n\n{path}\n{FIRST}", 1)
    data.write_text(target, text)
    data.write_text(settings, read(module))
    return target, settings


def read(module):
    """Return the source of a module of ours."""
    return (SRC / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("script", help=", ".join(SETTINGS))
    parser.add_argument("target", help="where to, such as my_dpo.py")
    arguments = parser.parse_args(argv)
    try:
        print("\n".join(map(str, copy(arguments.script, arguments.target))))
    except (UserError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
