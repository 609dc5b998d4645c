# SPDX-License-Identifier: Apache-2.0
"""What `bagua.lightning` and `bagua.pytorch_lightning` have in common: the classes but for their base."""


def check_version(package: str, version: str) -> None:
    """Refuse a Lightning whose interface is another."""
    if int(version.partition(".")[0]) < 2:
        raise ImportError(f"bagua.{package} needs {package} 2.0 or later, got version {version}")
