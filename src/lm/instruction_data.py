"""Texts for supervised fine-tuning -> token ids and which of them are trained.

alpaca      {"instruction", "output"}, optionally "input" and "history", [[question, answer], ...]
sharegpt    {"conversations"} of {"from", "value"}
messages    {"messages"} of {"role", "content"}
custom      two fields: the prompt and the reply, which are texts or messages
preference  a row of any format of preference_data.py: its prompt and its chosen reply

Each may have a "system" text. In a conversation every reply is trained, with the token that ends
it: the same tokens as if each reply were a row of its own.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddp_utils import UserError, data
from ddp_utils.data import DataFile, Record, Unusable
from lm import chat_template, conversations, preference_data, token_rows
from lm.chat_template import Encoder, Prompt, Reply, common_prefix, plain_text
from lm.logps import Pair
from lm.preference_data import Format
from lm.token_rows import Rows

FORMATS = [  # the first one whose two fields (or one) a row has
    Format("custom", ("prompt", "completion")),
    Format("alpaca", ("instruction", "output", "input", "history")),
    Format("sharegpt", ("conversations",)),
    Format("messages", ("messages",)),
    Format("custom", ("prompt", "response")),
    Format("custom", ("question", "answer")),
]


class Text(NamedTuple):
    """Token ids of one text, a logps.Example: the prompt, and a reply that is trained in part."""

    prompt: list[int]  # everything before the first trained token; at least one token
    reply: list[int]  # the rest
    scored: list[int]  # [len(reply)] 1: trained, 0: only read (later user turns, template text)
    location: str  # file:line
    text: str  # the first question as the data file has it: rows are split by it

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.reply)

    @property
    def trained(self) -> int:
        """Return the number of tokens over which the loss is averaged."""
        return sum(self.scored)

    @property
    def lengths(self) -> dict[str, int]:
        """Return the numbers of tokens whose means are in the data report."""
        return {"prompt": len(self.prompt), "reply": len(self.reply), "trained": self.trained}

    @property
    def responses(self) -> list[list[int]]:
        return [self.reply]

    @property
    def targets(self) -> list[Sequence[int]]:
        return [[index for index, on in enumerate(self.scored) if on]]

    def num_forward_tokens(self, shared: bool) -> int:
        return self.forward_tokens(len(self.prompt), len(self.reply), len(self.scored), shared)

    @staticmethod
    def forward_tokens(prompt: Any, reply: Any, _scored: Any, _shared: bool) -> Any:
        """Return num_forward_tokens() from the lengths of the lists, numbers or arrays of them."""
        return prompt + reply - 1


def read(source: DataFile, encoder: Encoder) -> tuple[Rows, dict]:
    """Return the usable texts of a file, and the report on it.

    Rows without a reply are dropped and counted. Malformed rows raise UserError; with
    on_bad_record="skip" they are dropped and counted, too.
    """
    encode_rows = preference_data.encode_rows
    make = functools.partial(encode_rows, source, encoder, find_format, encode_record, split=_first)
    return token_rows.cached_rows(Text, source, encoder.facts(), make)


# --- record -> prompt and reply ------------------------------------------------------------------


def _first(record: Record) -> list[Record]:
    """Return the first pair of a row: only its chosen response is used."""
    return preference_data.pairs_of(record)[:1]


def find_format(record: Record) -> Format:
    """Return the format of a row."""
    if not record.data.keys() >= {"prompt", "completion"}:  # even beside a preference
        with contextlib.suppress(UserError):
            return preference_data.find_format(record)._replace(name="preference")
    for format in FORMATS:
        if record.data.keys() >= set(format.fields[:2]):
            return format
    expected = "instruction, output or another format of docs/data.md"
    raise preference_data.unknown_format(record, expected)


def encode_record(record: Record, format: Format, encoder: Encoder) -> tuple[Text, Text, set[str]]:
    """Return the Text of a row as encode() does; raise Unusable if it has no reply."""
    prompt, reply = prompt_and_reply(record, format)
    if not plain_text(reply).strip():
        raise Unusable("empty response")
    conversations.check_accepted(encoder, prompt)
    return encode(encoder, record.location, prompt, reply, only_last=bool(format.preference))


def prompt_and_reply(record: Record, format: Format) -> tuple[Prompt, Reply]:
    """Return the prompt and the last reply of a row that is trained."""
    if format.preference:
        return preference_data.prompt_and_responses(record, format.preference)[:2]
    chat_template.check_text_only(record, "", record.data)
    first, second = [*format.fields, ""][:2]
    if format.name in ("sharegpt", "messages"):
        turns = conversations.with_system(record, conversations.messages_of(record, first))
        return _last_reply(conversations.check_order(record, first, turns, "assistant"))
    values = record.data.get(first), record.data.get(second)
    if format.name == "custom" and any(isinstance(value, list | dict) for value in values):
        turns = conversations.messages_of(record, first, "user")
        turns = conversations.with_system(record, turns)
        turns = [{**turn, "weight": 0} for turn in turns]  # the prompt
        replies = conversations.messages_of(record, second)
        role = replies[0]["role"]
        if role != "assistant":
            raise data.wrong_value(record, f"{second}[0].role", role, "assistant")
        return _last_reply(conversations.check_order(record, second, turns + replies, "assistant"))
    history = preference_data.history_of(record) if format.name == "alpaca" else []
    prompt = preference_data.question(record, first, history)
    return prompt, data.text(record, second, may_be_empty=True)


def _last_reply(turns: list[dict]) -> tuple[Prompt, Reply]:
    """Return the turns before the last trained reply, and that reply."""
    while turns and (turns[-1]["role"] != "assistant" or "weight" in turns[-1]):
        turns.pop()
    if not turns:
        raise Unusable("no reply to train")
    return turns[:-1], conversations.reply_of(turns[-1])


# --- prompt and reply -> tokens ------------------------------------------------------------------


def encode(
    encoder: Encoder, location: str, prompt: Prompt, reply: Reply, only_last: bool = False
) -> tuple[Text, Text, set[str]]:
    """Return the Text of a prompt and its reply, the same before truncation, and notes.

    Replies in the prompt are trained, too, unless only the last one shall be (only_last). A
    conversation that is too long loses its oldest exchanges, but keeps its system turn; the rest
    is truncated like a pair. Raises Unusable if no trained token is left.
    """
    turns = prompt if isinstance(prompt, list) and not only_last else []
    question = plain_text(turns[: min(_questions(turns), default=0) + 1] if turns else prompt)
    turns, reply = _with_one_end(encoder, turns), encoder.one_turn(reply)
    pair, notes = encoder.encode(location, turns or prompt, reply, reply)
    whole = text = _text(encoder, pair, turns, question, notes)
    if whole.num_tokens > encoder.max_length:
        if turns:
            turns = _drop_exchanges(encoder, turns, reply)
            pair, notes = encoder.encode(location, turns, reply, reply)
        text = _text(encoder, pair, turns, question, notes, truncate=True)
    return text, whole, notes


def _text(
    encoder: Encoder,
    pair: Pair,
    turns: list[dict],
    question: str,
    notes: set[str],
    truncate: bool = False,
) -> Text:
    """Return the Text of a pair's prompt and chosen reply; replies in the turns are trained, too.

    Add to the notes if they cannot be. truncate: as encoder.truncate() does.
    """
    ids = pair.prompt + pair.chosen
    scored = [0] * len(pair.prompt) + [1] * len(pair.chosen)
    for start, stop in _earlier_replies(encoder, turns, ids, notes):
        scored[start:stop] = [1] * (stop - start)
    if truncate:
        kept, room = encoder.kept(pair)
        kept += range(len(pair.prompt), min(len(ids), len(pair.prompt) + room))
        ids, scored = [ids[place] for place in kept], [scored[place] for place in kept]
        scored[0] = 0  # nothing would predict it
    if 1 not in scored:
        raise Unusable("no trained token left")
    first = scored.index(1)
    return Text(ids[:first], ids[first:], scored[first:], pair.location, question)


def _with_one_end(encoder: Encoder, turns: list[dict]) -> list[dict]:
    """Return turns whose replies have one end token, or none if the template adds it."""
    end = "" if encoder.templated else encoder.text_of(encoder.end)
    ended = []
    for turn in turns:
        if turn["role"] == "assistant":
            turn = {**turn, "content": encoder.one_turn(turn["content"]) + end}
        ended.append(turn)
    return ended


def _drop_exchanges(encoder: Encoder, turns: list[dict], reply: Reply) -> list[dict]:
    """Return the turns without as many of the first exchanges as are too long with the reply."""
    first = min(_questions(turns), default=0)
    fitted = turns
    for index in _questions(turns)[1:]:
        text = encoder.text_with_reply(fitted, reply, encoder.text(fitted))
        if len(encoder.ids(text)[0] + encoder.added_end) <= encoder.max_length:
            break
        fitted = turns[:first] + turns[index:]
    return fitted


def _questions(turns: list[dict]) -> list[int]:
    """Return the indices of the user's turns."""
    return [index for index, turn in enumerate(turns) if turn["role"] == "user"]


