"""What settings are made of: fields with a sentence of help, and kinds of values with their checks."""

from __future__ import annotations

import ipaddress
import os
import urllib.parse
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field


def setting(default: Any, description: str, *, option: str = "", secret: bool = False, **bounds: Any) -> Any:
    """option: the command-line name where it is not the field's. A secret appears in no repr, log or help text."""
    extra: dict[str, Any] = {"option": option, "secret": secret}
    return Field(default, description=description, repr=not secret, json_schema_extra=extra, **bounds)


def _comma_separated(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def only(*supported: Any) -> AfterValidator:
    def check(value: Any) -> Any:
        if value not in supported:
            raise ValueError(f"{value} is not supported yet, only {' or '.join(map(str, supported))}")
        return value

    return AfterValidator(check)


def _check_redis_url(url: str) -> str:
    if urllib.parse.urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        raise ValueError("must begin with redis://, rediss:// or unix://")
    return url


def check_served_name(name: str) -> str:
    # it is the hash tag of every Redis key of the model
    if len(name) > 128 or any(c in "{}" or not c.isprintable() for c in name):
        raise ValueError("must be at most 128 printable characters without braces")
    return name


def _check_readable(path: str) -> str:
    if path and not os.access(path, os.R_OK):
        raise ValueError("cannot be read")
    return path


def tls_files(folder: str) -> dict[str, str]:
    """Option of redis-py → file of the folder, there or not."""
    names = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "client.pem", "ssl_keyfile": "client.key"}
    return {option: os.path.join(folder, name) for option, name in names.items()} if folder else {}


def _check_tls_folder(folder: str) -> str:
    files = [path for path in tls_files(folder).values() if os.path.exists(path)]
    if folder and not files:
        raise ValueError("has neither ca.pem nor client.pem")
    for path in files:
        _check_readable(path)
    return folder


Words = Annotated[tuple[str, ...], BeforeValidator(_comma_separated)]
Folder = Annotated[Path, AfterValidator(Path.expanduser)]
RedisUrl = Annotated[str, AfterValidator(_check_redis_url)]
ServedName = Annotated[str, AfterValidator(check_served_name)]
ReadableFile = Annotated[str, AfterValidator(_check_readable)]
TlsFolder = Annotated[str, AfterValidator(_check_tls_folder)]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
