"""The one place that reads the environment: what can be set, its default, its bounds and its sentence of help.

A setting is a field of one section below; `max_num_seqs` is HEADRACE_MAX_NUM_SEQS in the environment and
`--max-num-seqs` on a command line. Options become environment entries, so there is one parser, and a child process
is configured by the same variables as a container. Sections are frozen; a service loads `CommonSettings` and its own
section and never sees another's. An option that people know from elsewhere and that does nothing yet is refused by
name. How options look on a command line is `shared/options.py`'s.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from shared import crash_points
from shared import speculative_config as speculation
from shared.setting_types import (
    Folder,
    ReadableFile,
    RedisUrl,
    ServedName,
    TlsFolder,
    Words,
    check_served_name,
    is_loopback,
    tls_files,
)
from shared.setting_types import only as _only
from shared.setting_types import setting as _setting

PREFIX = "HEADRACE_"
DEFAULT_MODEL = "smollm2-135m-instruct"
SCRIPTED_MODEL = "scripted"  # the vocabulary of `--engine scripted`: nothing to fetch


class SettingsError(ValueError):
    """A setting that cannot be used; the text is one sentence that names it."""


PREFIX_CACHING_HELP = "share the KV blocks of equal prompt prefixes"


class Section(BaseModel):
    """Base of all sections; TITLE heads its group in help and documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
    TITLE: ClassVar[str] = ""


class CommonSettings(Section):
    TITLE = "every service"
    redis_url: RedisUrl = _setting(
        "redis://127.0.0.1:6379/0",
        "Redis of the deployment (redis://, rediss://, unix://); `serve` brings its own if none is given",
        secret=True,
    )
    redis_tls_dir: TlsFolder = _setting(
        "", "folder with ca.pem and, for a rediss:// server that asks for them, client.pem and client.key"
    )
    volatile: bool = _setting(False, "accept a Redis without an append-only file, whose restart forgets requests")
    model: str = _setting(
        DEFAULT_MODEL, "model: a known name, a .gguf file, a Hugging Face folder, or hf:org/name", min_length=1
    )
    served_model_name: ServedName = _setting("", "name that clients use; derived from the model when empty")
    secret: str = _setting("", "deployment secret that salts cached blocks, the same for every gateway", secret=True)
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least severe level that is logged")
    log_format: Literal["text", "json"] = _setting("text", "log lines for people or as JSON")
    state_dir: Folder = _setting(Path("~/.local/state/headrace"), "folder of the embedded Redis, its lock and secret")
    cache_dir: Folder = _setting(Path("~/.cache/headrace"), "folder for downloaded models and compiled kernels")
    retention_s: float = _setting(300.0, "seconds that a finished request can still be read", ge=1, le=86400)
    drain_timeout_s: float = _setting(
        5.0, "seconds that open streams, and a worker's sequences, get to finish at shut-down", ge=0, le=3600
    )
    incarnation: str = _setting("", "id of this life of the process; drawn when empty", pattern=r"^[\w.-]{0,64}$")
    heartbeat_file: str = _setting("", "file touched while the event loop runs, for health checks; off when empty")
    crash_at: str = _setting(
        "", "for tests: the process dies at that moment, as `after-commit:3` says", pattern=f"^{crash_points.NAME}$"
    )

    @model_validator(mode="after")
    def _files_need_tls(self) -> CommonSettings:
        if self.redis_tls_dir and not self.redis_url.startswith("rediss://"):
            raise ValueError("redis_tls_dir needs a rediss:// address")
        return self

    @property
    def redis_address(self) -> str:
        """redis_url and the files of its TLS, as `bus.connect` takes it."""
        found = {option: path for option, path in tls_files(self.redis_tls_dir).items() if os.path.exists(path)}
        query = urllib.parse.urlencode(found)
        return self.redis_url + (("&" if "?" in self.redis_url else "?") + query if query else "")

    @property
    def redis_is_open(self) -> bool:
        """Whoever reaches its address may write there: it is on a network, and asks for no password."""
        parts = urllib.parse.urlsplit(self.redis_url)
        with_certificate = "ssl_certfile" in self.redis_address
        return bool(parts.hostname) and not (parts.password or with_certificate or is_loopback(parts.hostname or ""))

    @property
    def served_name(self) -> str:
        """The model's name for clients and in Redis keys; the same in every service, loaded or not."""
        if self.served_model_name:
            return self.served_model_name
        name = self.model.removeprefix("hf:")
        is_path = name == self.model and ("/" in name or name.endswith(".gguf"))
        return check_served_name(Path(os.path.abspath(name)).name.removesuffix(".gguf") if is_path else name)


