from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from asynckv.observability.lines import as_line, redacted, without_passwords


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("layer 3 of Qwen/é 模型", "layer 3 of Qwen/é 模型"),
        ("x\nCRITICAL root: hacked", "x\\nCRITICAL root: hacked"),
        ("\x1b[31mred\r", "\\x1b[31mred\\r"),
        ("\u2028next\u202edaer\ud800", "\\u2028next\\u202edaer\\ud800"),
    ],
)
def test_what_would_not_stay_in_line_is_escaped(text: str, line: str) -> None:
    assert as_line(text) == line


def test_a_line_has_an_end() -> None:
    assert as_line("abc\n" * 100, max_chars=4) == "abc\\n"


@given(st.text(st.characters()))
def test_a_line_is_one_line_that_any_terminal_can_show(text: str) -> None:
    line = as_line(text)
    assert line.isprintable()
    assert len(line.splitlines()) <= 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pa:ss@h:1/0", "redis://user:***@h:1/0"),
        ("redis://:pass@h", "redis://:***@h"),
        ("rediss://h?password=p&db=1", "rediss://h?password=***&db=1"),
        ("s3://b/x?secret_key=k&SIGNATURE=s", "s3://b/x?secret_key=***&SIGNATURE=***"),
        ("disk:///var/kv?max=100GiB", "disk:///var/kv?max=100GiB"),
        ("s3://b/who@where:1", "s3://b/who@where:1"),
        ("redis://h/\nfake line", "redis://h/\\nfake line"),
        ("redis://:pa/ss@h:1", "redis://:***@h:1"),
        ("redis://us/er:p?s#s@h:1/0", "redis://us/er:***@h:1/0"),
        ("redis://u:p@s/s@h:1/0", "redis://u:***@h:1/0"),
        ("redis://h:1/0?password=p@ss&x=1", "redis://***"),
        ("redis://u:p?key=a@h:1/0", "redis://***"),
    ],
)
def test_a_url_is_shown_without_what_is_secret(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_a_text_is_shown_without_passwords_in_it() -> None:
    shown = "'redis://u:***@h': no user belongs in it"
    assert without_passwords("'redis://u:pa/ss@h': no user belongs in it") == shown
    assert (
        without_passwords("tcp://127.0.0.1:7000, or b") == "tcp://127.0.0.1:7000, or b"
    )
