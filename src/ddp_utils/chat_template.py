"""The texts of a row -> token ids of prompt, chosen and rejected.

The three share one prompt: the common prefix of the tokens of prompt, prompt + chosen and
prompt + rejected. Where a tokenizer merges across the boundary, the merged token belongs to the
response, so that no response token is lost and no prompt token is trained.
"""

import contextlib
import copy
import json
import os.path
import re
from typing import Any

import transformers
from jinja2 import TemplateError

from ddp_utils import UserError, data, models
from ddp_utils.data import Prompt, Reply
from ddp_utils.logps import Pair

# what a template silently leaves out if it does not mention it
NEED_SUPPORT = {"tool", "developer", "tools", "tool_calls", "reasoning_content"}
TEMPLATE_ERRORS: tuple = (TemplateError, *models.FAULTS)  # a template is a program
PLAIN_ROLES = {"system": "\n\nSystem:", "user": "\n\nHuman:", "assistant": "\n\nAssistant:"}

Ids = list[int]  # token ids


class Encoder:
    """Encodes a row as a Pair: template, prompt boundary, end of the reply, truncation.

    chat_template: "auto" (the tokenizer's, if it has one), "none", or a .jinja file.
    max_length: in tokens, of a prompt and a response.
    truncation: "keep_end" or "keep_start" of the prompt.
    kwargs: arguments of the template besides the messages, as the text of a JSON object.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str = "auto",
        max_length: int = 1024,
        truncation: str = "keep_end",
        kwargs: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.keep_end = truncation == "keep_end"
        if chat_template not in ("auto", "none"):
            if not data.resolve(chat_template).is_file():
                problem = f"no file {chat_template}; use a .jinja file, auto or none"
                raise UserError(f"--chat_template: {problem}")
            tokenizer.chat_template = data.content(chat_template)
        self.templated = chat_template != "none" and bool(tokenizer.chat_template)
        self.template = tokenizer.chat_template if self.templated else ""
        self.template_words = set(re.findall(r"\w+", self.template))
        self.end = tokenizer.eos_token_id  # the token that ends a reply, or None
        self.after_reply = ""  # the template's text after a reply
        self.kwargs = self.check_arguments(kwargs or {}, "--chat_template_kwargs")
        if self.templated:
            self._find_end_of_reply()

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
        settings = self.template, self.kwargs, self.max_length, self.keep_end
        return [vocabulary, special, *settings, transformers.__version__]

    @property
    def ends(self) -> Ids:
        """Return the token ids at which a sampled reply is over."""
        ends = dict.fromkeys((self.end, self.tokenizer.eos_token_id))  # self.end first
        return [token for token in ends if token is not None]

    def render(self, messages: list[dict], **options: Any) -> str:
        """Return the template's text; without a system role, its text precedes the first turn."""
        try:
            options |= self.kwargs
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except TEMPLATE_ERRORS as error:
            if messages[0]["role"] != "system" or len(messages) < 2:
                raise UserError(f"--chat_template: {models.first_line(error)}") from error
            system, first, *rest = messages
            first = {**first, "content": f"{system['content']}\n\n{first['content']}"}
            return self.render([first, *rest], **options)

    def check_arguments(self, value: str | dict, place: str) -> dict:
        """Return arguments, perhaps given as JSON; raise UserError for one the template lacks."""
        arguments = data.decode(value, place) if isinstance(value, str) else value
        if not isinstance(arguments, dict):
            raise UserError(f'{place}: must be an object, such as {{"enable_thinking": false}}')
        for name in arguments:
            if name not in self.template_words or name in ("messages", "add_generation_prompt"):
                problem = f"the chat template does not use {data.shown(name)}; remove it"
                raise UserError(f"{place}: {problem}")
        return arguments

    def check_supported(self, messages: list[dict]) -> None:
        """Raise UserError for a role or field that the template would silently leave out."""
        for message in messages:
            for name in NEED_SUPPORT & {*message, message["role"]} - self.template_words:
                hint = "use another --chat_template"
                raise UserError(f"the chat template does not support {name}; {hint}")

    def _find_end_of_reply(self) -> None:
        """Set `after_reply` and `end` by rendering a reply; also test for any roles."""
        question = {"role": "user", "content": "u"}
        with contextlib.suppress(UserError):
            if "@@@" in self.render([{"role": "@", "content": "@@@"}, question]):
                self.template_words |= {"tool", "developer"}  # it renders every role
        rendered = self.render([question, {"role": "assistant", "content": "@@@"}])
        self.after_reply = rendered.rsplit("@@@", 1)[-1]
        ids = self.tokenizer(self.after_reply, add_special_tokens=False).input_ids
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        self.end = next((token for token in ids if token in special), self.end)

    def text(self, prompt: Prompt) -> str:
        """Return what the model reads before it replies."""
        self.check_supported(prompt if isinstance(prompt, list) else [])
        if self.templated:
            return self.render(messages_of(prompt), add_generation_prompt=True)
        if isinstance(prompt, str):
            return prompt
        turns = [f"{PLAIN_ROLES[turn['role']]} {turn['content']}" for turn in prompt]
        return "".join(turns) + PLAIN_ROLES["assistant"]

    def text_with_reply(self, prompt: Prompt, reply: Reply, text: str) -> str:
        """Return a prompt and a reply as one text, which ends with the reply.

        text: of the prompt.
        """
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        self.check_supported([message])
        if not self.templated:
            return f"{text}{reply}" if isinstance(prompt, str) else f"{text} {reply}"
        messages = messages_of(prompt)
        full = self.render([*messages, message]).removesuffix(self.after_reply)
        # a template may render the prompt differently once there is a reply
        same_prompt = full.startswith(text) or full.startswith(self.render(messages))
        return full if same_prompt or isinstance(reply, dict) else f"{text}{reply}"

    def ids(self, *texts: str) -> list[Ids]:
        """Return the token ids of each text, with at most one BOS: a template may add a second."""
        bos = self.tokenizer.bos_token_id
        add_bos = not self.templated
        ids_of_texts = self.tokenizer([*texts], add_special_tokens=add_bos, verbose=False).input_ids
        for ids in ids_of_texts:
            while bos is not None and ids[:2] == [bos, bos]:
                del ids[0]
        return ids_of_texts

    def encode(
        self, location: str, prompt: Prompt, chosen: Reply, rejected: Reply
    ) -> tuple[Pair, set[str]]:
        """Return the Pair of a prompt and two replies, which may be equal (for SFT), and notes.

        notes: what the data report counts, "truncated" or "merged at the seam".
        """
        text = self.text(prompt)
        replies = [chosen] if chosen == rejected else [chosen, rejected]
        full_texts = [self.text_with_reply(prompt, reply, text) for reply in replies]
        prompt_ids, *full_ids = self.ids(text, *full_texts)
        boundary = common_prefix(prompt_ids, *full_ids)
        if boundary == 0:  # nothing before the first response token would predict it
            raise UserError(f"prompt: {text!r:.40} has no token of its own; use a longer one")
        notes = {"merged at the seam"} if boundary < len(prompt_ids) else set()
        responses = [self.with_end(ids[boundary:]) for ids in (full_ids[0], full_ids[-1])]
        parts = prompt_ids[:boundary], responses[0], responses[1]
        truncated = self.truncate(*parts)
        if truncated != parts:
            notes.add("truncated")
        return Pair(*truncated, location, plain_text(prompt), plain_text(chosen)), notes

    def with_end(self, response: Ids) -> Ids:
        """Return the response with exactly one end token, which is trained, if there is one."""
        length = len(response)
        while length and response[length - 1] in self.ends:
            length -= 1
        return response[:length] + ([] if self.end is None else [self.end])

    def truncate(self, prompt: Ids, chosen: Ids, rejected: Ids) -> tuple[Ids, Ids, Ids]:
        """Shorten the prompt first, to a quarter of max_length at least, then the responses."""
        room = self.max_length - max(len(chosen), len(rejected))
        room = max(room, min(len(prompt), self.max_length // 4), 1)
        if len(prompt) > room:
            bos = prompt[:1] if prompt[0] == self.tokenizer.bos_token_id and room > 1 else []
            tail = prompt[len(prompt) - room + len(bos) :]
            prompt = bos + tail if self.keep_end else prompt[:room]
        room = self.max_length - len(prompt)
        return prompt, chosen[:room], rejected[:room]


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


def common_prefix(*sequences: Ids) -> int:
    """Return how many leading items all sequences share."""
    return len(os.path.commonprefix(sequences))
