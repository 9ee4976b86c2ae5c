"""Preference files of many formats -> pairs of token ids; the fields of a row tell the format.

prompt       {"prompt", "chosen", "rejected"}: texts, optionally a "system" text
instruction  {"instruction", "chosen", "rejected"}, optionally "input", "system" and "history",
             [[question, answer], ...]
question     {"question", "chosen", "rejected"}, optionally "system"
messages     like prompt, but any of the three is a list of {"role", "content"}; chosen and rejected
             may hold the whole conversation, with or without a prompt (UltraFeedback)
sharegpt     {"conversations", "chosen", "rejected"} of {"from", "value"}, optionally "system"
transcript   {"chosen", "rejected"}: texts of "\\n\\nHuman:" and "\\n\\nAssistant:" turns (HH); or a
             "prompt" of such turns, which the two continue
openai       {"input": {"messages"}, "preferred_output", "non_preferred_output"}

Where messages are expected, their JSON text is read as well, as tables have it. If "rejected" is a
list of responses, the row is one pair for each of them.
"""

import array
import contextlib
import functools
import inspect
import itertools
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from ddp_utils import UserError, data, sampler
from ddp_utils.data import DataFile, Record, Unusable
from lm import all_cores, chat_template, model_files, token_rows
from lm.chat_template import HUMAN, Encoder, Prompt, Reply, ignoring, plain_text
from lm.logps import Pair
from lm.message_texts import check_not_python, messages_in, parts_in
from lm.token_rows import Rows

SIDES = ("chosen", "rejected")
IN_PARTS = (*SIDES, "prompt", "completion", "response")  # fields that may be lists of parts
TEXTS = ("prompt", "instruction", "question")
FIELDS = {name: (name, *SIDES) for name in TEXTS}  # format -> fields that a row must have
FIELDS["sharegpt"] = ("conversations", *SIDES)
FIELDS["openai"] = ("input", "preferred_output", "non_preferred_output")
ARGUMENTS = ("tools", "chat_template_kwargs")  # arguments of the chat template for one row
ALWAYS_READ = (*chat_template.SYSTEMS, *chat_template.WEIGHTS, *ARGUMENTS)
# Exact names of fields of public data sets, in lower case and with _ for -. WINNERS name the better
# response, row by row (of fields such as score_a and score_b, the first one is enough); SCORES are
# higher for the better response, RANKS lower; MARGINS are negative if rejected is better.
WINNERS = {"label", "labels", "choice", "verdict", "human_label", "winner", "winner_model_a"}
WINNERS |= {"preference", "preference_strength", "overall_preference", "overall_pref", "better_idx"}
WINNERS |= {"better_response_id", "safer_response_id", "preferred_response", "score_a", "score_0"}
WINNERS |= {"conv_a_rating", "response1_score"}
BETTER = {"preferred", "better", "chosen_is_better"}  # "rejected" and false contradict the order
WORDS = {"score", "rating", "reward", "rewards", "avg_rating", "rm_score", "overall_score"}
WORDS |= {"judge_score", "helpfulness", "win_rate", "elo"}
BOTH = {"scores", "ratings", *WORDS}  # {"chosen": 9, "rejected": 1}
SCORES = {f"chosen_{word}" for word in WORDS} | {f"{word}_chosen" for word in WORDS}
RANKS = {"chosen_rank", "rank_chosen"}
MARGINS = {"score", "margin"}
for _ending in ("margin", "diff", "difference", "gap", "delta"):
    MARGINS |= {f"{word}_{_ending}" for word in WORDS}
