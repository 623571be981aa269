"""Ways to log in: what a node, the head's ssh_config and its environment are like for each."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.lab import kernel
from tests.lab.keys import make_key, public
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.lab.lab import Lab
    from tests.lab.node import Node

FIDO: Final = "/usr/lib/openssh/regress/misc/sk-dummy/sk-dummy.so"
REALM: Final = "LAB.TEST"
SECRET: Final = "3132333435363738393031323334353637383930"
HEAD_KEY: Final = "/etc/ssh/ssh_host_ed25519_key"


@dataclass
class Scene:
    """What one login is set up in.

    Attributes:
        lab: The lab.
        folder: For keys and scripts.
        node: The node that is logged in to.
        env: Environment of the head's programs.
        ends: What undoes the set-up.
    """

    lab: Lab
    folder: Path
    node: Node
    env: dict[str, str]
    ends: contextlib.ExitStack

    def config(self, *lines: str, host: str | None = None) -> None:
        """Put lines for the node before all else in ssh_config."""
        block = "\n    ".join([f"Host {host or self.node.name}", *lines])
        self.lab.ssh_config.write_text(block + "\n" + self.lab.ssh_config.read_text())

    def script(self, name: str, text: str) -> Path:
        """Write a program."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def authorize(self, key: Path) -> None:
        """Let a key in."""
        home = self.node.spec.home
        self.node.run(["sh", "-c", f"cat >{home}/.ssh/authorized_keys"], input=public(key) + "\n", check=True)

    def key(self, kind: str = "ed25519") -> Path:
        """Make a key that the node lets in, and name it in ssh_config."""
        key = make_key(self.folder / kind, kind)
        self.authorize(key)
        self.config(f"IdentityFile {key}", "IdentitiesOnly yes")
        return key


@dataclass(frozen=True, kw_only=True)
class Login:
    """One way to log in.

    Attributes:
        specs: The nodes; the last is logged in to.
        prepare: Sets up the head's side.
        needs: Programs and files that it takes.
        works: Whether `ssh` gets in.
    """

    specs: Sequence[NodeSpec] = (NodeSpec(authorized=False, files={".ssh/authorized_keys": ""}),)
    prepare: Callable[[Scene], object] = field(default=lambda _: None)
    needs: Sequence[str] = ()
    works: bool = True

    @property
    def missing(self) -> list[str]:
        """What it takes and is not there."""
        return [name for name in self.needs if not (os.path.exists(name) or shutil.which(name))]


def passphrase(scene: Scene) -> Path:
    """A key with a passphrase and nobody who knows it."""
    key = scene.key()
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key], check=True, stdout=subprocess.DEVNULL)
    return key


def agent(scene: Scene) -> None:
    """A key that only an ssh-agent holds."""
    key = scene.key()
    _into_agent(scene, key)
    key.unlink()


def unlocked(scene: Scene) -> None:
    """A key with a passphrase, which was typed once into an ssh-agent."""
    key = passphrase(scene)
    answer = scene.script("answer", "echo secret")
    _into_agent(scene, key, SSH_ASKPASS=str(answer), SSH_ASKPASS_REQUIRE="force")


def _into_agent(scene: Scene, key: Path, **env: str) -> None:
    sock = scene.folder / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", sock], stdout=subprocess.DEVNULL)
    scene.ends.callback(process.wait)
    scene.ends.callback(process.kill)
    wait_for(sock.exists, what="the ssh-agent")
    scene.env["SSH_AUTH_SOCK"] = str(sock)
    subprocess.run(["ssh-add", "-q", key], env=scene.env | env, check=True, stdin=subprocess.DEVNULL)


def certificate(scene: Scene, validity: str = "-1d:+1d") -> None:
    """A certificate of the user, and a key that is in no authorized_keys."""
    key = make_key(scene.folder / "key")
    scene.lab.certify(key, validity=validity)
    scene.config(f"IdentityFile {key}")


def expired(scene: Scene) -> None:
    """The same, and too late."""
    certificate(scene, "20200101:20200102")


def foreign_authority(scene: Scene) -> None:
    """The host's certificate is for another name."""
    scene.config(f"HostKeyAlias {scene.node.name}.elsewhere")
    known = scene.lab.head.known_hosts
    known.write_text(known.read_text().replace("@cert-authority ", "@cert-authority *.elsewhere,"))


def known_hosts_command(scene: Scene) -> None:
    """Only a program knows the host keys."""
    known = scene.lab.head.known_hosts
    lines = scene.folder / "lines"
    lines.write_text(known.read_text())
    known.write_text("")
    scene.config(f"KnownHostsCommand {scene.script('known', f'cat {lines}')} %H")


