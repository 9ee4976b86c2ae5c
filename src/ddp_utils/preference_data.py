"""Preference files of many formats -> pairs of token ids; the fields of a row tell the format.

prompt       {"prompt", "chosen", "rejected"}: texts, optionally a "system" text
instruction  {"instruction", "chosen", "rejected"}, optionally "input" and "system"
question     {"question", "chosen", "rejected"}, optionally "system"
messages     like prompt, but any of the three is a list of {"role", "content"}; chosen and rejected
             may hold the whole conversation, with or without a prompt (UltraFeedback)
sharegpt     {"conversations", "chosen", "rejected"} of {"from", "value"}, optionally "system"
transcript   {"chosen", "rejected"}: texts of "\\n\\nHuman:" and "\\n\\nAssistant:" turns (HH)
openai       {"input": {"messages"}, "preferred_output", "non_preferred_output"}
"""

import collections
import difflib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ddp_utils import UserError, data, sampler
from ddp_utils.chat_template import Encoded, Encoder, Prompt, Reply, reply_text
from ddp_utils.data import DataFile, Record, Rows
from ddp_utils.logps import Pair

SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS}  # format -> fields that a row must have
FIELDS["sharegpt"] = ("conversations", *SIDES)
FIELDS["openai"] = ("input", "preferred_output", "non_preferred_output")
MEDIA = ("function_call", "image", "images", "audio", "audios", "video", "videos")
WEIGHTS = ("weight", "loss_weight", "train", "loss", "label")  # of a row or message: 1, true or 0
ARGUMENTS = ("tools", "chat_template_kwargs")  # arguments of the chat template for one row
HUMAN = "\n\nHuman:"  # begins a transcript


class Unusable(Exception):
    """A well-formed row that nothing can be learned from; the text is the reason, for counting."""


class Shape(NamedTuple):
    """How the rows of a file are written."""

    name: str  # for the report
    fields: tuple[str, ...]  # that are read, besides "system"
    preference: str = ""  # the format of a preference


# --- a file --------------------------------------------------------------------------------------


def read(source: DataFile, encoder: Encoder) -> tuple[Rows, dict]:
    """Return the usable pairs of a file, and the report on it.

    Rows that teach nothing (equal or empty responses, prompts that differ) are dropped and counted.
    Malformed rows raise UserError; with on_bad_record="skip" they are dropped and counted, too.
    """

    def encode(record: Record, shape: Shape, encoder: Encoder) -> Encoded:
        prompt, chosen, rejected = texts_of(record, shape.name)
        encoded = encoder.encode(record.location, prompt, chosen, rejected)
        pair = encoded.pair
        if not (pair.chosen and pair.rejected):  # a tokenizer may drop letters and have no end
            raise Unusable("empty response")
        if pair.chosen == pair.rejected:
            raise Unusable("identical once cut")
        return encoded

    def pairs(report: dict) -> Iterator[Pair]:
        longer = 0
        for pair in encode_rows(report, source, encoder, find_shape, encode):
            longer += len(pair.chosen) > len(pair.rejected)
            yield pair
        report["chosen_is_longer"] = round(longer / report["used"], 3)

    return data.cached_rows(Pair, source, encoder.facts(), pairs)