class GatewaySettings(Section):
    TITLE = "gateway"
    host: str = _setting("127.0.0.1", "address to listen on; others than loopback need an API key or --no-auth")
    port: int = _setting(8000, "port to listen on; further gateways of `serve` take the next ones", ge=0, le=65535)
    api_keys: Words = _setting((), "accepted API key, may be repeated", option="--api-key", secret=True)
    api_keys_file: ReadableFile = _setting("", "file of API keys, one a line: a key, or `sha256:` and its digest")
    no_auth: bool = _setting(False, "serve without API keys on any address (means nothing once there are keys)")
    cors_origins: Words = _setting(
        (), "browser origin that may call, may be repeated; * for any", option="--cors-origin"
    )
    max_body_bytes: ByteSize = _setting(ByteSize(8 << 20), "largest request body", ge=1024, le=1 << 30)
    max_queued_requests: int = _setting(1024, "waiting sequences beyond which requests get 429", ge=1)
    max_queued_tokens: int = _setting(1 << 20, "waiting prompt tokens beyond which requests get 429", ge=1)
    strict: bool = _setting(False, "refuse requests with fields that are unknown, which are ignored otherwise")
    tool_call_parser: Literal[
        "auto", "hermes", "llama3_json", "pythonic", "mistral", "granite", "deepseek_v3", "deepseek_v31", "generic"
    ] = _setting("auto", "how the model writes calls of tools; known by its chat template when auto")
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "mistral", "granite"] = _setting(
        "auto", "how the model writes thoughts; known by its chat template when auto, left in the text when none"
    )
    max_num_choices: int = _setting(16, "largest n of a request", ge=1, le=128)
    request_timeout_s: float = _setting(600.0, "seconds from admission after which a request is ended", ge=1, le=86400)
    resume_s: float = _setting(
        0.0, "seconds that a request goes on when its client has left, unless X-Headrace-Resume says it", ge=0, le=86400
    )

    @model_validator(mode="after")
    def _closed_unless_said(self) -> GatewaySettings:
        if not (self.keys or self.no_auth or is_loopback(self.host)):
            raise ValueError(
                f"host: {self.host} can be reached by others: give --api-key, or --no-auth to serve anybody"
            )
        return self

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """All accepted API keys, some perhaps as `sha256:` digests."""
        lines = Path(self.api_keys_file).read_text().splitlines() if self.api_keys_file else []
        return (*self.api_keys, *(line.strip() for line in lines if line.strip() and not line.startswith("#")))


class LimitSettings(Section):
    """What every gateway of a deployment has to be told alike."""

    TITLE = "gateway: limits"
    queue_timeout_s: float = _setting(
        0.0, "seconds from admission within which a request must have been given to a worker; any when 0",
        ge=0, le=86400,
    )  # fmt: skip
    first_token_timeout_s: float = _setting(
        0.0, "seconds from admission within which the first token must come; any when 0", ge=0, le=86400
    )
    inter_token_timeout_s: float = _setting(0.0, "seconds between two tokens of a choice; any when 0", ge=0, le=86400)
    max_concurrency_per_key: int = _setting(
        0, "open requests of an API key beyond which it gets 429, over all gateways; any when 0", ge=0, le=1 << 24
    )
    requests_per_minute_per_key: int = _setting(0, "calls a minute of an API key; any when 0", ge=0, le=1 << 24)
    tokens_per_minute_per_key: int = _setting(
        0, "tokens a minute of an API key, in prompts and drawn; any when 0", ge=0, le=1 << 40
    )
    send_timeout_s: float = _setting(
        60.0, "seconds within which a client must take what is buffered for it (64 KiB), or is cut", gt=0, le=3600
    )
    max_connections: int = _setting(
        0, "connections beyond which a gateway answers 503; as many as its file descriptors allow when 0", ge=0
    )


