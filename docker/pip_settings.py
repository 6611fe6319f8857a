"""pip's settings of this machine as one file for a build: the way to its package index, and nothing else.

They come from pip's configuration files, the machine's and the user's, and from variables ``PIP_...``; what all of them
amount to, pip says itself. Folders are left out, with a line on standard error: they do not exist inside a build.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PLACES = ("index-url", "extra-index-url", "find-links")
OTHERS = ("no-index", "trusted-host", "proxy", "timeout", "default-timeout", "retries")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # Debian's place for them, here and inside


def effective(listing: str) -> dict[str, str]:
    """Values by key of what ``pip config list`` prints, as ``pip install`` would take them."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # later ones win
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in sections:
            sections[section][key] = ast.literal_eval(value)
    return {key: value for values in sections.values() for key, value in values.items() if value.strip()}


def for_a_build(settings: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Those of the settings that a build needs, and the folders that were left out of them."""
    kept = {key: settings[key] for key in OTHERS if key in settings}
    left_out = []
    for key in PLACES:
        places = settings.get(key, "").split()
        remote = [place for place in places if "://" in place and not place.startswith("file:")]
        left_out += [place for place in places if place not in remote]
        if remote:
            kept[key] = "\n".join(remote)
    return kept, left_out


def certificates(settings: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The file of certificates that pip would trust here, empty where there is none."""
    names = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    asked = [settings.get("cert"), *map(environment.get, names), CERTIFICATES]
    return next((name for name in asked if name and Path(name).is_file()), "")


def main() -> None:
    """Write the file, and print the file of certificates that belongs to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="pip.conf to write; an index's address may hold a password")
    arguments = parser.parse_args()

    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, stdout=subprocess.PIPE)
    settings = effective(listing.stdout.decode())
    kept, left_out = for_a_build(settings)
    bundle = certificates(settings, os.environ)
    if bundle:
        kept["cert"] = CERTIFICATES
    file = configparser.RawConfigParser()
    file["global"] = kept
    arguments.file.touch(mode=0o600)
    with arguments.file.open("w") as stream:
        file.write(stream)
    if left_out:
        print(f"pip's settings, without folders of this machine: {' '.join(left_out)}", file=sys.stderr)
    print(bundle)


if __name__ == "__main__":
    main()
