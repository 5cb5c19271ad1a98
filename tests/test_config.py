from __future__ import annotations

import json
import re
import traceback
from typing import Any

import pytest

from asynckv.config import KVTransferConfig
from asynckv.errors import ConfigError
from asynckv.security.tls import TLS
from asynckv.types import KVFingerprint


def config_of(**fields: Any) -> KVTransferConfig:
    return KVTransferConfig.from_json(json.dumps(fields))


def test_the_originals_configuration_is_read() -> None:
    config = KVTransferConfig.from_json(
        '{"kv_connector":"PyNcclConnector","kv_role":"kv_producer","kv_rank":0,'
        '"kv_parallel_size":2,"kv_buffer_size":5e9,"kv_ip":"10.0.0.1",'
        '"kv_port":14580}'
    )
    assert (config.kv_rank, config.kv_parallel_size) == (0, 2)
    assert config.max_bytes == 5 * 10**9
    assert config.url == "tcp://10.0.0.1:14580"


def test_todays_configuration_is_read() -> None:
    config = config_of(
        kv_connector="AsyncKVConnector",
        kv_connector_module_path="asynckv.integrations.vllm",
        kv_role="kv_both",
        engine_id="engine-7",
        kv_buffer_device="cuda",
        kv_load_failure_policy="recompute",
        enable_permute_local_kv=True,
        kv_connector_extra_config={"store_timeout": 5, "own": [1, 2]},
    )
    assert config.get_from_extra_config("own", None) == [1, 2]
    assert config.get_from_extra_config("other", 7) == 7
    assert config.store_timeout_s == 5.0


def test_bytes_that_are_no_text_are_no_role() -> None:
    with pytest.raises(ConfigError, match="kv_role"):
        KVTransferConfig.from_json('{"kv_role": "kv_\udcff"}')


def test_the_defaults_are_the_originals() -> None:
    config = config_of()
    assert (config.kv_ip, config.kv_port) == ("127.0.0.1", 14579)
    assert (config.kv_parallel_size, config.kv_rank) == (1, None)
    assert (config.max_bytes, config.store_timeout_s) == (10**9, 300.0)
    assert config.kv_load_failure_policy == "fail"
    assert not config.is_kv_transfer_instance


@pytest.mark.parametrize(
    ("role", "produces", "consumes"),
    [
        ("kv_producer", True, False),
        ("kv_consumer", False, True),
        ("kv_both", True, True),
    ],
)
def test_a_role_has_its_verbs(role: str, produces: bool, consumes: bool) -> None:
    config = config_of(kv_role=role)
    assert (config.is_kv_producer, config.is_kv_consumer) == (produces, consumes)
    assert config.is_kv_transfer_instance


@pytest.mark.parametrize(
    ("size", "nbytes"), [("1e9", 10**9), (5e8, 5 * 10**8), ("2GiB", 2**31), (7, 7)]
)
def test_a_buffer_size_may_be_written_in_many_ways(size: Any, nbytes: int) -> None:
    assert config_of(kv_buffer_size=size).max_bytes == nbytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_rol": "kv_both"}, "'kv_rol' is no field.*did you mean 'kv_role'"),
        ({"port": 1}, "'port' is no field.*did you mean 'kv_port'"),
        ({"zzz": 1}, "'zzz' is no field.*fields: kv_connector, engine_id"),
        ({"kv_role": "producer"}, "did you mean 'kv_producer'.*one of kv_producer"),
        ({"kv_role": "kv_konsumer"}, "did you mean 'kv_consumer'"),
        ({"kv_role": 3}, "kv_role is 3.*one of kv_producer, kv_consumer, kv_both"),
        ({"kv_port": "14579"}, "kv_port is '14579': Expected `int`, got `str`"),
        ({"kv_port": 70000}, "kv_port is 70000.*0 to 65535"),
        ({"kv_port": True}, "kv_port is True: Expected `int`, got `bool`"),
        ({"kv_parallel_size": 0}, "kv_parallel_size is 0.*1 or more"),
        ({"kv_rank": -1}, "kv_rank is -1.*0 or more"),
        ({"kv_buffer_size": "much"}, "kv_buffer_size: 'much' is not a size.*'2GB'"),
        ({"kv_buffer_size": 0}, "kv_buffer_size is 0.*1 or more"),
        ({"kv_buffer_size": None}, "kv_buffer_size is None"),
        ({"kv_connector": "X"}, "kv_role is not set.*set kv_role"),
        ({"kv_connector_extra_config": [1]}, "kv_connector_extra_config is \\[1\\]"),
        ({"kv_load_failure_policy": "retry"}, "one of fail, recompute"),
    ],
)
def test_what_cannot_work_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**fields)


