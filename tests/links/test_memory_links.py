from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asynckv.errors import PeerLost, WrongLoop
from asynckv.links.dial import dial
from asynckv.links.listen import listen
from asynckv.links.options import keys_of
from asynckv.protocol.values import PeerIdentity
from asynckv.security.keyring import Keyring
from harness.link_pairs import ScriptedService, linked

ME = PeerIdentity("me", "1")


async def test_both_ends_are_there_when_dial_returns() -> None:
    async with linked("mem://") as pair:
        assert pair.listener.links == (pair.far,)


async def test_a_listener_on_another_loop_is_named_as_such() -> None:
    listener = await listen(
        "mem://here", identity=ME, service_for=lambda link: ScriptedService()
    )

    def elsewhere() -> None:
        asyncio.run(_fail_to_dial())

    async def _fail_to_dial() -> None:
        with pytest.raises(WrongLoop):
            await dial("mem://here", identity=ME)

    await asyncio.to_thread(elsewhere)
    await listener.aclose()


async def test_a_listener_that_was_dropped_is_not_found() -> None:
    listener = await listen(
        "mem://dropped", identity=ME, service_for=lambda link: ScriptedService()
    )
    listener.abort()
    with pytest.raises(PeerLost, match="of this process only"):
        await dial("mem://dropped", identity=ME)


async def test_a_door_that_closes_while_its_keys_are_read_lets_nobody_in(
    tmp_path: Path,
) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("correct-horse-battery-staple-0123")
    keyring = Keyring(secret_file=str(path))
    listener = await listen(
        "mem://closing",
        identity=ME,
        service_for=lambda link: ScriptedService(),
        keyring=keyring,
    )
    keyring._checked_at = 0.0
    secrets = Keyring(secrets=(await keys_of(keyring)).secrets)
    keyring._checked_at = 0.0
    task = asyncio.create_task(dial("mem://closing", identity=ME, keyring=secrets))
    await asyncio.sleep(0)
    listener.abort()
    with pytest.raises(PeerLost, match="nobody listens"):
        await task
