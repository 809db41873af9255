"""`headrace fetch`: gets a model's files, so that a later start needs no download. Prints where they are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from services.model_download import fetch_model
from shared.model_source import KNOWN, ModelSourceError
from shared.options import add_options, given
from shared.settings import SCRIPTED_MODEL, CommonSettings, SettingsError, current_environ, load


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="headrace fetch", usage="headrace fetch [MODEL] [options]", description="Download a model.",
        epilog=f"Known names: {', '.join(KNOWN)}. Example: headrace fetch hf:org/name", allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument(
        "model_argument", metavar="MODEL", nargs="?", help="what to download; the default model if none"
    )
    skip = set(CommonSettings.model_fields) - {"cache_dir", "model"}
    add_options(parser, [CommonSettings], skip)
    options = parser.parse_args(argv)
    try:
        common = load(CommonSettings, current_environ() | given(options, [CommonSettings]))
        spec = options.model_argument or common.model
        if spec == SCRIPTED_MODEL:
            sys.stdout.write("The scripted engine needs no files.\n")
            return 0
        source = fetch_model(spec, common.cache_dir)
    except (SettingsError, ModelSourceError) as e:
        sys.stderr.write(f"headrace fetch: {e}\n")
        return 1
    sys.stdout.write(f"{source.name}: {source.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
