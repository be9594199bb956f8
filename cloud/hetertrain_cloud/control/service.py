"""The control plane as a process: the API's server, the connection to the broker, and upkeep.

The main thread serves the API. One thread takes what comes from the broker; another keeps the
broker's rules, the certificates of our own and the dates at which nodes were seen up to date.
"""

from __future__ import annotations

import datetime
import secrets
import ssl
import threading
import time
from dataclasses import replace
from pathlib import Path

import uvicorn
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from hetertrain.errors import FrameError, HetertrainError, TransportError
from hetertrain.logging import get_logger
from hetertrain.security import Signer, write_private
from hetertrain.service import Mailbox, Stop
from hetertrain.transport import mqtt
from hetertrain.wire import topics
from hetertrain.wire.events import Outgoing
from hetertrain.wire.frames import pack, unpack
from hetertrain.wire.messages import (
    AggregatorStatus,
    CellMembers,
    JobOrder,
    LogLines,
    LogRequest,
    NodeState,
)
from hetertrain.wire.signing import signed
from hetertrain_cloud.console import mount_console
from hetertrain_cloud.control.access import AGGREGATOR, CONTROL, watcher_topics
from hetertrain_cloud.control.api.app import build_app
from hetertrain_cloud.control.authority import Authority
from hetertrain_cloud.control.credentials import write_own, write_server
from hetertrain_cloud.control.dynsec import RESPONSE_TOPIC, DynamicSecurity
from hetertrain_cloud.control.jobs import JobSpecification
from hetertrain_cloud.control.live import LiveFleet
from hetertrain_cloud.control.log_desk import FRAME_BYTES_MAX, LogDesk
from hetertrain_cloud.control.plane import Advertised, ControlPlane
from hetertrain_cloud.control.search import members_known
from hetertrain_cloud.control.settings import CloudSettings
from hetertrain_cloud.control.tables import Job, User

LOOK_SECONDS = 1.0
"""Orders of operators reach nodes within so long."""
UPKEEP_SECONDS = 30.0
"""The broker's rules are compared at least so often."""
CHANGES_SECONDS = 5.0
"""What happened to nodes is written down so often."""
SHUTDOWN_SECONDS = 3
SOCKET_BYTES_MAX = 1 << 20
"""Of one message from a browser."""
BOOTSTRAP_FILE = "bootstrap-token"


def now() -> datetime.datetime:
    """Return the time."""
    return datetime.datetime.now(datetime.UTC)


