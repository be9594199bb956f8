"""What a doctor looks at between a node and its broker: name, port, TLS, WebSocket, MQTT, rights.

It connects with the node's real credential, but under a client id of its own that no other process
has, with no will and no session: a running agent of the node is not disturbed. What is published to
try a right is an empty message, which every receiver of this protocol drops and counts.
"""

from __future__ import annotations

import base64
import queue
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hetertrain.doctor import Check, Finding, failed, ok, skipped
from hetertrain.transport import mqtt
from hetertrain.wire.events import Outgoing

DNS_SECONDS = 3.0
TCP_SECONDS = 3.0
TLS_SECONDS = 5.0
WEBSOCKET_SECONDS = 4.0
MQTT_SECONDS = 6.0
ACL_SECONDS = 6.0
SPARE_SECONDS = 0.4
"""A check that waits by itself ends so long before its deadline, and says what for."""
REFUSAL_SECONDS = 0.5
"""With TLS 1.3 a server refuses our certificate after the handshake, at once."""
RESPONSE_BYTES_MAX = 4096
_EXPIRED, _UNKNOWN, _OTHER_NAME = 10, (18, 19, 20, 21), (62, 64)
"""Reasons for which OpenSSL refuses a certificate (X509_V_ERR_…)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One connection that a part makes."""

    host: str
    port: int
    endpoint: Callable[[], mqtt.Endpoint]
    """Reads the credential, so it is called where that is well."""
    subscriptions: tuple[str, ...]
    publications: tuple[str, ...]


def link_checks(link: Link, prefix: str = "") -> list[Check]:
    """Return the checks of a link, from its name to its rights; ``prefix`` tells it from others."""

    def check(
        layer: str,
        run: Callable[[], Finding],
        seconds: float,
        silence: str,
        *needs: str,
    ) -> Check:
        return Check(
            name=prefix + layer, run=run, seconds=seconds, silence=silence, needs=tuple(needs)
        )

    where, endpoint = f"{link.host}:{link.port}", link.endpoint
    firewall = f"something swallows what we send to {where}: look for a firewall on the way"
    return [
        check(
            "dns",
            lambda: check_dns(link.host),
            DNS_SECONDS,
            "the name server does not answer: check the network, and /etc/resolv.conf",
        ),
        check(
            "tcp", lambda: check_tcp(link.host, link.port), TCP_SECONDS, firewall, f"{prefix}dns"
        ),
        check(
            "tls",
            lambda: check_tls(endpoint()),
            TLS_SECONDS,
            f"{where} accepts connections and does not speak TLS: is it the right port?",
            *(f"{prefix}tcp", "certificate"),
        ),
        check(
            "websocket",
            lambda: check_websocket(endpoint()),
            WEBSOCKET_SECONDS,
            f"{where} does not speak HTTP: is it the right port?",
            f"{prefix}tls",
        ),
        check(
            "mqtt",
            lambda: check_mqtt(endpoint()),
            MQTT_SECONDS,
            f"{where} accepts connections and does not speak MQTT: is it the right port?",
            f"{prefix}websocket",
        ),
        check(
            "acl",
            lambda: check_acl(endpoint(), link.subscriptions, link.publications),
            ACL_SECONDS,
            "the broker takes connections and does nothing more: look at its log",
            f"{prefix}mqtt",
        ),
    ]


