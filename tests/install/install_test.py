"""Installs the build into a temporary prefix and builds a program against it, with CMake and with pkg-config.

python tests/install/install_test.py build/release
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CONSUMER = Path(__file__).resolve().parent / "consumer"
C_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.c"


def run(*command, env=None):
    print("+", *command, flush=True)
    result = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True)
    print(result.stdout + result.stderr, flush=True)
    if result.returncode != 0:
        sys.exit(f"exit status {result.returncode}")
    return result.stdout


def main(build):
    with tempfile.TemporaryDirectory() as folder:
        prefix, work = Path(folder) / "prefix", Path(folder) / "work"
        run("cmake", "--install", build, "--prefix", prefix)

        run("cmake", "-S", CONSUMER, "-B", work, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
        run("cmake", "--build", work)
        printed = run(work / "app")

        (config,) = prefix.rglob("qkv.pc")
        env = dict(os.environ, PKG_CONFIG_PATH=str(config.parent))
        flags = run("pkg-config", "--cflags", "--libs", "qkv", env=env).split()
        run("c++", "-std=c++20", CONSUMER / "main.cpp", "-o", work / "app_pc", *flags)
        env = dict(os.environ, LD_LIBRARY_PATH=str(config.parent.parent))
        if run(work / "app_pc", env=env) != printed:
            sys.exit("the program behaves differently when built with pkg-config")
        run("cc", "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", C_EXAMPLE, "-o", work / "app_c", *flags)
        run(work / "app_c", env=env)

        # The installed command finds its library by itself.
        run(prefix / "bin" / "qkv", "--help")
        # And the library its plug-in, where one was built.
        for plugin in prefix.rglob("libqkv_mpi.so"):
            found = re.findall(r"^ranks by MPI +at (.*)$", run(prefix / "bin" / "qkv", "info"), re.MULTILINE)
            if [Path(path).resolve() for path in found] != [plugin.resolve()]:
                sys.exit(f"the installed library does not find {plugin}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
