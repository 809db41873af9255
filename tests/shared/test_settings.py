"""Settings: where a value comes from, what is refused and how the refusal reads, who sees what."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.settings import (
    ALL_SECTIONS,
    SERVE_SECTIONS,
    SERVICE_SECTIONS,
    ClientSettings,
    CommonSettings,
    DeviceSettings,
    GatewaySettings,
    Section,
    SettingsError,
    WorkerSettings,
    child_environ,
    describe,
    load,
    secret_values,
    unknown_variables,
    variable,
)


def test_every_default_is_valid_and_every_setting_says_what_it_is() -> None:
    for section in ALL_SECTIONS:
        load(section, {})
        assert section.TITLE and 1 <= len(section.model_fields) <= 16
        assert all(info.description for info in section.model_fields.values())


def test_values_come_from_the_environment_and_empty_is_unset() -> None:
    environ = {"HEADRACE_MAX_NUM_SEQS": "8", "HEADRACE_KV_CACHE_BYTES": "1GiB", "HEADRACE_THREADS": ""}
    worker = load(WorkerSettings, environ)
    assert (worker.max_num_seqs, worker.kv_cache_bytes, worker.threads) == (8, 1 << 30, 0)
    gateway = load(GatewaySettings, {"HEADRACE_API_KEYS": "a, b,", "HEADRACE_NO_AUTH": "true"})
    assert gateway.api_keys == ("a", "b") and gateway.no_auth


def test_steps_are_larger_on_a_card_unless_their_size_is_set() -> None:
    assert load(WorkerSettings, {}).most_in_a_step(on_card=False) == (512, 64)
    assert load(WorkerSettings, {}).most_in_a_step(on_card=True) == (2048, 256)
    own = load(WorkerSettings, {"HEADRACE_MAX_NUM_SEQS": "8", "HEADRACE_MAX_NUM_BATCHED_TOKENS": "99"})
    assert own.most_in_a_step(on_card=True) == own.most_in_a_step(on_card=False) == (99, 8)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load(WorkerSettings, {}).max_num_seqs = 3  # type: ignore[misc]


def test_folders_know_the_home_folder() -> None:
    assert load(CommonSettings, {"HEADRACE_STATE_DIR": "~/x"}).state_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("section", "name", "value", "sentence"),
    [
        (DeviceSettings, "TENSOR_PARALLEL_SIZE", "2", "tensor_parallel_size: 2 is not supported yet, only 1"),
        (DeviceSettings, "DTYPE", "half", "dtype: should be 'auto', 'bfloat16', 'float16' or 'float32', not 'half'"),
        (DeviceSettings, "ENFORCE_EAGER", "maybe", "enforce_eager: should be a valid boolean"),
        (DeviceSettings, "DEVICE", "tpu", "device: should be 'auto', 'cpu' or 'cuda', not 'tpu'"),
        (WorkerSettings, "QUANTIZATION", "awq", "quantization: should be 'none', 'int8', 'int4' or 'fp8', not 'awq'"),
        (WorkerSettings, "SPECULATIVE_CONFIG", "{}", "speculative_config: method: is missing, not '{}'"),
        (WorkerSettings, "KV_CACHE_DTYPE", "fp8", "kv_cache_dtype: should be 'auto', 'float32', 'float16'"),
        (WorkerSettings, "MAX_NUM_SEQS", "-1", "max_num_seqs: should be greater than or equal to 0, not '-1'"),
        (WorkerSettings, "MAX_NUM_SEQS", "many", "max_num_seqs: should be a valid integer"),
        (DeviceSettings, "GPU_MEMORY_UTILIZATION", "1.5", "gpu_memory_utilization: should be less than or equal to 1"),
        (WorkerSettings, "MAX_STEP_MS", "nan", "max_step_ms: should be a finite number"),
        (GatewaySettings, "PORT", "65536", "port: should be less than or equal to 65535"),
        (CommonSettings, "REDIS_URL", "http://x", "redis_url: must begin with redis://, rediss:// or unix://"),
        (CommonSettings, "SERVED_MODEL_NAME", "a{b}", "served_model_name: must be at most 128 printable"),
        (CommonSettings, "LOG_LEVEL", "loud", "log_level: should be 'debug', 'info', 'warning' or 'error'"),
        (CommonSettings, "INCARNATION", "a b", "incarnation: should match pattern"),
        (ClientSettings, "URL", "localhost:8000", "url: should match pattern"),
    ],
)
def test_a_refusal_is_one_sentence_that_names_the_setting(
    section: type[Section], name: str, value: str, sentence: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(section, {"HEADRACE_" + name: value})
    text = str(caught.value)
    assert text.startswith(sentence) and "\n" not in text
    assert text.endswith(f"or HEADRACE_{name})")


def test_a_refusal_does_not_repeat_a_secret() -> None:
    with pytest.raises(SettingsError) as caught:
        load(CommonSettings, {"HEADRACE_REDIS_URL": "http://:hunter2@host"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_an_open_address_needs_a_key_or_an_explicit_no_auth(host: str) -> None:
    with pytest.raises(SettingsError, match="--no-auth"):
        load(GatewaySettings, {"HEADRACE_HOST": host})
    load(GatewaySettings, {"HEADRACE_HOST": host, "HEADRACE_NO_AUTH": "1"})
    load(GatewaySettings, {"HEADRACE_HOST": host, "HEADRACE_API_KEYS": "k"})


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_key(host: str) -> None:
    assert load(GatewaySettings, {"HEADRACE_HOST": host}).host == host


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("/models/My-Model.Q4_1.gguf", "My-Model.Q4_1"),
        ("model.gguf", "model"),
        ("./folder/qwen2/", "qwen2"),
        ("hf:org/name", "org/name"),
    ],
)
def test_the_served_name_is_derived_from_the_model(model: str, name: str) -> None:
    assert load(CommonSettings, {"HEADRACE_MODEL": model}).served_name == name
    assert load(CommonSettings, {"HEADRACE_MODEL": model, "HEADRACE_SERVED_MODEL_NAME": "x"}).served_name == "x"


@pytest.mark.parametrize(
    ("url", "is_open"),
    [
        ("redis://db:6379/0", True), ("redis://192.0.2.1", True), ("rediss://db/0", True),
        ("redis://gateway:x@db:6379/0", False), ("redis://127.0.0.1:6379/0", False), ("redis://[::1]", False),
        ("redis://localhost/0", False), ("unix:///run/redis.sock", False), ("rediss://db/0?ssl_certfile=c.pem", False),
    ],
)  # fmt: skip
def test_a_redis_on_a_network_without_a_password_is_open(url: str, is_open: bool) -> None:
    assert load(CommonSettings, {"HEADRACE_REDIS_URL": url}).redis_is_open == is_open


def test_secrets_are_in_no_repr_and_no_start_up_line() -> None:
    environ = {"HEADRACE_REDIS_URL": "redis://:hunter2@host/0", "HEADRACE_SECRET": "salt", "HEADRACE_API_KEYS": "k1,k2"}
    common, gateway = load(CommonSettings, environ), load(GatewaySettings, environ)
    assert sorted(secret_values(common, gateway)) == ["hunter2", "k1", "k2", "salt"]
    for shown in (repr(common), str(gateway), str(describe(common)), str(describe(gateway))):
        assert not any(secret in shown for secret in secret_values(common, gateway))
    assert describe(gateway)["port"] == "8000"


def test_a_child_sees_its_own_sections_only() -> None:
    environ = {"PATH": "/bin", "HEADRACE_API_KEYS": "k", "HEADRACE_MODEL": "m", "HEADRACE_THREADS": "1"}
    assert child_environ(environ, "gpu_worker", {"HEADRACE_INCARNATION": "w-1"}) == {
        "PATH": "/bin",
        "HEADRACE_MODEL": "m",
        "HEADRACE_THREADS": "1",
        "HEADRACE_INCARNATION": "w-1",
    }
    assert child_environ(environ, "gateway", {}).get("HEADRACE_API_KEYS") == "k"


def test_misspelt_variables_are_found() -> None:
    assert unknown_variables({"HEADRACE_MAX_SEQS": "1", "HEADRACE_PORT": "1", "HOME": "/"}) == ["HEADRACE_MAX_SEQS"]


def test_a_name_that_two_sections_share_means_the_same_in_both() -> None:
    seen: dict[str, tuple[object, str | None]] = {}
    for section in ALL_SECTIONS:
        for field, info in section.model_fields.items():
            meaning = (info.default, info.description)
            assert seen.setdefault(variable(field), meaning) == meaning
    assert all(section in SERVE_SECTIONS for sections in SERVICE_SECTIONS.values() for section in sections)
