"""Where a setting comes from, and that junk is a sentence and never an exception."""
from __future__ import annotations

import json
import pathlib
import sys
import types

import pytest

from comfy_zerocopy import config


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.ENVIRONMENT, raising=False)
    monkeypatch.delenv(config.ENVIRONMENT_FILE, raising=False)
    monkeypatch.delitem(sys.modules, "folder_paths", raising=False)


def in_user_directory(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, content: str) -> None:
    module = types.ModuleType("folder_paths")
    module.get_user_directory = lambda: str(folder)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "folder_paths", module)
    (folder / config.FILE).write_text(content)


def test_nothing_set_is_off() -> None:
    assert config.load() == config.Settings("off", "default", None, ())


@pytest.mark.parametrize(("word", "mode"), [
    ("off", "off"), ("0", "off"), ("false", "off"), ("1", "results"), ("results", "results"), (" SWAP ", "swap"), ("on", "results"),
])
def test_environment(monkeypatch: pytest.MonkeyPatch, word: str, mode: str) -> None:
    monkeypatch.setenv(config.ENVIRONMENT, word)
    assert config.load() == config.Settings(mode, "environment COMFY_ZEROCOPY")


def test_order(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    in_user_directory(monkeypatch, tmp_path, '{"mode": "swap", "max_result_bytes": 1024}')
    assert config.load() == config.Settings("swap", f"file {tmp_path / config.FILE}", 1024)
    monkeypatch.setenv(config.ENVIRONMENT, "")
    assert config.load().mode == "swap"
    monkeypatch.setenv(config.ENVIRONMENT, "results")
    assert config.load().mode == "results"
    assert config.load("off") == config.Settings("off", "argument", 1024)


def test_named_file_replaces_the_user_directorys(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    in_user_directory(monkeypatch, tmp_path, '{"mode": "swap"}')
    named = tmp_path / "other.json"
    named.write_text('{"mode": true}')
    monkeypatch.setenv(config.ENVIRONMENT_FILE, str(named))
    assert config.load() == config.Settings("results", f"file {named}")


@pytest.mark.parametrize("junk", ["banana", "2", "résultats", "off swap", "\udcff"])
def test_junk_in_the_environment_is_off_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, junk: str) -> None:
    in_user_directory(monkeypatch, tmp_path, '{"mode": "swap"}')
    monkeypatch.setenv(config.ENVIRONMENT, junk)
    found = config.load()
    assert found.mode == "off" and repr(junk) in found.problems[0] and "COMFY_ZEROCOPY" in found.problems[0]


@pytest.mark.parametrize("junk", [3, 1.5, [], {}, "x", b"swap"])
def test_junk_as_argument(junk: object) -> None:
    found = config.load(junk)
    assert (found.mode, found.source) == ("off", "argument") and len(found.problems) == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '"swap"', '{"mode": 7}', '{"mode": ["swap"]}', "\x00", "[" * 100_000])
def test_junk_file(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, content: str) -> None:
    in_user_directory(monkeypatch, tmp_path, content)
    found = config.load()
    assert found.mode == "off" and len(found.problems) == 1 and str(tmp_path) in found.problems[0]
    assert config.load("swap").mode == "swap"


def test_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv(config.ENVIRONMENT_FILE, str(tmp_path))
    assert len(config.load().problems) == 1
    monkeypatch.setenv(config.ENVIRONMENT_FILE, str(tmp_path / "missing.json"))
    assert "does not exist" in config.load().problems[0]


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1G", True, []])
def test_junk_limit_is_ignored_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, limit: object) -> None:
    in_user_directory(monkeypatch, tmp_path, json.dumps({"mode": "results", "max_result_bytes": limit}))
    found = config.load()
    assert (found.mode, found.max_result_bytes) == ("results", None) and "max_result_bytes" in found.problems[0]


def test_unknown_setting_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    in_user_directory(monkeypatch, tmp_path, '{"mode": "results", "mood": "good"}')
    assert config.load().mode == "results" and "'mood'" in config.load().problems[0]


def test_user_directory_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "folder_paths", types.ModuleType("folder_paths"))
    assert config.load() == config.Settings()
