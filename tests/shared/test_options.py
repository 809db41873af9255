"""Settings on a command line and in the documentation say the same as the settings themselves."""

from __future__ import annotations

import argparse

import pytest

from shared.options import add_options, given, markdown_tables
from shared.settings import (
    SERVE_SECTIONS,
    CommonSettings,
    GatewaySettings,
    ServeSettings,
    WorkerSettings,
    load,
    option,
    variable,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    add_options(made, SERVE_SECTIONS)
    return made


def test_what_is_not_given_is_not_set() -> None:
    assert given(parser().parse_args([]), SERVE_SECTIONS) == {}


def test_given_options_load_as_the_values_they_are() -> None:
    args = ["--max-num-seqs", "3", "--no-enable-prefix-caching", "--kv-cache-bytes", "1GiB", "--api-key", "a"]
    args += ["--api-key", "b", "--redis-maxmemory", "64MB", "--no-auth", "--max-step-ms", ".5"]
    entries = given(parser().parse_args(args), SERVE_SECTIONS)
    worker, gateway, serve = (load(section, entries) for section in (WorkerSettings, GatewaySettings, ServeSettings))
    assert isinstance(worker, WorkerSettings) and isinstance(gateway, GatewaySettings)
    assert isinstance(serve, ServeSettings)
    assert (worker.max_num_seqs, worker.enable_prefix_caching, worker.kv_cache_bytes) == (3, False, 1 << 30)
    assert worker.max_step_ms == 0.5 and serve.redis_maxmemory == 64_000_000
    assert gateway.api_keys == ("a", "b") and gateway.no_auth


def test_every_setting_is_an_option_and_a_row_of_its_table() -> None:
    tables = markdown_tables(SERVE_SECTIONS)
    known = {text for action in parser()._actions for text in action.option_strings}
    for section in SERVE_SECTIONS:
        assert f"### {section.TITLE}\n" in tables
        for field, info in section.model_fields.items():
            assert option(field, info) in known
            assert f"| `{option(field, info)}` | `{variable(field)}` |" in tables


def test_defaults_read_well() -> None:
    tables = markdown_tables([CommonSettings, GatewaySettings, WorkerSettings])
    assert "| `--max-body-bytes` | `HEADRACE_MAX_BODY_BYTES` | 8.0MiB |" in tables
    assert "| `--enable-prefix-caching` | `HEADRACE_ENABLE_PREFIX_CACHING` | on |" in tables
    assert "| `--api-key` | `HEADRACE_API_KEYS` |  |" in tables
    assert "| `--retention-s` | `HEADRACE_RETENTION_S` | 300 |" in tables


def test_an_abbreviated_option_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--max-num", "3"])
    assert "unrecognized" in capsys.readouterr().err
