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
from typing import NamedTuple

from ddp_utils import UserError, jsonl, sampler

SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS}  # format -> what a row must have
FIELDS |= {
    "sharegpt": ("conversations", *SIDES),
    "openai": ("input", "preferred_output", "non_preferred_output"),
}
NOT_TEXT = ("tools", "tool_calls", "function_call", "image", "images")
NOT_TEXT += ("audio", "audios", "video", "videos")
WEIGHTS = ("weight", "loss_weight", "train", "loss", "label")  # of a row or message: 1, true or 0
READ_INSIDE = [(), *((key,) for key in ("role", "content", "from", "value", *WEIGHTS))]
HUMAN = "\n\nHuman:"  # begins a transcript


class Example(NamedTuple):
    """One preference, checked."""

    where: str  # file:line
    prompt: str | list  # plain text, or [{"role", "content"}, ...] that ends with a user's turn
    chosen: str
    rejected: str


class Unusable(Exception):
    """A well-formed row that teaches nothing; its text is the reason, to count such rows by."""


def read(path, encoder, limit=-1, on_bad_record="error"):
    """The usable pairs of a data file and its report.

    Rows that cannot teach (equal sides, empty responses, prompts that differ) are dropped and
    counted; malformed ones raise UserError, or with "skip" are counted, too.
    """
    name = None
    seen = set()
    ignored = set()

    def make(record, row):
        nonlocal name
        name = name or find_format(record)
        row_example = example(record, name)
        pair = encoder.encode(row_example)
        if not (pair.chosen and pair.rejected):  # a tokenizer may drop letters and have no end
            raise Unusable("empty response")
        if pair.chosen == pair.rejected:
            raise Unusable("identical once cut")
        if (pair.text, row_example.chosen, row_example.rejected) in seen:
            encoder.counts["same as an earlier row"].append(row)
        if (pair.text, row_example.rejected, row_example.chosen) in seen:
            encoder.counts["opposite of an earlier row"].append(row)
        seen.add((pair.text, row_example.chosen, row_example.rejected))
        ignored.update(unread(record, name))
        return pair

    pairs, counted = collect(path, encoder, make, limit, on_bad_record)
    sides = ("prompt", "chosen", "rejected")
    lengths = {side: [len(getattr(pair, side)) for pair in pairs] for side in sides}
    longer = sum(len(pair.chosen) > len(pair.rejected) for pair in pairs)
    facts = report(path, name, encoder, counted, ignored, lengths)
    return pairs, {**facts, "chosen_is_longer": round(longer / len(pairs), 3)}


def collect(path, encoder, make, limit, on_bad_record):
    """What make(record, row number) gives for each usable row, and {"rows", "used", "dropped"}.

    UserError if a row is malformed (with "skip" it is dropped), or if no row is usable.
    """
    usable, dropped, first_error = [], collections.defaultdict(list), None
    encoder.counts.clear()
    rows = jsonl.read(path, limit, skip=True)  # what is no JSON is a record with an error
    for record in rows:
        row = record.where.rsplit(":", 1)[1]
        try:
            if isinstance(record.data, UserError):
                raise record.data
            usable.append(make(record, row))
        except Unusable as reason:
            dropped[str(reason)].append(row)
        except UserError as error:
            first_error = first_error or error
            dropped["malformed"].append(row)
    if first_error and on_bad_record == "error":
        mend = f", or skip {len(dropped['malformed'])} of {len(rows)} rows: --on_bad_record skip"
        raise UserError(f"{first_error}{mend if usable else ''}") from first_error
    if not usable:
        reasons = ", ".join(f"{len(bad)} {reason}" for reason, bad in dropped.items())
        raise UserError(f"{path}: 0 usable rows of {len(rows)}: {reasons}")
    return usable, {"rows": len(rows), "used": len(usable), "dropped": dict(dropped)}


def report(path, name, encoder, counted, unread, lengths):
    """What a person would want to know of a data file before training on it.

    lengths: of each part of a row, the tokens in every row.
    """
    return {
        "file": str(path),
        "format": name,
        "fields_not_read": ", ".join(sorted(map(jsonl.shown, unread))),
        "template": encoder.templated,
        **counted,
        **encoder.counts,
        "mean_tokens": {part: round(sum(n) / len(n), 1) for part, n in lengths.items()},
    }


def describe(split, report):
    """The report of one file as one line."""
    tokens = ", ".join(f"{mean:g} {part}" for part, mean in report["mean_tokens"].items())
    line = f"{split}: {report['rows']} rows of {report['format']}, {report['used']} used"
    if "split" in report:
        parts = [f"{rows} {name}" for name, rows in report["split"].items()]
        line += f", split into {', '.join(parts)}"
    notes = [line, f"tokens {tokens}"]
    if "chosen_is_longer" in report:
        notes += [f"chosen longer in {report['chosen_is_longer']:.0%}"]
    notes += [f"{len(rows)} {reason}" for reason, rows in report["dropped"].items()]
    notes += [f"{len(x)} {name}" for name, x in report.items() if x and isinstance(x, list)]
    notes += [f"not read: {report['fields_not_read']:.100}"] if report["fields_not_read"] else []
    return "; ".join(notes)


