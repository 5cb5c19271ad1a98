"""Certificates for tests of ``tls://``, by an authority of their own.

It needs ``trustme``, which the extra ``testing`` installs.
"""

from __future__ import annotations

import datetime
import os
import secrets
from pathlib import Path
from types import ModuleType
from typing import Literal

from asynckv.security.tls import TLS

__all__ = ("Authority",)


class Authority:
    """Certifies whoever a test asks it to, with files in ``folder``. Blocks.

    :raises ModuleNotFoundError: trustme is not installed
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        trustme = _trustme()
        self.folder = Path(folder)
        self.path = self.folder / f"authority-{secrets.token_hex(4)}.pem"
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(self.path)

    def issue(
        self,
        *names: str,
        ca: str | os.PathLike[str] | None = None,
        not_after: datetime.datetime | None = None,
        key_type: Literal["ECDSA", "RSA"] = "ECDSA",
    ) -> TLS:
        """Return what one side needs that has those names, in new files.

        Without names: 127.0.0.1 and localhost. ``ca`` is whom that side trusts,
        if it is another authority.
        """
        trustme = _trustme()
        certificate = self._authority.issue_cert(
            *(names or ("127.0.0.1", "localhost")),
            not_after=not_after,
            key_type=trustme.KeyType[key_type],
        )
        path = self.folder / f"{secrets.token_hex(8)}.pem"
        path.touch(0o600)
        certificate.private_key_and_cert_chain_pem.write_to_path(path)
        return TLS(certificate=path, key=path, ca=ca or self.path)


def _trustme() -> ModuleType:
    try:
        import trustme
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "certificates for tests are made by trustme, which is not installed "
            '(in a checkout of asynckv: python -m pip install ".[testing]")',
            name="trustme",
        ) from error
    return trustme
