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

import bisect
import collections
import difflib
import itertools
import reprlib
from typing import NamedTuple

from ddp_utils import UserError, jsonl, sampler

SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS}  # format -> what a row must have
FIELDS["sharegpt"] = ("conversations", *SIDES)
FIELDS["openai"] = ("input", "preferred_output", "non_preferred_output")
NOT_TEXT = ("tools", "tool_calls", "function_call", "image", "images")
NOT_TEXT += ("audio", "audios", "video", "videos")
WEIGHTS = ("weight", "loss_weight", "train", "loss", "label")  # of a row or message: 1, true or 0
MESSAGE = {"role", "content", "from", "value", "messages", *WEIGHTS}  # what is read of one
HUMAN = "\n\nHuman:"  # begins a transcript


class Example(NamedTuple):
    """One preference, checked."""

    location: str  # file:line
    prompt: str | list  # plain text, or [{"role", "content"}, ...] that ends with a user's turn
    chosen: str
    rejected: str


class Unusable(Exception):
    """A well-formed row that teaches nothing; its text is the reason, to count such rows by."""


class Shape(NamedTuple):
    """How the rows of a file are written."""

    kind: str  # as the report calls it
    fields: tuple  # what is read of a row, besides "system"
    format: str = ""  # of preferences


def read(path, encoder, limit=-1, on_bad_record="error"):
    """Return the usable pairs of a data file and its report.

    Rows that cannot teach (equal sides, empty responses, prompts that differ) are dropped and
    counted; malformed ones raise UserError, or with "skip" are counted, too.
    """
    seen = set()

    def make(record, shape):
        checked = example(record, shape.format)
        pair = encoder.encode(checked)
        if not (pair.chosen and pair.rejected):  # a tokenizer may drop letters and have no end
            raise Unusable("empty response")
        if pair.chosen == pair.rejected:
            raise Unusable("identical once cut")
        if (pair.text, checked.chosen, checked.rejected) in seen:
            encoder.notes.add("same as an earlier row")
        if (pair.text, checked.rejected, checked.chosen) in seen:
            encoder.notes.add("opposite of an earlier row")
        seen.add((pair.text, checked.chosen, checked.rejected))
        return pair

    pairs, report = collect(path, encoder, find_shape, make, limit, on_bad_record)
    longer = sum(len(pair.chosen) > len(pair.rejected) for pair in pairs)
    return pairs, {**report, "chosen_is_longer": round(longer / len(pairs), 3)}


def collect(path, encoder, find, make, limit, on_bad_record):
    """Return make(record, shape) of each usable row, and what is worth knowing of the file.

    find: returns the Shape of the first row. Raises UserError if a row is malformed (with "skip"
    it is dropped), or if no row is usable.
    """
    usable = []
    shape = first_error = None
    not_read = set()
    dropped = collections.defaultdict(list)  # reason -> rows
    counts = collections.defaultdict(list)  # what was mended -> rows
    records = jsonl.read(path, limit, skip=True)  # what is no JSON is a record with an error
    for record in records:
        encoder.notes.clear()
        try:
            if isinstance(record.data, UserError):
                raise record.data
            shape = shape or find(record)
            usable.append(make(record, shape))
            not_read |= unread(record.data, {*shape.fields, "system", *WEIGHTS})
        except Unusable as reason:
            dropped[str(reason)].append(record.row)
        except UserError as error:
            first_error = first_error or error
            dropped["malformed"].append(record.row)
        for note in sorted(encoder.notes):
            counts[note].append(record.row)
    if first_error and on_bad_record == "error":
        skip = f"skip {len(dropped['malformed'])} of {len(records)} rows: --on_bad_record skip"
        raise UserError(f"{first_error}, or {skip}" if usable else str(first_error))
    if not usable:
        reasons = ", ".join(f"{len(rows)} {reason}" for reason, rows in dropped.items())
        raise UserError(f"{path}: 0 usable rows of {len(records)}: {reasons}")
    means = {}
    for part in usable[0].lengths:
        means[part] = round(sum(item.lengths[part] for item in usable) / len(usable), 1)
    return usable, {
        "file": str(path),
        "format": shape.kind,
        "fields_not_read": ", ".join(sorted(map(jsonl.shown, not_read))),
        "template": encoder.templated,
        "rows": len(records),
        "used": len(usable),
        "dropped": dict(dropped),
        **counts,
        "mean_tokens": means,
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
    if report["fields_not_read"]:
        line += f"; not read: {report['fields_not_read']:.100}"
    return line


def split_by_prompt(pairs, seed, shares=(0.85, 0.05, 0.10)):
    """Cut pairs into train, validation and test so that no prompt stands in two of them."""
    prompts = sorted({pair.text for pair in pairs})
    edges = [round(len(prompts) * share) for share in itertools.accumulate(shares)]
    part_of = {}  # prompt -> number of its part
    for place, index in enumerate(sampler.order(len(prompts), seed, epoch=-1).tolist()):
        part_of[prompts[index]] = bisect.bisect(edges, place)
    parts = [[] for _ in shares]
    for pair in pairs:
        parts[part_of[pair.text]].append(pair)
    return parts


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
    return UserError(f"{record.location}: fields found: {', '.join(names) or '-':.200}; {nearest}")


def unread(data, fields, path="") -> set:
    """Return the dotted paths that nothing reads: of fields of a row, and of its messages."""
    names = set()
    for key, value in data.items():
        if key not in fields and value not in (None, "", [], {}):  # tables have null or ""
            names.add(path + key)
        elif isinstance(value, dict):
            names |= unread(value, MESSAGE, f"{path}{key}.")
        elif isinstance(value, list):
            for item in value:
                names |= (
                    unread(item, MESSAGE, f"{path}{key}[].") if isinstance(item, dict) else set()
                )
    return names


def example(record, name) -> Example:
    """Read a record in the named format; UserError if malformed, Unusable if it teaches nothing."""
    prompt, chosen, rejected = prompt_and_sides(record, name)
    if not chosen.strip() or not rejected.strip():
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
    from ddp_utils.readers import conversations  # for rows of turns alone

    if name == "transcript":
        return conversations.transcript(record)
    return conversations.chat(record, *FIELDS.get(name, FIELDS["prompt"]))


def question(record, field, has_input, history=()):
    """Return the prompt of a field: a text, or messages where something stands before it."""
    text = "\n".join([jsonl.text(record, field), *(optional(record, "input") * has_input)])
    before = [*system_of(record), *history]
    return [*before, {"role": "user", "content": text}] if before else text


def response(record, field):
    """Return a text that may be empty: such a row is counted, not refused."""
    value = record.data.get(field)
    return value if isinstance(value, str) and not value.strip() else jsonl.text(record, field)


def system_of(record):
    return [{"role": "system", "content": text} for text in optional(record, "system")]


def optional(record, field):
    """Return [text], or [] where it is absent: tables write null or "" there."""
    value = record.data.get(field)
    return [] if value is None or not str(value).strip() else [jsonl.text(record, field)]


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