def split_by_prompt(pairs, seed, shares=(0.85, 0.05, 0.10)):
    """Cut pairs into train, validation and test so that no prompt stands in two of them."""
    prompts = sorted({pair.text for pair in pairs})
    visit = sampler.order(len(prompts), seed, epoch=-1)
    edges = [round(len(prompts) * sum(shares[: k + 1])) for k in range(len(shares))]
    place = {}
    for turn, index in enumerate(visit):
        place[prompts[index]] = next(k for k, edge in enumerate(edges) if turn < edge)
    return [[pair for pair in pairs if place[pair.text] == k] for k in range(len(shares))]


def find_format(record) -> str:
    """The name of the format that has the fields of this record."""
    data = record.data
    prompt, *sides = (data.get(field) for field in ("prompt", *SIDES))
    if data.keys() >= set(SIDES) and any(isinstance(value, list) for value in [prompt, *sides]):
        return "messages"
    for name, fields in FIELDS.items():
        if data.keys() >= set(fields):
            return name
    if any(isinstance(value, str) and value.startswith(HUMAN) for value in sides):
        return "transcript"
    raise unknown(record, FIELDS.values())


def unknown(record, shapes) -> UserError:
    """Says which fields a record has, and what it lacks to be of the nearest shape (its fields)."""
    names = [repr(key)[1:-1][:40] for key in record.data]
    known = sum(shapes, ())
    meant = set(sum((difflib.get_close_matches(name, known, n=1) for name in names), []))
    nearest = max(shapes, key=lambda fields: len(meant & set(fields)))
    missing = next(field for field in nearest if field not in record.data)
    nearest = f"nearest is {', '.join(nearest)}: {missing} is missing"
    return UserError(f"{record.where}: fields found: {', '.join(names) or '-':.200}; {nearest}")


def unread(record, name) -> set:
    """The dotted paths that nothing reads: extra fields, and misspelt `system`s."""
    read = {"messages": FIELDS["prompt"], "transcript": SIDES, **FIELDS}[name]
    also = ("system", "input") if name == "instruction" else ("system",)
    return unread_paths(record, {*read, *also})


def unread_paths(record, fields) -> set:
    """The dotted paths to what is neither in these fields nor in their messages, at any depth."""
    unread = set()
    waiting = [((), record.data)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, "[]"), inner) for inner in value]
        elif value not in (None, ""):  # which tables write where there is nothing
            inside = tuple(key for key in path[1:] if key not in ("[]", "messages"))
            if path[0] not in {*fields, *WEIGHTS} or inside not in READ_INSIDE:
                unread.add(".".join(path).replace(".[]", "[]"))
    return unread


def example(record, name) -> Example:
    """Read a record in the named format; UserError if malformed, Unusable if it teaches nothing."""
    text_only(record, "", record.data)
    prompt, chosen, rejected = prompt_and_sides(record, name)
    if not chosen.strip() or not rejected.strip():
        raise Unusable("empty response")
    if chosen == rejected:
        raise Unusable("identical")
    return Example(record.where, prompt, chosen, rejected)


def prompt_and_sides(record, name):
    """(prompt, chosen, rejected) of a record in the named format."""
    if name in TEXTS:
        return _texts(record, name)
    from ddp_utils.readers import conversations  # for rows of turns alone

    return conversations.FORMATS[name](record)


def _texts(record, field):
    prompt = question(record, field, field == "instruction")
    return prompt, *(response(record, side) for side in SIDES)


def question(record, field, has_input, history=()):
    """The prompt of a field: a text, or messages where something stands before it."""
    text = "\n".join([jsonl.text(record, field), *(optional(record, "input") * has_input)])
    before = [*system_of(record), *history]
    return [*before, {"role": "user", "content": text}] if before else text


def response(record, field):
    """A text that may be empty: such a row is counted, not refused."""
    value = record.data.get(field)
    return value if isinstance(value, str) and not value.strip() else jsonl.text(record, field)


def system_of(record):
    return [{"role": "system", "content": text} for text in optional(record, "system")]


def optional(record, field):
    """[text], or [] where it is absent: tables write null or "" there."""
    value = record.data.get(field)
    return [] if value is None or not str(value).strip() else [jsonl.text(record, field)]


def text_only(record, path, value, weights=(None, 1)):
    """The value, if it is an object and holds nothing that training on text would ignore.

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
    return value


def error(record, path, value, hint):
    return UserError(f"{record.where}: {path} is {reprlib.repr(value):.100}; {hint}")
