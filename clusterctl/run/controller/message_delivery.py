"""Delivers one message to one target of `notify`: a webhook, a service of apprise, or a program of the head."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import logging
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message as Headers
from pathlib import Path
from typing import IO

from typing_extensions import override

from clusterctl._version import __version__
from clusterctl.config.spec import ClusterSpec, NotifySpec, SecretSpec
from clusterctl.run.rules.notification import Message, build_request, build_variables

_HTTP_TIMEOUT_S = 4.0
"""Seconds that a server may be silent before the message is sent again."""
_COMMAND_TIMEOUT_S = 30.0
_TRANSIENT_STATUS = (408, 425, 429)


class DeliveryError(Exception):
    """A message was not delivered. The text contains no URL.

    Attributes:
        is_final: Whether another try cannot succeed.
    """

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because urllib would repeat the request as a GET without the message."""

    @override
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Headers, newurl: str
    ) -> None:
        return None


def list_targets(notify: NotifySpec) -> list[str]:
    """Return the keys of `notify` that name a target."""
    return [*notify.addresses, *(["command"] if notify.command else [])]


def read_url(source: SecretSpec, environ: Mapping[str, str]) -> str:
    """Return the URL that `env` or `file` names.

    Raises:
        DeliveryError: The variable is not set, or the file cannot be read.
    """
    try:
        text = environ.get(source.env, "") if source.env else Path(source.file or "").read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DeliveryError(f"{source.file} cannot be read", is_final=True) from error
    if not text.strip():
        raise DeliveryError(
            f"the variable {source.env} is not set" if source.env else f"{source.file} is empty", is_final=True
        )
    return text.strip()


def deliver(spec: ClusterSpec, target: str, url: str, message: Message) -> str:
    """Deliver a message once; return the answer in a few words. This takes seconds if the target is slow.

    Raises:
        DeliveryError: The target did not take the message.
    """
    if target == "command":
        return _run_command(spec, message)
    return _send_by_apprise(url, message) if target == "apprise" else _post(*build_request(target, url, message))


def _post(url: str, body: object) -> str:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    try:
        opener = urllib.request.build_opener(_NoRedirects)
        request = urllib.request.Request(url, data, {**headers, "User-Agent": f"clusterctl/{__version__}"})
        with opener.open(request, timeout=_HTTP_TIMEOUT_S) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        is_final = error.code < 500 and error.code not in _TRANSIENT_STATUS
        raise DeliveryError(f"it answered {error.code}", is_final=is_final) from None
    except urllib.error.URLError as error:
        raise DeliveryError(getattr(error.reason, "strerror", None) or type(error.reason).__name__) from None
    except (OSError, http.client.HTTPException) as error:
        raise DeliveryError(getattr(error, "strerror", None) or type(error).__name__) from None
    except ValueError:
        raise DeliveryError("its URL is invalid", is_final=True) from None


def _send_by_apprise(url: str, message: Message) -> str:
    try:
        # It belongs to an extra, and it loads 100 services.
        apprise = importlib.import_module("apprise")
    except ImportError:
        raise DeliveryError("the package apprise is missing: pip install apprise", is_final=True) from None
    # Its warnings contain parts of the URL.
    logging.getLogger("apprise").disabled = True
    service = apprise.Apprise()
    if not service.add(url):
        raise DeliveryError("apprise does not know this URL", is_final=True)
    title = f"{message.title} (repeat)" if message.repeat else message.title
    if not service.notify(title=title, body=f"{message.text}\n{message.command}"):
        raise DeliveryError("apprise could not deliver the message")
    return "delivered"


def _run_command(spec: ClusterSpec, message: Message) -> str:
    """Run the program of `notify.command`, with the message on stdin and in variables."""
    text = f"{message.title}\n{message.text}\n{message.command}\n"
    try:
        program = subprocess.Popen(
            spec.notify.command,
            cwd=os.path.dirname(spec.path) or ".",
            env={**os.environ, **build_variables(message)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise DeliveryError(f"it cannot be started: {error.strerror}", is_final=True) from error
    except ValueError:
        raise DeliveryError("one of its arguments contains a null byte", is_final=True) from None
    try:
        program.communicate(text.encode(errors="replace"), timeout=_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        raise DeliveryError(f"it did not end within {_COMMAND_TIMEOUT_S:.0f} s") from None
    if program.returncode != 0:
        raise DeliveryError(f"it ended with {program.returncode}")
    return "exit code 0"
