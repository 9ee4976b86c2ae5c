"""Preference files as people have them -> one Example per row; the fields tell the format.

prompt       {"prompt", "chosen", "rejected"}: texts, and perhaps a "system" text
instruction  {"instruction", "chosen", "rejected"}, and perhaps "input" and "system"
question     {"question", "chosen", "rejected"}, and perhaps "system"
messages     like prompt, but any of the three is a list of {"role", "content"}; chosen and rejected
             may hold the whole conversation, with or without a prompt (UltraFeedback)
sharegpt     {"conversations", "chosen", "rejected"} of {"from", "value"}, and perhaps "system"
transcript   {"chosen", "rejected"}: texts of "\\n\\nHuman:" and "\\n\\nAssistant:" turns (HH)
openai       {"input": {"messages"}, "preferred_output", "non_preferred_output"}
"""

import collections
import difflib
import reprlib
import threading
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from ddp_utils import UserError, data, sampler, tables
from ddp_utils.chat_template import reply_text
from ddp_utils.logps import Pair

SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS}  # format -> what a row must have
FIELDS["sharegpt"] = ("conversations", *SIDES)
FIELDS["openai"] = ("input", "preferred_output", "non_preferred_output")
NOT_TEXT = ("function_call", "image", "images", "audio", "audios", "video", "videos")
WEIGHTS = ("weight", "loss_weight", "train", "loss", "label")  # of a row or message: 1, true or 0
MORE = ("reasoning_content", "tool_calls", "tool_call_id")  # what a template may show of a message
ARGUMENTS = ("tools", "chat_template_kwargs")  # what a row may give its template
WHOLE = {"content", *MORE, *ARGUMENTS}  # fields whose own fields have other names
MESSAGE = {"role", "from", "value", "messages", *WHOLE, *WEIGHTS}  # what is read of one
HUMAN = "\n\nHuman:"  # begins a transcript


class Example(NamedTuple):
    """One preference, checked."""

    location: str  # file:line
    prompt: str | list  # plain text, or [{"role", "content"}, ...] that ends with a user's turn
    chosen: str | dict  # a turn if there is more to it than text
    rejected: str | dict


class Unusable(Exception):
    """A well-formed row that teaches nothing; its text is the reason, to count such rows by."""


class Shape(NamedTuple):
    """How the rows of a file are written."""

    kind: str  # as the report calls it
    fields: tuple  # what is read of a row, besides "system"
    format: str = ""  # of preferences


def read(source, encoder):
    """Return the usable pairs of a DataFile, as Rows, and its report.

    Rows that cannot teach (equal sides, empty responses, prompts that differ) are dropped and
    counted; malformed ones raise UserError, or with "skip" are counted, too.
    """

    def make(record, shape):
        pair = encoder.encode(example(record, shape.format))
        if not (pair.chosen and pair.rejected):  # a tokenizer may drop letters and have no end
            raise Unusable("empty response")
        if pair.chosen == pair.rejected:
            raise Unusable("identical once cut")
        return pair

    def pairs(report):
        longer = 0
        for pair in collect(report, source, encoder, find_shape, make):
            longer += len(pair.chosen) > len(pair.rejected)
            yield pair
        report["chosen_is_longer"] = round(longer / report["used"], 3)

    return tables.read(Pair, source, encoder.facts(), pairs)


def collect(report, source, encoder, find, make):
    """Yield make(record, shape) of each usable row, and report what is worth knowing of them.

    find: returns the Shape of the first row. Raises UserError if a row is malformed (with "skip"
    it is dropped), or if no row is usable.
    """
    shape = first_error = None
    count = used = 0
    not_read = set()
    seen = set()
    tokens = collections.Counter()  # part of a row -> its tokens in all rows
    dropped = collections.defaultdict(list)  # reason -> rows
    counts = collections.defaultdict(list)  # what was mended -> rows
    tqdm.set_lock(threading.RLock())  # its default is a semaphore, which os._exit would leak
    for record in tqdm(source.records(), "Tokenizing", disable=None, leave=False, unit=" rows"):
        count += 1
        encoder.notes.clear()
        try:
            if isinstance(record.data, UserError):
                raise record.data
            shape = shape or find(record)
            encoder.row_kwargs = row_kwargs(record, encoder)
            row = make(record, shape)
            prompt, one, other = map(tuple, row[:3])
            if hash((prompt, one, other)) in seen:
                encoder.notes.add("same as an earlier row")
            if hash((prompt, other, one)) in seen:
                encoder.notes.add("opposite of an earlier row")
            seen.add(hash((prompt, one, other)))
            yield row
            used += 1
            tokens.update(row.lengths)
            not_read |= unread(record.data, {*shape.fields, "system", *WEIGHTS, *ARGUMENTS})
        except Unusable as reason:
            dropped[str(reason)].append(record.row)
        except UserError as error:
            if not str(error).startswith(source.path):  # of its template
                error = UserError(f"{record.location}: {error}")
            first_error = first_error or error
            dropped["malformed"].append(record.row)
        for note in sorted(encoder.notes):
            counts[note].append(record.row)
    if first_error and source.on_bad_record == "error":
        skip = f"skip {len(dropped['malformed'])} of {count} rows: --on_bad_record skip"
        raise UserError(f"{first_error}, or {skip}" if used else str(first_error))
    if not used:
        reasons = ", ".join(f"{len(rows)} {reason}" for reason, rows in dropped.items())
        raise UserError(f"{source.path}: 0 usable rows of {count}: {reasons}")
    report |= {
        "format": shape.kind,
        "fields_not_read": ", ".join(sorted(map(data.shown, not_read))),
        "template": encoder.templated,
        "rows": count,
        "used": used,
        "dropped": dropped,
        **counts,
        "mean_tokens": {part: round(total / used, 1) for part, total in tokens.items()},
    }


