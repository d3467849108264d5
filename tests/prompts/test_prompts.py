from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import UsageError
from kvtide.prompts import BODY_KEYS, KEYS, Prompt, parse_prompt, read_prompts

USER = {"role": "user", "content": "Hi"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "prompts.md"
EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def _write(folder: Path, *lines: str | bytes) -> str:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return str(path)


def test_prompt_becomes_one_message_of_the_user(tmp_path: Path) -> None:
    """A plain prompt is a conversation of one turn, without settings."""
    path = _write(tmp_path, '{"id": "a", "prompt": "Hi"}')
    assert [Prompt(f"{path}, line 1", "a", (USER,), is_chat=False)] == read_prompts(path)


def test_messages_and_settings_are_kept(tmp_path: Path) -> None:
    """A line's settings are kept, and a temperature may be a whole number."""
    system = {"role": "system", "content": "Be brief."}
    said = {"max_new_tokens": 3, "temperature": 1, "seed": 0, "top_p": 0.5, "top_k": 7}
    line = {"id": "b", "messages": [system, USER], **said, "logprobs": 2, "n": 4}
    path = _write(tmp_path, json.dumps(line))
    expected = Prompt(
        f"{path}, line 1",
        "b",
        (system, USER),
        is_chat=True,
        settings={**said, "logprobs": 2},
        sample_count=4,
    )
    assert [expected] == read_prompts(path)


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        ("max_tokens", 3, {"max_new_tokens": 3}),
        ("stop", "END", {"stop": ("END",)}),
        ("stop", ["END", "\n"], {"stop": ("END", "\n")}),
        ("stop", [], {"stop": ()}),
    ],
)
def test_settings_have_the_names_that_people_use(
    key: str, value: object, setting: dict[str, object]
) -> None:
    """The names of OpenAI's API are accepted too."""
    line = json.dumps({"id": "a", "prompt": "x", key: value}).encode()
    assert setting == parse_prompt(line, where="f, line 1").settings


def test_prompts_know_their_places(tmp_path: Path) -> None:
    """A place is the number among the prompts; blank lines between them don't count."""
    path = _write(tmp_path, '{"id": "z", "prompt": "1"}', "", '{"id": "a", "prompt": "2"}')
    assert [("z", 0), ("a", 1)] == [(prompt.id, prompt.place) for prompt in read_prompts(path)]


def test_answers_of_two_prompts_have_different_names(tmp_path: Path) -> None:
    """A prompt with several answers gives each a name, which no other prompt may have."""
    lines = ('{"id": "a", "prompt": "1"}', '{"id": "a#1", "prompt": "2"}')
    path = _write(tmp_path, *lines)
    assert ["a", "a#1"] == [prompt.id for prompt in read_prompts(path)]
    with pytest.raises(UsageError, match=r'line 2: ids "a#1" and "a" \(line 1\) would both have'):
        read_prompts(path, sample_count=2)


def test_null_settings_are_as_if_absent(tmp_path: Path) -> None:
    """Programs write null for a setting that isn't set."""
    line = {"id": "a", "prompt": "p"} | dict.fromkeys(KEYS[3:])
    (prompt,) = read_prompts(_write(tmp_path, json.dumps(line)))
    assert ({}, None) == (prompt.settings, prompt.sample_count)


def test_order_is_kept_and_blank_lines_count_but_are_skipped(tmp_path: Path) -> None:
    """A byte order mark and carriage returns, which Windows editors write, change nothing."""
    path = _write(
        tmp_path,
        b'\xef\xbb\xbf{"id": "z", "prompt": "1"}\r',
        "",
        "  ",
        '{"id":"a","prompt":"2"}',
        "",
    )
    assert [("z", f"{path}, line 1"), ("a", f"{path}, line 4")] == [
        (prompt.id, prompt.where) for prompt in read_prompts(path)
    ]