class ControlService:
    """The control plane at work."""

    def __init__(self, settings: CloudSettings) -> None:
        self._settings = settings
        self._log = get_logger(part="control")
        self._stopping = threading.Event()
        self._exit_code = 0
        self._mailbox: Mailbox[mqtt.Event] = Mailbox()
        self._live = LiveFleet()
        self._database = settings.open_database()
        self._authority = Authority(settings.authority, now(), settings.authority_passphrase_file)
        is_mosquitto = settings.broker == "mosquitto"
        # No other process may use the name, whatever its session was: it is new each time.
        own = settings.model_copy(update=settings.credential(CONTROL))
        endpoint = own.endpoint(f"{CONTROL}-{secrets.token_hex(4)}")
        credentials = settings.directory / "credentials"
        self._sign = Signer(credentials / f"{CONTROL}.key", credentials / f"{CONTROL}.crt").sign
        self._announced: dict[str, JobOrder] = {}
        self._answers = (RESPONSE_TOPIC,) if is_mosquitto else ()
        self._is_deaf = False
        """The broker does not let us hear all that we ask for."""
        self._connection = mqtt.Connection(
            endpoint, (*watcher_topics(), *self._answers), self._mailbox.put
        )
        self._access = DynamicSecurity(self._connection.publish) if is_mosquitto else None
        self._desk = LogDesk(self._ask_for_log)
        self.plane = ControlPlane(
            database=self._database,
            authority=self._authority,
            live=self._live,
            advertised=Advertised(
                host=settings.advertised_host or settings.broker_host,
                port=settings.advertised_port or settings.broker_port,
                is_tls=is_mosquitto,
                websocket_path=settings.advertised_websocket_path,
            ),
            jobs_directory=settings.jobs_directory,
            bootstrap_file=settings.directory / BOOTSTRAP_FILE,
            now=now,
            access=self._access,
            broker_lost_at=now(),
            certificates=_own_certificates(settings),
            settings=settings.shown(),
            logs=self._desk,
        )

    def run(self) -> int:
        """Serve until stopped; return the exit code."""
        self._database.migrate()
        self._offer_bootstrap()
        server = self._server()
        threads = [
            threading.Thread(target=self._watch, args=(server,), name="watch", daemon=True),
            threading.Thread(target=self._keep_up, args=(server,), name="upkeep", daemon=True),
        ]
        self._connection.start()
        for thread in threads:
            thread.start()
        try:
            server.run()
        finally:
            self._stopping.set()
            self.plane.access_changed.set()
            self._mailbox.close()
            self._mailbox.stop()
            self._connection.stop()
            for thread in threads:
                thread.join(SHUTDOWN_SECONDS)
            self._database.close()
        return self._exit_code

    def _server(self) -> uvicorn.Server:
        settings = self._settings
        directory, name = settings.directory / "credentials", "api"
        if settings.tls_directory is not None:
            directory, name = settings.tls_directory, "tls"
        else:
            write_server(self._authority, directory, name, settings.host_names, now())
        app = build_app(self.plane)
        mount_console(app)
        configuration = uvicorn.Config(
            app,
            host=settings.listen_host,
            port=settings.listen_port,
            ssl_certfile=str(directory / f"{name}.crt"),
            ssl_keyfile=str(directory / f"{name}.key"),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws_max_size=SOCKET_BYTES_MAX,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        # Else the upkeep, which begins before the server, may find no TLS context to renew.
        configuration.load()
        return uvicorn.Server(configuration)

    def _offer_bootstrap(self) -> None:
        """Write the one-time token for the first admin, where there is no user yet."""
        with self._database.read() as transaction:
            has_user = transaction.query(User.name).first() is not None
        if has_user:
            return
        path = self.plane.bootstrap_file
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32).encode())
        self._log.warning("no_admin_yet", bootstrap_file=str(path))

    def _watch(self, server: uvicorn.Server) -> None:
        """Take what comes from the broker; where that ends for good, end the process, so that its
        supervisor starts another.
        """
        try:
            self._take_all()
        except Exception as error:  # whatever it was, a control plane without a broker is of no use
            self._log.error("broker_lost", error=repr(error))
            self._exit_code = TransportError.exit_code
            server.should_exit = True

    def _take_all(self) -> None:
        while True:
            match self._mailbox.take(time.monotonic() + UPKEEP_SECONDS):
                case Stop():
                    return
                case mqtt.Received(topic, frame):
                    self._take(topic, frame)
                case mqtt.Connected():
                    self._live.broker_error, self.plane.broker_lost_at = "", None
                    self._announced.clear()
                    self.plane.access_changed.set()
                    self._log.info("broker_connected")
                case mqtt.Disconnected(reason, is_final):
                    self._live.broker_error = reason
                    self.plane.broker_lost_at = self.plane.broker_lost_at or now()
                    self._log.warning("broker_disconnected", reason=reason)
                    if is_final:
                        raise TransportError(reason)
                case mqtt.Denied(what, reason):
                    self._is_deaf = self._is_deaf or what in watcher_topics()
                    self._log.error("access_denied", what=what, reason=reason)
                case _:
                    pass  # Deliveries, and the passing of time.

    def _take(self, topic: str, frame: bytes) -> None:
        if topic == RESPONSE_TOPIC:
            if self._access is not None:
                self._access.take(frame)
            return
        try:
            message, _ = unpack(frame)
        except FrameError as error:
            self._log.warning("frame_refused", topic=topic[:128], reason=error.reason)
            return
        match message:
            case NodeState() if topic == topics.state(message.node):
                self._live.see(message)
            case AggregatorStatus() if topic == topics.status(message.job, message.cell):
                self._live.hear(message)
            case CellMembers() if topic == topics.members(message.job, message.cell):
                self._hear_members(message)
            case LogLines() if topic == topics.log(message.node):
                if len(frame) > FRAME_BYTES_MAX or not self._desk.take(message):
                    self._log.warning("frame_refused", topic=topic[:128], reason="unasked")
            case _:
                self._log.warning("frame_refused", topic=topic[:128], reason="misplaced")

    def _ask_for_log(self, node: str, number: int) -> None:
        request = LogRequest(node=node, number=number)
        request = signed(request, "", "", self._sign)
        self._connection.publish((Outgoing(topics.inbox(node), pack(request)),))

    def _hear_members(self, report: CellMembers) -> None:
        """Take what a gateway tells of its cell, of nodes that are enrolled."""
        if not self._live.expects(report):
            return
        names = [member.node for member in report.members if topics.is_name(member.node)]
        try:
            with self._database.read() as transaction:
                known = members_known(transaction, report.cell, names)
        except SQLAlchemyError as error:  # The next report may find the database again.
            self._log.warning("members_not_taken", cell=report.cell, error=str(error))
            return
        self._live.hear_members(report, known)

    def _keep_up(self, server: uvicorn.Server) -> None:
        """Keep up to date what ages; whatever fails is tried again."""
        due_at = changes_due_at = 0.0
        while not self._stopping.is_set():
            is_changed = self.plane.access_changed.wait(LOOK_SECONDS)
            self.plane.access_changed.clear()
            try:
                if self._stopping.is_set() or time.monotonic() >= changes_due_at:
                    changes_due_at = time.monotonic() + CHANGES_SECONDS
                    self.plane.save_changes()
                if self._stopping.is_set():
                    return
                self._announce()
                if is_changed or time.monotonic() >= due_at:
                    due_at = time.monotonic() + UPKEEP_SECONDS
                    self._reconcile()
                    self.plane.save_seen()
                    self._renew(server)
            except Exception as error:  # the thread must outlive a database that comes and goes
                self._log.error("upkeep_failed", error=repr(error))

    def _announce(self) -> None:
        """Tell each job's nodes, where it is news, whether they are to train."""
        if self._live.broker_error:
            return
        with self._database.read() as transaction:
            jobs = list(transaction.scalars(select(Job)))
        for job in jobs:
            state = job.state if job.state == "completed" else job.wanted
            wanted = JobSpecification(**job.specification)
            # Its revision counts what operators did, not that it completed: the time counts both.
            order = JobOrder(
                number=int(job.changed_at.timestamp() * 1000),
                state=state,
                train_when=wanted.train_when,
                send_when=wanted.send_when,
            )
            before = self._announced.get(job.name)
            if before is not None and _is_same(before, order):
                continue
            order = signed(order, job.name, topics.CLOUD_CELL, self._sign)
            frame = pack(order)
            self._connection.publish((Outgoing(topics.order(job.name), frame, retain=True),))
            self._announced[job.name] = order

    def _reconcile(self) -> None:
        if self._access is None or self._live.broker_error:
            return
        try:
            changed = self._access.reconcile(self.plane.rights)
        except TransportError as error:
            self.plane.access_error = str(error)
            self.plane.access_failed_at = self.plane.access_failed_at or now()
            self._log.error("access_not_reconciled", error=str(error))
            return
        self.plane.access_error, self.plane.access_failed_at = "", None
        if changed:
            self._log.info("access_reconciled", changed=changed)
        if changed and self._is_deaf:
            # A broker that an earlier release set up has just been told that we may hear it.
            self._is_deaf = False
            self._connection.resubscribe(self._answers)
            self._connection.resubscribe((*watcher_topics(), *self._answers))

    def _renew(self, server: uvicorn.Server) -> None:
        directory = self._settings.directory / "credentials"
        write_own(self._authority, directory, now())
        context = server.config.ssl
        if self._settings.tls_directory is None and isinstance(context, ssl.SSLContext):
            hosts = self._settings.host_names
            if write_server(self._authority, directory, "api", hosts, now()):
                context.load_cert_chain(directory / "api.crt", directory / "api.key")


def _own_certificates(settings: CloudSettings) -> dict[str, Path]:
    """Return where the cloud's own certificates are, by what they are for."""
    own = settings.directory / "credentials"
    api = own / "api.crt" if settings.tls_directory is None else settings.tls_directory / "tls.crt"
    return {"the API": api} | {f"the {user}": own / f"{user}.crt" for user in (CONTROL, AGGREGATOR)}


def _is_same(before: JobOrder, order: JobOrder) -> bool:
    """Tell whether an order says nothing new."""
    return replace(before, number=order.number, signature=b"", certificate=b"") == order


def run_control(settings: CloudSettings) -> None:
    """Be the control plane."""
    try:
        exit_code = ControlService(settings).run()
    except HetertrainError as error:
        get_logger(part="control").error("control_failed", code=error.code, error=str(error))
        raise SystemExit(error.exit_code) from error
    if exit_code:
        raise SystemExit(exit_code)