def _earlier_replies(
    encoder: Encoder, turns: list[dict], ids: list[int], notes: set[str]
) -> list[tuple[int, int]]:
    """Return the (start, stop) of each reply in the turns of a prompt in its ids.

    There are none, and it is noted, if the template renders a reply differently, except for white
    space, when it is not the last one: that is not what the model should generate. The same is true
    if it does not render a reply without a question alone.
    """
    if not turns:
        return []
    full_text = encoder.text(turns)
    spans = []
    call_end = encoder.text_of(encoder.call_end)
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant" or "weight" in turn:
            continue
        reply = conversations.reply_of(turn)
        try:
            before = _text_before(encoder, turns[:number])
            as_last = encoder.text_with_reply(turns[:number], reply, before)
        except UserError:
            if _questions(turns[:number]):
                raise
            notes.add(chat_template.ONLY_LAST)
            return []
        is_call = call_end and as_last.endswith(call_end)
        end = call_end if is_call else encoder.earlier_end  # "" without a template
        as_last = as_last.removesuffix(encoder.end_text).removesuffix(call_end) + end
        stop = len(as_last)
        if end:  # the reply may have other white space when it is not the last one
            stop = len(end.join(full_text.split(end)[: as_last.count(end)]) + end)
        if chat_template.without_space(full_text[:stop]) != chat_template.without_space(as_last):
            notes.add(chat_template.ONLY_LAST)
            return []
        ids_before, ids_with_reply = encoder.ids(before, full_text[:stop])
        start = max(common_prefix(ids_before, ids), 1)  # nothing would predict a first token
        spans.append((start, common_prefix(ids_with_reply, ids)))
    return spans


def _text_before(encoder: Encoder, turns: list[dict]) -> str:
    """Return the text before a reply to these turns, which may lack a question."""
    if _questions(turns) or not encoder.templated:
        return encoder.text(turns)
    return encoder.render([*turns, {"role": "assistant", "content": "@@@"}]).partition("@@@")[0]
