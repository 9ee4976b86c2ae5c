"""The texts of a row -> token ids of prompt, chosen and rejected.

The three share one prompt: the common prefix of the tokens of prompt, prompt + chosen and
prompt + rejected. Where a tokenizer merges across the boundary, the merged token belongs to the
response, so that no response token is lost and no prompt token is trained.
"""

import contextlib
import copy
import datetime
import functools
import hashlib
import json
import os
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import transformers
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from ddp_utils import UserError, data, distributed
from ddp_utils.checkpoints import is_started_again, start_facts
from ddp_utils.data import Record
from ddp_utils.distributed import World
from lm import models
from lm.logps import Pair

Prompt = str | list[dict]  # a user's text, or messages that end with a user's turn
Reply = str | dict  # a text, or a message that has more than text
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
EMPTY: tuple = (None, "", [], {})  # values that count as an absent field
SYSTEMS = ("system", "system_prompt")  # names of the system text of a row
# names of roles, in lower case, in public data; function_call is read as an assistant's tool_calls
ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant"}
ROLES |= {"bot": "assistant", "chatbot": "assistant", "ai": "assistant", "model": "assistant"}
ROLES |= {"function_call": "assistant", "function": "tool", "observation": "tool"}
ROLES |= {"tool_response": "tool", "ipython": "tool"}
# whether a row or message is trained
WEIGHTS: tuple[str, ...] = ("weight", "loss_weight", "train", "loss", "label", "kto_tag")
WEIGHTS += ("training", "train_detail")  # Axolotl's
WEIGHTS += ("loss_mask", "loss_scale", "trainable", "train_on_turn", "calculate_loss")
WEIGHT_OF = {"none": 1, "": 1, "[]": 1, "1": 1, "1.0": 1, "true": 1, "0": 0, "0.0": 0, "false": 0}
WEIGHT_OF |= {"chosen": 1}  # the label of a pair
# what a template silently leaves out if it does not mention it
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of a field of a message
NEED_SUPPORT = {"system", "developer", "tool", "tools", "tool_calls", *THOUGHTS}
# a field in a template: message.functions, message["functions"] or message.get("functions"); others
# are fields of calls and tools, of loops, or methods
FIELD = re.compile(r"""(?:\.|\[['"]|get\(['"])(\w+)""")
NOT_OF_MESSAGES = {"name", "type", "id", "function", "arguments", "parameters", "description"}
NOT_OF_MESSAGES |= {"text", "first", "last", "index", "index0", "length", "items", "keys", "values"}
NOT_OF_MESSAGES |= {"get", "split", "strip", "lstrip", "rstrip", "startswith", "endswith", "upper"}
NOT_OF_MESSAGES |= {"replace"}
TEMPLATE_ERRORS: tuple = (TemplateError, *models.FAULTS)  # a template is a program
HUMAN = "\n\nHuman:"
QUESTION = {"role": "user", "content": "~~~"}  # to find out how a template renders turns
PLAIN_ROLES = {"system": "\n\nSystem:", "user": HUMAN, "assistant": "\n\nAssistant:"}

# notes about a row, and the warning if most rows have one
NOT_CONTINUED = "without all of the generation prompt"
REPEATED = "with the prompt in its replies"
FOREIGN = "with a reply that another model's template has rendered"
ASKING = "with the name of the assistant at the end of the prompt"
LISTED = "with the text of a list as the prompt or one of the replies"
ONLY_LAST = "only the last reply is trained"
PLAIN_TURNS = "with turns as Human: and Assistant:"  # there is no template
DOUBTFUL = {
    NOT_CONTINUED: "have no reply that continues all of the chat template's generation prompt, "
    "which may open a thought; use replies with one, or another --chat_template or its _kwargs",
    REPEATED: "have replies that begin with the prompt; remove it from them if it is repeated",
    FOREIGN: "have replies that begin with the name of the assistant, or begin or end with a token "
    "that this tokenizer does not have; remove it",
    ASKING: "have prompts that end with the name of the assistant, or with a token of a chat "
    "template, which adds these; remove them, use messages, or --chat_template none",
    LISTED: "have the text of a list as the prompt or as one of the two replies; decode it, or, "
    "for several rejected replies, use a row for each, or a list in JSON Lines or Parquet",
    ONLY_LAST: "have earlier replies, perhaps tool calls, that are not trained, because the chat "
    "template renders them otherwise where they are not the last; use a row for each reply, or "
    "another --chat_template",
}
# a special token of some model: <|user|>, <|turn>, <turn|>, <｜User｜>, [|user|]
MARKER = r"(?:<\|[^\s<>|]+\|?>|<\w+\|>|<｜[^<>｜]+｜>|\[\|\w+\|\])"
# how a conversation begins that the chat template of some model has rendered
RENDERED = re.compile(
    rf"(<s>\s*\[[A-Z_]+\]|(<s>\s*)?({MARKER}"  # <s> alone may be HTML
    r"|<(?i:bos|bos_token|(start|begin\w*)_of_\w+)>"
    r"|\[(INST|SYSTEM_PROMPT|gMASK)\]|\]~"  # Mistral, GLM, MiniMax
    r"))"
)
# a line or less and the name of a user, or, at the end, that of an assistant: Alpaca, Vicuna, HH
USER_START = re.compile(r"(<s>\s*)?(([^\n]*\S)?\s+)?(#+ )?(?i:human|user|instruction):")
ASSISTANT_END = re.compile(r"\s(#+ )?(?i:assistant|response):\Z")
# the name of the assistant, as templates write it: Alpaca, Vicuna, HH; ChatML without its tokens
ASSISTANT = r"(?:(?:#+ )?(?i:assistant|response)|<(?i:assistant|ai|bot|model)>)(?::|\n)"
# how a prompt or a reply ends, and a reply begins, that the template of some model has rendered
ASKING_END = re.compile(rf"(?:{MARKER}|\[/INST\]|(?:\A|\s){ASSISTANT})\s*\Z")
FOREIGN_END = re.compile(
    rf"(?:{MARKER}|</s>|<eos>|<EOD>|<im_end>|\[EOS\]|\[/INST\]|\[e~\[|<end_of_\w+>)\s*\Z"
)
FOREIGN_START = re.compile(rf"\s*(?:{MARKER}|{ASSISTANT})")
# what libraries of tables write where there is no value
NO_VALUE = ("nan", "<NA>", "None", "null")
# a list of strings, as JSON or Python writes it
STRINGS = re.compile(r"""\s*\[\s*["'][\s\S]*["']\s*\]\s*\Z""")