# Two responses of a row of a public data set -> its name, and where the first one is better
EITHER = {
    ("human_ref_A", "human_ref_B"): ("SHP", "labels is 1"),
    ("output_A", "output_B"): ("HALOs", "label is 1"),
    ("response_0", "response_1"): ("PKU-SafeRLHF", "better_response_id is 0"),
    ("response_1", "response_2"): ("HelpSteer2", "preference_strength is below 0"),
    ("response1", "response2"): ("HelpSteer3", "overall_preference is below 0"),
    ("conversation_a", "conversation_b"): ("Chatbot Arena", "winner is model_a"),
    ("response_a", "response_b"): ("Chatbot Arena", "winner_model_a is 1 (decode the JSON lists)"),
    ("output_1", "output_2"): ("AlpacaFarm", "preference is 1"),
    ("answer_0", "answer_1"): ("WebGPT", "score_0 is above score_1"),
    ("conv_A", "conv_B"): ("Unified-Feedback", "conv_A_rating is above conv_B_rating"),
    ("completion_a", "completion_b"): ("MultiPref", "overall_pref begins with A"),
}
# Fields of rows that have to be converted -> whose they are, and how
CONVERTED: dict[tuple[str, ...], tuple[str, str]] = {
    (a, b): (name, f"chosen is {a} where {where}, otherwise {b}; leave out ties")
    for (a, b), (name, where) in EITHER.items()
}
CONVERTED |= {
    ("context", "completions"): ("NeMo-RL", "chosen is the completion of rank 0, rejected another"),
    ("completions",): ("UltraFeedback", "chosen is the completion with the highest overall_score"),
    ("prompt", "answers"): ("Nectar", "chosen is the answer with rank 1, rejected another one"),
    ("completion", "label"): ("KTO", "combine a row of label true and one of label false"),
    ("output", "label"): ("KTO", "combine a row of label 1 and one of label 0"),
    ("messages", "rejected_response"): ("ms-swift", "copy the prompt of messages to rejected"),
}
SNAKE = re.compile(r"(?<=[a-z])(?=[A-Z])|-")  # where scoreChosen and score-chosen have a _
# fields of other formats that are probably part of the prompt or of the replies
CONTEXT = {"history", "chat_history", "context", "input", "documents", "document", "functions"}
CONTEXT |= {"system_message", "instruction", "question", "query", "reasoning", "reasoning_content"}
CONTEXT |= {"thinking", "cot", "tools", "function_call", "function_calls"}
CONTEXT |= {"prefix", "initial_reason_steps", "full_chosen", "full_rejected"}
CONTEXT |= {"solution", "rationale", "explanation"}
# how a text of several turns begins
TRANSCRIPT = re.compile(r"\n\nHuman:|\s*Human:[\s\S]*\n\nAssistant:")
# what is counted -> what to do if it is more than 1 %; all but the last compare rows
DUPLICATES = "exact duplicates"
CONTRADICTIONS = "pairs contradict each other"
REPEATED_PROMPTS = "prompts also in train_data"
COMPARED = {
    DUPLICATES: "keep one of equal rows",
    CONTRADICTIONS: "of two rows with the same responses in both orders, keep one",
    REPEATED_PROMPTS: "remove these rows from one of the files, because they are not held out",
    chat_template.MISSING: "remove these rows if that means that there is no value",
}


class Format(NamedTuple):
    """How the rows of a file are written."""

    name: str  # for the report
    fields: tuple[str, ...]  # that are read, besides "system"
    preference: str = ""  # name of the format, if the rows are preferences


# prompt, chosen and rejected of a record: texts, or messages
RowReader = Callable[[Record], tuple[Prompt, Reply, Reply]]
# returns a row as token ids, truncated and whole, and notes; or raises Unusable or UserError
Encode = Callable[[Record, Format, Encoder], tuple[Any, Any, set[str]]]


class Encoded(NamedTuple):
    """A row as token ids, and what the report counts."""

    row: Any
    hashes: list[int]  # of the prompt and the two responses before truncation
    lengths: dict[str, int]  # part of the row -> its tokens before truncation
    notes: set[str]
    not_read: list[str]  # names of fields


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
        make = functools.partial(encode_rows, source, encoder, find_format, encode, split=pairs_of)
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
    if isinstance(texts[0], list):
        from lm import conversations

        conversations.check_accepted(encoder, texts[0])
    whole, notes = encoder.encode(record.location, *texts)
    pair = encoder.truncate(whole)
    if not (pair.chosen and pair.rejected):  # a tokenizer may drop letters and have no end
        raise Unusable("empty response")
    if pair.chosen == pair.rejected:
        raise Unusable("identical once cut")
    return pair, whole, notes


