import os
import stat

import pytest

from peagle.errors import ConfigError
from pipelines.online.gateway import keys as module
from pipelines.online.gateway.keys import (
    LOCAL,
    KeyRing,
    digest,
    find,
    keys_from_environment,
    new_key,
    read_keys,
    write_keys,
)


def test_key_file_has_no_secrets_and_is_private(tmp_path):
    path = tmp_path / "keys.json"
    key, record = new_key("alice", requests_per_min=10)
    write_keys(path, [record])
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path) == (record,)


def test_key_is_found_by_its_hash():
    (a, first), (b, second) = new_key("a"), new_key("b")
    assert find(b, [first, second]) == second
    assert find(a[:-1], [first, second]) is None
    assert find("", [first, second]) is None


def test_every_record_is_compared(monkeypatch):
    """The time of the search must not reveal which record matches."""
    compared = []
    monkeypatch.setattr(module.hmac, "compare_digest", lambda a, b: compared.append(b) or a == b)
    (a, first), (_, second) = new_key("a"), new_key("b")
    assert find(a, [first, second]) == first
    assert compared == [first.sha256, second.sha256]


def test_keys_are_read_from_the_environment():
    (record,) = keys_from_environment({"PEAGLE_API_KEYS": " ci=0123456789abcdef , "})
    assert (record.name, record.sha256) == ("ci", digest("0123456789abcdef"))
    assert keys_from_environment({}) == ()


@pytest.mark.parametrize("value", ["0123456789abcdef", "ci=short", "b@d name=0123456789abcdef"])
def test_invalid_environment_entry_is_refused_without_quoting_it(value):
    with pytest.raises(ConfigError) as error:
        keys_from_environment({"PEAGLE_API_KEYS": value})
    assert "0123456789abcdef" not in str(error.value)


@pytest.mark.parametrize("text", ["{}", "no json", '[{"name": "a"}]', '[{"name": "a", "sha256": "xyz"}]'])
def test_invalid_key_file_is_refused(tmp_path, text):
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys .*keys\.json"):
        read_keys(path)


def test_duplicate_key_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a key named alice already exists"):
        write_keys(tmp_path / "keys.json", [new_key("alice")[1], new_key("alice")[1]])


@pytest.fixture
def key_ring(tmp_path, monkeypatch):
    """A file with two keys, a ring that reloads the file at each call, and each key with its record."""
    monkeypatch.setattr("pipelines.online.gateway.keys._RELOAD_S", 0)
    path = tmp_path / "keys.json"
    alice, bob = new_key("alice"), new_key("bob")
    write_keys(path, [alice[1], bob[1]])
    return path, KeyRing(path), alice, bob


def test_revoked_key_is_invalid_without_a_restart(key_ring):
    path, ring, (alice, alice_record), (bob, bob_record) = key_ring
    assert ring.find(bob) == bob_record
    write_keys(path, [alice_record])
    assert ring.find(bob) is None
    assert ring.find(alice) == alice_record
    path.unlink()
    assert ring.find(alice) is None


def test_current_limits_of_a_key_are_found_by_name_until_it_is_revoked(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.online.gateway.keys._RELOAD_S", 0)
    path = tmp_path / "keys.json"
    _, alice = new_key("alice", budget_usd=1)
    write_keys(path, [alice])
    ring = KeyRing(path)
    write_keys(path, [new_key("alice", budget_usd=2)[1]])
    current = ring.current(alice.without_hash())
    assert (current.budget_usd, current.sha256) == (2, "0" * 64)
    write_keys(path, [])
    assert ring.current(alice) is None
    assert ring.current(LOCAL) == LOCAL


def test_damaged_file_keeps_previous_keys_and_each_version_is_logged_once(key_ring, caplog):
    path, ring, (alice, alice_record), (bob, bob_record) = key_ring
    assert ring.find(alice) == alice_record
    for text in ("[,]", "[,,]"):
        path.write_text(text)
        os.utime(path, ns=(0, len(text)))
        for _ in range(3):
            assert ring.find(alice) == alice_record
            assert ring.current(bob_record) == bob_record.without_hash()
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert "keys.json: cannot be read" in caplog.text
    assert "stay valid" in caplog.text
    write_keys(path, [alice_record])
    assert ring.find(bob) is None
    assert ring.find(alice) == alice_record


def test_unreadable_file_is_retried(key_ring, monkeypatch):
    path, ring, (alice, alice_record), (bob, bob_record) = key_ring
    assert ring.find(bob) == bob_record
    write_keys(path, [alice_record])
    with monkeypatch.context() as outage:
        outage.setattr(ring._file, "_read", fail_to_read)
        assert ring.find(bob) == bob_record
    assert ring.find(bob) is None
    assert ring.find(alice) == alice_record


def fail_to_read(path):
    raise ConfigError(f"keys {path}: cannot be read: no answer")


def test_unreadable_key_file_raises(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text("[,]")
    ring = KeyRing(path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be read"):
            ring.find("a key")
        with pytest.raises(ConfigError, match="cannot be read"):
            ring.current(new_key("alice")[1])


def test_expired_key_has_no_current_record(tmp_path, monkeypatch):
    _, record = new_key("alice", expires_at=1000)
    ring = KeyRing(None, [record])
    for now, is_valid in ((999.9, True), (1000, False), (1e9, False)):
        monkeypatch.setattr(module.time, "time", lambda now=now: now)
        assert (ring.current(record) is not None) == is_valid
        assert record.is_expired() != is_valid


@pytest.mark.parametrize(
    "limits",
    [
        {"expires_at": float("inf")},
        {"expires_at": "soon"},
        {"max_parallel_requests": 0},
        {"budget_usd": float("inf")},
        {"budget_usd": float("nan")},
        {"models": [""]},
        {"models": ["m", ""]},
    ],
)
def test_invalid_limit_is_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        new_key("alice", **limits)


def test_name_local_is_reserved():
    with pytest.raises(ConfigError, match="'local' is reserved for requests without a key"):
        new_key("local")
    with pytest.raises(ConfigError, match="'local' is reserved for requests without a key"):
        keys_from_environment({"PEAGLE_API_KEYS": f"local={'k' * 32}"})