Ids = list[int]  # token ids
DATE = "date of chat_template"  # name of an input of a run, in its environment.json
MISSING = "rows have nan, None or null as a reply"  # name of a count in the data report
NO_END = (
    "warning: replies will not stop: the tokenizer has no eos_token, and there is no chat template "
    "that ends a reply with a special token; set eos_token in tokenizer_config.json, or use "
    "--chat_template"
)


class Encoder:
    """Encodes a row as a Pair: template, prompt boundary, end of the reply, truncation.

    chat_template: "auto" (the tokenizer's, if it has one), "none", a .jinja file, or the name of
    one of several templates of the tokenizer.
    max_length: in tokens, of a prompt and a response.
    truncation: "keep_end" or "keep_start" of the prompt.
    kwargs: arguments of the template besides the messages, as the text of a JSON object.
    keep_thoughts: append a reply as it is written where the template drops text of it.
    date: that the template writes if it writes one, such as 2026-11-26; "": today's.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str = "auto",
        max_length: int = 1024,
        truncation: str = "keep_end",
        kwargs: str = "",
        keep_thoughts: bool = False,
        date: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.keep_end = truncation == "keep_end"
        self.keep_thoughts = keep_thoughts
        self.template = choose_template(tokenizer, chat_template)
        self.templated = bool(self.template)
        special = *tokenizer.all_special_tokens, *tokenizer.get_added_vocab()
        # white space may be an added token as well
        self.special = dict.fromkeys(filter(str.strip, special))
        self.borders = borders_of(tokenizer) if self.template else {}
        self.border_lengths = lengths_by_first(self.borders)
        self.border_starts = one_of(self.border_lengths)
        self.template_words = {"system", *re.findall(r"\w+", self.template)}
        self.shown_fields = {*FIELD.findall(self.template)} - NOT_OF_MESSAGES
        self.date = (date or today()) if "strftime_now" in self.template_words else ""
        self.end = tokenizer.eos_token_id  # the last token of a reply, or None
        self.end_text = ""  # what the template writes behind a reply, up to its last special token
        self.earlier_end = ""  # the same behind a reply that is not the last one
        self.starts: list[str] = []  # tokens with which the template begins a turn
        self.stops: list = []  # more tokens at which sampling stops
        self.call_end: int | None = None  # the token that ends tool calls, if it is another one
        # the template expects the arguments of a tool call as a JSON text; None: not known yet
        self.arguments_as_text: bool | None = None
        self.before_reply = ""  # the template's text between a prompt and a reply
        self.after_end = ""  # what it writes behind end_text
        self.in_parts = False  # the template expects a content as [{"type": "text", "text": ...}]
        self.begins: tuple[str, ...] = ()  # what the template writes before a first turn
        self.kwargs = self.check_arguments(kwargs or {}, "--chat_template_kwargs")
        if self.templated:
            self._find_ends_of_replies()
            self.begins = self._find_begins()
        # the end that is added to the ids of a reply, since the text has none
        self.added_end = [self.end] if not self.end_text and self.end is not None else []
        self.adds_end = not self.templated and self.added_end == tokenizer("a").input_ids[-1:]
        if self.end is None:
            distributed.warn(NO_END)
        marker = re.search(MARKER, self.after_end)
        if marker and not self.end_text:
            problem = f"{marker[0]} behind a reply, which is no token of this tokenizer"
            hint = "replies end with its eos_token; add the template's tokens, or use another one"
            distributed.warn(f"warning: --chat_template writes {problem}; {hint}")
        end = self.text_of(self.end)
        self.special_end = end if self.templated and end in self.special else ""
        # decoded replies often end with the token that pads them
        tokens = *self.ends, *self.special_ids(self.end_text), tokenizer.pad_token_id
        ends = {self.end_text, self.earlier_end, *map(self.text_of, tokens)}
        either = one_of(filter(None, ends)).pattern
        self.brought = re.compile(rf"(?:(?:{either})\s*)+\Z")  # ends that a reply has in its text

    @classmethod
    def of(cls, config: Any, date: str = "", needs_weights: bool = True) -> "Encoder":
        """Return the encoder that the settings of a script describe.

        date: as of Encoder; needs_weights: False if the model is not loaded.
        """
        names = config.model_name, config.init_adapter, config.chat_template
        tokenizer = models.load_tokenizer(*names, needs_weights=needs_weights)
        shape = config.max_length, config.truncation, config.chat_template_kwargs
        return cls(tokenizer, config.chat_template, *shape, config.keep_thoughts, date)

    def with_arguments(self, arguments: dict) -> "Encoder":
        """Return an encoder whose template gets more arguments, such as the tools of one row."""
        encoder = copy.copy(self)
        encoder.kwargs = {**self.kwargs, **arguments}
        return encoder

    def facts(self) -> list:
        """Return what the token ids depend on, besides rows and code."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        if self.tokenizer.is_fast:
            vocabulary = self.tokenizer.backend_tokenizer.to_str()
        special = self.tokenizer.special_tokens_map
        shape = self.max_length, self.keep_end, self.keep_thoughts
        settings = self.template, self.kwargs, self.date
        return [vocabulary, special, *shape, *settings, transformers.__version__]

    @property
    def template_digest(self) -> str:
        """Return a digest of the template's text."""
        return hashlib.sha256(self.template.encode()).hexdigest()[:16]

    @property
    def inputs(self) -> dict[str, str]:
        """Return the date that the template writes, if any, as an input of a run."""
        return {DATE: self.date} if self.date else {}

    @property
    def notes(self) -> list[str]:
        """Return a line about the date, to print; none if the template writes no date."""
        return [f"the chat template writes the date {self.date}"] if self.date else []

    @property
    def ends(self) -> Ids:
        """Return the token ids at which a sampled reply is over."""
        ends = dict.fromkeys((self.end, *self.stops, self.call_end, self.tokenizer.eos_token_id))
        return [token for token in ends if token is not None]

    def render(self, messages: list[dict], **options: Any) -> str:
        """Return the template's text; without a system role, its text precedes the first turn."""
        try:
            options |= {"chat_template": self.template, "tokenize": False, **self.kwargs}
            turns = [self._as_expected(message) for message in messages]
            with self._clock():
                return self.tokenizer.apply_chat_template(turns, **options)
        except TEMPLATE_ERRORS as error:
            if messages[0]["role"] != "system" or len(messages) < 2:
                raise UserError(f"--chat_template: {models.one_line(error)}") from error
            system, first, *rest = messages
            first = {**first, "content": f"{system['content']}\n\n{first['content']}"}
            return self.render([first, *rest], **options)

    def _clock(self) -> contextlib.AbstractContextManager:
        """Return a context in which strftime_now of a template writes the date of the run.

        transformers accepts plain data as arguments of a template, but no function.
        """
        if not self.date:
            return contextlib.nullcontext()
        day = datetime.datetime.fromisoformat(self.date)
        return mock.patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: day))

    def _as_expected(self, message: dict) -> dict:
        """Return a message in the form that the template expects."""
        message = {**message}
        if "tool_calls" in message and self.arguments_as_text is not None:
            from lm import tool_calls

            calls, as_text = message["tool_calls"], self.arguments_as_text
            message["tool_calls"] = [tool_calls.with_arguments(call, as_text) for call in calls]
        if self.in_parts:
            message["content"] = [{"type": "text", "text": message["content"]}]
        return message

    def check_arguments(self, value: str | dict, place: str) -> dict:
        """Return arguments, perhaps given as JSON; raise UserError for one the template lacks.

        Those of a row may be false or empty, since all rows of a table have the same ones.
        """
        arguments = data.decode(value, place) if isinstance(value, str) else value
        if not isinstance(arguments, dict):
            raise UserError(f'{place}: must be an object, such as {{"enable_thinking": false}}')
        used = {}
        is_field = place.endswith(": chat_template_kwargs")  # of a row
        fix = ignoring("chat_template_kwargs") if is_field else "remove it"
        for name, argument in arguments.items():
            if name in self.template_words and name not in ("messages", "add_generation_prompt"):
                used[name] = argument
            elif place.startswith("--") or not (argument is False or argument in EMPTY):
                problem = f"the chat template does not use {data.shown(name)}"
                raise UserError(f"{place}: {problem}; {fix}, or use another --chat_template")
        return used

    def check_supported(self, messages: list[dict]) -> None:
        """Raise UserError for a role or field that the template would silently leave out."""
        for message in messages:
            for name in NEED_SUPPORT & {*message, message["role"]} - self.template_words:
                hint = "use another --chat_template"
                if name in THOUGHTS and self.template_words & {*THOUGHTS}:
                    other = min(self.template_words & {*THOUGHTS})
                    hint = f"it reads {other}: rename the field"
                raise UserError(f"the chat template does not support {name}; {hint}")

    def _find_ends_of_replies(self) -> None:
        """Set what precedes and ends a reply by rendering some; also find the roles supported."""
        reply = {"role": "assistant", "content": "@@@"}
        self.template_words.discard("system")
        self.in_parts = not self._renders(QUESTION, reply)
        if self.in_parts and not self._renders(QUESTION, reply):
            self.in_parts = False
            self.render([QUESTION, reply])  # its own error, if it has one
            raise UserError("--chat_template: it renders no text of a reply; use another one")
        for role, supported in (("@", {"tool", "developer"}), ("system", {"system"})):
            if self._renders({"role": role, "content": "@@@"}, QUESTION):
                self.template_words |= supported
        asked = self.text([QUESTION])
        before, _, after = self.render([QUESTION, reply]).rpartition("@@@")
        self.before_reply = before.removeprefix(asked)
        start = self._find_start(asked, before.rpartition("~~~")[2])
        # some templates write the generation prompt behind every conversation
        end = after.partition(start)[0] if start else ""
        self.end_text = self._up_to_special(end if end.strip() else after)
        self.after_end = after.removeprefix(self.end_text)
        self.end = next(reversed(self.special_ids(self.end_text)), self.end)
        self.earlier_end = self.end_text.strip() or self.text_of(self.end)
        self.starts = [start] if start and start not in self.end_text else []
        if "tool_calls" in self.template_words:
            self.arguments_as_text, self.call_end = self._find_form_of_calls(QUESTION)
        with contextlib.suppress(UserError):
            text = self.render([QUESTION, reply, QUESTION])
            between, next_turn, _ = text.rpartition("@@@")[2].partition("~~~")
            if next_turn:
                self._find_border(between)
            stop = next(reversed(self.special_ids(self.earlier_end)), self.end)
            # sampling stops there as well, unless it also ends a thought
            thought = {**reply, **dict.fromkeys(THOUGHTS, "t")}
            text = self.render([QUESTION, thought]).rpartition("@@@")[0]
            if stop not in [self.end, *self.special_ids(text[common_prefix(asked, text) :])]:
                self.stops.append(stop)

    def _find_start(self, asked: str, before: str) -> str:
        """Return the special token with which the turn of the assistant begins, or "".

        asked: a question with the generation prompt; before: what is written between a question
        and a reply.
        """
        plain = self.render([QUESTION])
        tokens = [*self._special_in(before).finditer(before)]
        if asked != plain and asked.startswith(plain):
            turn = asked.removeprefix(plain)
        else:  # the first one of several ends the user's turn
            turn = before[tokens[0].end() :] if tokens[1:] else before
        start = self._up_to_special(turn.strip(), first=True)
        return start if start in self.special else ""

    def _find_border(self, after: str) -> None:
        """Set what ends a reply that is not the last one, and what begins the turn behind it.

        after: what the template writes between the two texts.
        """
        shared = after[: common_prefix(after, self.end_text)]
        end = self._up_to_special(shared) or self._up_to_special(after, first=True)
        self.earlier_end = end.strip() or self.earlier_end
        rest = after.removeprefix(end)
        token = self._special_in(rest).search(rest)
        start = token[0] if token else after.strip() if end else ""  # such as </s>USER:
        if start not in self.end_text and start not in (self.tokenizer.eos_token, *self.starts):
            self.starts.append(start)

    def _up_to_special(self, text: str, first: bool = False) -> str:
        """Return a text up to its last, or first, special token; "" if it has none."""
        tokens = [*self._special_in(text).finditer(text)]
        return text[: tokens[0 if first else -1].end()] if tokens else ""

    def _special_in(self, text: str) -> re.Pattern:
        """Return a pattern of the special tokens in a text."""
        return one_of(filter(text.__contains__, self.special))

    def _find_begins(self) -> tuple[str, ...]:
        """Return what the template writes before a first user or system turn, without BOS."""
        first = {"role": "user", "content": "@@@"}
        begins = []
        for turns in ([first], [{**first, "role": "system"}, {**first, "content": "u"}]):
            text = self.render(turns, add_generation_prompt=True)
            begin, content, _ = text.partition("@@@")
            begins += [self._without_bos(begin)] if content else []
        return tuple(filter(None, begins))

    def _find_form_of_calls(self, question: dict) -> tuple[bool, int | None]:
        """Return whether arguments of tool calls are texts, and the token that ends calls.

        The token is None if calls end as other replies do.
        """
        for as_text, arguments in ((False, {"a": "b"}), (True, '{"a": "b"}')):
            call = {"type": "function", "function": {"name": "@@@", "arguments": arguments}}
            call["id"] = "a" * 9  # Mistral's templates expect nine characters
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            with contextlib.suppress(UserError):
                _, name, after = self.render([question, reply]).rpartition("@@@")
                if name and "{'" not in after:  # Python's text of a dict is not JSON
                    ends = self.special_ids(after)
                    is_other = self.end_text and self.end not in ends
                    return as_text, next(reversed(ends), None) if is_other else None
        return False, None  # rows with calls are errors

    def _renders(self, *messages: dict) -> bool:
        """Return whether the template renders the content @@@ of a message."""
        with contextlib.suppress(UserError):
            return "@@@" in self.render([*messages])
        return False

    def special_ids(self, text: str) -> Ids:
        """Return the special tokens in a text."""
        return self.tokenizer.convert_tokens_to_ids(self._special_in(text).findall(text))

    def text_of(self, token: int | None) -> str:
        """Return the text of a token, or "" if there is none."""
        return "" if token is None else self.tokenizer.decode([token])

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """Return the token ids that the model reads before it replies, in every script."""
        return self.ids(self.text(prompt))[0]

    def text(self, prompt: Prompt) -> str:
        """Return what the model reads before it replies."""
        self.check_supported(prompt if isinstance(prompt, list) else [])
        if self.templated:
            messages = messages_of(prompt)
            first = next((turn for turn in messages if turn["role"] == "user"), None)
            for turn in messages:
                self.check_turn("prompt", turn["content"] or "", turn["role"], turn is first)
            return self.render(messages, add_generation_prompt=True)
        if isinstance(prompt, str):
            return prompt
        turns = [f"{PLAIN_ROLES[turn['role']]} {turn['content']}" for turn in prompt]
        return "".join(turns) + PLAIN_ROLES["assistant"]

    def check_turn(self, name: str, text: str, role: str = "user", is_first: bool = False) -> None:
        """Raise UserError if the template cannot make a turn of a text.

        It begins as this template begins a conversation (what assistants and tools write may do
        so), or contains a token with which the template begins a turn. The first question, whose
        text may be all that there is of a conversation, may not begin like any other template.
        """
        shape = rendered(text) if is_first else None
        start = self._without_bos(text) if role not in ("assistant", "tool") else ""
        begin = shape[0] if shape else next(filter(start.startswith, self.begins), "")
        if begin:
            problem = f"begins with {data.shown(begin.strip())} (expected text without a template)"
            raise UserError(f"{name}: {problem}; use messages, or --chat_template none")
        # <s> is also the HTML of a text that is crossed out
        self.check_one_turn(name, text, (self.special.keys() & self.starts) - {"<s>"})

    def _without_bos(self, text: str) -> str:
        """Return the text without white space and BOS at its beginning."""
        return text.lstrip().removeprefix(self.tokenizer.bos_token or "").lstrip()

    def text_with_reply(self, prompt: Prompt, reply: Reply, text: str) -> str:
        """Return a prompt and a reply as one text, which ends as the template ends the reply.

        text: of the prompt. Raises UserError if the template drops text of the reply, unless
        thoughts are kept.
        """
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        self.check_supported([message])
        if not self.templated:
            return f"{text}{reply}" if isinstance(prompt, str) else f"{text} {reply}"
        messages = messages_of(prompt)
        ended = self.render([*messages, message]).removesuffix(self.after_end)
        full = ended.removesuffix(self.end_text)
        # a template may render the prompt differently once there is a reply
        same_prompt = full.startswith(text) or full.startswith(self.render(messages))
        if not same_prompt:
            other = self._after_another_prompt(text, message)
            same_prompt, ended = bool(other), other or ended
            full = ended.removesuffix(self.end_text)
        lost = lost_text(message, text, full)
        is_appended = (
            not same_prompt or (lost and self.keep_thoughts) or adds_thought(message, text, full)
        )
        if isinstance(reply, str) and is_appended:
            if self.before_reply.isspace():  # the reply begins with it, as in " Yes."
                reply = self.before_reply + reply.lstrip()
            return continued(text, reply) + self.end_text
        if lost:
            shown = reprlib.repr(full[common_prefix(text, full) :])
            problem = f"reply: the chat template renders {reprlib.repr(lost)} as {shown}"
            helps = isinstance(reply, str) and not self.keep_thoughts
            hint = "use --keep_thoughts, or another" if helps else "use another"
            raise UserError(f"{problem}; {hint} --chat_template")
        return ended

    def _after_another_prompt(self, text: str, message: dict) -> str:
        """Return a prompt and a reply as one text; the reply is rendered after QUESTION.

        This is for a prompt that the template renders differently once there is a reply. gpt-oss,
        for example, then drops the thought before an earlier call. Returns "" if the template does
        the same to QUESTION.
        """
        asked = self.text([QUESTION])
        answered = self.render([QUESTION, message]).removesuffix(self.after_end)
        return text + answered.removeprefix(asked) if answered.startswith(asked) else ""

    def one_turn(self, reply: Any) -> Any:
        """Return a reply without the ends in its text, since it gets one.

        Raises UserError if it contains the start of another turn, Unusable if an end is within.
        """
        if isinstance(reply, dict):
            return {**reply, "content": self.one_turn(reply["content"])}
        reply = self.brought.sub("", reply)
        self.check_one_turn("reply", reply, self.starts)
        if self.special_end and self.special_end in reply:
            raise data.Unusable("an end within a reply")
        return reply

    def check_one_turn(self, name: str, text: str, borders: Iterable[str]) -> None:
        """Raise UserError if a text contains one of the tokens that begin a turn."""
        for border in filter(text.__contains__, borders):
            problem = f"contains {data.shown(border)}, with which the chat template begins a turn"
            fix = "remove it, use messages, or --chat_template none"
            raise UserError(f"{name}: {problem} (expected the text of one turn); {fix}")

    def ids(self, *texts: str) -> list[Ids]:
        """Return the token ids of each text, with at most one BOS: a template may add a second.

        There is no end that the text does not have; some tokenizers add one to each text.
        """
        bos = self.tokenizer.bos_token_id
        add_bos = not self.templated
        ids_of_texts = self.tokenizer([*texts], add_special_tokens=add_bos, verbose=False).input_ids
        for ids in ids_of_texts:
            del ids[len(ids) - self.adds_end :]
            while bos is not None and ids[:2] == [bos, bos]:
                del ids[0]
        return ids_of_texts

    def ids_of_texts_that_begin_alike(self, text: str, *others: str) -> list[Ids]:
        """Return the same as ids(), but encode the beginning that all texts share only once.

        The beginning ends before a special token: a tokenizer encodes both sides independently.
        """
        start, stop = self.last_border(text)
        head = text[:start]
        if not stop or not all(other.startswith(text[:stop]) for other in others):
            return self.ids(text, *others)
        first, *rest = self.ids(head, *(full[len(head) :] for full in (text, *others)))
        return [first + ids for ids in rest]

    def last_border(self, text: str) -> tuple[int, int]:
        """Return start and stop of the last special token that divides a text; (0, 0) for none.

        The tokenizer takes the longest token at each place. There may be thousands of tokens.
        """
        last, stop = (0, 0), 0
        for match in self.border_starts.finditer(text):
            start = match.start()
            for length in self.border_lengths[match[0]] if start >= stop else ():
                token = text[start : start + length]
                if token in self.borders:
                    stop = start + length
                    last = (start, stop) if self.borders[token] else last
                    break
        return last

    def texts(self, replies: Iterable[Ids]) -> list[str]:
        """Return the texts of sampled replies, without special tokens and what is between them."""
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        end = decode(self.tokenizer(self.end_text, add_special_tokens=False).input_ids)
        return [decode(reply).removesuffix(end) for reply in replies]

    def encode(
        self, location: str, prompt: Prompt, chosen: Reply, rejected: Reply
    ) -> tuple[Pair, set[str]]:
        """Return the Pair of a prompt and two replies, which may be equal (for SFT), and notes.

        It is not truncated. notes: what the data report counts about the prompt's end.
        """
        chosen, rejected = self.one_turn(chosen), self.one_turn(rejected)
        if self.templated and isinstance(prompt, list):
            prompt = [self.one_turn(x) if x["role"] == "assistant" else x for x in prompt]
        text = self.text(prompt)
        replies = [chosen] if chosen == rejected else [chosen, rejected]
        full_texts = [self.text_with_reply(prompt, reply, text) for reply in replies]
        prompt_ids, *full_ids = self.ids_of_texts_that_begin_alike(text, *full_texts)
        boundary = common_prefix(prompt_ids, *full_ids)
        if boundary == 0:  # nothing before the first response token would predict it
            raise UserError(f"prompt: {text!r:.40} has no token of its own; use a longer one")
        notes = set() if self.templated or isinstance(prompt, str) else {PLAIN_TURNS}
        if boundary < len(prompt_ids):
            is_merged = all(full.startswith(text) for full in full_texts)
            notes.add("merged at the seam" if is_merged else NOT_CONTINUED)
        question, *answers = map(plain_text, (prompt, chosen, rejected))
        if len(question) >= 20 and all(answer.startswith(question) for answer in answers):
            notes.add(REPEATED)
        edges = [*map(FOREIGN_START.match, answers)] if self.templated else []
        edges += map(FOREIGN_END.search, answers)
        if any(edge and edge[0].strip() not in self.special for edge in edges):
            notes.add(FOREIGN)
        if self.templated and ASKING_END.search(question[-100:]):
            notes.add(ASKING)
        if any(answer.strip() in NO_VALUE for answer in answers):
            notes.add(MISSING)
        is_list = [bool(STRINGS.match(part)) for part in (question, *answers)]
        if is_list[0] or is_list[1] != is_list[2]:
            notes.add(LISTED)
        first, second = [ids[boundary:] + self.added_end for ids in (full_ids[0], full_ids[-1])]
        return Pair(prompt_ids[:boundary], first, second, location, question, answers[0]), notes

    def truncate(self, pair: Pair) -> Pair:
        """Shorten the prompt first, to a quarter of max_length at least, then the responses."""
        if pair.num_tokens <= self.max_length:
            return pair
        places, room = self.kept(pair)
        prompt = [pair.prompt[place] for place in places]
        chosen, rejected = pair.chosen[:room], pair.rejected[:room]
        return pair._replace(prompt=prompt, chosen=chosen, rejected=rejected)

    def kept(self, pair: Pair) -> tuple[list[int], int]:
        """Return which tokens of a prompt truncate() keeps, and how many of a response at most."""
        prompt, places = pair.prompt, [*range(len(pair.prompt))]
        room = self.max_length - max(len(pair.chosen), len(pair.rejected))
        room = max(room, min(len(prompt), self.max_length // 4), 1)
        if len(prompt) > room:
            bos = places[:1] if prompt[0] == self.tokenizer.bos_token_id and room > 1 else []
            tail = places[len(prompt) - room + len(bos) :]
            places = bos + tail if self.keep_end else places[:room]
        return places, self.max_length - len(places)


def today() -> str:
    """Return the date of today, such as 2026-11-26."""
    return datetime.date.today().isoformat()


def date_in(folder: str | Path, restart: bool = False) -> str:
    """Return the date that the chat template of a run writes; "" if there is none.

    restart: none is used, unless the launcher of the run has started its processes again.
    """
    file = Path(folder) / "environment.json"
    facts = data.read_json(file) if file.is_file() else {}
    if restart and not is_started_again(facts, start_facts()):
        return ""
    return facts.get("inputs", {}).get(DATE, "")


def date_of(folder: str, config: Any, world: World) -> str:
    """Return the date that a chat template writes in a run: the day of its first start.

    It is the same on all ranks. config: with `restart` and `check`.
    """
    world = World() if config.check else world  # a check has no process group
    return distributed.on_main(world, lambda: date_in(folder, config.restart) or today())


def choose_template(tokenizer: Any, choice: str) -> str:
    """Return the text of the chosen chat template, or "", and make it the tokenizer's default."""
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    if choice == "none" or (choice == "auto" and not templates):
        return ""
    name = "default" if choice == "auto" else choice
    if choice == "auto" and name not in templates:
        raise UserError(f"--chat_template: choose one of {', '.join(templates)}")
    if name not in templates and not data.resolve(name).is_file():
        names = "".join(f", {name}" for name in templates)
        raise UserError(f"--chat_template: no file {name}; use a .jinja file, auto, none{names}")
    template = templates.get(name) or data.content(name)
    templates = {**templates, "default": template}
    tokenizer.chat_template = templates if len(templates) > 1 else template
    return template


def rendered(prompt: str) -> re.Match | None:
    """Return how a prompt begins that the chat template of some model has rendered, or None."""
    shape = RENDERED.match(prompt.lstrip())
    if not shape and ASSISTANT_END.search(prompt.rstrip()[-100:]):
        shape = USER_START.match(prompt.lstrip())
    return shape


def lost_text(message: dict, text: str, full: str) -> str:
    """Return the part of a reply that is not in its rendering, except for white space, or "".

    text: of the prompt; full: of the prompt and the reply.
    """
    parts = [message.get(name) for name in ("content", *THOUGHTS)]
    parts += [call["function"]["name"] for call in message.get("tool_calls", [])]
    start = common_prefix(text, full)
    for part in filter(None, parts):
        # the prompt's text may end with the beginning of the reply, such as <think>
        rendered = without_space(full[max(0, start - len(part)) :])
        if rendered.count(without_space(part)) < parts.count(part):  # two calls may be alike
            return part
    return ""


def adds_thought(message: dict, text: str, full: str) -> bool:
    """Return whether a thought of the reply, perhaps an unfinished one, got an empty one as well.

    text: of the prompt; full: of the prompt and the reply.
    """
    reply, end = message["content"] or "", "</think>"
    has_thought = "<think>" in reply or end in reply
    return has_thought and full.count(end) > text.count(end) + reply.count(end)


def continued(text: str, reply: str) -> str:
    """Return the reply after the text; an opening <think> of both is there once."""
    opening = re.match(r"\s*(<\w+>)\s*", reply)
    if opening and text.rstrip().endswith(opening[1]):
        reply = reply[opening.end() :]
    return text + reply


def without_space(text: str) -> str:
    """Return the text without white space, which templates change."""
    return "".join(text.split())


def truncation_warning(split: str, truncated: int, rows: int, flag: str) -> list[str]:
    """Return a warning of one line, or none, about the rows that are longer than a flag allows."""
    if truncated <= 0.1 * rows:
        return []
    hint = "a larger value needs more memory and time"
    return [f"warning: {split}: {truncated} of {rows} rows are longer than {flag}; {hint}"]


def messages_of(prompt: Prompt) -> list[dict]:
    """Return a prompt as messages; a text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def plain_text(turns: Prompt | Reply) -> str:
    """Return a prompt or reply without a template: the text of a single turn, or all turns."""
    if isinstance(turns, str):
        return turns
    if isinstance(turns, dict):
        return turns["content"] or json.dumps(turns.get("tool_calls", ""))
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


def one_of(texts: Iterable[str]) -> re.Pattern:
    """Return a pattern that matches each of these texts, the longest first; of none, nothing."""
    longest_first = sorted({*texts}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def common_prefix(*sequences: Any) -> int:
    """Return how many leading items all sequences (token ids, or texts) share."""
    shortest = min(sequences, key=len)
    if all(sequence[: len(shortest)] == shortest for sequence in sequences):
        return len(shortest)  # the usual case; the line below compares item by item
    return len(os.path.commonprefix(sequences))


def borders_of(tokenizer: Any) -> dict[str, bool]:
    """Return the special tokens at which a tokenizer splits a text before anything else.

    The value is True if the text before the token can be encoded independently. The result is empty
    for a tokenizer that is written in Python or that splits special tokens.
    """
    if not tokenizer.is_fast or tokenizer.split_special_tokens:
        return {}
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if not token.normalized]
    names = [token.content for token in tokens]
    # a second BOS is removed from the beginning of a text, see Encoder.ids()
    others = {tokenizer.bos_token, *(t.content for t in tokens if t.lstrip or t.single_word)}
    text = "\0".join(names)
    others |= {name for name in names if text.count(name) > 1}  # a longer token contains it
    return {name: name not in others for name in names}


def lengths_by_first(names: Iterable[str]) -> dict[str, list[int]]:
    """Return first character -> lengths of the names that begin with it, the longest first."""
    lengths: dict[str, list[int]] = {}
    for name in sorted(names, key=len, reverse=True):
        own = lengths.setdefault(name[0], [])
        if len(name) not in own:
            own.append(len(name))
    return lengths


# --- rows and messages ----------------------------------------------------------------------------


def system_of(record: Record) -> list[dict]:
    """Return the system message of a row, if there is one."""
    texts = [*optional_text(record, "system"), *optional_text(record, "system_prompt")]
    if len(texts) > 1:
        raise UserError(f"{record.location}: system_prompt: there is also system; remove one")
    return [{"role": "system", "content": text} for text in texts]


def optional_text(record: Record, field: str) -> list[str]:
    """Return [text], or [] if it is absent, null or empty, as columns of a table are.

    Alpaca's <noinput>, and what pandas writes of a missing text, count as empty.
    """
    value = record.data.get(field)
    is_empty = value is None or str(value).strip() in ("", "<noinput>", "nan", "<NA>")
    return [] if is_empty else [data.text(record, field)]


def ignoring(field: str) -> str:
    """Return the hint that a field of all rows can be ignored with --columns."""
    ours = re.sub(r"\W", "_", f"ignored_{field}")
    return f"use --columns {ours}={field} to ignore this field"


def check_text_only(record: Record, path: str, value: Any, may_be_0: bool = False) -> bool:
    """Return whether a row or message is trained: no weight of it is 0.

    Raises UserError if it is not an object, or has media, a weight that is neither 1 nor 0, or a
    weight of 0 that it must not have.
    """
    if not isinstance(value, dict):
        raise data.wrong_value(record, path, value, "an object, {...}")
    place = f"{path}." if path else ""
    for key in filter(value.get, MEDIA):
        raise UserError(f"{record.location}: {place}{key}: only text is supported; remove it")
    weights = {key: WEIGHT_OF.get(str(value.get(key)).lower()) for key in WEIGHTS}
    for key, weight in weights.items():
        if weight is None or not (weight or may_be_0):
            expected = "1 or true (use only such rows)"
            error = data.wrong_value(record, place + key, value[key], expected)
            raise error if path else UserError(f"{error}; {ignoring(key)}")
    return all(weights.values())