def encode_rows(
    source: DataFile,
    encoder: Encoder,
    find_format: Callable,
    encode: Encode,
    report: dict,
    split: Callable[[Record], Sequence[Record]] | None = None,
) -> Iterator:
    """Yield the usable rows of a file and fill in the report.

    find_format: returns the Format of the first well-formed row. split: see data.usable().
    Raises UserError if a row is malformed (unless these are skipped), or if no row is usable.
    """
    formats: list[Format] = []  # one, that of the first well-formed record
    numbers = itertools.count()  # of records
    used = 0
    dropped: Counter = Counter()  # reason -> number of rows
    notes: Counter = Counter()
    tokens: Counter = Counter()  # part of a row -> tokens in all rows, before truncation
    chosen_longer = 0
    # hashes of all rows, also with the two responses in the other order
    same, swapped = array.array("q"), array.array("q")
    not_read: set[str] = set()
    sample: list[str] = []  # texts of the first rows, and of some later ones, for check_known()
    extra_names = [name for name in source.extra_fields.split(",") if name]
    tqdm.set_lock(threading.RLock())  # the default lock is a semaphore, which os._exit would leak

    def format_of(record: Record) -> Format:
        """Return the format of a record, if possible of its fields that are not null."""
        filled = {name: value for name, value in record.data.items() if value is not None}
        with contextlib.suppress(UserError):
            return find_format(record._replace(data=filled))
        return find_format(record)

    def parts(record: Record) -> Sequence[Record]:
        """Return the records of a row; find the format in the first one, and sample some texts."""
        records = split(record) if split else [record]
        for one, number in zip(records, numbers, strict=False):
            if not isinstance(one.data, dict):  # a line that is not JSON
                continue
            if not formats:
                with contextlib.suppress(UserError):  # make() raises it again
                    formats.append(format_of(one))
            if formats and (number < 100 or number % 100 == 0):
                sample.extend(strings([one.data.get(name) for name in formats[0].fields]))
        return records

    def make(record: Record) -> Encoded:
        format = formats[0] if formats else format_of(record)
        if split:
            for name in format.fields:
                check_not_python(record, name)
        extra = {name: extra_field(record, name) for name in extra_names}
        others = record.data.keys() - {*extra_names} | {*format.fields}
        # an extra field such as weight has no other meaning
        record = record._replace(data={k: v for k, v in record.data.items() if k in others})
        arguments = {}
        if not record.data.keys().isdisjoint(("input", *ARGUMENTS)):
            from lm import tool_calls

            record = tool_calls.without_nulls_of_tables(record)
            arguments = tool_calls.template_arguments(record, encoder.check_arguments)
        unread: set[str] = set()
        if split and any(isinstance(record.data.get(name), list | dict) for name in format.fields):
            from lm import conversations

            shown = encoder.shown_fields
            record, unread = conversations.with_known_fields(record, format.fields, shown)
        row, whole, notes = encode(record, format, encoder.with_arguments(arguments))
        hashes = [hash(tuple(part)) for part in whole[:3]]
        notes |= {"truncated"} if row != whole else set()
        names = record.data.keys() - {*format.fields, *ALWAYS_READ}
        not_read = [name for name in names if record.data[name] not in chat_template.EMPTY]
        not_read += unread
        row = row._replace(extra=extra) if extra else row
        lengths = whole.lengths
        if "trained" in lengths:  # of what is left
            lengths["trained"] = row.lengths["trained"]
        return Encoded(row, hashes, lengths, notes, not_read)

    rows = data.usable(source, make, dropped, parts, all_cores.map_on_all_cores)
    rows = check_known(rows, source.path, encoder.tokenizer, sample, report)
    rows = tqdm(rows, "Tokenizing", disable=None, leave=False, unit=" rows")
    for encoded in rows:
        yield encoded.row
        used += 1
        prompt, first, second = encoded.hashes
        same.append(hash((prompt, first, second)))
        swapped.append(hash((prompt, second, first)))
        lengths = encoded.lengths
        tokens.update(lengths)
        chosen_longer += lengths.get("chosen", 0) > lengths.get("rejected", 0)
        notes.update(encoded.notes)
        not_read.update(encoded.not_read)
    distinct, index = np.unique(np.array(same), return_index=True)
    notes[DUPLICATES] += used - len(distinct)
    if "chosen" in tokens:
        notes[CONTRADICTIONS] += int(np.isin(np.array(swapped)[index], distinct).sum())
    report |= {
        "format": formats[0].name,
        "fields_not_read": ", ".join(sorted(map(data.shown, not_read))),
        "template": encoder.templated,
        "rows": used + dropped.total(),
        "used": used,
        "dropped": dropped,
        "notes": +notes,  # without those that no row has
        "mean_tokens": {part: round(total / used, 1) for part, total in tokens.items()},
    }
    if "chosen" in tokens:
        report["chosen_longer"] = round(chosen_longer / used, 3)


