"""Start of the `.pyz` file of clusterctl: its first start with a Python unpacks the wheels for this Python.

The wheels go into a virtual environment in the cache folder; every start executes the program of that environment.
It parses with any Python 3, so that an old one gets an error that it understands.
"""

import io
import json
import os
import shutil
import sys
import tempfile
import zipfile

ARCHIVE = os.path.abspath(sys.argv[0])


def main():
    """Replace this process by the program of the virtual environment."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        contents = json.loads(archive.read("contents.json").decode())
        name = "{}.{}{}-{}".format(*sys.version_info[:2], getattr(sys, "abiflags", ""), os.uname().machine)
        wheels = contents["wheels"].get(name)
        if wheels is None or sys.implementation.name != "cpython" or get_glibc_version() < tuple(contents["glibc"]):
            text = (
                "error: {} runs with CPython {} on Linux with glibc {}.{} or later; this is {} {} with glibc {}\n\n{}"
            )
            known = ", ".join(contents["wheels"])
            here = sys.implementation.name, name, ".".join(map(str, get_glibc_version())) or "none"
            hint = "hint: use another Python, or `pip install clusterctl`"
            sys.exit(text.format(os.path.basename(ARCHIVE), known, *contents["glibc"], *here, hint))
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(cache, "clusterctl", "pyz", contents["digest"] + "-" + name)
        python, program = (os.path.join(folder, "bin", name) for name in ("python", "clusterctl"))
        # The link to the interpreter is broken if that Python was removed.
        if not (os.path.exists(python) and os.path.exists(program)):
            make_environment(archive, wheels, folder)
    os.execv(python, [python, program, *sys.argv[1:]])


def get_glibc_version():
    """Return such as (2, 36), or () without glibc."""
    try:
        return tuple(int(part) for part in os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))
    except (AttributeError, IndexError, ValueError, OSError):
        return ()


def make_environment(archive, wheels, folder):
    """Make the environment under another name, then rename it: no start sees half of one."""
    import venv

    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    made = tempfile.mkdtemp(prefix="new-", dir=os.path.dirname(folder))
    try:
        venv.create(made, symlinks=True)
        site = os.path.join(made, "lib", "python{}.{}".format(*sys.version_info[:2]), "site-packages")
        for name in wheels:
            with zipfile.ZipFile(io.BytesIO(archive.read("wheels/" + name))) as wheel:
                wheel.extractall(site)
        program = os.path.join(made, "bin", "clusterctl")
        with open(program, "w") as file:
            file.write("#!" + os.path.join(folder, "bin", "python") + "\n")
            file.write("import sys\nfrom clusterctl.cli.main import main\nsys.exit(main())\n")
        os.chmod(program, 0o755)
        if not os.path.exists(os.path.join(folder, "bin", "python")):
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(made, folder)
    except OSError:
        if not os.path.exists(os.path.join(folder, "bin", "python")):  # Unless another start was faster.
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


main()
