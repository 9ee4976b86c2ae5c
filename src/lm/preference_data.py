"""Preference files of many formats -> pairs of token ids; the fields of a row tell the format.

prompt       {"prompt", "chosen", "rejected"}: texts, optionally a "system" text
instruction  {"instruction", "chosen", "rejected"}, optionally "input" and "system"
question     {"question", "chosen", "rejected"}, optionally "system"
messages     like prompt, but any of the three is a list of {"role", "content"}; chosen and rejected
             may hold the whole conversation, with or without a prompt (UltraFeedback)
sharegpt     {"conversations", "chosen", "rejected"} of {"from", "value"}, optionally "system"
transcript   {"chosen", "rejected"}: texts of "\\n\\nHuman:" and "\\n\\nAssistant:" turns (HH); or a
             "prompt" of such turns, which the two continue
openai       {"input": {"messages"}, "preferred_output", "non_preferred_output"}
"""

import contextlib
import functools
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sized
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ddp_utils import UserError, data, sampler
from ddp_utils.data import DataFile, Record, Unusable
from lm import chat_template, token_rows
from lm.chat_template import HUMAN, Encoder, Prompt, Reply, ignoring, plain_text
from lm.logps import Pair
from lm.token_rows import Rows

SIDES = ("chosen", "rejected")
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS}  # format -> fields that a row must have
FIELDS["sharegpt"] = ("conversations", *SIDES)
FIELDS["openai"] = ("input", "preferred_output", "non_preferred_output")
ARGUMENTS = ("tools", "chat_template_kwargs")  # arguments of the chat template for one row
ALWAYS_READ = ("system", *chat_template.WEIGHTS, *ARGUMENTS)
# Exact names of fields of public data sets, in lower case and with _ for -. WINNERS name the better
# response, row by row (of fields such as score_a and score_b, the first one is enough); SCORES are
# higher for the better response; MARGINS are negative if rejected is better.
WINNERS = {"label", "labels", "choice", "verdict", "human_label", "winner", "winner_model_a"}
WINNERS |= {"preference", "preference_strength", "overall_preference", "overall_pref", "better_idx"}
WINNERS |= {"better_response_id", "safer_response_id", "preferred_response", "score_a", "score_0"}
WINNERS |= {"conv_a_rating", "response1_score"}
WORDS = ("score", "rating", "reward", "avg_rating", "rm_score", "helpfulness")
SCORES = {f"chosen_{word}" for word in WORDS} | {f"{word}_chosen" for word in WORDS}
MARGINS = {"score", "margin"} | {f"{word}_margin" for word in WORDS}
MARGINS |= {f"{word}_diff" for word in WORDS} | {f"{word}_difference" for word in WORDS}


class Format(NamedTuple):
    """How the rows of a file are written."""

    name: str  # for the report
    fields: tuple[str, ...]  # that are read, besides "system"
    preference: str = ""  # name of the format, if the rows are preferences


# prompt, chosen and rejected of a record: texts, or messages
RowReader = Callable[[Record], tuple[Prompt, Reply, Reply]]
# returns a row as token ids, truncated and whole, and notes; or raises Unusable or UserError
Encode = Callable[[Record, Format, Encoder], tuple[Any, Any, set[str]]]


# --- a file --------------------------------------------------------------------------------------


def read(
    source: DataFile, encoder: Encoder, row_reader: RowReader | None = None
) -> tuple[Rows, dict]:
    """Return the usable pairs of a file, and the report on it.

    Rows that teach nothing (equal or empty responses, prompts that differ) are dropped and counted.
    Malformed rows raise UserError; with on_bad_record="skip" they are dropped and counted, too.

    row_reader: prompt, chosen and rejected of a record in a format of one's own.
    """
    facts = encoder.facts()
    if row_reader is None:
        make = functools.partial(encode_rows, source, encoder, find_format, encode)
    else:
        facts.append(inspect.getsource(row_reader))  # the cache has what it has read
        own = functools.partial(encode, row_reader=row_reader)
        make = functools.partial(encode_rows, source, encoder, format_of_ones_own, own)
    return token_rows.cached_rows(Pair, source, facts, make)


def format_of_ones_own(record: Record) -> Format:
    """Return the format of a row_reader, of which all fields count as read."""
    return Format("own", tuple(record.data))


def encode(
    record: Record, format: Format, encoder: Encoder, row_reader: RowReader | None = None
) -> tuple[Pair, Pair, set[str]]:
    """Return the Pair of a record, the same before truncation, and notes.

    Raises Unusable if nothing is learned from it.
    """
    texts = texts_of(record, format.preference, row_reader)
    whole, notes = encoder.encode(record.location, *texts)
    pair = encoder.truncate(whole)
    if not (pair.chosen and pair.rejected):  # a tokenizer may drop letters and have no end
        raise Unusable("empty response")
    if pair.chosen == pair.rejected:
        raise Unusable("identical once cut")
    return pair, whole, notes