def encode_rows(
    report: dict,
    source: DataFile,
    encoder: Encoder,
    find_shape: Callable[[Record], Shape],
    encode: Callable[[Record, Shape, Encoder], tuple[Any, set[str]]],
) -> Iterator:
    """Yield the usable rows of a file and fill in the report.

    find_shape: called with the first well-formed row.
    encode: returns a row and notes on it, or raises Unusable or UserError.
    Raises UserError if a row is malformed (unless these are skipped), or if no row is usable.
    """
    shape: Shape | None = None
    first_error = None
    count = used = 0
    not_read: set[str] = set()
    tokens: collections.Counter = collections.Counter()  # part of a row -> tokens in all rows
    dropped = collections.defaultdict(list)  # reason -> rows
    noted = collections.defaultdict(list)  # note -> rows
    tqdm.set_lock(threading.RLock())  # the default lock is a semaphore, which os._exit would leak
    records = data.read(source.path, source.limit, skip=True, columns=source.columns)
    for record in tqdm(records, "Tokenizing", disable=None, leave=False, unit=" rows"):
        count += 1
        try:
            if isinstance(record.data, UserError):
                raise record.data
            shape = shape or find_shape(record)
            arguments = template_arguments(record, encoder)
            row, notes = encode(record, shape, encoder.with_arguments(arguments))
        except Unusable as reason:
            dropped[str(reason)].append(record.row)
            continue
        except UserError as error:
            if not str(error).startswith(source.path):  # the chat template's have no location
                error = UserError(f"{record.location}: {error}")
            first_error = first_error or error
            dropped["malformed"].append(record.row)
            continue
        yield row
        used += 1
        tokens.update(row.lengths)
        not_read |= fields_not_read(record, shape)
        for note in sorted(notes):
            noted[note].append(record.row)
    if first_error and source.on_bad_record == "error":
        hint = f"; or skip {len(dropped['malformed'])} of {count} rows with --on_bad_record skip"
        raise UserError(f"{first_error}{hint if used else ''}")
    if not used or not shape:
        reasons = ", ".join(f"{len(rows)} {reason}" for reason, rows in dropped.items())
        raise UserError(f"{source.path}: 0 usable rows of {count}: {reasons}")
    report |= {
        "format": shape.name,
        "fields_not_read": ", ".join(sorted(map(data.shown, not_read))),
        "template": encoder.templated,
        "rows": count,
        "used": used,
        "dropped": dropped,
        **noted,
        "mean_tokens": {part: round(total / used, 1) for part, total in tokens.items()},
    }


def fields_not_read(record: Record, shape: Shape) -> set[str]:
    """Return the names of the fields that hold something and are not read."""
    names = record.data.keys() - {*shape.fields, "system", *WEIGHTS, *ARGUMENTS}
    return {name for name in names if record.data[name] not in (None, "", [], {})}


def describe(split: str, report: dict) -> str:
    """Return the report of one file as one line."""
    line = f"{split}: {report['rows']} rows of {report['format']}, {report['used']} used"
    if "split" in report:
        parts = [f"{rows} {name}" for name, rows in report["split"].items()]
        line += f", split into {', '.join(parts)}"
    tokens = ", ".join(f"{mean:g} {part}" for part, mean in report["mean_tokens"].items())
    line += f"; tokens {tokens}"
    if "chosen_is_longer" in report:
        line += f"; chosen longer in {report['chosen_is_longer']:.0%}"
    for name, rows in {**report["dropped"], **report}.items():
        if rows and isinstance(rows, list):
            line += f"; {len(rows)} {name}"
    if not report["template"]:
        line += "; no chat template"
    if report["fields_not_read"]:
        line += f"; not read: {report['fields_not_read']:.100}"
    return line


def split_by_prompt(
    rows: Rows, seed: int, fractions: tuple[float, ...] = (0.85, 0.05, 0.10)
) -> list[Rows]:
    """Split rows into training, validation and test data such that no prompt is in two of them."""
    prompts, prompt_of = np.unique(rows.prompts, return_inverse=True)
    edges = np.round(np.cumsum(fractions[:-1]) * len(prompts)).astype(int)
    parts = np.split(sampler.order(len(prompts), seed, epoch=-1), edges)
    return [rows.select(np.isin(prompt_of, part)) for part in parts]


# --- a row ---------------------------------------------------------------------------------------


def find_shape(record: Record) -> Shape:
    """Return the Shape of a preference."""
    name = find_format(record)
    fields = FIELDS.get(name, FIELDS["prompt"])
    return Shape(name, (*fields, "input") if name == "instruction" else fields, name)


def find_format(record: Record) -> str:
    """Return the name of the format that has the fields of a record."""
    responses = [record.data.get(side) for side in SIDES]
    has_responses = record.data.keys() >= set(SIDES)
    values = [record.data.get("prompt"), *responses]
    if has_responses and any(isinstance(value, list) for value in values):
        return "messages"
    for name, fields in FIELDS.items():
        if record.data.keys() >= set(fields):
            return name
    if any(str(response).startswith(HUMAN) for response in responses):
        return "transcript"
    raise unknown_format(record, FIELDS.values())


