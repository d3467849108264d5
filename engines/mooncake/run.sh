#!/bin/sh
# Runs a command with Mooncake's libraries, and in a network of its own where the system allows that:
#     run.sh ENVIRONMENT COMMAND...
# ENVIRONMENT is the virtual environment that has the wheel. The wheel lacks three libraries. Where the
# system lacks them too, Debian's packages are unpacked into ENVIRONMENT; nothing is installed.
# Exits with 75 where they can't be had at all, which is another thing than a test that failed.
set -eu
environment=$(cd "$1" && pwd)
shift
lib=$environment/debian
packages='libibverbs1 libnl-3-200 libnl-route-3-200'

loads() {
  "$environment/bin/python" -c 'import mooncake.store' 2>"$environment/error"
}

unpacked() {
  export LD_LIBRARY_PATH="$(find "$lib/root" -name 'lib*.so.*' -exec dirname {} + | sort -u | paste -sd :)"
}

# Own lists, since a fresh system has none and only root may fetch the system's.
fetch() (
  mkdir -p "$lib/lists/partial" "$lib/cache/archives/partial" "$lib/root"
  cd "$lib"
  set -- -qq -o "Dir::State::lists=$lib/lists" -o "Dir::Cache=$lib/cache" -o APT::Sandbox::User=root
  apt-get -qq -o APT::Sandbox::User=root download $packages ||
    { apt-get "$@" update && apt-get "$@" download $packages; } || exit 1
  for package in *.deb; do dpkg -x "$package" root || exit 1; done
)

if [ -d "$lib/root" ]; then unpacked; fi
if ! loads; then
  if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    cat "$environment/error" >&2
    echo "Mooncake can't be loaded, and this system has no apt-get to fetch $packages with." >&2
    exit 75
  fi
  echo "unpacking $packages into $lib"
  if ! fetch; then
    echo "Debian's packages $packages can't be fetched." >&2
    echo "Install them (apt install $packages), or try again with a network." >&2
    exit 75
  fi
  unpacked
  loads || { cat "$environment/error" >&2; exit 1; }
fi

# The nodes' ports listen on all addresses, and nobody else should reach them. What the tests started
# ends with them, however they end.
apart='--map-root-user --net --pid --fork --kill-child'
if unshare $apart true 2>/dev/null; then
  exec unshare $apart "$@"
fi
echo 'unshare --net is not allowed here: the tests use ports of this machine'
exec "$@"