def encode_rows(
    source: DataFile, encoder: Encoder, find_format: Callable, encode: Encode, report: dict
) -> Iterator:
    """Yield the usable rows of a file and fill in the report.

    find_format: returns the Format of the first well-formed row.
    Raises UserError if a row is malformed (unless these are skipped), or if no row is usable.
    """
    formats: list[Format] = []  # one, that of the first well-formed record
    used = 0
    dropped: Counter = Counter()  # reason -> number of rows
    notes: Counter = Counter()
    tokens: Counter = Counter()  # part of a row -> tokens in all rows, before truncation
    chosen_longer = 0
    not_read: set[str] = set()
    extra_names = [name for name in source.extra_fields.split(",") if name]
    tqdm.set_lock(threading.RLock())  # the default lock is a semaphore, which os._exit would leak

    def make(record: Record) -> tuple[Record, Any, Any, set[str]]:
        if not formats:
            formats.append(find_format(record))
        extra = {name: extra_field(record, name) for name in extra_names}
        others = record.data.keys() - {*extra_names} | {*formats[0].fields}
        # an extra field such as weight has no other meaning
        record = record._replace(data={k: v for k, v in record.data.items() if k in others})
        arguments = {}
        if not record.data.keys().isdisjoint(("input", *ARGUMENTS)):
            from lm import tool_calls

            arguments = tool_calls.template_arguments(record, encoder.check_arguments)
        row, whole, notes = encode(record, formats[0], encoder.with_arguments(arguments))
        if extra:
            row, whole = (each._replace(extra=extra) for each in (row, whole))
        return record, row, whole, notes

    rows = data.usable(source, make, dropped)
    rows = tqdm(rows, "Tokenizing", disable=None, leave=False, unit=" rows")
    for record, row, whole, notes_on_row in rows:
        yield row
        used += 1
        lengths = whole.lengths
        tokens.update(lengths)
        chosen_longer += lengths.get("chosen", 0) > lengths.get("rejected", 0)
        notes.update(notes_on_row | ({"truncated"} if row != whole else set()))
        for name in record.data.keys() - {*formats[0].fields, *ALWAYS_READ}:
            if record.data[name] not in (None, "", [], {}):
                not_read.add(name)
    report |= {
        "format": formats[0].name,
        "fields_not_read": ", ".join(sorted(map(data.shown, not_read))),
        "template": encoder.templated,
        "rows": used + dropped.total(),
        "used": used,
        "dropped": dropped,
        "notes": notes,
        "mean_tokens": {part: round(total / used, 1) for part, total in tokens.items()},
    }
    if "chosen" in tokens:
        report["chosen_longer"] = round(chosen_longer / used, 3)


def extra_field(record: Record, name: str) -> Any:
    """Return the value of a field that --extra_fields names; raise UserError if there is none."""
    if name not in record.data:
        problem = f"missing, but --extra_fields names it; fields found: {data.names_of(record)}"
        raise UserError(f"{record.location}: {data.shown(name)}: {problem}")
    return record.data[name]


def describe_all(reports: dict[str, dict], data: dict[str, Sized]) -> list[str]:
    """Return a line for each file, and warnings about truncated or absent rows."""
    lines = [describe(split, report) for split, report in reports.items()]
    for split, report in reports.items():
        truncated = report["notes"].get("truncated", 0)
        lines += chat_template.truncation_warning(split, truncated, report["used"], "--max_length")
        for note, problem in chat_template.DOUBTFUL.items():
            count = report["notes"].get(note, 0)
            if 2 * count > report["used"]:
                lines.append(f"warning: {split}: {count} of {report['used']} rows {problem}")
    if not data["val"]:
        lines.append("warning: 0 validation rows; use --val_data FILE, or more rows")
    return lines


def describe(split: str, report: dict) -> str:
    """Return the report of one file as one line."""
    line = f"{split}: {report['rows']} rows of {report['format']}, {report['used']} used"
    if "split" in report:
        line += f", split into {data.listed(report['split'])}"
    parts = [line, f"tokens {data.listed(report['mean_tokens'])}"]
    if "chosen_longer" in report:
        parts.append(f"chosen longer in {report['chosen_longer']:.1%}".replace("%", " %"))
    parts += [f"{rows} {name}" for name, rows in {**report["dropped"], **report["notes"]}.items()]
    if not report["template"]:
        parts.append("no chat template")
    if report["fields_not_read"]:
        parts.append(f"not read: {report['fields_not_read']:.100}")
    return "; ".join(parts)


