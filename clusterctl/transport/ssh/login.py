"""Logs in on an encrypted connection: offers keys of the ssh-agent and of files until the server accepts one."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.message import Message

from clusterctl.errors import ConnectError
from clusterctl.transport.ssh import login_errors, login_keys
from clusterctl.transport.ssh.ssh_options import SshOptions
from clusterctl.transport.ssh.underlying_stream import Watchdog

_RSA_SHA2_SINCE = (7, 2)
_Version = tuple[int, int]


class _AgentKey:
    """A key in an ssh-agent, with the methods of paramiko's `PKey` that a login needs."""

    public_blob = None

    def __init__(self, agent: login_keys.SshAgent, identity: login_keys.AgentIdentity) -> None:
        self.declined = False
        self._agent = agent
        self._identity = identity

    def get_name(self) -> str:
        return self._identity.type

    def asbytes(self) -> bytes:
        return self._identity.blob

    def sign_ssh_data(self, data: bytes, algorithm: str | None = None) -> Message:
        try:
            signature = self._agent.sign(self._identity.blob, data, algorithm or self._identity.type)
        except login_keys.SshAgentError:
            # An exception would end paramiko's thread, which calls this function. The server rejects an empty
            # signature.
            self.declined = True
            signature = b""
        return Message(signature)