def test_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` means standard input, and errors name it so."""
    raw = b'{"id": "a", "prompt": "Hi"}\n'
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(raw)))
    assert ["standard input, line 1"] == [prompt.where for prompt in read_prompts("-")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("hello", "is not JSON"),
        ('{"id": "a", "prompt": "Hi"', "is not JSON"),
        ('{"id": "a", "prompt": "Hi"} {}', "is not JSON"),
        (b'{"id": "a", "prompt": "\xff"}', "is not UTF-8 (byte 24: 0xff)"),
        ("[" * 100_000, "nested too deeply"),
        ('{"id": "a", "prompt": "x", "seed": ' + "9" * 5000 + "}", ""),
        ('["a"]', "is a list, not a JSON object"),
        ('"a"', "is a string, not a JSON object"),
        ("null", "is null, not a JSON object"),
        ("{}", "lacks an 'id'"),
        ('{"prompt": "Hi"}', "lacks an 'id'"),
        ('{"id": "a"}', "lacks a 'prompt' or 'messages'"),
        ('{"id": "a", "prompt": "x", "messages": []}', "both 'prompt' and 'messages'"),
        ('{"id": "a", "prompt": "x", "prompt": "y"}', 'key "prompt" appears twice'),
        ('{"id": "a", "prompt": "x", "max_token": 3}', 'unknown key "max_token"'),
        ('{"id": 1, "prompt": "x"}', "'id' is a number (1), not a string"),
        ('{"id": "", "prompt": "x"}', "'id' is empty"),
        ('{"id": "a", "prompt": null}', "'prompt' is null, not a string"),
        ('{"id": "a", "prompt": ["x"]}', "'prompt' is a list, not a string"),
        ('{"id": "a", "prompt": ""}', "'prompt' is empty"),
        ('{"id": "a", "prompt": "\\ud800"}', "'prompt' has half a surrogate pair at character 1"),
        ('{"id": "a", "prompt": "x", "tools": [{}]}', "has 'tools', which need 'messages'"),
        ('{"id": "a", "prompt": "x", "max_new_tokens": -1}', "'max_new_tokens' is -1"),
        ('{"id": "a", "prompt": "x", "max_new_tokens": 0}', "'max_new_tokens' is 0"),
        ('{"id": "a", "prompt": "x", "max_new_tokens": 1.5}', "not a whole number"),
        ('{"id": "a", "prompt": "x", "max_new_tokens": true}', "is true or false"),
        ('{"id": "a", "prompt": "x", "max_new_tokens": "3"}', "is a string, not a whole"),
        ('{"id": "a", "prompt": "x", "max_new_tokens": 1' + "0" * 30 + "}", "must be from 1 to"),
        ('{"id": "a", "prompt": "x", "temperature": NaN}', "NaN is not a JSON number"),
        ('{"id": "a", "prompt": "x", "temperature": Infinity}', "Infinity is not a JSON number"),
        (
            '{"id": "a", "prompt": "x", "temperature": 1e999}',
            "1e999 is larger than any",
        ),
        ('{"id": "a", "prompt": "x", "temperature": 1' + "0" * 400 + "}", "'temperature' is inf"),
        ('{"id": "a", "prompt": "x", "temperature": -0.5}', "'temperature' is -0.5"),
        ('{"id": "a", "prompt": "x", "temperature": 1e-9}', "'temperature' is 1e-09"),
        ('{"id": "a", "prompt": "x", "temperature": "hot"}', "is a string, not a number"),
        ('{"id": "a", "prompt": "x", "seed": -1}', "'seed' is -1"),
        ('{"id": "a", "prompt": "x", "seed": 9223372036854775808}', "must be from 0 to"),
        (
            '{"id": "a", "prompt": "x", "max_tokens": 3, "max_new_tokens": 3}',
            "has both 'max_new_tokens' and 'max_tokens'; keep one",
        ),
        ('{"id": "a", "prompt": "x", "top_p": 0}', "'top_p' is 0.0; it must be above 0"),
        ('{"id": "a", "prompt": "x", "top_k": -1}', "'top_k' is -1"),
        ('{"id": "a", "prompt": "x", "stop": 3}', "'stop' is a number (3), not a string or a list"),
        ('{"id": "a", "prompt": "x", "stop": ""}', "'stop' is empty"),
        ('{"id": "a", "prompt": "x", "stop": ["a", ""]}', "'stop[1]' is empty"),
        ('{"id": "a", "prompt": "x", "stop": ["a", 1]}', "'stop[1]' is a number (1), not a string"),
        ('{"id": "a", "prompt": "x", "n": 0}', "'n' is 0; it must be from 1 to 128"),
        ('{"id": "a", "prompt": "x", "logprobs": 21}', "'logprobs' is 21; it must be from 0 to 20"),
        ('{"id": "first", "prompt": "x"}', 'id "first" was used in line 1'),
    ],
)
def test_bad_line_is_refused_with_its_number(
    tmp_path: Path, line: str | bytes, complaint: str
) -> None:
    """The error for line 3 is one line: the file, the line's number and the mistake."""
    path = _write(tmp_path, '{"id": "first", "prompt": "x"}', "", line, "not reached")
    with pytest.raises(UsageError) as error:
        read_prompts(path)
    message = str(error.value)
    assert message.startswith(f"{path}, line 3: ")
    assert complaint in message
    assert "\n" not in message
    assert len(message) < len(path) + 250


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    """The file is called .txt; ids are the lines' numbers, and a prompt keeps its spaces."""
    path = tmp_path / "prompts.TXT"
    path.write_bytes(b'\xef\xbb\xbf  Hi \r\n\n"quoted"\n')
    prompts = read_prompts(str(path))
    assert [("line-1", "  Hi "), ("line-3", '"quoted"')] == [
        (prompt.id, prompt.messages[0]["content"]) for prompt in prompts
    ]
    assert f"{path}, line 3" == prompts[1].where
    assert prompts == read_prompts(str(path), input_format="text")


def test_only_a_file_called_txt_is_plain_text(tmp_path: Path) -> None:
    """A damaged file of JSON, or one of another kind, must not become prompts of its lines."""
    path = _write(tmp_path, "Why is the sky blue?")
    with pytest.raises(UsageError, match=r"line 1: is not a JSON object .* --input-format text"):
        read_prompts(path)
    assert ["line-1"] == [prompt.id for prompt in read_prompts(path, input_format="text")]
    path = str(Path(path).rename(tmp_path / "prompts.txt"))
    Path(path).write_text('{"id": "a", "prompt": "x"}')
    with pytest.raises(UsageError, match=r"line 1: looks like JSON, but the file is called \.txt"):
        read_prompts(path)
    assert ["a"] == [prompt.id for prompt in read_prompts(path, input_format="jsonl")]
    assert ["line-1"] == [prompt.id for prompt in read_prompts(path, input_format="text")]


def test_plain_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """The error names the line and the byte, as it does for JSON."""
    path = _write(tmp_path, b"ok", b"caf\xe9")
    with pytest.raises(UsageError, match=r"line 2: is not UTF-8 \(byte 4: 0xe9\)"):
        read_prompts(path, input_format="text")


def test_the_first_line_says_whether_the_file_is_a_batch(tmp_path: Path) -> None:
    """The rest must be alike: its answers come in one format."""
    body = {"messages": [USER]}
    batch = json.dumps({"custom_id": "b", "url": "/v1/chat/completions", "body": body})
    line = '{"id": "a", "prompt": "x"}'
    assert [True, True] == [
        prompt.is_openai
        for prompt in read_prompts(_write(tmp_path, batch, batch.replace('"b"', '"c"')))
    ]
    with pytest.raises(UsageError, match='line 2: unknown key "id"; known are custom_id'):
        read_prompts(_write(tmp_path, batch, line))
    with pytest.raises(UsageError, match='line 2: unknown key "custom_id"'):
        read_prompts(_write(tmp_path, line, batch))
    with pytest.raises(UsageError, match='line 1: unknown key "id"'):
        read_prompts(_write(tmp_path, line), input_format="openai")


@pytest.mark.parametrize("raw", [b"", b"\n \n\r\n", b"\xef\xbb\xbf"])
def test_file_without_prompts_is_refused(tmp_path: Path, raw: bytes) -> None:
    """An empty file is a mistake, not a run without requests."""
    path = tmp_path / "empty.jsonl"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=r"empty\.jsonl has no prompts"):
        read_prompts(str(path))


def test_examples_are_24_prompts_of_both_kinds() -> None:
    """The examples have conversations, and prompts with their own settings."""
    prompts = read_prompts(str(EXAMPLES))
    assert 24 == len({prompt.id for prompt in prompts}) == len(prompts)
    assert any(prompt.is_chat for prompt in prompts)
    assert any("max_new_tokens" in prompt.settings for prompt in prompts)
    assert any("temperature" in prompt.settings for prompt in prompts)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file and a folder are named with the system's reason."""
    with pytest.raises(UsageError, match=r"cannot read prompts from .*nowhere: No such file"):
        read_prompts(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"cannot read prompts from .*: Is a directory"):
        read_prompts(str(tmp_path))


def test_documented_lines_can_be_read_and_every_key_is_documented(tmp_path: Path) -> None:
    """The document has kvtide's own lines and the batch format."""
    text = DOCUMENT.read_text(encoding="utf-8")
    plain, batch = re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert ["sky", "two"] == [prompt.id for prompt in read_prompts(_write(tmp_path, plain))]
    assert [True] == [prompt.is_openai for prompt in read_prompts(_write(tmp_path, batch))]
    unnamed = [key for key in (*KEYS, *BODY_KEYS) if f"`{key}`" not in text]
    assert [] == unnamed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.binary()
    | st.dictionaries(st.sampled_from(KEYS) | st.text(), json_values).map(
        lambda fields: json.dumps(fields).encode()
    )
)
def test_any_bytes_give_a_prompt_or_a_usage_error(raw: bytes) -> None:
    """No line of a file ends in a traceback."""
    try:
        prompt = parse_prompt(raw, where="f, line 1")
    except UsageError as error:
        assert str(error).startswith("f, line 1: ")  # noqa: PT017 - either outcome is right
    else:
        assert prompt.id
        assert prompt.messages
