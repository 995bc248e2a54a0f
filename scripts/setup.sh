#!/usr/bin/env bash
# Installs what is missing, and nothing else:  scripts/setup.sh [build] [mpi] [bench] [lint] [python] [demo] [plot] [cuda]
# Debian packages by apt-get when root, else it names the one command to run. Python packages go into .venv.
source "$(dirname "$0")/steps.sh"

packages=()
python=no
requirements=()
for group in "$@"; do
  case $group in
    build) packages+=(g++ cmake ninja-build ccache pkg-config libhwy-dev libfmt-dev libpng-dev libxxhash-dev
                      libcli11-dev nlohmann-json3-dev libdlpack-dev libgtest-dev libgmock-dev) ;;
    mpi) packages+=(libopenmpi-dev openmpi-bin) ;;
    bench) packages+=(libbenchmark-dev libopenblas-dev) ;;
    lint) packages+=(clang-format clang-tidy python3-venv) python=yes ;;
    python) packages+=(python3-dev python3-venv) python=yes ;;
    demo) python=yes requirements+=(scripts/requirements-demo.txt) ;;
    plot) python=yes requirements+=(scripts/requirements-bench.txt) ;;
    cuda) python=yes requirements+=(scripts/requirements-cuda.txt) ;;
    *) echo "setup.sh: unknown group '$group'; allowed: build, mpi, bench, lint, python, demo, plot, cuda" >&2; exit 2 ;;
  esac
done

install_debian_packages() {
  if ! command -v dpkg-query >/dev/null; then
    echo "Not a Debian system; this is needed, under the names of your system: ${packages[*]}"
    return
  fi
  local package missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
  done
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  if [ "$(id -u)" -ne 0 ]; then
    printf 'Debian packages are missing. Run this as root, then again what you ran:\n\n    %s\n' \
      "apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  step "Refresh the list of Debian packages" apt-update apt-get update
  echo "Debian packages to install: ${missing[*]}"
  step "Install the Debian packages" apt-install apt-get install -y --no-install-recommends "${missing[@]}"
}

# The hash of the files that were installed is kept, so that the second run has nothing to ask.
install_python_packages() {
  local interpreter file digest stamp
  interpreter=${PYTHON:-python3}
  if ! "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Python 3.11 or later is needed; '$interpreter' is not. Name another one: PYTHON=python3.11 make …" >&2
    exit 1
  fi
  if ! .venv/bin/python -c '' 2>/dev/null; then
    step "Create .venv" venv "$interpreter" -m venv --clear .venv
  fi
  for file in scripts/requirements.txt "${requirements[@]}"; do
    digest=$(sha256sum "$file")
    stamp=.venv/installed-$(basename "$file")
    if [ "$(cat "$stamp" 2>/dev/null)" != "$digest" ]; then
      step "Install the Python packages of $file" "pip-$(basename "$file" .txt)" \
        .venv/bin/python -m pip install --disable-pip-version-check --no-deps -r "$file"
      echo "$digest" >"$stamp"
    fi
  done
}

if [ ${#packages[@]} -gt 0 ]; then install_debian_packages; fi
if [ $python = yes ]; then install_python_packages; fi
