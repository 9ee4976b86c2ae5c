"""Folders as runs leave them, with any texts, for the tests of report.html."""

import functools
import io
import json

from PIL import Image

from ddp_utils.tools import report

HOSTILE = {
    "a script": "<script>parent.hit = 1</script>",
    "an image": '"><img src=x onerror="parent.hit = 1">',
    "an end": "</dd></dl></pre></style></title></table><h1>mine</h1>",
    "a template": "{{ 7 * 191 }}{% for x in y %}",
    "one word": "w" * 10_000,
    "to the left": "\u202e" + "\u0634\u0643\u0631\u0627 " * 400,
    "NUL": "nul\0 \x1b[31m \ud800 end",
    "lines": "one\n\ttwo",
}


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@functools.cache
def white(size):
    file = io.BytesIO()
    Image.new("RGB", size, "white").save(file, "PNG")
    return file.getvalue()


def a_run(folder, texts=("why?",), **summary):
    """A folder as a run leaves it, with these texts wherever a run has some from elsewhere."""
    for name, size in {"loss": (960, 570), "rewards": (1920, 570), "returns": (1950, 630)}.items():
        put(folder)
        (folder / f"{name}.png").write_bytes(white(size))
    first = texts[0]
    return put(
        folder,
        summary={
            **{"status": "finished", "exit_code": 0, "step": 30, "world_size": 2, "seconds": 61.4},
            "val": {
                "count": 20,
                "loss": 0.123456,
                "win_rate": 0.75,
                "win_rate_low": 0.51239,
                "win_rate_high": 0.875,
            },
            "test": {
                "loss": 2.0,
                "wins": 3,
                first: None,
                "rewards/margins": 0.5,
                "judge/policy/right": 0.25,
            },
            **summary,
        },
        config={"beta": 0.3, "seed": 0, "judge": first, "train_data": first, "shuffle": True},
        environment={
            **{"command": f"python -u src/main_distributed.py --judge {first}", "device": first},
            **{"launcher": "torchrun", "world_size": 2, "versions": {"torch": "2.13.0"}},
            "defaults": {"beta": 0.1, "judge": ""},
        },
        data_report={"train": {"file": first, "rows": 9, "dropped": {first: [*range(30)]}}},
        examples={"test": [dict.fromkeys(("prompt", "verdict", text), text) for text in texts]},
    )


def page_of(folder):
    """Write the report of a folder and return it."""
    report.write(folder, report.read_run(folder))
    return (folder / "report.html").read_text(encoding="utf-8")