class LoginKeys:
    """Private keys of files and the ssh-agents, loaded once for all nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[login_keys.KeyOffer, tuple[_Version, paramiko.PKey]] = {}
        self._agents: dict[str, login_keys.SshAgent] = {}

    def get_agent(self, path: str | None) -> login_keys.SshAgent | None:
        """Return the ssh-agent with the socket `path`."""
        if path is None:
            return None
        with self._lock:
            return self._agents.setdefault(path, login_keys.SshAgent(path))

    def load_key(self, offer: login_keys.KeyOffer) -> paramiko.PKey | str:
        """Return the present private key in the file of an offer, or a text that says why the key is unusable."""
        with self._lock:
            version = _version(offer.path or "")
            loaded = self._loaded.get(offer)
            if loaded is not None and loaded[0] == version:
                return loaded[1]
            key = _load(offer)
            if version is not None and not isinstance(key, str):
                self._loaded[offer] = (version, key)
            return key


def _version(path: str) -> _Version | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _load(offer: login_keys.KeyOffer) -> paramiko.PKey | str:
    path = offer.path or ""
    if login_keys.parse_key_type(login_keys.read_public_key(path) or b"").startswith("sk-"):
        return login_keys.HARDWARE
    try:
        key = paramiko.PKey.from_path(path)
        if offer.certificate:
            key.load_certificate(offer.certificate)
    except paramiko.PasswordRequiredException:
        return login_keys.ENCRYPTED
    except (TypeError, ValueError, OSError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
        # The errors come from the cryptography package, which raises a TypeError if a key needs a password.
        return login_keys.ENCRYPTED if "password" in str(error).lower() else f"cannot be read: {error}"
    except UnsupportedAlgorithm:
        # The `ssh` program may be able to read such a key.
        return login_keys.UNSUPPORTED
    return key


def log_in(
    node: str, transport: paramiko.Transport, options: SshOptions, login_keys: LoginKeys, watchdog: Watchdog
) -> str | None:
    """Try keys until the server accepts one; return a note for the user, or `None`.

    Raises:
        AuthError: No key was accepted.
        ConnectError: The server did not answer in time, or closed the connection.
    """
    login = _Login(transport, options, login_keys)
    if login.try_keys():
        return login.note
    tried = login.tried
    # Some servers need no key. Other servers answer with the login methods that they allow.
    if not tried.refused and transport.is_active() and login.offer(None, "none"):
        return None
    tried.closed = not transport.is_active()
    if tried.refused and not tried.methods and not tried.closed:
        login.offer(None, "none")
        tried.lost = False
    if watchdog.expired:
        # This is no AuthError: the server has rejected no key, and a second attempt may succeed.
        hint = "the machine may be overloaded, or its directory service down (LDAP, SSSD)"
        raise ConnectError(node, "sshd did not answer the login in time", hint=hint)
    if tried.lost and not tried.refused:
        hint = "sshd may be restarting; if this repeats, see its log on the machine"
        raise ConnectError(node, "sshd closed the connection during the login", hint=hint)
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", transport.remote_version or "")
    tried.sha1_only = version is not None and (int(version[1]), int(version[2])) < _RSA_SHA2_SINCE
    raise login_errors.explain_login_failure(node, tried)


class _Login:
    """A login on one connection.

    Attributes:
        tried: The results of the attempts.
        note: A note for the user about the successful login, or `None`.
    """

    def __init__(self, transport: paramiko.Transport, options: SshOptions, login_keys: LoginKeys) -> None:
        self.tried = login_errors.LoginAttempt(
            options.user,
            missing=login_errors.list_missing_keys(options.identity_files, options.cluster_file_key),
            address=options.address,
        )
        self.note: str | None = None
        self._transport = transport
        self._options = options
        self._keys = login_keys
        self._agent = login_keys.get_agent(options.identity_agent)
        self._forwarded = self._agent is not None and self._agent.is_forwarded(os.environ)

    def try_keys(self) -> bool:
        """Offer keys until the server accepts one or closes the connection; return whether it accepted a key."""
        for offer in self._offers():
            if self._by(offer):
                return True
            if not self._transport.is_active():
                return False
        return False

    def _offers(self) -> Iterator[login_keys.KeyOffer]:
        """Yield the keys to offer.

        Keys of a forwarded ssh-agent come last, because such an ssh-agent ends with the user's login.
        """
        options = self._options
        plan = functools.partial(
            login_keys.list_key_offers,
            options.identity_files,
            options.certificate_files,
            identities_only=options.identities_only,
        )
        if self._forwarded:
            yield from plan(())
        try:
            held = self._agent.identities() if self._agent is not None else ()
        except login_keys.SshAgentError as error:
            self.tried.agent = str(error)
            held = ()
        yield from (offer for offer in plan(held) if not self._forwarded or offer.identity is not None)

    def _by(self, offer: login_keys.KeyOffer) -> bool:
        if offer.identity is None or self._agent is None:
            return self._by_file(offer)
        key = _AgentKey(self._agent, offer.identity)
        if self.offer(cast("paramiko.PKey", key), offer.name):
            self.note = self._note_of(offer)
            return True
        if key.declined:
            self.tried.agent = "the ssh-agent would not sign"
            if offer.path is not None and self._transport.is_active():
                return self._by_file(login_keys.KeyOffer(path=offer.path))
        return False

    def _by_file(self, offer: login_keys.KeyOffer) -> bool:
        key = self._keys.load_key(offer)
        if isinstance(key, str):
            self.tried.unusable[offer.path or ""] = key
            return False
        return self.offer(key, offer.name)

    def _note_of(self, offer: login_keys.KeyOffer) -> str | None:
        if self._forwarded:
            return login_keys.FORWARDED_ONLY
        alone = offer.path is not None and not isinstance(
            self._keys.load_key(login_keys.KeyOffer(path=offer.path)), str
        )
        return None if alone else login_keys.AGENT_ONLY

    def offer(self, key: paramiko.PKey | None, name: str) -> bool:
        """Return whether the server accepts a key, or a login without a key."""
        answered = threading.Event()
        transport, tried = self._transport, self.tried
        try:
            if key is None:
                transport.auth_none(tried.user)
            else:
                transport.auth_publickey(tried.user, key, answered)
                answered.wait()
            if transport.is_authenticated():
                return True
            error = transport.get_exception()
        except (paramiko.SSHException, EOFError, OSError) as raised:
            error = raised
        if isinstance(error, paramiko.ssh_exception.PartialAuthentication):
            tried.further_methods = tuple(error.allowed_types)
        elif isinstance(error, paramiko.BadAuthenticationType):
            tried.methods = tuple(error.allowed_types)
        # A server that refuses further attempts sends a message before it closes the connection. Without a message,
        # the server has not answered.
        tried.lost = isinstance(error, EOFError | OSError) and not transport.is_active()
        if key is not None and not tried.lost:
            tried.refused.append(name)
        return False
