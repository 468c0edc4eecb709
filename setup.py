"""What pyproject.toml cannot say: the extension `_zcx`, whether to build it here, and with which flags.

Needs a C compiler and Python's headers; no CUDA toolkit, no torch. Where the extension cannot be (not Linux, or a
free-threaded Python) the package installs without it, imports, and says why it stays off (comfy_zerocopy/_native.py).

    ZCX_WERROR=1                     warnings are errors
    ZCX_SANITIZE=address,undefined   (or thread) build with those sanitizers
"""
import os
import pathlib
import sys
import sysconfig

from setuptools import Extension, setup

ROOT = pathlib.Path(__file__).resolve().parent
LIMITED = sys.version_info >= (3, 11)  # the buffer protocol, which the extension needs, is in the stable ABI from 3.11 on


def project_version() -> str:
    for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines():
        if line.startswith("version = "):
            return line.split('"')[1]
    raise SystemExit("setup.py: pyproject.toml has no version line")


def extensions() -> list:
    if sys.platform != "linux":
        print(f"comfy-zerocopy: no extension is built on {sys.platform}; the package will say that it is off", file=sys.stderr)
        return []
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        print("comfy-zerocopy: no extension is built for a free-threaded Python: use the regular build of Python",
              file=sys.stderr)
        return []
    flags = ["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wmissing-prototypes", "-O2", "-pthread"]
    if os.environ.get("ZCX_WERROR") == "1":
        flags.append("-Werror")
    link = ["-pthread", "-Wl,--as-needed"]
    if sanitize := os.environ.get("ZCX_SANITIZE"):
        flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g"]
        link += [f"-fsanitize={sanitize}"]
    macros = [("ZCX_VERSION", f'"{project_version()}"')]
    if LIMITED:
        macros.append(("Py_LIMITED_API", "0x030B0000"))
    os.chdir(ROOT)  # setuptools wants source paths relative to where it runs
    return [
        Extension(
            "comfy_zerocopy._zcx",
            sources=sorted(p.as_posix() for p in pathlib.Path("csrc").glob("*.c")),
            depends=sorted(p.as_posix() for p in pathlib.Path("csrc").glob("*.h")),
            include_dirs=["csrc"],
            define_macros=macros,
            libraries=["dl"],
            extra_compile_args=flags,
            extra_link_args=link,
            py_limited_api=LIMITED,
        )
    ]


modules = extensions()
setup(
    ext_modules=modules,
    options={
        # Flags come from the environment, and setuptools compares only file times: without force a stale object survives.
        "build_ext": {"force": True},
        **({"bdist_wheel": {"py_limited_api": "cp311"}} if modules and LIMITED else {}),
    },
)
