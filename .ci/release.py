"""Build a release into `dist/`: wheel, sdist, a `.pyz`, the SBOM and the notes; then install and run each of them.

Nothing is published. `--tag` makes the annotated tag; without it the command is only printed. `--no-check` skips the
installations.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DIST = REPOSITORY / "dist"
LOCK = REPOSITORY / "requirements" / "head.lock"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
"""The oldest one: that of RHEL 8. The wheels of bcrypt and cryptography need no newer one."""
TAGS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux2010", "manylinux_2_5")
CYCLONEDX = "cyclonedx-bom==7.5.0"


def main() -> int:
    """Build, check, tag; the answer is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    version = re.findall(r'"(.+)"', (REPOSITORY / "clusterctl/_version.py").read_text().splitlines()[-1])[0]
    notes, is_released = read_notes(version)
    is_clean = not run("git", "status", "--porcelain").strip()
    if options.tag and not (is_released and is_clean):
        print(f"error: CHANGELOG.md has no section `## [{version}]`, or the working tree has changes\n")
        print("hint: rename the section `## [Unreleased]`, and commit")
        return 1
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    shutil.rmtree(DIST, ignore_errors=True)
    run("uv", "build", "--quiet", "--build-constraints", str(LOCK), "--require-hashes", "--out-dir", str(DIST))
    (DIST / ".gitignore").unlink(missing_ok=True)
    (wheel,) = DIST.glob("*.whl")
    (sdist,) = DIST.glob("*.tar.gz")
    (DIST / "NOTES.md").write_text(notes)
    write_sbom(DIST / "sbom.cdx.json", version)
    pyz = DIST / f"clusterctl-{version}.pyz"
    with tempfile.TemporaryDirectory() as folder:
        write_pyz(pyz, wheel, Path(folder))
    if not options.no_check:
        for artifact in (wheel, sdist, pyz):
            check_artifact(artifact, version)
    files = sorted(DIST.iterdir())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    (DIST / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(REPOSITORY)}")
    tag = ["git", "tag", "--annotate", f"v{version}", "--message", f"clusterctl {version}"]
    if options.tag:
        run(*tag)
    else:
        print("the tag, not made:", " ".join(tag[:-1]), repr(tag[-1]))
    return 0


def run(*command: str, **options: object) -> str:
    """Return the output of a command of this repository; a failure ends the release."""
    if command[0] in ("uv", "uvx"):
        command = (str(Path(sys.executable).parent / command[0]), *command[1:])
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, **options)  # type: ignore[call-overload]
    return str(done.stdout)


def read_notes(version: str) -> tuple[str, bool]:
    """Return the section of the changelog for this version, else that of the next one, and whether it is the former."""
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    sections = dict(re.findall(r"^## \[(.+?)\].*?\n(.*?)(?=^## \[|\Z)", text, re.DOTALL | re.MULTILINE))
    return sections.get(version, sections.get("Unreleased", "")).strip() + "\n", version in sections


def compile_lock(*target: str) -> str:
    """Return the packages of the lock that the program needs, without those that build it."""
    options = ("--quiet", "--generate-hashes", "--no-annotate", "--no-header", "--constraints", str(LOCK), *target)
    return run("uv", "pip", "compile", *options, "pyproject.toml")


def write_sbom(path: Path, version: str) -> None:
    """Write the bill of materials, as CycloneDX, from the lock."""
    locked = compile_lock("--universal", "--python-version", PYTHONS[0])
    tool = ("uvx", "--quiet", "--from", CYCLONEDX, "cyclonedx-py", "requirements", "-", "--pyproject", "pyproject.toml")
    options = ("--output-reproducible", "--validate", "--sv", "1.6", "--output-format", "JSON", "--output-file")
    run(*tool, *options, str(path), input=locked)
    bill = json.loads(path.read_text())
    bill["metadata"]["component"]["version"] = version  # pyproject.toml reads it from a file.
    path.write_text(json.dumps(bill, indent=1))


def write_pyz(path: Path, wheel: Path, folder: Path) -> None:
    """Write the archive with the wheels for each Python and machine, and the table of which are for which."""
    fitting = {f"{python}-{machine}": download(python, machine, folder) for machine in MACHINES for python in PYTHONS}
    shutil.copy(wheel, folder)
    wheels = sorted(folder.glob("*.whl"))
    allowed = LOCK.read_text()
    for file in wheels:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if file.name != wheel.name and f"sha256:{digest}" not in allowed:
            raise SystemExit(f"error: {file.name}: its SHA-256 is not in {LOCK.name}")
    named = {name: [*files, wheel.name] for name, files in fitting.items()}
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in wheels)).hexdigest()[:16]
    contents = json.dumps({"digest": digest, "glibc": GLIBC, "wheels": named}, indent=1)
    with path.open("wb") as raw:
        raw.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(raw, "w") as archive:
            main_text = Path(__file__).with_name("pyz_main.py").read_bytes()
            for name, data in (("__main__.py", main_text), ("contents.json", contents.encode())):
                archive.writestr(zipfile.ZipInfo(name), data)
            for file in wheels:
                archive.writestr(zipfile.ZipInfo(f"wheels/{file.name}"), file.read_bytes())
    path.chmod(0o755)


def download(python: str, machine: str, folder: Path) -> list[str]:
    """Fetch the wheels for one Python on one machine; return their names."""
    target = folder / f"{python}-{machine}"
    target.mkdir()
    locked = folder / "locked.txt"
    platform = f"{machine}-manylinux_{GLIBC[0]}_{GLIBC[1]}"
    locked.write_text(compile_lock("--python-version", python, "--python-platform", platform))
    platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_{machine}")]
    options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--python-version", python]
    pip = (sys.executable, "-m", "pip", "download", *options, *platforms, "--dest", str(target))
    run(*pip, "--requirement", str(locked), stderr=subprocess.DEVNULL)
    names = sorted(file.name for file in target.iterdir())
    for file in target.iterdir():
        file.rename(folder / file.name)
    return names


def check_artifact(artifact: Path, version: str) -> None:
    """Install it where nothing of this repository is, and run the demo, in which a rank is killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "PYTHON", "VIRTUAL_ENV"))}
        env |= {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "CACHE", "DATA")}
        if artifact.suffix == ".pyz":
            program = [sys.executable, "-I", str(artifact)]
        else:
            venv.create(folder / "venv", with_pip=True)
            constraints = folder / "constraints.txt"
            constraints.write_text(re.sub(r" *\\\n +--hash=\S+", "", LOCK.read_text()))
            pip = (str(folder / "venv/bin/pip"), "install", "--quiet", "--constraint", str(constraints), str(artifact))
            run(*pip, env=env, stderr=subprocess.DEVNULL)
            program = [str(folder / "venv/bin/clusterctl")]
        shown = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True, env=env).stdout
        demo = [*program, "demo", "--keys", "kq"]
        done = subprocess.run(demo, cwd=folder, env=env, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if version not in shown or done.returncode != 0 or "removed " not in output:
        raise SystemExit(f"error: {artifact.name}: the demo ended with {done.returncode}\n{shown}{output}")
    print(f"installed and ran {artifact.name}")


if __name__ == "__main__":
    sys.exit(main())