def test_all_that_cannot_work_is_named_at_once() -> None:
    wrong = {"kv_rol": "kv_both", "kv_port": "x", "kv_rank": -1, "kv_buffer_size": "x"}
    with pytest.raises(ConfigError) as caught:
        config_of(**wrong)
    problems = caught.value.problems
    assert len(problems) == len(wrong)
    assert all(any(name in one for one in problems) for name in wrong)
    assert str(caught.value) == "; ".join(problems)


def test_one_thing_that_cannot_work_is_the_only_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(kv_port="x")
    assert caught.value.problems == (str(caught.value),)
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_constructor_checks_as_well() -> None:
    with pytest.raises(ConfigError, match="kv_port is 'many'"):
        KVTransferConfig(kv_port="many")  # type: ignore[arg-type]


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", ["{", "kv_both", "[1]", "7", '"{}"', DEEP])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="configuration"):
        KVTransferConfig.from_json(text)


def test_a_variable_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ConfigError, match="ASYNCKV_KV_CONNECTOR_EXTRA_CONFIG"):
        KVTransferConfig.from_env({"ASYNCKV_KV_CONNECTOR_EXTRA_CONFIG": DEEP})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"port_offset": "x"}, "port_offset is 'x'.*whole number"),
        ({"port_offset": 60000}, "port_offset is 74579.*0 to 65535"),
        ({"store_timeout": "soon"}, "store_timeout is 'soon'.*seconds"),
        ({"store_timeout": 0}, "store_timeout is 0.*more than 0"),
        ({"peer_url": 7}, "peer_url is 7.*URL"),
        ({"fingerprint": 7}, "fingerprint is 7.*name"),
        ({"secret_file": 7}, "secret_file is 7.*path"),
        ({"max_waiting_bytes": []}, r"max_waiting_bytes is \[\].*2GiB"),
        ({"max_waiting_bytes": "much"}, "max_waiting_bytes: .*much.*2GiB"),
        ({"allow_plaintext": "yes"}, "allow_plaintext is 'yes'.*true or false"),
        ({"fingerprint": {"modl": "m"}}, "fingerprint: .*modl.*model, dtype"),
    ],
)
def test_extra_values_are_checked_when_they_are_used(
    extra: dict[str, Any], message: str
) -> None:
    config = config_of(kv_role="kv_both", kv_connector_extra_config=extra)
    name = re.split(r"[ :]", message)[0]
    attribute = {"port_offset": "url", "store_timeout": "store_timeout_s"}
    with pytest.raises(ConfigError, match=message):
        getattr(config, attribute.get(name, name))


def test_the_port_offset_is_added() -> None:
    config = config_of(kv_port=100, kv_connector_extra_config={"port_offset": 7})
    assert config.url == "tcp://127.0.0.1:107"


def test_what_protects_a_link_is_said_there_too() -> None:
    extra = {"secret_file": "/run/secret", "allow_plaintext": True}
    config = config_of(kv_connector_extra_config=extra)
    assert (config.secret_file, config.allow_plaintext) == ("/run/secret", True)
    assert (config_of().secret_file, config_of().allow_plaintext) == (None, False)


@pytest.mark.parametrize("size", [2**20, 1048576.0, "1MiB"])
def test_what_waiting_requests_may_keep_is_said_there_too(size: object) -> None:
    config = config_of(kv_connector_extra_config={"max_waiting_bytes": size})
    assert config.max_waiting_bytes == 2**20
    assert config_of().max_waiting_bytes == 2**28


def test_certificates_make_the_address_a_tls_one() -> None:
    files = {"certificate": "/own.pem", "key": "/key.pem", "ca": "/ca.pem"}
    extra = {"tls": {**files, "allowed_peers": ["a"], "server_name": "b"}}
    config = config_of(kv_port=1, kv_connector_extra_config=extra)
    assert config.tls == TLS(**files, allowed_peers=("a",), server_name="b")
    assert config.url == "tls://127.0.0.1:1"
    for wrong in ({"certificate": "/own.pem"}, {**files, "keys": "x"}, "own.pem"):
        config = config_of(kv_connector_extra_config={"tls": wrong})
        with pytest.raises(ConfigError, match="an object of certificate, key, ca"):
            config.url  # noqa: B018


def test_an_ipv6_address_is_put_in_brackets() -> None:
    assert config_of(kv_ip="::1", kv_port=1).url == "tcp://[::1]:1"


