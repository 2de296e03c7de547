"""docs/configuration.md and the README list the options that exist, with their defaults."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from sglang_psd.config import FLAG_FIELDS, PSDConfig, flag_name

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z_]+)` \| ([^|]*) \|", re.MULTILINE)


def documented() -> dict[str, str]:
    """Key to default, as the page's tables say."""
    found = ROW.findall(PAGE)
    assert len(found) == len(dict(found)), "a key stands in two rows"
    return dict(found)


def test_every_option_is_documented_and_no_other() -> None:
    assert set(documented()) == {field.name for field in dataclasses.fields(PSDConfig)}


def test_defaults_are_those_of_the_code() -> None:
    """Where the default is a value; None stands for what the page says in words."""
    page = documented()
    for field in dataclasses.fields(PSDConfig):
        if field.default is None:
            assert page[field.name] != "null"
        else:
            said = page[field.name].strip("`")
            default = field.default
            assert said == default or json.loads(said) == default, field.name


def test_options_with_a_flag_come_first() -> None:
    """The page says that only those of the first table have one."""
    assert list(documented())[: len(FLAG_FIELDS)] == list(FLAG_FIELDS)


def test_the_readme_lists_every_flag() -> None:
    listed = set(re.findall(r"`(--psd-[a-z-]+)`", README))
    assert listed == {flag_name(field) for field in FLAG_FIELDS} | {"--psd-config"}