def check_known(
    rows: Iterator, path: str, tokenizer: Any, sample: list[str], report: dict
) -> Iterator:
    """Yield the rows; then raise UserError if a tokenizer does not know their texts.

    sample: texts of the rows so far. This error replaces one about a row, which it may explain.
    """
    try:
        yield from rows
    finally:
        result = model_files.unknown(tokenizer, sample)
        model_files.describe_unknown(path, result)
        report |= {"unknown_tokens": result} if result["fraction"] else {}


def strings(value: Any) -> Iterator[str]:
    """Yield the beginnings of the texts in a value of a row, such as a list of messages."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value[:1000].encode(errors="ignore").decode()  # without half of a surrogate pair
        elif isinstance(value, list | dict):
            values += value.values() if isinstance(value, dict) else value


def extra_field(record: Record, name: str) -> Any:
    """Return the value of a field that --extra_fields names; raise UserError if there is none."""
    if name not in record.data:
        problem = f"missing, but --extra_fields names it; fields found: {data.names_of(record)}"
        raise UserError(f"{record.location}: {data.shown(name)}: {problem}")
    value = record.data[name]
    try:
        json.dumps(value)
    except TypeError as error:  # a table has dates, for example
        expected = "a text, a number, or lists of these"
        raise data.wrong_value(record, name, value, expected) from error
    return value


def describe_all(reports: dict[str, dict], data: dict[str, Sized]) -> list[str]:
    """Return a line for each file, and warnings about truncated, doubtful or repeated rows."""
    lines = [describe(split, report) for split, report in reports.items()]
    for split, report in reports.items():
        truncated = report["notes"].get("truncated", 0)
        lines += chat_template.truncation_warning(split, truncated, report["used"], "--max_length")
        if "unknown_tokens" in report:
            lines += model_files.describe_unknown(split, report["unknown_tokens"])
        for note, problem in chat_template.DOUBTFUL.items():
            count = report["notes"].get(note, 0)
            if 2 * count > report["used"]:
                lines.append(f"warning: {split}: {count} of {report['used']} rows {problem}")
        fields = report["fields_not_read"].split(", ")
        unread = [name for name in fields if name.rpartition(".")[2] in CONTEXT]
        if unread:
            problem = f"{', '.join(unread)}: not read in the format {report['format']}"
            hint = "if they belong to the prompt or the replies, write them there"
            lines.append(f"warning: {split}: {problem}; {hint}")
        rows = len(data.get(split, ())) or report["used"]  # fewer with --max_eval_rows
        for note, remedy in COMPARED.items():
            count = report["notes"].get(note, 0)
            if 100 * count > rows:
                lines.append(f"warning: {split}: {count} {note}; {remedy}")
    if not data["val"]:
        lines.append("warning: 0 validation rows; use --val_data FILE, or more rows")
    return lines


def describe(split: str, report: dict) -> str:
    """Return the report of one file as one line."""
    rows = f"{report['rows']} rows in the format {report['format']}"
    line = f"{split}: {rows}, {report['used']} used"
    if "split" in report:
        line += f", split into {data.listed(report['split'])}"
    parts = [line, f"tokens {data.listed(report['mean_tokens'])}"]
    if "chosen_longer" in report:
        parts.append(f"chosen longer in {report['chosen_longer']:.1%}".replace("%", " %"))
    parts += [f"{rows} {name}" for name, rows in {**report["dropped"], **report["notes"]}.items()]
    if not report["template"]:
        parts.append("no chat template")
    if report["fields_not_read"]:
        parts.append(f"not read: {report['fields_not_read']:.400}")
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
            report[split]["notes"][REPEATED_PROMPTS] = int(repeated.sum())


# --- a row ---------------------------------------------------------------------------------------


def pairs_of(record: Record) -> list[Record]:
    """Return a record for each pair of a row: `rejected` may be a list of responses.

    Messages are lists, also where the file has their JSON text.
    """
    if not isinstance(record.data, dict):  # a line that is not JSON
        return [record]
    fields = {name: messages_in(value) for name, value in record.data.items()}
    fields |= {name: parts_in(fields[name]) for name in IN_PARTS if name in fields}
    wholes = [whole for whole in map(fields.get, SIDES) if isinstance(whole, dict)]
    others = [{**whole, "messages": None} for whole in wholes if "messages" in whole]
    if len(others) == 2 and others[0] == others[1]:  # tools, for example
        fields = others[0] | fields | {side: fields[side]["messages"] for side in SIDES}
    rejected = fields.get("rejected")
    if not (isinstance(rejected, list) and all(isinstance(x, str | list) for x in rejected)):
        rejected = []
    records = [record._replace(data={**fields, "rejected": messages_in(x)}) for x in rejected]
    return records or [record._replace(data=fields)]


def find_format(record: Record) -> Format:
    """Return the format that has the fields of a record."""
    responses = [record.data.get(side) for side in SIDES]
    is_pair = record.data.keys() >= {*SIDES}
    if is_pair and all(TRANSCRIPT.match(str(x)) for x in responses):
        return Format("transcript", (*SIDES, "prompt"), "transcript")
    if is_pair and str(record.data.get("prompt")).startswith(HUMAN):
        return Format("transcript", FIELDS["prompt"], "transcript")
    kinds = [type(value) for value in (record.data.get("prompt"), *responses) if value != {}]
    if is_pair and (list in kinds or (dict in kinds and "conversations" not in record.data)):
        return Format("messages", FIELDS["prompt"], "messages")
    for name, fields in FIELDS.items():
        if record.data.keys() >= set(fields):
            more = ("input", "history") if name == "instruction" else ()
            return Format(name, (*fields, *more), name)
    if any(str(response).startswith(HUMAN) for response in responses):
        return Format("transcript", SIDES, "transcript")
    raise unknown_format(record, "prompt, chosen, rejected or another format of docs/data.md")


def unknown_format(record: Record, expected: str) -> UserError:
    """Return the error for a record whose fields fit no format, or are those of a public set."""
    for name in record.data:  # such as a conversation without a prompt
        check_not_python(record, name)
    for fields, (name, conversion) in CONVERTED.items():
        if record.data.keys() >= {*fields}:
            problem = f"the fields {', '.join(fields)} are those of {name} (expected {expected})"
            return data.WrongFields(f"{record.location}: {problem}; {conversion}")
    problem = f"fields found: {data.names_of(record)}; expected {expected}"
    hint = "rename fields with --columns ours=theirs"
    if record.data.keys() >= {*SIDES} and not record.data.keys() & {*TEXTS, "conversations"}:
        hint += "; if both replies begin with the prompt, write it in a field of its own"
    return data.WrongFields(f"{record.location}: {problem}; {hint}")


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
    fields = {SNAKE.sub("_", name).lower(): name for name in record.data}
    for name, original in fields.items():
        value = record.data[original]
        if name in WINNERS and isinstance(value, str | int | float):
            # a longer text is about something else
            word = str(value).strip().lower()
            is_wrong = word not in ("true", "chosen", "") and len(word) < 40
        elif name in BETTER:
            is_wrong = str(value).strip().lower() in ("rejected", "false", "0", "0.0")
        elif name in SCORES | RANKS:
            other = record.data.get(fields.get(name.replace("chosen", "rejected")))
            higher, lower = (other, value) if name in RANKS else (value, other)
            is_wrong = _number(higher) < _number(lower)
        elif name in BOTH and isinstance(value, dict):
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
        if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
            problem = "must be one response (a text, or a list of messages), not several ones"
            raise UserError(f"{record.location}: {side}: {problem}; write one row for each")
    if format in TEXTS:
        if all(TRANSCRIPT.match(str(record.data.get(side))) for side in SIDES):
            expected = "one reply, not turns of Human and Assistant as in the first row's format"
            raise data.wrong_value(record, "chosen", record.data["chosen"], expected)
        history = history_of(record) if format == "instruction" else []
        prompt = question(record, format, history)
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


def history_of(record: Record) -> list[dict]:
    """Return the turns of [[question, answer], ...]; there are none if it is null or []."""
    history = record.data.get("history") or []
    if isinstance(history, str):  # from CSV
        history = data.decode(history, f"{record.location}: history")
    turns = []
    for exchange in history if isinstance(history, list) else [history]:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise data.wrong_value(record, "history", history, "[[question, answer], ...]")
        for role, value in zip(("user", "assistant"), exchange, strict=True):
            content = data.text(Record(record.location, {"history": value}), "history")
            turns.append({"role": role, "content": content})
    return turns
