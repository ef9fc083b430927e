"""Host and port, joined and split."""

from __future__ import annotations

import re

import pytest

from serinus.core.addresses import (
    check_host,
    check_tcp_url,
    host_port,
    http_url,
    is_loopback,
    is_wildcard,
    reachable,
    split_host_port,
    tcp_url,
)
from serinus.core.errors import ConfigError

WHOLE = [
    ("127.0.0.1", "127.0.0.1:80"),
    ("localhost", "localhost:80"),
    ("::1", "[::1]:80"),
    ("::", "[::]:80"),
    ("2001:db8::7", "[2001:db8::7]:80"),
    ("fe80::1%eth0", "[fe80::1%eth0]:80"),
]


@pytest.mark.parametrize(("host", "whole"), WHOLE)
def test_a_host_and_a_port_are_joined_and_split_again(host: str, whole: str) -> None:
    assert host_port(host, 80) == whole
    assert split_host_port(whole, "x") == (host, 80)
    assert (http_url(host, 80), tcp_url(host, 80)) == (f"http://{whole}", f"tcp://{whole}")
    check_host(host, "x")


def test_an_address_that_has_brackets_gets_no_others() -> None:
    assert host_port("[::1]", 80) == "[::1]:80"
    check_host("[::1]", "x")


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("::1:5000", "in brackets, as in [::1]:5000"),
        ("2001:db8::7:5000", "in brackets, as in [::1]:5000"),
        ("::1", "in brackets, as in [::1]:5000"),
        ("[::1]", "expected host:port"),
        ("10.0.0.1", "expected host:port"),
        (":5000", "expected host:port"),
        ("a:65536", "expected host:port"),
        ("a:٣", "expected host:port"),
        ("[10.0.0.1]:5000", "expected a name or an address"),
        ("[zz::1]:5000", "expected a name or an address"),
        ("tcp://a:5000", "in brackets"),
    ],
)
def test_what_is_no_host_and_port_is_refused_by_name(address: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as caught:
        split_host_port(address, "config: --x")
    assert str(caught.value).startswith("config: --x is ")


@pytest.mark.parametrize("host", ["", "10.0.0.1:80", "[::1]:80", "::1:30000", "[::1", "a b", "http://a", "[a]"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--x is {re.escape(repr(host))}, expected a name or an address"):
        check_host(host, "--x")


@pytest.mark.parametrize("url", ["127.0.0.1:5000", "http://a:1", "tcp://a", "tcp://::1:5000", "tcp://a:0", "tcp://"])
def test_what_is_no_tcp_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--x is .*, expected"):
        check_tcp_url(url, "--x")
    check_tcp_url("tcp://[::1]:5000", "--x")


def test_loopback_and_every_interface_are_known_in_all_their_forms() -> None:
    assert [h for h in ("localhost", "127.0.0.9", "::1", "[::1]", "::", "10.0.0.1", "a") if is_loopback(h)] == [
        "localhost", "127.0.0.9", "::1", "[::1]",
    ]  # fmt: skip
    assert [h for h in ("0.0.0.0", "::", "[::]", "*", "::1", "10.0.0.1", "a") if is_wildcard(h)] == [
        "0.0.0.0", "::", "[::]", "*",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("listens", "found"),
    [
        ("tcp://[::]:7", "tcp://[2001:db8::7]:7"),
        ("tcp://0.0.0.0:7", "tcp://[2001:db8::7]:7"),
        ("tcp://10.0.0.1:7", "tcp://10.0.0.1:7"),
        ("tcp://[::1]:7", "tcp://[::1]:7"),
        ("local://prefill", "local://prefill"),
        ("", ""),
    ],
)
def test_a_process_that_listens_on_every_interface_is_found_where_it_is_known_to_be(listens: str, found: str) -> None:
    assert reachable(listens, "2001:db8::7") == found