class SchedulerSettings(Section):
    TITLE = "scheduler"
    scheduling_policy: Annotated[str, _only("fcfs")] = _setting("fcfs", "order of the queue")
    enable_prefix_caching: bool = _setting(True, PREFIX_CACHING_HELP)
    min_priority: int = _setting(
        0, "lowest `priority` that counts between API keys; below it one only orders a key's own requests",
        ge=-(1 << 31), le=1 << 31,
    )  # fmt: skip
    max_strikes: int = _setting(2, "worker deaths after which a sequence runs alone; one more ends it", ge=1, le=10)


class WorkerSettings(Section):
    TITLE = "worker"
    engine: Literal["auto", "native", "torch", "scripted"] = _setting(
        "auto", "kernels: compiled C, or torch where they cannot be had (auto); `scripted` computes nothing, for tests"
    )
    model_impl: Literal["auto", "headrace", "transformers"] = _setting(
        "auto", "code that computes: ours, or for architectures that it does not know transformers' (auto)"
    )
    max_num_seqs: int = _setting(0, "most sequences in a step; 64 on a CPU and 256 on a GPU when 0", ge=0, le=4096)
    max_num_batched_tokens: int = _setting(
        0, "most tokens in a step; 512 on a CPU and 2048 on a GPU when 0", ge=0, le=1 << 20
    )
    max_model_len: int = _setting(0, "context length; the model's own when 0", ge=0, le=1 << 24)
    block_size: int = _setting(8, "tokens in a KV block; of its last one a sequence wastes half", ge=1, le=256)
    kv_cache_bytes: ByteSize = _setting(ByteSize(0), "size of the KV pool; from free memory when 0", ge=0)
    enable_prefix_caching: bool = _setting(True, PREFIX_CACHING_HELP)
    threads: int = _setting(0, "compute threads; one a physical core, shared between workers, when 0", ge=0, le=1024)
    max_step_ms: float = _setting(100.0, "bound of a step's prefill share while others decode", gt=0, le=60000)
    kv_cache_dtype: Literal["auto", "float32", "float16", "int8", "fp8_e4m3"] = _setting(
        "auto", "type of cached keys and values; in eight bits each token's head has a scale"
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = _setting(
        "none", "what matrices stored as floats become while they are loaded"
    )
    speculative_config: Annotated[str, AfterValidator(speculation.check)] = _setting(
        speculation.AUTO,
        'speculative decoding: auto (by what pays, where native kernels compute), none, or JSON: {"method": "suffix"}',
    )

    def most_in_a_step(self, on_card: bool) -> tuple[int, int]:
        """(max_num_batched_tokens, max_num_seqs), those that suit the device where none are set."""
        num_tokens, num_seqs = (2048, 256) if on_card else (512, 64)
        return self.max_num_batched_tokens or num_tokens, self.max_num_seqs or num_seqs


class DeviceSettings(Section):
    TITLE = "worker: device"
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "device of the model: a GPU where there is one (auto)")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _setting(
        "auto", "type that a GPU computes in: bfloat16 when auto; CPUs have one of their own"
    )
    gpu_memory_utilization: float = _setting(0.9, "share of a GPU's memory to use", gt=0, le=1)
    enforce_eager: bool = _setting(False, "launch a GPU's kernels one by one, without CUDA graphs")
    deterministic: bool = _setting(
        False, "let no token on a GPU depend on what is computed beside it, as on CPUs; without libraries' products"
    )
    tensor_parallel_size: Annotated[int, _only(1)] = _setting(1, "GPUs of one worker")


class ScriptedSettings(Section):
    TITLE = "worker --engine scripted"
    scripted_step_ms: float = _setting(1.0, "duration of a step", ge=0, le=60000)
    scripted_token_ms: float = _setting(0.0, "what each prompt token adds to its step", ge=0, le=1000)
    scripted_num_blocks: int = _setting(1024, "blocks of its pool", ge=1, le=1 << 24)
    scripted_crash_on: str = _setting("", "text in a prompt at which the process exits")
    scripted_hang_on: str = _setting("", "text in a prompt at which a step never ends")
    scripted_raise_on: str = _setting("", "text in a prompt at which a step raises")


class ServeSettings(Section):
    TITLE = "serve"
    gateways: int = _setting(1, "number of gateways", ge=1, le=64)
    schedulers: int = _setting(1, "number of schedulers", ge=1, le=64)
    cache_stores: int = _setting(1, "number of cache stores", ge=1, le=64)
    workers: int = _setting(1, "number of workers", ge=1, le=64)
    redis_maxmemory: ByteSize = _setting(ByteSize(1 << 30), "memory limit of the embedded Redis", ge=1 << 22)
    stop_timeout_s: float = _setting(10.0, "seconds that a service gets to stop before it is killed", ge=0, le=3600)