def check_dns(host: str) -> Finding:
    """Look whether the name has an address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return failed(f"{host}: {error}", "check broker_host, the network and its name server")
    addresses = sorted({str(item[4][0]) for item in found})
    return ok(f"{host} is {', '.join(addresses[:4])}")


def check_tcp(host: str, port: int) -> Finding:
    """Look whether the port accepts connections."""
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), TCP_SECONDS - SPARE_SECONDS) as connection:
            found = f"{where} accepts connections from {connection.getsockname()[0]}"
    except TimeoutError:
        return failed(
            f"{where} does not answer",
            "is the broker's machine up? Look for a firewall; port 443 with "
            "broker_websocket_path passes most",
        )
    except OSError as error:
        return failed(f"{where}: {error}", "check broker_port, and that the broker runs")
    return ok(found)


def check_tls(endpoint: mqtt.Endpoint) -> Finding:
    """Look whether broker and we know each other's certificates, and the name is the broker's."""
    try:
        context = mqtt.tls_context(endpoint)
    except (OSError, ValueError) as error:
        return failed(f"tls_ca_file {endpoint.ca_file}: {error}", "check the file and its rights")
    if context is None:
        return skipped("not used: tls_ca_file is not set")
    try:
        with _connect(endpoint, context, TLS_SECONDS - SPARE_SECONDS) as tls:
            assert isinstance(tls, ssl.SSLSocket), "it was wrapped"
            name, cipher = tls.version(), (tls.cipher() or ("?",))[0]
            is_closed = _is_closed(tls)
    except ssl.SSLCertVerificationError as error:
        return failed(
            f"the broker's certificate: {error.verify_message}", _verify_advice(endpoint, error)
        )
    except ssl.SSLError as error:
        advice = "is this the broker's TLS port? Does the broker know our certificate's authority?"
        return failed(f"{error.reason or error}", advice)
    except OSError as error:
        return failed(f"the handshake: {error}", "is this the broker's TLS port?")
    if is_closed:
        return failed(
            "the broker closed the connection after the handshake",
            "does the broker know our certificate's authority? Look at its log",
        )
    return ok(f"{name}, {cipher}, the certificate is of {endpoint.host}")


def _is_closed(tls: ssl.SSLSocket) -> bool:
    """Tell whether the server goes away at once; one of MQTT or HTTP waits for us to speak."""
    tls.settimeout(REFUSAL_SECONDS)
    try:
        return not tls.recv(1)
    except TimeoutError:
        return False


def _verify_advice(endpoint: mqtt.Endpoint, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "renew the broker's certificate, or check this machine's clock"
    if error.verify_code in _OTHER_NAME:
        return f"the broker's certificate is not for {endpoint.host}: check broker_host"
    if error.verify_code in _UNKNOWN:
        return f"{endpoint.ca_file} is not of the broker's authority: check tls_ca_file"
    return "check tls_ca_file, and whether this is the right broker"


def check_websocket(endpoint: mqtt.Endpoint) -> Finding:
    """Look whether MQTT over WebSocket is offered at the path, where it is used."""
    path = endpoint.websocket_path
    if path is None:
        return skipped("not used: broker_websocket_path is not set")
    request = (
        f"GET {path} HTTP/1.1\r\nHost: {endpoint.host}:{endpoint.port}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: {base64.b64encode(secrets.token_bytes(16)).decode()}\r\n"
        "Sec-WebSocket-Protocol: mqtt\r\n\r\n"
    )
    advice = "check broker_websocket_path, and what the proxy before the broker passes on"
    try:
        seconds = WEBSOCKET_SECONDS - SPARE_SECONDS
        with _connect(endpoint, mqtt.tls_context(endpoint), seconds) as connection:
            connection.sendall(request.encode())
            answer = connection.recv(RESPONSE_BYTES_MAX)
    except OSError as error:
        return failed(f"{path}: {error}", advice)
    status = answer.partition(b"\r\n")[0].decode("latin-1")[:100]
    if not status.startswith("HTTP/1.1 101"):
        return failed(f"{path}: {status or 'the connection was closed'}", advice)
    return ok(f"{path} is MQTT over WebSocket")


def check_mqtt(endpoint: mqtt.Endpoint) -> Finding:
    """Look whether the broker takes our credential."""
    events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
    connection = mqtt.Connection(_as_doctor(endpoint), (), events.put)
    connection.start()
    try:
        for event in _until(events, MQTT_SECONDS - 2 * SPARE_SECONDS):
            match event:
                case mqtt.Connected(packet_bytes_max):
                    most = "of any size" if packet_bytes_max is None else f"to {packet_bytes_max} B"
                    return ok(f"the broker takes us, and packets {most}")
                case mqtt.Disconnected(reason, is_refusal=True):
                    return failed(
                        reason,
                        "is the node revoked, or not enrolled there? Check broker_username and "
                        "broker_password, or enroll again",
                    )
                case mqtt.Disconnected(reason):
                    needs_tls = "" if endpoint.ca_file else "; does it insist on TLS (tls_ca_file)?"
                    return failed(reason, f"look at the broker's log{needs_tls}")
    finally:
        connection.stop(SPARE_SECONDS)
    return failed("no CONNACK came", f"is {endpoint.host}:{endpoint.port} a broker of MQTT 5?")


def check_acl(
    endpoint: mqtt.Endpoint, subscriptions: tuple[str, ...], publications: tuple[str, ...]
) -> Finding:
    """Look whether we may hear and say what our part must: subscribe to each topic, and publish
    nothing on each.
    """
    events: queue.SimpleQueue[mqtt.Event] = queue.SimpleQueue()
    connection = mqtt.Connection(_as_doctor(endpoint), subscriptions, events.put)
    tries = tuple(Outgoing(topic, b"", token=i) for i, topic in enumerate(publications))
    waiting, denied, broken = set(range(len(tries))), [], ""
    connection.start()
    try:
        for event in _until(events, ACL_SECONDS - 2 * SPARE_SECONDS):
            match event:
                case mqtt.Connected():
                    connection.publish(tries)
                case mqtt.Delivered(token):
                    waiting.discard(token)
                case mqtt.Denied(what, reason, token):
                    verb = f"hear {what}" if token is None else f"publish on {publications[token]}"
                    denied.append(f"{verb}: {reason}")
                    waiting.discard(-1 if token is None else token)
                case mqtt.Disconnected(reason):
                    broken = reason
            if broken or not waiting:
                break
    finally:
        connection.stop(SPARE_SECONDS)
    advice = "is the node revoked, or not enrolled for this job? Is the job's name right?"
    if denied:
        return failed("we may not " + "; ".join(denied), advice)
    if broken:
        return failed(f"the broker ended the connection: {broken}", advice)
    if waiting:
        unanswered = ", ".join(publications[i] for i in sorted(waiting))
        return failed(f"no PUBACK came for {unanswered}", "look at the broker's log")
    return ok(f"we may hear {len(subscriptions)} topics and publish on {len(publications)}")


def _as_doctor(endpoint: mqtt.Endpoint) -> mqtt.Endpoint:
    client_id = f"{endpoint.client_id}-doctor-{secrets.token_hex(4)}"
    return replace(endpoint, client_id=client_id, session_seconds=0)


def _until(events: queue.SimpleQueue[mqtt.Event], seconds: float) -> Iterator[mqtt.Event]:
    """Yield events as they come, for so long."""
    ends_at = time.monotonic() + seconds
    while True:
        try:
            yield events.get(timeout=max(0.0, ends_at - time.monotonic()))
        except queue.Empty:
            return


def _connect(
    endpoint: mqtt.Endpoint, context: ssl.SSLContext | None, seconds: float
) -> socket.socket:
    """Connect, with TLS where there is a context; whoever has the result closes it.

    Raises:
        OSError: it cannot be done, or not in time.
    """
    raw = socket.create_connection((endpoint.host, endpoint.port), seconds)
    if context is None:
        return raw
    try:
        return context.wrap_socket(raw, server_hostname=endpoint.host)
    except (OSError, ValueError):
        raw.close()
        raise