def unknown_format(record: Record, formats: Collection[tuple[str, ...]]) -> UserError:
    """Return an error with the fields of a record, and what the nearest format has and it lacks."""
    names = [repr(key)[1:-1][:40] for key in record.data]
    known = sorted(set().union(*formats))
    alike: set[str] = set()
    for name in names:
        alike.update(difflib.get_close_matches(name, known, n=1))
    nearest = max(formats, key=lambda fields: len(alike & set(fields)))
    missing = next(field for field in nearest if field not in record.data)
    problem = f"fields found: {', '.join(names) or '-':.200}; nearest is {', '.join(nearest)}"
    hint = f"{missing} is missing; use --columns {missing}=... for another name"
    return UserError(f"{record.location}: {problem}: {hint}")


def template_arguments(record: Record, encoder: Encoder) -> dict:
    """Return a row's arguments for the chat template: its tools and chat_template_kwargs."""
    tools, arguments = map(record.data.get, ARGUMENTS)
    if isinstance(record.data.get("input"), dict):  # of the format openai
        tools = record.data["input"].get("tools")
    place = f"{record.location}: chat_template_kwargs"
    arguments = encoder.check_arguments(arguments or {}, place)
    if not tools:
        return arguments
    if isinstance(tools, str):
        tools = data.decode(tools, f"{record.location}: tools")
    if not isinstance(tools, list):
        raise data.wrong_value(record, "tools", tools, "a list of JSON schemas")
    return encoder.check_arguments({**arguments, "tools": tools}, f"{record.location}: tools")


def texts_of(record: Record, format: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of a record; Unusable if nothing is learned from them."""
    prompt, chosen, rejected = prompt_and_responses(record, format)
    if not reply_text(chosen).strip() or not reply_text(rejected).strip():
        raise Unusable("empty response")
    if chosen == rejected:
        raise Unusable("identical")
    return prompt, chosen, rejected


def prompt_and_responses(record: Record, format: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of a record in the named format."""
    check_text_only(record, "", record.data)
    if format in TEXTS:
        prompt = question(record, format)
        return prompt, response(record, "chosen"), response(record, "rejected")
    from ddp_utils import conversations

    if format == "transcript":
        return conversations.transcript(record)
    return conversations.chat(record, *FIELDS.get(format, FIELDS["prompt"]))


def question(record: Record, field: str, history: Collection[dict] = ()) -> Prompt:
    """Return the prompt in a field: a text, or messages if others precede it."""
    lines = [data.text(record, field)]
    if field == "instruction":
        lines += optional_text(record, "input")
    before = [*system_of(record), *history]
    text = "\n".join(lines)
    return [*before, {"role": "user", "content": text}] if before else text


def response(record: Record, field: str) -> str:
    """Return a text that may be empty: such a row is dropped and counted."""
    value = record.data.get(field)
    return value if isinstance(value, str) and not value.strip() else data.text(record, field)


def system_of(record: Record) -> list[dict]:
    """Return the system message of a row, if there is one."""
    return [{"role": "system", "content": text} for text in optional_text(record, "system")]


def optional_text(record: Record, field: str) -> list[str]:
    """Return [text], or [] if it is absent, null or empty, as columns of a table are."""
    value = record.data.get(field)
    return [] if value is None or not str(value).strip() else [data.text(record, field)]


def check_text_only(record: Record, path: str, value: Any, weights: tuple = (None, 1)) -> None:
    """Raise UserError if a row or message is not an object, or has media or another weight."""
    if not isinstance(value, dict):
        raise data.wrong_value(record, path, value, "an object, {...}")
    for key in filter(value.get, MEDIA):
        raise unsupported(record, f"{path}.{key}".strip("."))
    for key in WEIGHTS:
        if value.get(key) not in weights:
            expected = "1 or true (use only such rows)"
            raise data.wrong_value(record, f"{path}.{key}".strip("."), value[key], expected)


def unsupported(record: Record, field: str) -> UserError:
    """Return the error for a field that holds something else than text."""
    return UserError(f"{record.location}: {field}: only text is supported; remove it")