def split_by_prompt(
    rows: Rows, seed: int, fractions: tuple[float, ...] = (0.85, 0.05, 0.10)
) -> list[Rows]:
    """Split rows into training, validation and test data such that no prompt is in two of them."""
    prompts, prompt_of = np.unique(rows.prompts, return_inverse=True)
    edges = np.round(np.cumsum(fractions[:-1]) * len(prompts)).astype(int)
    parts = np.split(sampler.order(len(prompts), seed, epoch=-1), edges)
    return [rows.select(np.isin(prompt_of, part)) for part in parts]


def note_repeated_prompts(data: dict[str, Rows], report: dict[str, dict]) -> None:
    """Count the rows of held-out files whose prompt is also in the training data, in the report."""
    for split in report.keys() - {"train"}:
        repeated = np.isin(data[split].prompts, data["train"].prompts)
        if repeated.any():
            report[split]["notes"]["prompts also in train_data"] = int(repeated.sum())


# --- a row ---------------------------------------------------------------------------------------


def find_format(record: Record) -> Format:
    """Return the format that has the fields of a record."""
    responses = [record.data.get(side) for side in SIDES]
    if str(record.data.get("prompt")).startswith(HUMAN):
        return Format("transcript", FIELDS["prompt"], "transcript")
    has_list = any(isinstance(value, list) for value in (record.data.get("prompt"), *responses))
    if has_list and record.data.keys() >= {*SIDES}:
        return Format("messages", FIELDS["prompt"], "messages")
    for name, fields in FIELDS.items():
        if record.data.keys() >= set(fields):
            more = ("input",) if name == "instruction" else ()
            return Format(name, (*fields, *more), name)
    if any(str(response).startswith(HUMAN) for response in responses):
        return Format("transcript", SIDES, "transcript")
    raise unknown_format(record, "prompt, chosen, rejected or another format of docs/dpo.md")


def unknown_format(record: Record, expected: str) -> UserError:
    """Return the error for a record whose fields fit no format."""
    problem = f"fields found: {data.names_of(record)}; expected {expected}"
    return UserError(f"{record.location}: {problem}; rename fields with --columns ours=theirs")


def texts_of(
    record: Record, format: str, row_reader: RowReader | None = None
) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of a record; Unusable if nothing is learned from them."""
    prompt, chosen, rejected = (
        row_reader(record) if row_reader else prompt_and_responses(record, format)
    )
    if not plain_text(chosen).strip() or not plain_text(rejected).strip():
        raise Unusable("empty response")
    if chosen == rejected:
        raise Unusable("identical")
    return prompt, chosen, rejected


def check_direction(record: Record) -> None:
    """Raise UserError if a field of the sets above does not mean that chosen is better.

    Which response a field such as winner names depends on the file: it can only be "chosen".
    """
    fields = {name.lower().replace("-", "_"): name for name in record.data}
    for name, original in fields.items():
        value = record.data[original]
        if name in WINNERS and isinstance(value, str | int | float):
            # a longer text is about something else
            is_wrong = str(value).lower() not in ("true", "chosen", "") and len(str(value)) < 40
        elif name in SCORES:
            other = record.data.get(fields.get(name.replace("chosen", "rejected")))
            is_wrong = _number(value) < _number(other)
        elif name == "scores" and isinstance(value, dict):
            is_wrong = _number(value.get("chosen")) < _number(value.get("rejected"))
        else:
            is_wrong = name in MARGINS and _number(value) < 0
        if is_wrong:
            problem = f"{value!r:.40} does not mean that chosen is the better response"
            hint = f"swap the two where rejected is better; if it never is, {ignoring(original)}"
            raise UserError(f"{record.location}: {data.shown(original)}: {problem}; {hint}")


def _number(value: Any) -> float:
    """Return a number, which CSV has as a text; anything else as NaN."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return math.nan


def prompt_and_responses(record: Record, format: str) -> tuple[Prompt, Reply, Reply]:
    """Return prompt, chosen and rejected of a record in the named format."""
    check_direction(record)
    chat_template.check_text_only(record, "", record.data)
    for side in SIDES:
        value = record.data.get(side)
        if isinstance(value, list) and sum(isinstance(item, str | list) for item in value) > 1:
            problem = "must be one response (a text, or a list of messages), not several ones"
            raise UserError(f"{record.location}: {side}: {problem}; write one row for each")
    if format in TEXTS:
        prompt = question(record, format)
        chosen, rejected = (data.text(record, side, may_be_empty=True) for side in SIDES)
        return prompt, chosen, rejected
    from lm import conversations

    if format == "transcript":
        return conversations.transcript(record, *SIDES)
    return conversations.chat(record, *FIELDS.get(format, FIELDS["prompt"]))


def question(record: Record, field: str, history: Collection[dict] = ()) -> Prompt:
    """Return the prompt in a field: a text, or messages if others precede it."""
    lines = [data.text(record, field)]
    if field == "instruction":
        lines += chat_template.optional_text(record, "input")
    before = [*chat_template.system_of(record), *history]
    text = "\n".join(lines)
    return [*before, {"role": "user", "content": text}] if before else text
