#!/usr/bin/env bash
# Test trimesh on the CUDA devices of this machine, then measure it; no network is needed.
#
#     bash cuda.sh [--minutes 8] [--only REGEX] [--without-device]
#
# PYTHON names an interpreter that has torch and numpy (default: python3), OUT the folder of the results (default: out
# beside this file). Nothing is installed into that interpreter. Exit status: 0 all passed, 1 something failed, 3 it
# could not run.
set -u
refuse() {
    echo "cuda.sh: $1" >&2
    exit 3
}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
out=${OUT:-$here/out}
case $out in /*) ;; *) out=$PWD/$out ;; esac

[ -d "$here/wheels" ] || refuse "there are no wheels beside this file: run it in a folder that \`make cuda-bundle\` has built"
wanted=$(cat "$here/python-version")
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    refuse "there is no interpreter $python: set PYTHON to a Python $wanted that has torch"
[ "$found" = "$wanted" ] ||
    refuse "this bundle is for Python $wanted and $python is $found: set PYTHON, or build one by \`make cuda-bundle CUDA_PYTHON=$found\`"
for name in torch numpy; do
    error=$("$python" -c "import $name" 2>&1) || refuse "$python cannot import $name (${error##*$'\n'}): set PYTHON to one that has it"
done
mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || refuse "the folder $out cannot be written: set OUT to another one"

work=$(mktemp -d) || refuse "no temporary folder can be made: set TMPDIR"
trap 'rm -rf "$work"' EXIT
pip=$(echo "$here"/installer/pip-*.whl)/pip # a wheel runs without being installed
"$python" "$pip" --isolated install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action ignore --target "$work/site" "$here"/wheels/*.whl ||
    refuse "its wheels cannot be unpacked into $work"
cp -R "$here/tree" "$work/tree" || refuse "the tests cannot be copied to $work"
chmod -R u+w "$work/tree"

cd "$work/tree" || exit 3
export PYTHONPATH="$work/site:$work/tree${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE # many processes import the same modules
"$python" -m tests.cuda.session --bundle "$here/bundle.json" --out "$out" "$@" &
session=$!
trap 'kill -TERM "$session" 2>/dev/null' TERM INT
wait "$session"
status=$?
while kill -0 "$session" 2>/dev/null; do # a signal has ended the wait
    wait "$session"
    status=$?
done
exit "$status"