class ClientSettings(Section):
    TITLE = "chat and bench"
    url: str = _setting(
        "http://127.0.0.1:8000",
        "address of the gateway; for chat also several, with commas between: it goes on at another when one is lost",
        pattern=r"^https?://[^/\s]+",
    )
    api_key: str = _setting("", "API key to send", secret=True)


SERVICE_SECTIONS: dict[str, tuple[type[Section], ...]] = {
    "gateway": (CommonSettings, GatewaySettings, LimitSettings),
    "scheduler": (CommonSettings, SchedulerSettings),
    "cache_store": (CommonSettings,),
    "gpu_worker": (CommonSettings, WorkerSettings, DeviceSettings, ScriptedSettings),
}
SERVE_SECTIONS: tuple[type[Section], ...] = (
    CommonSettings, ServeSettings, GatewaySettings, LimitSettings, SchedulerSettings, WorkerSettings, DeviceSettings,
    ScriptedSettings,
)  # fmt: skip
ALL_SECTIONS: tuple[type[Section], ...] = (*SERVE_SECTIONS, ClientSettings)

S = TypeVar("S", bound=Section)


def variable(field: str) -> str:
    return PREFIX + field.upper()


def option(field: str, info: FieldInfo) -> str:
    """The command-line option of a field, for instance `--max-num-seqs`."""
    return extra(info, "option") or "--" + field.replace("_", "-")


def extra(info: FieldInfo, key: str) -> Any:
    assert isinstance(info.json_schema_extra, dict)
    return info.json_schema_extra[key]


def load(section: type[S], environ: Mapping[str, str] | None = None) -> S:
    """The section as the environment sets it; SettingsError names the first setting that is wrong.

    An empty variable counts as unset, since compose files pass on `${NAME:-}`.
    """
    environ = os.environ if environ is None else environ
    values = {f: environ[variable(f)] for f in section.model_fields if environ.get(variable(f), "") != ""}
    try:
        return section.model_validate(values)
    except ValidationError as e:
        raise SettingsError(_sentence(section, e)) from None


def _sentence(section: type[Section], error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("String ")
    if not first["loc"]:
        return message
    field = str(first["loc"][0])
    info = section.model_fields[field]
    given = "" if extra(info, "secret") or str(first["input"]) in message else f", not {str(first['input'])[:80]!r}"
    return f"{field}: {message}{given} (set by {option(field, info)} or {variable(field)})"


def current_environ() -> dict[str, str]:
    """A copy of this process' environment, to be changed and handed to `load` or to a child."""
    return dict(os.environ)


def child_environ(environ: Mapping[str, str], service: str, given: Mapping[str, str]) -> dict[str, str]:
    """What a service's process sees: everything foreign, of ours only its own sections, and what is given."""
    own = {variable(field) for section in SERVICE_SECTIONS.get(service, ()) for field in section.model_fields}
    return {k: v for k, v in environ.items() if not k.startswith(PREFIX) or k in own} | dict(given)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """HEADRACE_ variables that set nothing: most likely misspelt."""
    known = {variable(field) for section in ALL_SECTIONS for field in section.model_fields}
    return sorted(k for k in environ if k.startswith(PREFIX) and k not in known)


def secret_values(*sections: Section) -> list[str]:
    """What must never be written to a log: keys, the deployment secret, the password in the Redis address."""
    secrets: list[str] = []
    for section in sections:
        for field, info in type(section).model_fields.items():
            value = getattr(section, field)
            if field == "redis_url":
                quoted = urllib.parse.urlsplit(value).password or ""
                value = (quoted, urllib.parse.unquote(quoted))
            if extra(info, "secret"):
                secrets += [value] if isinstance(value, str) else list(value)
        if isinstance(section, GatewaySettings):
            secrets += section.keys
    return [secret for secret in dict.fromkeys(secrets) if secret]


def describe(section: Section) -> dict[str, str]:
    """field → value for a start-up log line, without secrets."""
    fields = type(section).model_fields
    return {f: str(getattr(section, f)) for f, info in fields.items() if not extra(info, "secret")}