def describe(split, report):
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


def split_by_prompt(rows, seed, shares=(0.85, 0.05, 0.10)):
    """Cut rows into train, validation and test so that no prompt stands in two of them."""
    prompts, prompt_of = np.unique(rows.prompts, return_inverse=True)
    edges = np.round(np.cumsum(shares[:-1]) * len(prompts)).astype(int)
    parts = np.split(sampler.order(len(prompts), seed, epoch=-1), edges)
    return [rows.select(np.isin(prompt_of, part)) for part in parts]


def find_shape(record) -> Shape:
    """Return the Shape of a preference."""
    name = find_format(record)
    fields = FIELDS.get(name, FIELDS["prompt"])
    return Shape(name, (*fields, "input") if name == "instruction" else fields, name)


def find_format(record) -> str:
    """Return the name of the format that has the fields of this record."""
    data = record.data
    sides = [data.get(side) for side in SIDES]
    if data.keys() >= set(SIDES) and list in map(type, [data.get("prompt"), *sides]):
        return "messages"
    for name, fields in FIELDS.items():
        if data.keys() >= set(fields):
            return name
    if any(str(side).startswith(HUMAN) for side in sides):
        return "transcript"
    raise unknown(record, FIELDS.values())


def unknown(record, shapes) -> UserError:
    """Say which fields a record has, and what it lacks to be of the nearest shape (its fields)."""
    names = [repr(key)[1:-1][:40] for key in record.data]
    known = sum(shapes, ())
    meant = set()
    for name in names:
        meant.update(difflib.get_close_matches(name, known, n=1))
    nearest = max(shapes, key=lambda fields: len(meant & set(fields)))
    missing = next(field for field in nearest if field not in record.data)
    nearest = f"nearest is {', '.join(nearest)}: {missing} is missing"
    nearest += f"; or name yours: --columns {missing}=..."
    return UserError(f"{record.location}: fields found: {', '.join(names) or '-':.200}; {nearest}")


def unread(data, fields, path="") -> set:
    """Return the dotted paths that nothing reads: of fields of a row, and of its messages."""
    names = set()
    for key, value in data.items():
        is_read = key in fields or (key == "name" and data.get("role") == "tool")
        if is_read and key in WHOLE:
            continue
        if not is_read and value not in (None, "", [], {}):  # tables have null or ""
            names.add(path + key)
        elif isinstance(value, dict):
            names |= unread(value, MESSAGE, f"{path}{key}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    names |= unread(item, MESSAGE, f"{path}{key}[].")
    return names


def row_kwargs(record, encoder):
    """Return what a row gives its template besides messages: tools, and chat_template_kwargs."""
    tools, arguments = map(record.data.get, ARGUMENTS)
    if isinstance(record.data.get("input"), dict):  # OpenAI's
        tools = record.data["input"].get("tools")
    place = f"{record.location}: chat_template_kwargs"
    arguments = encoder.arguments(arguments or {}, place)
    if not tools:
        return arguments
    if isinstance(tools, str):
        tools = data.decode(tools, f"{record.location}: tools")
    if not isinstance(tools, list):
        raise error(record, "tools", tools, "give a list of JSON schemas")
    return encoder.arguments({**arguments, "tools": tools}, f"{record.location}: tools")


def example(record, name) -> Example:
    """Read a record in the named format; UserError if malformed, Unusable if it teaches nothing."""
    prompt, chosen, rejected = prompt_and_sides(record, name)
    if not reply_text(chosen).strip() or not reply_text(rejected).strip():
        raise Unusable("empty response")
    if chosen == rejected:
        raise Unusable("identical")
    return Example(record.location, prompt, chosen, rejected)


def prompt_and_sides(record, name):
    """Return prompt, chosen and rejected of a record in the named format."""
    text_only(record, "", record.data)
    if name in TEXTS:
        prompt = question(record, name, name == "instruction")
        return prompt, *(response(record, side) for side in SIDES)
    from ddp_utils import conversations  # for rows of turns alone

    if name == "transcript":
        return conversations.transcript(record)
    return conversations.chat(record, *FIELDS.get(name, FIELDS["prompt"]))


def question(record, field, has_input, history=()):
    """Return the prompt of a field: a text, or messages where something stands before it."""
    text = "\n".join([data.text(record, field), *(optional(record, "input") * has_input)])
    before = [*system_of(record), *history]
    return [*before, {"role": "user", "content": text}] if before else text


def response(record, field):
    """Return a text that may be empty: such a row is counted, not refused."""
    value = record.data.get(field)
    return value if isinstance(value, str) and not value.strip() else data.text(record, field)


def system_of(record):
    return [{"role": "system", "content": text} for text in optional(record, "system")]


def optional(record, field):
    """Return [text], or [] where it is absent: tables write null or "" there."""
    value = record.data.get(field)
    return [] if value is None or not str(value).strip() else [data.text(record, field)]


def text_only(record, path, value, weights=(None, 1)):
    """Raise UserError if a row or message is no object, or has what training on text ignores.

    weights: what it may say of how much it counts.
    """
    if not isinstance(value, dict):
        raise error(record, path, value, "give an object, {...}")
    for key in filter(value.get, NOT_TEXT):
        raise error(record, f"{path}.{key}".strip("."), value[key], "only text is read: cut it")
    for key in WEIGHTS:
        if value.get(key) not in weights:
            hint = "give rows that count 1 or true, of KTO those with label true"
            raise error(record, f"{path}.{key}".strip("."), value[key], hint)


def error(record, path, value, hint):
    return UserError(f"{record.location}: {path} is {reprlib.repr(value):.100}; {hint}")