def gssapi(scene: Scene) -> None:
    """A ticket of a KDC on the head."""
    folder, node = scene.folder, scene.node
    conf = folder / "krb5.conf"
    conf.write_text(
        f"[libdefaults]\ndefault_realm = {REALM}\ndns_lookup_kdc = false\ndns_lookup_realm = false\n"
        "dns_canonicalize_hostname = false\nrdns = false\nudp_preference_limit = 1\n"
        "default_keytab_name = FILE:/run/keytab\n"
        f"[realms]\n{REALM} = {{\nkdc = {scene.lab.head_address}\n}}\n"
    )
    kdc = folder / "kdc.conf"
    kdc.write_text(
        f"[kdcdefaults]\nkdc_ports = 88\nkdc_tcp_ports = 88\n[realms]\n{REALM} = {{\ndatabase_name = {folder}/db\n"
        f"key_stash_file = {folder}/stash\nacl_file = {folder}/acl\n"
        "supported_enctypes = aes256-cts-hmac-sha1-96:normal\n}\n"
    )
    env = scene.env | {"KRB5_CONFIG": str(conf), "KRB5_KDC_PROFILE": str(kdc)}
    scene.env |= {"KRB5_CONFIG": str(conf), "KRB5CCNAME": f"FILE:{folder}/ticket"}
    keytab = folder / "keytab"
    for argv in (
        ["kdb5_util", "create", "-s", "-P", "master", "-r", REALM],
        ["kadmin.local", "addprinc", "-pw", "secret", "alice"],
        ["kadmin.local", "addprinc", "-randkey", f"host/{node.name}"],
        ["kadmin.local", "ktadd", "-k", str(keytab), f"host/{node.name}"],
    ):
        subprocess.run(argv, env=env, check=True, capture_output=True)
    process = subprocess.Popen(["krb5kdc", "-n"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scene.ends.callback(process.wait)
    scene.ends.callback(process.kill)

    def ticket() -> bool:
        return subprocess.run(["kinit", "alice"], input=b"secret\n", env=scene.env, capture_output=True, check=False).returncode == 0  # fmt: skip

    wait_for(ticket, what="a ticket")
    node.path("/run/keytab").write_bytes(keytab.read_bytes())
    node.path("/run/krb5.conf").write_text(conf.read_text())
    node.run(["mount", "--bind", "/run/krb5.conf", "/etc/krb5.conf"], check=True)
    node.restart_sshd()
    scene.config(f"HostName {node.name}", "GSSAPIAuthentication yes", "User alice")


def hostbased(scene: Scene) -> None:
    """The head's own host key, signed by ssh-keysign, which goes by the machine's ssh_config."""
    system = scene.folder / "ssh_config"
    system.write_text("EnableSSHKeysign yes\n")
    kernel.bind(str(system), "/etc/ssh/ssh_config")
    scene.ends.callback(kernel.unmount, "/etc/ssh/ssh_config")
    me = os.uname().nodename
    home = scene.node.spec.home
    known = f"{me} {public(Path(HEAD_KEY))}\n"
    scene.node.run(["sh", "-c", f"cat >{home}/.ssh/known_hosts"], input=known, check=True)
    scene.node.run(["sh", "-c", f"echo '{me} root' >{home}/.shosts; chown {scene.node.spec.user} {home}/.shosts"], check=True)  # fmt: skip
    scene.config("HostbasedAuthentication yes")


def typed(scene: Scene) -> None:
    """A program types what is asked for; the code is another one each time."""
    counter = scene.folder / "counter"
    counter.write_text("0")
    answer = scene.script(
        "answer",
        f'case "$1" in\n*One-time*) exec 9<>{counter}; flock 9; n=$(cat {counter}); echo $((n + 1)) >{counter}\n'
        f"oathtool -c $n {SECRET} ;;\n*assword*) echo secret ;;\n*) exit 1 ;;\nesac",
    )
    scene.env |= {"SSH_ASKPASS": str(answer), "SSH_ASKPASS_REQUIRE": "force"}


def second_factor(scene: Scene) -> None:
    """PAM asks for a password and a code."""
    typed(scene)
    node, user = scene.node, scene.node.spec.user
    node.run(["mkdir", "-m", "700", "/run/oath"], check=True)
    node.path("/run/oath/users").write_text(f"HOTP {user} - {SECRET}\n")
    node.path("/run/oath/users").chmod(0o600)
    node.path("/run/pam").write_text(
        "auth requisite pam_unix.so\nauth required pam_oath.so usersfile=/run/oath/users window=100 digits=6\n"
        "account required pam_unix.so\nsession required pam_unix.so\n"
    )
    node.run(["mount", "--bind", "/run/pam", "/etc/pam.d/sshd"], check=True)


def key_and_code(scene: Scene) -> None:
    """A key, and then what PAM asks for."""
    second_factor(scene)
    scene.key()


def shared(scene: Scene) -> None:
    """A connection that is open already, and no key that would make another."""
    scene.key()
    scene.config(f"ControlPath {scene.folder}/%C")
    name = scene.node.name
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    master = ["ssh", "-fNM", "-o", "ControlPersist=120", name]
    subprocess.run(master, env=scene.env, check=True, **quiet)  # type: ignore[call-overload]
    scene.ends.callback(subprocess.run, ["ssh", "-O", "exit", name], env=scene.env, check=False, **quiet)
    scene.node.path(".ssh/authorized_keys").write_text("")


def fido(scene: Scene) -> None:
    """A key of a security key, played by a library."""
    key = scene.folder / "sk"
    argv = ["ssh-keygen", "-q", "-t", "ed25519-sk", "-N", "", "-w", FIDO, "-f", str(key)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    scene.authorize(key)
    scene.config(f"IdentityFile {key}", f"SecurityKeyProvider {FIDO}", "IdentitiesOnly yes")


def proxied(scene: Scene) -> None:
    """Through a command that connects."""
    scene.key()
    scene.config("ProxyCommand ssh -W %h:%p gate")


def matched(scene: Scene) -> None:
    """The key is named by a condition that a program decides."""
    key = make_key(scene.folder / "key")
    scene.authorize(key)
    text = f'Match originalhost {scene.node.name} exec "test %n = {scene.node.name}"\n    IdentityFile {key}\n'
    scene.lab.ssh_config.write_text(text + scene.lab.ssh_config.read_text())


def jumps(scene: Scene) -> None:
    """A chain of three, each named by the one behind it."""
    scene.key()


_EMPTY = {".ssh/authorized_keys": ""}
_NO_KEY = "PubkeyAuthentication no"
_PAM = ("UsePAM yes", "KbdInteractiveAuthentication yes")
_OATH = ("oathtool", "/lib/x86_64-linux-gnu/security/pam_oath.so")

LOGINS: Final = {
    "ed25519": Login(prepare=Scene.key),
    "ecdsa": Login(prepare=lambda scene: scene.key("ecdsa")),
    "rsa": Login(prepare=lambda scene: scene.key("rsa")),
    "passphrase": Login(prepare=passphrase, works=False),
    "passphrase, and an agent": Login(prepare=unlocked),
    "agent": Login(prepare=agent),
    "certificate": Login(specs=[NodeSpec(authorized=False, user_ca=True)], prepare=certificate),
    "expired certificate": Login(specs=[NodeSpec(authorized=False, user_ca=True)], prepare=expired, works=False),
    "host certificate": Login(specs=[NodeSpec(host_certificate=True)]),
    "host certificate for another": Login(
        specs=[NodeSpec(host_certificate=True)], prepare=foreign_authority, works=False
    ),
    "KnownHostsCommand": Login(specs=[NodeSpec()], prepare=known_hosts_command),
    "GSSAPI": Login(
        specs=[NodeSpec(user="alice", authorized=False, names=True, sshd=("GSSAPIAuthentication yes", _NO_KEY))],
        prepare=gssapi,
        needs=("krb5kdc", "kinit", "kadmin.local"),
    ),
    "host-based": Login(
        specs=[
            NodeSpec(
                user="bob",
                files=_EMPTY,
                sshd=(
                    *("HostbasedAuthentication yes", "HostbasedUsesNameFromPacketOnly yes"),
                    "IgnoreRhosts no",
                    _NO_KEY,
                ),
            )
        ],
        prepare=hostbased,
        needs=(HEAD_KEY, "/usr/lib/openssh/ssh-keysign"),
    ),
    "password": Login(specs=[NodeSpec(password="secret", sshd=(_NO_KEY,))], prepare=typed),
    "second factor": Login(
        specs=[NodeSpec(user="bob", password="secret", sshd=(*_PAM, "AuthenticationMethods keyboard-interactive"))],
        prepare=second_factor,
        needs=_OATH,
    ),
    "key and second factor": Login(
        specs=[
            NodeSpec(
                user="bob",
                password="secret",
                authorized=False,
                files=_EMPTY,
                sshd=(*_PAM, "AuthenticationMethods publickey,keyboard-interactive"),
            )
        ],
        prepare=key_and_code,
        needs=_OATH,
    ),
    "shared connection": Login(prepare=shared),
    "chain of jumps": Login(
        specs=[
            NodeSpec(name="first"),
            NodeSpec(name="second", via="first"),
            NodeSpec(name="third", via="second"),
            NodeSpec(via="third", authorized=False, files=_EMPTY),
        ],
        prepare=jumps,
    ),
    "ProxyCommand": Login(
        specs=[NodeSpec(name="gate"), NodeSpec(authorized=False, files=_EMPTY)],
        prepare=proxied,
    ),
    "Match exec": Login(prepare=matched),
    "FIDO key": Login(prepare=fido, needs=(FIDO,)),
    "restricted shell": Login(specs=[NodeSpec(shell="/bin/rbash")]),
}
"""Each by the name that its test has."""
