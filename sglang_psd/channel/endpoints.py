"""Where the wire may run: private socket files, loopback, or elsewhere under a key."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass

import zmq

from sglang_psd.errors import EndpointError

# Length of sun_path on Linux, its final zero included.
LONGEST_SOCKET_PATH = 107


@dataclass(frozen=True)
class CurveKeys:
    """ZMQ CURVE: encryption, and a proof of who the peer is (Z85 text, as ``zmq.curve_keypair`` makes it).

    Attributes
    ----------
    public, secret : bytes
        This side's own pair.
    peer : bytes
        The other side's public key. The binding side needs none: it lets in whoever knows its public key.
    """

    public: bytes
    secret: bytes
    peer: bytes = b""

    @classmethod
    def generate(cls, peer: bytes = b"") -> CurveKeys:
        """A fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public, secret, peer)

    def apply(self, socket: zmq.Socket, *, bind: bool) -> None:
        """Switch CURVE on; before the socket binds or connects."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        if bind:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.peer


def check_endpoint(address: str, keys: CurveKeys | None) -> None:
    """Refuse an address that others could reach and no key protects.

    Raises
    ------
    EndpointError
        Neither ``ipc://`` nor loopback, and no keys.
    """
    kind, _, rest = address.partition("://")
    if kind == "ipc" or keys is not None:
        return
    if kind != "tcp" or not _is_loopback(rest.rpartition(":")[0]):
        raise EndpointError(
            f"The drafter channel {address!r} can be reached from other machines; "
            "use ipc://, a loopback address, or give a CURVE key."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # Names are not looked up: whom they point to may change.
        return False


class PrivateEndpoint:
    """Random paths (sockets, shared memory) in a folder that only this user can enter; removed by ``cleanup``.

    Raises
    ------
    EndpointError
        There is no place for the folder, or its path is too long for a socket.
    """

    def __init__(self) -> None:
        try:
            self.folder = tempfile.mkdtemp(prefix="sglang-psd-")  # created with mode 0700
        except OSError as error:
            raise EndpointError(
                f"The drafter's socket has no place ({error.strerror or error}); let TMPDIR name a writable folder."
            ) from None
        self.path = os.path.join(self.folder, secrets.token_hex(8))
        self.pulse_path = os.path.join(self.folder, secrets.token_hex(8))
        self.lanes_path = os.path.join(self.folder, secrets.token_hex(8))
        if len(os.fsencode(self.path)) > LONGEST_SOCKET_PATH:
            self.cleanup()
            raise EndpointError(
                f"{self.path} is longer than a socket path can be ({LONGEST_SOCKET_PATH} bytes); "
                "let TMPDIR name a folder with a shorter path."
            )

    @property
    def address(self) -> str:
        """Of the messages."""
        return "ipc://" + self.path

    @property
    def pulse_address(self) -> str:
        """Of the drafter's sign of life."""
        return "ipc://" + self.pulse_path

    def exists(self) -> bool:
        """Whether the socket file is still there: nobody can connect without it."""
        return os.path.exists(self.path)

    def cleanup(self) -> None:
        """Remove the folder and the socket files in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
