#!/usr/bin/env bash
# Confirms on an Orin what only an Orin can confirm, and writes a report: jetson/verify.sh --bundle DIR [--output DIR]
# Elsewhere it runs as well, changes nothing, and says what it could not check.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for python in "${MIMO_EDGE_PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" /opt/mimo-edge/bin/python \
    "$HOME/.local/share/mimo-edge/venv/bin/python" python3; do
    if [ -n "$python" ] && "$python" -c 'import mimo_edge' 2>/dev/null; then
        exec "$python" "$here/verify" "$@"
    fi
done
echo "verify.sh: error: no Python with mimo-edge found: run jetson/install.sh, or name one in MIMO_EDGE_PYTHON" >&2
exit 1