def test_a_consumer_asks_the_address_and_the_others_whom_they_are_told() -> None:
    extra = {"peer_url": "tcp://b:1"}
    assert config_of(kv_role="kv_consumer", kv_port=1).peer_url == "tcp://127.0.0.1:1"
    assert config_of(kv_role="kv_both").peer_url is None
    config = config_of(kv_role="kv_both", kv_connector_extra_config=extra)
    assert config.peer_url == "tcp://b:1"
    config = config_of(kv_role="kv_producer", kv_connector_extra_config=extra)
    assert config.peer_url is None


@pytest.mark.parametrize("given", ["m", {"model": "m"}, None])
def test_a_fingerprint_is_a_name_or_its_fields(given: Any) -> None:
    config = config_of(kv_connector_extra_config={"fingerprint": given})
    assert config.fingerprint == (given and KVFingerprint(model="m"))


def test_the_environment_says_the_same() -> None:
    config = KVTransferConfig.from_env(
        {
            "ASYNCKV_KV_ROLE": "kv_consumer",
            "ASYNCKV_KV_PORT": "14580",
            "ASYNCKV_KV_RANK": "1",
            "ASYNCKV_KV_BUFFER_SIZE": "2GiB",
            "ASYNCKV_ENABLE_PERMUTE_LOCAL_KV": "true",
            "ASYNCKV_KV_CONNECTOR_EXTRA_CONFIG": '{"store_timeout": 3}',
            "ASYNCKV_LOG_LEVEL": "debug",
            "KV_PORT": "1",
        }
    )
    assert (config.kv_port, config.kv_rank, config.max_bytes) == (14580, 1, 2**31)
    assert config.enable_permute_local_kv
    assert config.store_timeout_s == 3.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("ASYNCKV_KV_PORT", "many", "ASYNCKV_KV_PORT is 'many'"),
        ("ASYNCKV_KV_ROL", "kv_both", "did you mean 'kv_role'"),
        ("ASYNCKV_KV_ROLE", "both", "did you mean 'kv_both'"),
        ("ASYNCKV_KV_CONNECTOR_EXTRA_CONFIG", "{", "EXTRA_CONFIG is '{'"),
    ],
)
def test_an_environment_that_cannot_work_is_named(
    name: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVTransferConfig.from_env({name: text})


@pytest.mark.parametrize("name", ["ASYNCKV_KV_PORT", "ASYNCKV_KV_PROT"])
def test_no_error_of_the_environment_holds_the_secret_in_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ASYNCKV_SECRET", "correct-horse-battery-staple-0123")
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ConfigError, match=name[8:].lower() + "|" + name) as caught:
        KVTransferConfig.from_env()
    shown = traceback.TracebackException.from_exception(
        caught.value, capture_locals=True
    )
    frames = [frame for frame in shown.stack if frame.filename != __file__]
    assert frames
    assert "battery" not in str([frame.locals for frame in frames])


def test_the_process_s_own_environment_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASYNCKV_KV_PORT", "7")
    assert KVTransferConfig.from_env().kv_port == 7


def test_it_does_not_change_and_equal_ones_are_equal() -> None:
    config = config_of(kv_role="kv_both")
    assert config == config_of(kv_role="kv_both")
    with pytest.raises(AttributeError):
        config.kv_port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "extra", "device"),
    [
        ("cpu", {"local_rank": 3}, "cpu"),
        ("cuda", {"local_rank": 3}, "cuda:3"),
        ("cuda", {"local_rank": "3"}, "cuda:3"),
        ("cuda", {}, "cuda"),
        ("cuda:1", {"local_rank": 3}, "cuda:1"),
    ],
)
def test_the_device_of_pipes_is_that_of_the_local_rank(
    name: str, extra: dict[str, object], device: str
) -> None:
    config = KVTransferConfig(kv_buffer_device=name, kv_connector_extra_config=extra)
    assert config.device == device


def test_without_a_rank_caches_may_be_on_any_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    config = KVTransferConfig(kv_buffer_device="cuda")
    config.check_device("cuda:1")
    with pytest.raises(ConfigError, match="the caches are on cpu"):
        config.check_device("cpu")


@pytest.mark.parametrize("rank", ["x", -1, True, 0.5])
def test_what_is_no_local_rank_is_refused(rank: object) -> None:
    extra = {"local_rank": rank}
    config = KVTransferConfig(kv_buffer_device="cuda", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match="local_rank"):
        _ = config.device
