"""Any content of a file, flag or path is accepted, or is an error of one short line."""

import contextlib
import dataclasses
import functools
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import config as config_module
import reading
from config import Config
from conftest import ROOT
from ddp_utils import UserError, cli, data
from lm.chat_template import Encoder
from lm.models import load_tokenizer

# what a library warns of would be a second line
pytestmark = pytest.mark.filterwarnings("error::UserWarning")
FIELDS = [field.name for field in dataclasses.fields(Config)]
FILES = sorted((ROOT / "tests/data/formats").iterdir())
ROWS = [record.data for file in FILES for record in data.read(file)]
ROWS += [{"instruction": "i", "input": "j", "output": "o", "history": [["q", "a"]]}] * 3
ROWS += [
    {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
] * 3

# every letter, those that end a line and half surrogate pairs among them
letters = st.text(st.characters(), max_size=20) | st.sampled_from(["\n", "\u2028", "\ud800", "\0"])
numbers = st.integers(-(10**30), 10**30) | st.floats() | st.sampled_from([0, -1, 0.5, 2**63])
values = st.recursive(
    st.none() | st.booleans() | numbers | letters,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(letters, inner, max_size=4),
    max_leaves=8,
)


def fuzz(count):
    """The same examples in every run: a test that fails today has failed yesterday."""
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


def accepts(fn, *args):
    """Return whether a function accepts its arguments; check that its error is one short line."""
    try:
        fn(*args)
    except UserError as error:
        message = str(error)
        assert message and message.splitlines() == [message]
        assert len(message.replace(str(args[0]), "FILE")) <= 400
        return False
    return True


templates = st.sampled_from(["auto", "none"])


@functools.cache
def encoder(template):
    return Encoder(load_tokenizer("data/demo/model"), template, max_length=64)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "file"


def read_all(file, content, template):
    """Each reader on one content, and what must hold between them."""
    file.write_bytes(content)
    read = accepts(lambda path: list(data.read(path)), file)
    used = accepts(reading.pairs, file, encoder(template))
    tolerant = accepts(reading.pairs, file, encoder(template), -1, "skip")
    accepts(reading.texts, file, encoder(template))
    assert read or not used, "pairs are made of records"
    assert tolerant or not used, "skipping bad rows accepts no less"


# --- data files ----------------------------------------------------------------------------------

PARTS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\n", b"\r\n", b" ", b"\\", b"\\ud800", b"\xff"]
PARTS += [b'"prompt"', b'"chosen"', b'"rejected"', b"NaN", b"1e999", b"-1", b"null", b"\x1f\x8b"]
PARTS += [b"\xef\xbb\xbf", b"\0", b'{"prompt": "p", "chosen": "a", "rejected": "b"}']
PARTS += [b'{"a\\nb": 1, "a\\nb": 1}']


@fuzz(100)
@given(st.lists(values, min_size=1, max_size=3), st.booleans(), st.booleans(), templates)
def test_any_json(file, rows, escaped, as_list, template):
    if as_list:
        rows = [rows]
    text = "\n".join(json.dumps(row, ensure_ascii=escaped) for row in rows)
    read_all(file, text.encode("utf-8", "surrogatepass"), template)


@st.composite
def damaged_bytes(draw):
    """A good file of any format, with up to three pieces cut out, put in or doubled."""
    content = b"\n".join(json.dumps(row).encode() for row in ROWS[: draw(st.integers(1, 3))])
    content = draw(st.sampled_from([content, draw(st.sampled_from(FILES)).read_bytes()]))
    for _ in range(draw(st.integers(1, 3))):
        start, length = draw(st.integers(0, len(content))), draw(st.integers(0, 30))
        piece = content[start : start + length]
        put = draw(st.sampled_from([b"", piece * 2, *PARTS]) | st.binary(max_size=4))
        content = content[:start] + put + content[start + length :]
    return content


@fuzz(150)
@given(damaged_bytes(), templates)
def test_any_damage_to_a_good_file(file, content, template):
    read_all(file, content, template)


@st.composite
def changed_row(draw):
    """A good row in which one part, however deep, is another one or gone."""
    row = json.loads(json.dumps(draw(st.sampled_from(ROWS))))
    part = row
    key = draw(st.sampled_from(sorted(row)))
    while part[key] and isinstance(part[key], dict | list) and draw(st.booleans()):
        part = part[key]
        key = draw(st.sampled_from(range(len(part)) if isinstance(part, list) else sorted(part)))
    if draw(st.booleans()) and isinstance(part, dict):
        part[draw(letters)] = part.pop(key)
    else:
        part[key] = draw(letters | values)
    return row


@fuzz(150)
@given(changed_row(), st.booleans(), templates)
def test_any_other_value_in_a_good_row(file, row, escaped, template):
    text = json.dumps(row, ensure_ascii=escaped)
    read_all(file, text.encode("utf-8", "surrogatepass"), template)


# --- settings ------------------------------------------------------------------------------------


def check(config):
    cli.check_types(config)
    config_module.check(config)


@fuzz(150)
@given(st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3))
def test_any_value_in_an_edited_file(changes):
    accepts(check, dataclasses.replace(Config(), **changes))


words = st.sampled_from([f"--{name}" for name in FIELDS]) | letters
numerals = numbers.map(str) | st.sampled_from(["1_000", "\u0663", "1e400", "nan", "", "None", "-"])


def parse(flags):
    """Parse and check; --help ends with status 0."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check(cli.parse(Config, flags))
    except SystemExit as stop:
        assert stop.code == 0 and {"-h", "--help"} & {*flags}


@fuzz(100)
@given(st.lists(words | numerals, max_size=4))
def test_any_flags(flags):
    accepts(parse, flags)
